"""Each GPU has a daemon of its own, which the first trainer on that GPU starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

from gradd import ORTModule
from gradd.memory import devices
from gradd.session import client as clients
from helpers import emu_torch
from helpers.nets import Net

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]

_DEVICES = ("cpu", "emu:0", "emu:1")


def _trained(device: str) -> ORTModule:
    """A module that has made a step there."""
    torch.manual_seed(1)
    model = ORTModule(Net().to(device), strict=True)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).to(device)
    model(x).square().mean().backward()
    return model


def _command(daemon: Any, *words: str) -> list[str]:
    command = [str(conftest.BINARY), *words, "--dir", str(daemon.directory)]
    return subprocess.check_output(command, text=True, timeout=60).splitlines()


def test_each_device_has_its_daemon(daemon: Any) -> None:
    models = [_trained(device) for device in _DEVICES]
    used = [clients.get_client(device=torch.device(device)) for device in _DEVICES]
    assert len({c.daemon_pid for c in used}) == 3
    assert [c.path for c in used] == [daemon.directory / c.memory.uuid for c in used]
    gradients = [[p.grad.cpu() for p in m.parameters()] for m in models]
    for others in gradients[1:]:
        torch.testing.assert_close(others, gradients[0])

    shown = [json.loads(line) for line in _command(daemon, "ps", "--json")]
    assert [d["pid"] for d in shown] == [c.daemon_pid for c in used]
    tables = "\n".join(_command(daemon, "ps")).split("\n\n")
    assert ["1 session" in t for t in tables] == [True] * 3
    plans = [json.loads(line) for line in _command(daemon, "explain", "--list", "--json")]
    assert [len(d["plans"]) for d in plans] == [1, 1, 1]


def test_a_daemon_of_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started by hand in the directory of this GPU, say."""
    memory = devices.of(torch.device("emu:1"))
    monkeypatch.setattr(memory, "environment", {})
    with pytest.raises(devices.DeviceError, match=f"on emu:1, {memory.uuid}; daemon .* GPU-.*00"):
        clients.get_client(device=memory.device).connect()


def test_stop_ends_all_of_them_and_trainers_go_on(daemon: Any) -> None:
    model = _trained("emu:1")
    before = clients.get_client(device=torch.device("emu:1"))
    first = before.daemon_pid
    said = _command(daemon, "stop")
    assert [line for line in said if not line.startswith("session ")] == ["stopped"] * 2
    model(torch.randn(4, 8).to("emu:1")).sum().backward()
    assert before.daemon_pid != first and before.recoveries == 1


def test_a_gpu_admits_what_its_own_memory_takes(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SIM_MEMORY_MB", "300")  # for the daemon that starts next
    _trained("emu:0")
    shown = [json.loads(line) for line in _command(daemon, "ps", "--json")]
    assert shown[1]["memory_limit"] == 300 * 1024 * 1024 // 10 * 9
    assert shown[0]["memory_limit"] > shown[1]["memory_limit"]


def test_the_directory_of_a_gpu_is_as_private_as_the_users(
    daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = daemon.directory.parent / "user"
    monkeypatch.setenv("GRADD_DIR", str(user))
    _trained("emu:0")
    made = [user, *conftest.gpu_directories(user)]
    assert len(made) == 2
    assert [d.stat().st_mode & 0o777 for d in made] == [0o700] * 2


def test_nccl_is_that_of_torch_s_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unless the environment names another."""
    monkeypatch.delenv("GRADD_NCCL", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnccl.so.2").touch()
    assert devices._nccl_of_torch() == {"GRADD_NCCL": str(folder / "libnccl.so.2")}
    monkeypatch.setenv("GRADD_NCCL", "other")
    assert devices._nccl_of_torch() == {}
