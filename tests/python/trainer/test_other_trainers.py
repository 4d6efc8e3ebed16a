"""Trainers of other packages with a wrapped model: equal losses, in the daemon.

What they need is large, so it is installed once under build/ beside the packages of the tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import site
import subprocess
import venv
from pathlib import Path

import pytest
from conftest import PYTHONPATH, Daemon

from helpers import BUILD, ROOT
from helpers.trainers.other_packages import TRAINERS

pytestmark = pytest.mark.nightly
NEEDS = ROOT / "requirements-trainers.txt"
ROUNDING = {"lightning_mixed": 2e-3, "fabric_mixed": 2e-3}  # of losses in bf16; others: 1e-4
# What of a trainer runs in PyTorch, by reason; nothing of the others.
IN_TORCH = {
    "whole_sft": {"graph_break"},
    "accelerated_sft": {"graph_break"},
    "grpo": {"decoding"},
    "accelerated_grpo": {"decoding", "graph_break"},
    "dora": {"graph_break"},
    "loha": {"graph_break", "autograd_function"},
    "adalora": {"graph_break"},
    "neftune": {"data_dependent_control_flow", "untraced_function"},
}


def _install(folder: Path, interpreter: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    lines = (f"import site; site.addsitedir({place!r})\n" for place in site.getsitepackages())
    (packages / "tests.pth").write_text("".join(lines))
    command = [str(interpreter), "-m", "pip", "install", "-q", "-r", str(NEEDS)]
    subprocess.run([*command, "-c", str(ROOT / "constraints.txt")], check=True)


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of an environment that has the packages, and sees those of this one."""
    folder = BUILD / "trainers"
    interpreter, done = folder / "bin" / "python", folder / "done"
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that test makes it
        if not done.exists() or done.read_text() != NEEDS.read_text():
            _install(folder, interpreter)
            done.write_text(NEEDS.read_text())
    return str(interpreter)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_of_others(name: str, python: str, daemon: Daemon) -> None:
    command = [python, "-m", "helpers.trainers.other_packages", name]
    env = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert len(said["ours"]) >= 5
    assert said["ours"] == pytest.approx(said["theirs"], rel=ROUNDING.get(name, 1e-4))
    assert said["self_check_failures"] == 0 and said["captures"] >= 1
    assert set(said["in_torch"]) == IN_TORCH.get(name, set())
    assert said["forwards"] >= len(said["ours"])
