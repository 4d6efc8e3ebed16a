"""tools/gpu/trainers.py, which runs on a real GPU, on the emulated one at tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BINARY, PYTHONPATH

from helpers import ROOT, emu_torch, waiting

pytestmark = [
    pytest.mark.emu,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
]


def _run(*arguments: str, **more: str) -> tuple[int, list[dict]]:
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_BIN": str(BINARY), **more}
    env.pop("GRADD_DIR", None)
    command = [sys.executable, str(ROOT / "tools/gpu/trainers.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print(done.stderr[-3000:])
    return done.returncode, [json.loads(x) for x in done.stdout.splitlines() if x[:1] == "{"]


@pytest.mark.parametrize("task", ["mlp", "killed", "two", "averages"])
def test_what_must_hold(task: str) -> None:
    status, (line,) = _run(task, "emu")
    assert status == 0 and line["held"], line


@pytest.mark.parametrize("task", ["peers", "lora"])
def test_engines_in_turns(task: str) -> None:
    """torch.compile does not work on this device, and that it fails does not stop the others."""
    status, lines = _run(task, "emu", "tiny", "2x20", "gradd", "eager", "liger")
    found = {line["engine"]: line for line in lines}
    assert status == 1 and list(found) == ["gradd", "eager", "liger"]
    assert "failed" in found["liger"] and not found["liger"]["held"]
    for engine in ("gradd", "eager"):
        line = found[engine]
        assert line["held"] and line["step_ms"] > 0 and line["adamw_step_ms"] > 0, line
    assert abs(found["gradd"]["loss"] - found["eager"]["loss"]) < 0.02 * found["eager"]["loss"]
    assert found["gradd"]["trained"] == found["eager"]["trained"]
    assert found["gradd"]["in_torch"] == {}


def test_what_was_measured_before_the_limit_is_reported() -> None:
    """The signal of `timeout` goes to the process and its group."""
    arguments = [str(ROOT / "tools/gpu/trainers.py"), "peers", "emu", "tiny", "2x20", "eager"]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_BIN": str(BINARY)}
    process = subprocess.Popen(
        [sys.executable, *arguments], env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    waiting.until(lambda: bool(children.read_text().split()), "no engine was started")
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate()
    (line,) = map(json.loads, said.splitlines())
    assert line["engine"] == "eager" and line["failed"] and not line["held"]
    assert process.returncode == 1
