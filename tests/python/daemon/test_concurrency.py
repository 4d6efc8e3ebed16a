"""Several processes train through one daemon at once, each with the bits of its solo run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH

from gradd import ORTModule
from helpers.nets import Net, batch, loss_of

STEPS = 40
SCRIPT = """
import sys
from test_concurrency import train
def meet():
    print("ready", flush=True)
    sys.stdin.readline()
print(train(int(sys.argv[1]), meet), flush=True)
"""


def train(seed: int, meet: Callable[[], None] = lambda: None) -> str:
    """Digest of all losses and gradients of a run; meet() is called when all is captured."""
    torch.manual_seed(seed)
    model = ORTModule(Net(width=64 * (seed + 1), seed=seed, dropout=0.2), strict=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    digest = hashlib.sha256()
    for step in range(STEPS):
        loss = loss_of(model(*batch(16, seed=100 * seed + step)))
        loss.backward()
        for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
            digest.update(tensor.numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            meet()
    return digest.hexdigest()


class Trainer:
    """A process that trains; it waits after its first steps until it is told to go on."""

    def __init__(self, seed: int, folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_AUTOSTART": "0"}
        command = [sys.executable, "-c", SCRIPT, str(seed)]
        pipe = subprocess.PIPE
        self._errors = folder / f"errors.{seed}"
        with open(self._errors, "w") as errors:
            here = Path(__file__).parent  # where the script finds this module
            self.process = subprocess.Popen(
                command, cwd=here, env=env, stdin=pipe, stdout=pipe, stderr=errors, text=True
            )

    def wait_until_ready(self) -> None:
        """Returns when the process has captured its network."""
        line = self.process.stdout.readline()
        assert line == "ready\n", f"got {line!r}, and:\n{self._errors.read_text()}"

    def go(self) -> None:
        """Lets it run on."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def digest(self) -> str:
        """Waits for its result."""
        output = self.process.communicate(timeout=120)[0].strip()
        assert self.process.returncode == 0, self._errors.read_text()
        return output

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.nightly  # test_sessions.py has language models in every run
def test_three_processes_at_once_have_the_bits_of_their_solo_runs(
    daemon: object, tmp_path: Path
) -> None:
    trainers = [Trainer(seed, tmp_path) for seed in range(3)]
    for trainer in trainers:
        trainer.wait_until_ready()
    for trainer in trainers:
        trainer.go()
    together = [trainer.digest() for trainer in trainers]
    assert daemon.ps()["sessions"] == []
    solo = [train(seed) for seed in range(3)]
    assert together == solo
    assert len(set(solo)) == 3


@pytest.mark.nightly
def test_a_killed_client_disturbs_no_other(daemon: object, tmp_path: Path) -> None:
    survivor, victim = Trainer(1, tmp_path), Trainer(2, tmp_path)
    for trainer in (survivor, victim):
        trainer.wait_until_ready()
    victim.go()
    victim.kill()
    survivor.go()
    got = survivor.digest()
    assert daemon.ps()["sessions"] == []
    assert got == train(1)
