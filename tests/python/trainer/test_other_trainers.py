"""Trainers of other packages with a wrapped model: equal losses, in the daemon."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from conftest import PYTHONPATH, Daemon

from helpers.trainers import environment
from helpers.trainers.other_packages import TRAINERS

pytestmark = pytest.mark.nightly
ROUNDING = {"lightning_mixed": 2e-3, "fabric_mixed": 2e-3}  # of losses in bf16; others: 1e-4
# What of a trainer runs in PyTorch, by reason; nothing of the others.
IN_TORCH = {
    "grpo": {"decoding"},
    "accelerated_grpo": {"decoding"},
    "loha": {"graph_break"},
    "adalora": {"graph_break"},
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_of_others(name: str, daemon: Daemon) -> None:
    command = [environment.interpreter(), "-m", "helpers.trainers.other_packages", name]
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
    assert said["forwards"] >= (6 if name == "log_probs" else len(said["ours"]))
