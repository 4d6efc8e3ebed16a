"""Several processes train through one daemon at once, each with the bits of its solo run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
SCRIPT = """
import hashlib, sys, torch
from nets import Net, batch, loss_of
from gradd import ORTModule
torch.set_num_threads(1)
seed, steps = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(seed)
model = ORTModule(Net(width=64 * (seed + 1), seed=seed, dropout=0.2), strict=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
digest = hashlib.sha256()
for step in range(steps):
    loss = loss_of(model(*batch(16, seed=100 * seed + step)))
    loss.backward()
    for parameter in model.parameters():
        digest.update(parameter.grad.numpy().tobytes())
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        print("ready", flush=True)
        sys.stdin.readline()
print(digest.hexdigest(), flush=True)
"""


def _start(seed: int) -> subprocess.Popen:
    path = f"{ROOT / 'adapters/python'}:{Path(__file__).parent}"
    env = {**os.environ, "PYTHONPATH": path, "GRADD_AUTOSTART": "0"}
    command = [sys.executable, "-c", SCRIPT, str(seed), str(STEPS)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)


def _finish(processes: list[subprocess.Popen]) -> list[str]:
    """Waits until all have captured, lets them run at once, returns their digests."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    return [process.communicate("go\n", timeout=120)[0].strip() for process in processes]


def test_three_processes_at_once_have_the_bits_of_their_solo_runs(daemon: object) -> None:
    solo = [_finish([_start(seed)])[0] for seed in range(3)]
    processes = [_start(seed) for seed in range(3)]
    together = _finish(processes)
    assert [p.returncode for p in processes] == [0, 0, 0]
    assert together == solo
    assert len(set(solo)) == 3
    assert daemon.ps()["sessions"] == []


def test_a_killed_neighbour_disturbs_nobody(daemon: object) -> None:
    (solo,) = _finish([_start(1)])
    survivor, victim = _start(1), _start(2)
    for process in (survivor, victim):
        assert process.stdout.readline() == "ready\n"
    victim.stdin.write("go\n")
    victim.stdin.flush()
    victim.kill()
    victim.wait()
    assert survivor.communicate("go\n", timeout=120)[0].strip() == solo
    victim.stdin.close()
    victim.stdout.close()
    assert daemon.ps()["sessions"] == []
