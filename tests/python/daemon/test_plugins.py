"""Devices that are plug-ins: a daemon reports one that it cannot use, and still serves."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import BINARY

from helpers import ROOT

ENTRY = """
#include "kernels/contract/plugin.h"
gradd_status_t gradd_plugin(uint32_t abi, const gradd_backend_t **out);
gradd_status_t gradd_plugin(uint32_t abi, const gradd_backend_t **out) {
    static gradd_backend_t table;
    (void)abi;
    %s
}
"""
REFUSES = 'return GRADD_FAIL(DEVICE, "there is no such thing here");'
OLD = "table.abi = 1; table.size = sizeof table; *out = &table; return GRADD_OK;"
CPU = 'table = gradd_backend_cpu; table.name = "cuda"; *out = &table; return GRADD_OK;'
pytestmark = pytest.mark.quick


def _plugin(folder: Path, source: str | None, name: str = "cuda") -> None:
    """The plug-in of that name in that folder; None: no object at all."""
    target = folder / f"libgradd_{name}.so"
    if source is None:
        target.write_text("nothing that can be loaded")
        return
    command = ["gcc", "-shared", "-fPIC", f"-I{ROOT}", "-x", "c", "-", "-o", str(target)]
    subprocess.run(command, input=source, text=True, check=True)


def _doctor(folder: Path) -> str:
    env = {**os.environ, "GRADD_PLUGINS": str(folder)}
    command = [str(BINARY), "doctor"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("device cuda: ")]
    return line


def _serve(folder: Path, device: str = "cuda") -> tuple[int, str]:
    """Starts a daemon for the device and stops it: exit status, and what it logged."""
    env = {**os.environ, "GRADD_PLUGINS": str(folder), "GRADD_DIR": str(folder / "run")}
    (folder / "run").mkdir(mode=0o700)
    command = [str(BINARY), "serve", "--device", device]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as daemon:
        lines = []
        for line in daemon.stderr:
            lines.append(line)
            if "event=daemon_start" in line:
                daemon.terminate()
    return daemon.returncode, "".join(lines)


BAD = [
    (None, "cannot be used: "),
    ("int nothing;", "is no plug-in of gradd"),
    (ENTRY % REFUSES, "there is no such thing here"),
    (ENTRY % OLD, "has version 1 of the device table, expected 2"),
]


@pytest.mark.parametrize("source,message", BAD, ids=["object", "entry", "device", "version"])
def test_a_plugin_that_cannot_be_used(tmp_path: Path, source: str | None, message: str) -> None:
    _plugin(tmp_path, source)
    assert message in _doctor(tmp_path)
    status, log = _serve(tmp_path)
    assert status == 0
    (warning,) = [line for line in log.splitlines() if "level=warn" in line]
    assert "event=device wanted=cuda used=default" in warning and message in warning
    assert "device=cpu" in log


def _shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 3)


def _damage(file: Path) -> None:
    """Its table of segments is said to be where no file is."""
    with file.open("r+b") as f:
        f.seek(32)
        f.write(b"\xf0" + b"\xff" * 7)


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


FILES = [
    (_shorten, "it was copied in part or is damaged, as its segments end at byte "),
    (_damage, "it was copied in part or is damaged"),
    (lambda file: os.truncate(file, 20), "it is no shared object (ELF)"),
    (_replace(Path.mkdir), "it is a folder"),
    (_replace(os.mkfifo), "it is no regular file"),
    (_replace(lambda file: file.symlink_to(file.name)), "Too many levels of symbolic links"),
]


@pytest.mark.parametrize(
    "change,message", FILES, ids=["part", "damaged", "head", "folder", "fifo", "loop"]
)
def test_a_file_that_is_no_whole_plugin(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    """Not the loader finds that out, by SIGBUS."""
    _plugin(tmp_path, ENTRY % CPU)
    file = tmp_path / "libgradd_cuda.so"
    change(file)
    assert f"the plug-in {file} cannot be used: {message}" in _doctor(tmp_path)
    status, log = _serve(tmp_path)
    assert status == 0 and message in log and "device=cpu" in log


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    _plugin(tmp_path, ENTRY % CPU)
    file = tmp_path / "libgradd_cuda.so"
    file.chmod(0)
    if os.access(file, os.R_OK):
        pytest.skip("this user may read every file")
    assert f"the plug-in {file} cannot be used: Permission denied" in _doctor(tmp_path)


def test_a_plugin_that_can(tmp_path: Path) -> None:
    _plugin(tmp_path, ENTRY % CPU)
    assert "products by" in _doctor(tmp_path)
    status, log = _serve(tmp_path)
    assert status == 0 and "device=cuda" in log and "level=warn" not in log


def test_a_plugin_of_another_project(tmp_path: Path) -> None:
    """It needs no list: doctor finds it, and the daemon takes it by its name."""
    _plugin(tmp_path, ENTRY % CPU.replace('"cuda"', '"vulkan"'), "vulkan")
    (tmp_path / "libgradd.so").touch()
    (tmp_path / "libgradd_other.so.1").touch()
    (tmp_path / "libgradd_shm.so").touch()  # the library of clients
    env = {**os.environ, "GRADD_PLUGINS": str(tmp_path)}
    for wanted, code in (("vulkan", 0), ("metal", 1)):
        command = [str(BINARY), "doctor", "--json", "--device", wanted]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        devices = json.loads(done.stdout)["devices"]
        names = ["cpu", "cuda", "vulkan", *(["metal"] if code else [])]
        assert done.returncode == code and [d["name"] for d in devices] == names
        assert devices[2]["usable"] and devices[2]["from"] == f"{tmp_path}/libgradd_vulkan.so"
    assert f"nor as a plug-in at {tmp_path}/libgradd_metal.so" in devices[3]["reason"]
    status, log = _serve(tmp_path, "vulkan")
    assert status == 0 and "device=vulkan" in log and "level=warn" not in log


def test_without_the_plugin_the_cpu_serves(tmp_path: Path) -> None:
    told = f"there is no plug-in at {tmp_path}/libgradd_cuda.so (`make cuda` builds it)"
    assert told in _doctor(tmp_path)
    status, log = _serve(tmp_path)
    assert status == 0 and f'wanted=cuda used=default reason="{told}"' in log


@pytest.mark.parametrize("name", ["abacus", "CUDA", "cuda:0"])
def test_doctor_knows_the_wanted_device(name: str) -> None:
    command = [str(BINARY), "doctor", "--device", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"device {name}: there is no device" in done.stdout


def test_doctor_speaks_json(tmp_path: Path) -> None:
    env = {**os.environ, "GRADD_PLUGINS": str(tmp_path)}
    command = [str(BINARY), "doctor", "--json"]
    found = json.loads(subprocess.check_output(command, env=env))
    cpu, cuda = found["devices"]
    assert cpu["name"] == "cpu" and cpu["usable"] and cpu["kernels"] > 100
    assert cuda["name"] == "cuda" and not cuda["usable"] and "no plug-in at" in cuda["reason"]


def test_the_daemon_itself_knows_no_cuda() -> None:
    names = subprocess.check_output(["nm", str(BINARY)], text=True)
    assert not [n for n in names.split() if n.startswith(("cuda", "cublas", "cu_"))]
    needed = subprocess.check_output(["readelf", "-d", str(BINARY)], text=True)
    assert "libcuda" not in needed and "cublas" not in needed
