"""Ten learners of one base take the base once, and ten times what is their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH, Daemon
from torch import nn

import gradd
from gradd import ORTModule, optim

LEARNERS, WIDTH, LAYERS, RANK = 10, 1024, 12, 4
BYTES = 4 * WIDTH * WIDTH * LAYERS  # of the base
WITHIN = 0.05
LEARNER = """
import sys
sys.path.insert(0, sys.argv[1])
from gradd.session import client
from test_ten_learners import learn

kept = learn(int(sys.argv[2]))
print("learns", flush=True)
sys.stdin.readline()
client.close_all()
"""


class Lora(nn.Module):
    """A frozen matrix, and a product of two that learn."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False, device=device).requires_grad_(False)

    def adapt(self) -> None:
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + x @ self.down.T @ self.up.T)


def stack(device: str) -> nn.Sequential:
    return nn.Sequential(*(Lora(device) for _ in range(LAYERS)))


def learn(seed: int) -> tuple[ORTModule, optim.FusedAdam]:
    """Some steps of a learner of its own; what it has then."""
    torch.manual_seed(seed)
    model = stack("meta")
    gradd.load("lora", model)
    for layer in model:
        layer.adapt()
    wrapped = ORTModule(model, strict=True)
    optimizer = optim.FusedAdam([p for p in model.parameters() if p.requires_grad])
    x = torch.randn(8, WIDTH)
    for _ in range(3):
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped, optimizer


@pytest.fixture
def learners() -> Iterator[list[subprocess.Popen]]:
    found: list[subprocess.Popen] = []
    yield found
    for process in found:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


def _shared(pid: int) -> tuple[float, float]:
    """PSS of what a process has mapped of memfds, and what of it is its own copy; in bytes."""
    pss = copied = 0.0
    of_memfd = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            of_memfd = "/memfd:" in line
            private = " rw-p " in line or " r--p " in line
        elif of_memfd and line.startswith("Pss:"):
            pss += 1024 * int(line.split()[1])
        elif of_memfd and private and line.startswith("Anonymous:"):
            copied += 1024 * int(line.split()[1])
    return pss, copied


@pytest.mark.nightly
def test_ten_learners_take_one_base(
    daemon: Daemon, learners: list[subprocess.Popen], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradd.share(stack("cpu"), "lora", keep_alive=-1)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    for seed in range(LEARNERS):
        process = subprocess.Popen(
            [sys.executable, "-c", LEARNER, str(Path(__file__).parent), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        learners.append(process)
    for process in learners:
        assert process.stdout.readline() == "learns\n", "a learner has failed"
    pids = {process.pid for process in learners}
    rows = [s for s in daemon.ps()["sessions"] if s["pid"] in pids]
    assert len(rows) == LEARNERS
    own = [s["segment_bytes"] - s["segment_kinds"]["base"] + s["arena_bytes"] for s in rows]
    assert max(own) == min(own), "equal learners have the same"
    assert all(abs(s["segment_kinds"]["base"] - BYTES) < WITHIN * BYTES for s in rows)
    found = [_shared(pid) for pid in (*pids, daemon.worker())]
    taken, copied = (sum(column) for column in zip(*found, strict=True))
    assert copied < 1 << 20, "the base was copied"
    assert BYTES * (1 - WITHIN) < taken < (BYTES + sum(own)) * (1 + WITHIN)
    gradd.forget("lora")
