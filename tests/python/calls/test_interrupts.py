"""Ctrl-C while the daemon works: KeyboardInterrupt comes, and nothing after it is wrong.

The daemon is stopped (SIGSTOP) while a request waits, so that each test decides what comes first:
Ctrl-C, another Ctrl-C, or the daemon's answer.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PYTHONPATH
from torch import nn

from gradd import ORTModule, interrupts, optim
from gradd.session import control, flusher
from helpers.nets import Net, assert_same_grads, batch, loss_of
from helpers.selection import drawn, every_run

pytestmark = pytest.mark.one_in(4)


class MeanSquare(nn.Module):
    """A scalar output beside a large input: their blocks have very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).pow(2).mean()


class Script:
    """Signals to come: "int" to this process, "go" to the daemon, which stands still until then.

    The first "int" waits until the block waits for the daemon (or until `ready`, and then the
    daemon is not stopped), the next ones until the one before was noted. So none comes too early or
    after the end of the block, however slow the machine is. "raised" waits until the client has
    given the request up; numbers are pauses in seconds.
    """

    def __init__(
        self, worker_pid: int, *events: str | float, ready: Callable[[], bool] | None = None
    ) -> None:
        self.worker_pid = worker_pid
        self.events = events
        self.stops_daemon = ready is None
        self.waits = threading.Event()
        self.ready = ready or self.waits.is_set
        self.over = threading.Event()
        self.patch = pytest.MonkeyPatch()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._until(self.ready)
        for event in self.events:
            before = interrupts.noted
            if self.over.is_set():
                return
            if event == "int":
                os.kill(os.getpid(), signal.SIGINT)
                self._until(lambda before=before: interrupts.noted != before)
            elif event == "raised":
                self._until(lambda: interrupts.noted == 0)
            elif event == "go":
                os.kill(self.worker_pid, signal.SIGCONT)
            else:
                self.over.wait(event)

    def _until(self, true: Callable[[], bool]) -> None:
        while not true() and not self.over.wait(0.005):
            pass

    def __enter__(self) -> None:
        if self.stops_daemon:
            stop(self.worker_pid)
            for name in ("_wait", "_exchange"):  # for a reply, and for that to a segment
                self._note(name)
        self.thread.start()

    def _note(self, name: str) -> None:
        method = getattr(control.Connection, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.waits.set()
            return method(*args, **kwargs)

        self.patch.setattr(control.Connection, name, noting)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        self.over.set()
        self.thread.join()
        os.kill(self.worker_pid, signal.SIGCONT)


def stop(pid: int) -> None:
    """SIGSTOP; returns when all threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    for status in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            while status.read_text().rsplit(")", 1)[1].split()[0] not in "TtXZ":
                time.sleep(0.001)


@pytest.fixture(autouse=True)
def _no_requests_of_the_flusher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for another thread's request delivers a Ctrl-C at once, not after the request."""
    monkeypatch.setattr(flusher, "PERIOD_SECONDS", 3600.0)


@pytest.fixture(autouse=True)
def _handler_is_kept() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


LATE = ("int", 0.1, "go")
TWICE = ("int", "int", "raised", 0.5, "go")
NEVER = ("int", "raised", 0.5, "go")
NOTED = ("int", "int", 0.5, "go")  # where the answer is waited for, whatever comes


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
        with Script(daemon.worker(), *events):
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
    with Script(daemon.worker(), *events), pytest.raises(KeyboardInterrupt):
        loss.backward()
    ours.zero_grad()
    kept.backward()  # a run from before the interrupt
    loss_of(theirs(*batch(seed=5))).backward()
    assert_same_grads(ours, theirs)
    for model in (ours, theirs):
        loss_of(model(x, y)).backward()
    assert_same_grads(ours, theirs)


@pytest.mark.parametrize("events", [LATE, NOTED], ids=["late", "twice"])
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
                with Script(daemon.worker(), *events), pytest.raises(KeyboardInterrupt):
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
        with Script(daemon.worker(), *NOTED):
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
    """Callbacks and finalizers run between any two instructions; an exception in one is lost."""
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
    assert not ignored, f"a KeyboardInterrupt was lost in {ignored}"
    assert caught == 300, f"{300 - caught} of 300 Ctrl-C were lost"
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


@pytest.mark.parametrize("times", every_run((15,), [15, 40]))
def test_captures_survive(daemon: object, times: int) -> None:
    """At any moment of a first step: it comes, and the module is as before."""
    warm = "ORTModule(net())(x).sum().backward()"
    assert _run_captures(times=times, warm=warm, step=0.12 / times) == times


DELAYS = [0.15, 0.4, 0.8]


@pytest.mark.parametrize("delay", every_run(drawn(DELAYS, 1), DELAYS))
def test_the_first_step_of_a_process_survives(daemon: object, delay: float) -> None:
    """The imports of the first capture are complete, or the next one repeats them."""
    assert _run_captures(times=1, first=delay) == 1


class Stuck(nn.Module):
    """A forward that does not end while it is captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            x = x * 1.0


def _is_captured() -> bool:
    """The main thread is in Stuck.forward, below a capture."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    if interrupts.compiles(frame):  # Dynamo reads the bytecode, in no frame of the forward
        return bool(interrupts._traced)
    while frame is not None:
        if (frame.f_code.co_name, frame.f_code.co_filename) == ("forward", __file__):
            return bool(interrupts._work)
        frame = frame.f_back  # type: ignore[assignment]
    return False


def test_the_third_one_ends_a_capture(daemon: object, caplog: pytest.LogCaptureFixture) -> None:
    model, x = ORTModule(Stuck()), torch.randn(2, 2)
    script = Script(daemon.worker(), "int", "int", "int", ready=_is_captured)
    with script, pytest.raises(KeyboardInterrupt):
        model(x)
    assert (
        caplog.text.count("waits until the capture of Stuck has ended; a third Ctrl-C does not")
        == 2
    )
