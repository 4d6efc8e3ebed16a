"""Ctrl-C while the daemon works: KeyboardInterrupt comes, and nothing after it is wrong.

The daemon is stopped (SIGSTOP) while a request waits, so that each test decides what comes first:
Ctrl-C, another Ctrl-C, or the daemon's answer.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH
from nets import Net, assert_same_grads, batch, loss_of
from torch import nn

from gradd import ORTModule, interrupts, optim
from gradd.session import flusher

ROOT = Path(__file__).resolve().parents[3]


class MeanSquare(nn.Module):
    """A scalar output beside a large input: their blocks have very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


class Script:
    """Signals to come, in seconds from now: "int" to this process, "stop", "go" to the daemon."""

    def __init__(self, daemon_pid: int, *events: tuple[float, str]) -> None:
        self.daemon_pid = daemon_pid
        self.events = events
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        start = time.monotonic()
        for at, what in self.events:
            time.sleep(max(0.0, start + at - time.monotonic()))
            if what == "int":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                os.kill(self.daemon_pid, signal.SIGSTOP if what == "stop" else signal.SIGCONT)

    def __enter__(self) -> None:
        if self.events[0] == (0.0, "stop"):
            os.kill(self.daemon_pid, signal.SIGSTOP)
            self.events = self.events[1:]
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join()
        os.kill(self.daemon_pid, signal.SIGCONT)


@pytest.fixture(autouse=True)
def _nobody_else_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for another thread's request hears of a Ctrl-C at once, and not after it."""
    monkeypatch.setattr(flusher, "PERIOD_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def _handler_is_kept() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


LATE = ((0.0, "stop"), (0.1, "int"), (0.4, "go"))
TWICE = ((0.0, "stop"), (0.1, "int"), (0.2, "int"), (1.5, "go"))
NEVER = ((0.0, "stop"), (0.1, "int"), (2.0, "go"))


@pytest.mark.parametrize("events", [LATE, TWICE, NEVER], ids=["late", "twice", "never"])
def test_the_next_forward_is_right(
    events: tuple, daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "GRACE_SECONDS", 0.5 if events is NEVER else 30.0)
    model = ORTModule(MeanSquare(), strict=True)
    small, big = torch.randn(3, 64) * 1e3, torch.randn(30000, 64)
    with torch.no_grad():
        expected = model(small)
        model(big)
        with Script(daemon.pid(), *events):
            with pytest.raises(KeyboardInterrupt):
                model(big)
            # The big run's output lies where this call's input would go.
            assert torch.equal(model(small), expected)
        assert torch.equal(model(small), expected)
    assert model.gradd_stats()["recoveries"] == (0 if events is LATE else 1)


@pytest.mark.parametrize("events", [LATE, TWICE], ids=["late", "twice"])
def test_the_next_step_after_an_interrupted_backward_is_right(
    events: tuple, daemon: object
) -> None:
    ours, theirs = ORTModule(Net(), strict=True), Net()
    x, y = batch()
    loss_of(ours(x, y)).backward()
    ours.zero_grad()
    kept = loss_of(ours(*batch(seed=5)))
    loss = loss_of(ours(x, y))
    with Script(daemon.pid(), *events), pytest.raises(KeyboardInterrupt):
        loss.backward()
    ours.zero_grad()
    kept.backward()  # a run from before the interrupt
    loss_of(theirs(*batch(seed=5))).backward()
    assert_same_grads(ours, theirs)
    for model in (ours, theirs):
        loss_of(model(x, y)).backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("events", [LATE, TWICE], ids=["late", "twice"])
def test_an_interrupted_optimizer_step_counts_once(events: tuple, daemon: object) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(8, 8)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [optim.FusedAdam(m.parameters(), lr=0.1) for m in models]
    for i in range(4):
        grad = torch.randn(8, 8)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.weight.grad = grad.clone()
            if i == 2 and model is models[0]:
                with Script(daemon.pid(), *events), pytest.raises(KeyboardInterrupt):
                    optimizer.step()
            else:
                optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


def test_a_handler_of_the_users_is_called_after_the_request(daemon: object) -> None:
    model = ORTModule(MeanSquare(), strict=True)
    x = torch.randn(3, 64)
    expected = model(x)
    calls: list[float] = []

    def handler(*_: object) -> None:
        calls.append(model(x).item())  # it may even use the model

    signal.signal(signal.SIGINT, handler)
    try:
        with Script(daemon.pid(), *TWICE):
            assert torch.equal(model(x), expected)
        assert calls == [expected.item()]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_threads_are_not_touched(daemon: object) -> None:
    model = ORTModule(Net(), strict=True)
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.append(loss_of(model(*batch())).item()))
    thread.start()
    thread.join()
    assert losses == [loss_of(model(*batch())).item()]


