"""Daemons of the emulated GPU that are killed at random moments: equal bits, and nothing is left.

A round has kills of its own and stands alone: -k "and-100" runs those of `make nightly`, 1400 kills
in 14 rounds, and -k "round-7" goes on with one of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gradd.memory import devices
from gradd.session import client as clients
from helpers import emu_torch
from helpers.emu_steps import DEVICE, OPTIMIZERS, Trainer
from helpers.waiting import until

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]
LATEST = 4e-3  # seconds behind a step's begin, which takes less


def _rounds(count: int, *case: str) -> list[Any]:
    """That many rounds of a hundred kills."""
    marks = [pytest.mark.nightly, pytest.mark.timeout(1800)]
    return [pytest.param(*case, 100, n, marks=marks) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("optimizer", "way", "n_kills", "number"),
    [
        *((optimizer, "vmm", 6, 0) for optimizer in OPTIMIZERS),
        ("fused", "pinned", 6, 0),
        *_rounds(10, "fused", "vmm"),
        *_rounds(2, "sgd", "pinned"),
        *_rounds(2, "fused", "handles"),
    ],
    ids=lambda value: f"round-{value}" if isinstance(value, int) and value < 20 else None,
)
def test_kills_at_any_moment_cost_no_bit(
    daemon: Any,
    optimizer: str,
    way: str,
    n_kills: int,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of them of the daemon, half of its process that computes."""
    monkeypatch.setenv("GRADD_GPU_MEMORY", way)
    steps, chance = 16 if n_kills == 6 else 3 * n_kills, random.Random(f"{optimizer} {number}")
    reference = Trainer(optimizer)
    expected = [reference.step(i).item() for i in range(steps)]
    values = reference.values()
    del reference
    before = _left()
    trainer = Trainer(optimizer)
    for i in range(3):
        assert trainer.step(i).item() == expected[i]
    kills = {i: chance.random() * LATEST for i in chance.sample(range(3, steps), n_kills)}
    losses, killed = [], Counter[str]()
    for i in range(3, steps):
        if i in kills:
            kind = chance.choice(("owner", "worker"))
            killer = threading.Timer(kills[i], _kill, (daemon, trainer.client, kind, killed))
            killer.start()
        losses.append(trainer.step(i))
        if i in kills:
            killer.join()
    assert [loss.item() for loss in losses] == expected[3:]
    assert all(map(torch.equal, trainer.values(), values))
    print(f"killed: {dict(killed)}; recovered: {trainer.client.recoveries}")
    assert n_kills // 2 < killed.total() <= n_kills
    assert trainer.client.recoveries > n_kills // 2
    del trainer, losses
    left: list[Counter[str]] = []

    def is_gone() -> bool:
        left[:] = [_left() - before]
        return not left[0]

    try:
        until(is_gone, "something is left")
    finally:
        print(left)


def _kill(daemon: Any, client: clients.Client, kind: str, killed: Counter[str]) -> None:
    """kill -9 of a GPU's daemon or of its process that computes; neither may be there now."""
    owner = client.daemon_pid
    with contextlib.suppress(OSError):
        if kind == "owner":
            daemon.kill(owner)
        else:
            for worker in Path(f"/proc/{owner}/task/{owner}/children").read_text().split():
                os.kill(int(worker), signal.SIGKILL)
        killed[kind] += 1


def _left() -> Counter[str]:
    """What this process has open, mapped and in /dev/shm, when no client is there."""
    gc.collect()
    clients.close_all()
    devices.of(torch.device(DEVICE)).driver.wait_for_ends()
    own = re.compile(rf"gradd|\b{os.getpid()}\b")
    found = Counter(filter(own.search, os.listdir("/dev/shm")))
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the scan
            found[re.sub(r"\d+", "", os.readlink(entry.path))] += 1
    maps = Path("/proc/self/maps").read_text()
    found.update(f"mapped {name}" for name in re.findall(r"memfd:\S+", maps))
    return found
