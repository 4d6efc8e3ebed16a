"""Daemons killed at random moments: in any request, while they start, while a module is captured.

Half of the time it is the whole daemon, else the process of it that computes. The training ends
with the same bits as an undisturbed one. The nightly rounds run while two other processes burn the
processors, as 20 rounds in a row.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Daemon
from torch import nn

from gradd import ORTModule, optim
from helpers.selection import one_in

pytestmark = pytest.mark.fake
STEPS = 12
STARTS = 2  # daemons in a row that are killed before they serve
MOST = 4  # daemons killed in one step: with the fifth in a row a trainer gives up


class Net(nn.Module):
    """Another number of rows is another plan, another `depth` another capture."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inner, self.outer = nn.Linear(64, 64), nn.Linear(64, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        for _ in range(depth):
            x = self.dropout(torch.tanh(self.inner(x)))
        return self.outer(x).square().mean()


def _optimizer(kind: str, model: nn.Module, clip: bool) -> Any:
    if kind == "fused":
        return optim.FusedAdam(model.parameters(), lr=0.01, max_grad_norm=0.1 if clip else None)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(
    kind: str, dropout: float, clip: bool, at_step: Callable[[int], object] = lambda step: None
) -> list[torch.Tensor]:
    """Losses, and what is in parameters and the optimizer at the end."""
    torch.manual_seed(5)
    model = ORTModule(Net(dropout), strict=True)
    optimizer = _optimizer(kind, model, clip)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        rows, depth = 3 + step % 3, 1 + step // 5
        at_step(step)
        for _ in range(2):  # gradients of two batches are added
            loss = model(torch.randn(rows, 64, generator=generator), depth)
            loss.backward()
            found.append(loss.detach().clone())
        if clip and kind != "fused":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)  # what a data loader takes
    found += [p.detach().clone() for p in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        found += [t.clone() for _, t in sorted(state.items()) if torch.is_tensor(t)]
    return found


class Killer(threading.Thread):
    """Kills the daemon or its worker, and in some cases the next ones while they start."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        super().__init__()
        self.daemon_of_test = daemon
        self.random = random.Random(seed)
        self.over = threading.Event()
        self.killed = threading.Event()
        self.served = self.starting = self.workers = 0
        self.in_step = 0

    def at_step(self, step: int) -> None:
        """A step begins. On a busy machine the last one may end before the first kill."""
        self.in_step = 0
        if step == STEPS // 2:
            self.killed.wait(60)

    def run(self) -> None:
        while not self.over.wait(self.random.uniform(0.005, 0.25)):
            again = self._kill_a_start
            if self.random.random() < 0.5:
                again = self._kill_a_worker
                if not again():
                    continue
                self.workers += 1
            elif not self._kill(self._serving()):
                continue
            self.served += 1
            self.killed.set()
            for _ in range(self.random.choice([0, 0, 1, STARTS])):
                self.starting += again()

    def _kill_a_worker(self) -> bool:
        """The one that computes, or that starts in the place of one that was killed."""
        deadline = time.monotonic() + 1.0
        while not self.over.wait(self.random.uniform(0.0, 0.015)) and time.monotonic() < deadline:
            workers = self.daemon_of_test.workers()
            if self.in_step == MOST:
                return False
            if workers:
                self.in_step += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(workers[0], signal.SIGKILL)
                return True
        return False

    def _kill_a_start(self) -> bool:
        """Waits until the trainer starts another daemon, and lets that live for milliseconds."""
        deadline = time.monotonic() + 1.0
        while not self.over.wait(0.001) and time.monotonic() < deadline:
            if any(p.poll() is None for p in self.daemon_of_test.processes()):
                self.over.wait(self.random.uniform(0.0, 0.015))
                return self._kill(None)
        return False

    def _serving(self) -> int | None:
        with contextlib.suppress(Exception):
            return self.daemon_of_test.pid()
        return 0

    def _kill(self, pid: int | None) -> bool:
        """A daemon of the test: this one, or whichever lives."""
        for process in self.daemon_of_test.processes():
            if self.in_step == MOST:
                return False
            if process.poll() is None and (pid is None or process.pid == pid):
                self.in_step += 1
                self.daemon_of_test.killed.add(process.pid)
                process.kill()
                return True
        return False


def _same(daemon: Daemon, seed: int, case: tuple[str, float, bool]) -> Killer:
    expected = _train(*case)
    killer = Killer(daemon, seed)
    killer.start()
    try:
        found = _train(*case, at_step=killer.at_step)
    finally:
        killer.over.set()
        killer.join()
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"entry {number} of {case}, seed {seed}"
    return killer


CASES = [("fused", 0.3, True), ("torch", 0.3, True), ("fused", 0.0, False), ("torch", 0.0, False)]
ALL = [*CASES, *((kind, p, not clip) for kind, p, clip in CASES)]


@pytest.mark.parametrize("case", one_in(2, CASES))
def test_the_bits_are_the_same(daemon: Daemon, case: tuple[str, float, bool]) -> None:
    killer = _same(daemon, seed=CASES.index(case), case=case)
    assert killer.served > 0, "nothing was killed: nothing is proven"


def _burn(parent: int) -> None:
    while os.getppid() == parent:
        pass


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Two other processes that compute all the time."""
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=_burn, args=(os.getpid(),), daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
def test_twenty_times_in_a_row(daemon: Daemon, seed: int) -> None:
    with _busy():
        killers = [
            _same(daemon, seed * len(ALL) + number, case)
            for number, case in enumerate(ALL[seed % 2 :: 2])
        ]
    served, starting, workers = (
        sum(getattr(k, name) for k in killers) for name in ("served", "starting", "workers")
    )
    print(f"killed {served} that served, {workers} of them workers, and {starting} that started")
    assert served > 8 and starting > 0 and 0 < workers < served