def test_no_interrupt_is_lost_in_what_python_frees(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callbacks and finalizers run between any two instructions; what one raises is lost."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: ignored.append(args.object))
    model = ORTModule(Net(), strict=True)
    x, y = batch()
    loss_of(model(x, y)).backward()
    random.seed(0)
    caught = 0
    monkeypatch.setattr(interrupts, "GRACE_SECONDS", 30.0)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 4e-3))
            for _ in range(3):
                loss_of(model(x, y)).backward()
                model.zero_grad()
                model(x, y)  # a run that ends without a backward
            time.sleep(0.5)
        except KeyboardInterrupt:
            caught += 1
    assert (caught, ignored) == (300, [])
    gc.collect()
    model.zero_grad()
    loss_of(model(x, y)).backward()
    assert model.gradd_stats()["slots"] <= 2


# ---- captures ----

_CAPTURES = """
import os, signal, sys, threading, torch
from gradd import ORTModule

def net():
    return torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))

x, arrived = torch.randn(8, 32), 0
{warm}
for i in range({times}):
    model = ORTModule(net())
    delay = {first} + {step} * i
    try:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            model(x).sum().backward()
    except KeyboardInterrupt:
        arrived += 1
    assert torch.is_grad_enabled()
    model.zero_grad()
    model(x).sum().backward()
    plain = model.module
    wanted = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    for p, g in zip(plain.parameters(), wanted):
        torch.testing.assert_close(p.grad, g)
    stats = model.gradd_stats()
    assert stats["forwards"] > 0 and not stats["fallbacks"], stats
print(arrived)
"""


def _run_captures(**values: object) -> int:
    values = {"warm": "", "first": 0.001, "step": 0.002, **values}
    command = [sys.executable, "-c", _CAPTURES.format(**values)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(done.stdout)


def test_captures_survive(daemon: object) -> None:
    """At any moment of a first step: it comes, and the module is as before."""
    warm = "ORTModule(net())(x).sum().backward()"
    assert _run_captures(times=40, warm=warm, step=0.003) == 40


@pytest.mark.parametrize("delay", [0.15, 0.4, 0.8])
def test_the_first_step_of_a_process_survives(daemon: object, delay: float) -> None:
    """What the first capture imports is there, or is imported by the next one."""
    assert _run_captures(times=1, first=delay) == 1


class Stuck(nn.Module):
    """A forward that does not end while it is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            x = x * 1.0


def test_the_third_one_ends_a_capture(daemon: object, caplog: pytest.LogCaptureFixture) -> None:
    model, x = ORTModule(Stuck()), torch.randn(2, 2)
    begin = time.monotonic()
    events = ((0.5, "int"), (0.7, "int"), (0.9, "int"))
    with Script(daemon.pid(), *events), pytest.raises(KeyboardInterrupt):
        model(x)
    assert 0.8 < time.monotonic() - begin < 10
    assert caplog.text.count("waits for the capture of Stuck; the third one does not") == 2
