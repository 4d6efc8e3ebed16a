"""How the memory of a GPU reaches its daemon: what is tried, freed, and waited for."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

from gradd import ORTModule
from gradd.memory.gpu_segments import WAYS
from gradd.session import client as clients
from gradd.session import control
from helpers import emu_torch
from helpers.nets import Net
from helpers.waiting import until

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]


def _train(strict: bool = True) -> ORTModule:
    """A module that has made two steps."""
    torch.manual_seed(1)
    model = ORTModule(Net().to("emu:0"), strict=strict)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).to("emu:0")
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _client() -> clients.Client:
    return clients.get_client(device=torch.device("emu:0"))


def _start_anew(client: clients.Client) -> None:
    """As in a new process, with a new daemon."""
    clients.close_all()
    subprocess.check_call([str(conftest.BINARY), "stop", "--dir", str(client.path)])
    emu_torch.forget_ways()


def _bytes() -> int:
    """Of the GPU's memory that this process has taken, and not freed."""
    library = ctypes.CDLL(str(emu_torch.LIBRARY))
    library.sim_bytes.restype = ctypes.c_size_t
    return library.sim_bytes()


@pytest.mark.parametrize(
    ("refused", "way"),
    [
        (["cuMemCreate"], "handles"),
        (["cuMemExportToShareableHandle"], "handles"),
        (["cuMemImportFromShareableHandle"], "handles"),  # by the daemon's driver
        (["cuMemCreate", "cudaIpcGetMemHandle"], "pinned"),
        (["cuMemImportFromShareableHandle", "cudaIpcOpenMemHandle"], "pinned"),
    ],
)
def test_the_next_way_is_taken_where_drivers_refuse(
    refused: list[str],
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = [p.detach().cpu() for p in _train().parameters()]
    _start_anew(_client())
    monkeypatch.setenv("GRADD_SIM_REFUSE", ",".join(refused))
    with caplog.at_level(logging.WARNING, logger="gradd"):
        model = _train()
    assert _client().memory.way is WAYS[way]
    (line,) = (m for m in caplog.messages if "shares memory with its daemon by" in m)
    assert line.count("NotSupported") + line.count("NOT_SUPPORTED") == len(refused), line
    assert model.gradd_stats()["mirrored"] == (4 if way == "pinned" else 0)
    assert all(map(torch.equal, (p.detach().cpu() for p in model.parameters()), expected))


def test_without_any_way_calls_run_in_pytorch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADD_SIM_REFUSE", "cuMemCreate,cudaIpcGetMemHandle,cudaHostRegister")
    model = _train(strict=False)
    assert model.gradd_stats()["fallbacks"].keys() == {"device"}
    assert any("no daemon can share memory of emu:0" in m for m in caplog.messages)


def test_a_way_that_is_asked_for_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_GPU_MEMORY", "handles")
    monkeypatch.setenv("GRADD_SIM_REFUSE", "cudaIpcGetMemHandle")
    assert _train(strict=False).gradd_stats()["fallbacks"].keys() == {"device"}
    monkeypatch.setenv("GRADD_GPU_MEMORY", "paper")
    with pytest.raises(ValueError, match="GRADD_GPU_MEMORY='paper'.*vmm, handles, pinned"):
        _train()


@pytest.mark.parametrize("end", ["unsegment", "close", "kill"])
def test_memory_is_freed_when_no_daemon_has_its_handle_open(
    end: str, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in stops a process that frees it before."""
    monkeypatch.setenv("GRADD_GPU_MEMORY", "handles")
    client = _client()
    with client.lock:
        segment = client.create_segment(8 << 20, "ring")
        size, before = segment.size, _bytes()
        segment.view = segment._memory = None  # nothing here uses it any more
        gc.collect()
        assert not client.memory.driver.wait_for_ends() and _bytes() == before
        if end == "unsegment":
            client.drop_segment(segment)
            del segment
            client.request("release", {"runs": []})
        elif end == "kill":
            segment.lent = None  # the next daemon does not get it
            del client._segments[segment.id], segment
            daemon.kill(client.daemon_pid)
            client.request("release", {"runs": []})
        else:
            del segment
            client.close()
    until(lambda: _bytes() <= before - size, "the memory is not freed")


def test_a_daemon_hangs_up_when_it_has_closed_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sign for the client that memory may be freed."""
    monkeypatch.setattr(control, "_END_SECONDS", 0)
    monkeypatch.setenv("GRADD_GPU_MEMORY", "handles")
    gate = tmp_path / "gate"
    client = _client()
    with monkeypatch.context() as patched:
        patched.setenv("GRADD_SIM_HOLD", f"cudaIpcCloseMemHandle:{gate}")  # in the daemon
        client.connect()
    gate.touch()
    with client.lock:
        client.create_segment(8 << 20, "ring")  # the daemon alone keeps it
        client.request("release", {"runs": []})
    gc.collect()
    client.memory.driver.wait_for_ends()  # of earlier tests as well
    before = _bytes()
    gate.unlink()
    try:
        client.close()
        until(lambda: "closing" in _states(client), "the session does not end")
        time.sleep(0.2)
        assert _bytes() > before - (8 << 20)
    finally:
        gate.touch()  # or the daemon never ends
    until(lambda: _bytes() <= before - (8 << 20), "the memory is not freed")


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("vmm", "cuMemMap"),
        ("handles", "cudaIpcOpenMemHandle"),
        ("pinned", "cudaHostRegister"),
    ],
)
def test_other_clients_are_served_while_memory_is_mapped(
    way: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    monkeypatch.setenv("GRADD_GPU_MEMORY", way)
    with monkeypatch.context() as patched:
        patched.setenv("GRADD_SIM_HOLD", f"{call}:{gate}")  # in the daemon
        _train()
    client = _client()
    gate.unlink()
    made: list[Any] = []

    def make() -> None:
        with client.lock:
            made.append(client.create_segment(1 << 20, "ring"))

    thread = threading.Thread(target=make)
    thread.start()
    try:
        until(lambda: "running" in _states(client), "no session runs a request")
        other = control.Connection(client.path, client.memory)
        assert other.attach() > 0
        other.close()
        assert thread.is_alive() and not made
    finally:
        gate.touch()
        thread.join()
    assert len(made) == 1


def _states(client: clients.Client) -> list[str]:
    """Of all sessions of its daemon."""
    command = [str(conftest.BINARY), "ps", "--json", "--dir", str(client.path)]
    found = json.loads(subprocess.check_output(command, text=True, timeout=60))
    return [session["state"] for session in found["sessions"]]


def test_an_idle_daemon_gives_memory_back(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_IDLE_TRIM", "1")
    model = _train()
    until(lambda: "event=idle_trim" in daemon.logs(), "nothing is given back")
    model(torch.ones(4, 8).to("emu:0")).square().mean().backward()  # takes memory again
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
