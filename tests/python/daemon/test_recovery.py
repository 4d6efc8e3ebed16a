"""A daemon that is killed costs a pause, not a bit."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradd
from gradd import ORTModule, errors, optim
from gradd.session import client, control, replay
from helpers import sessions
from helpers.nets import Net, batch, loss_of

pytestmark = pytest.mark.fake


def _train(steps: int, before_backward: dict, dropout: float = 0.0, width: int = 16) -> list:
    """Losses and gradients of a run; `before_backward[step]` is called between the two passes."""
    torch.manual_seed(11)
    model = ORTModule(Net(width=width, dropout=dropout), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history: list[torch.Tensor] = []
    for step in range(steps):
        loss = loss_of(model(*batch(5, seed=step)))
        before_backward.get(step, lambda: None)()
        loss.backward()
        history.append(loss.detach().clone())
        history += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return history


def _assert_equal_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"entry {i} differs by {(x - y).abs().max()}"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_kill_between_forward_and_backward(daemon: object, dropout: float) -> None:
    expected = _train(4, {}, dropout)
    got = _train(4, {1: daemon.kill, 2: daemon.kill}, dropout)
    _assert_equal_bits(got, expected)
    assert sessions.session().recoveries == 2


class Deep(torch.nn.Sequential):
    """Layers whose masks a budget has computed again."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layers = [
            (torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Dropout(0.3)) for _ in range(8)
        ]
        super().__init__(*(module for layer in layers for module in layer))


def test_kill_with_a_memory_budget(daemon: object) -> None:
    """The next daemon plans the same: what it computes again has the same masks."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    # What products need beside their operands depends on the machine, so the budget does.
    whole, least = (gradd.estimate(Deep(), [x]).curve[i].activations for i in (0, -1))
    results = []
    for kill, budget in (
        (False, None),
        (False, (whole + least) // 2),
        (True, (whole + least) // 2),
    ):
        torch.manual_seed(11)
        model = ORTModule(Deep(), strict=True, memory_budget=budget)
        loss = model(x).square().mean()
        if kill:
            daemon.kill()
        loss.backward()
        again = model.gradd_explain().recomputed_bytes
        assert again > 0 if budget else again == 0
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    _assert_equal_bits(results[1], results[0])
    _assert_equal_bits(results[2], results[0])


def test_kill_between_steps(daemon: object) -> None:
    model = ORTModule(Net(), strict=True)
    first = loss_of(model(*batch()))
    first.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    daemon.kill()
    model.zero_grad()
    second = loss_of(model(*batch()))
    second.backward()
    assert torch.equal(first, second)
    _assert_equal_bits([p.grad for p in model.parameters()], grads)


def test_kill_with_two_outstanding_forwards_and_a_kept_graph(daemon: object) -> None:
    results = []
    for kill in (False, True):
        model = ORTModule(Net(), strict=True)
        one, two = (loss_of(model(*batch(5, seed=s))) for s in (1, 2))
        one.backward(retain_graph=True)
        if kill:
            daemon.kill()
        two.backward()
        one.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    _assert_equal_bits(results[1], results[0])


@pytest.mark.parametrize("fused", [False, True])
def test_outputs_of_before_a_step_keep_their_values(daemon: object, fused: bool) -> None:
    """A forward is not run again with parameters that it has not seen."""
    model = ORTModule(Net(), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    one, two, kept = (loss_of(model(*batch(5, seed=s))) for s in (1, 2, 3))
    values = [two.item(), kept.item()]
    one.backward()
    kept.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    daemon.kill()
    loss_of(model(*batch(5, seed=4))).backward()
    assert [two.item(), kept.item()] == values
    # torch finds out by version counters, which fused optimizers leave alone.
    with pytest.raises(
        errors.StaleError if fused else RuntimeError,
        match="the parameters have changed since" if fused else "modified by an inplace operation",
    ):
        two.backward()
    assert sessions.session().recoveries == 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_another_model_loses_no_run(daemon: object, fused: bool) -> None:
    """Two models in turn, as in adversarial training."""
    results = []
    for kill in (False, True):
        models = [ORTModule(Net(seed=s), strict=True) for s in (1, 2)]
        losses = [loss_of(m(*batch(5))) for m in models]
        _, lazy = models[1](*batch(7))
        losses[0].backward()
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.5, fused=fused)
        optimizer.step()
        if kill:
            daemon.kill()
        losses[1].backward()
        results.append([lazy.clone(), *(p.grad.clone() for p in models[1].parameters())])
    _assert_equal_bits(results[1], results[0])


def test_kill_in_a_step_of_fused_adam_leaves_outputs_alone(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection comes back in the middle of the step, when half of it may be done."""
    model = ORTModule(Net(), strict=True)
    optimizer = optim.FusedAdam(model.parameters(), lr=0.5)
    one, two = (loss_of(model(*batch(5, seed=s))) for s in (1, 2))
    value = two.item()
    one.backward()
    call = control.Connection.call

    def killing(self: control.Connection, envelope: dict, *args: object, **kwargs: object) -> dict:
        if envelope["v"] != "step":
            return call(self, envelope, *args, **kwargs)
        monkeypatch.setattr(control.Connection, "call", call)
        call(self, envelope, *args, **kwargs)
        daemon.kill()  # after the parameters were written, before the client knows
        raise control.ConnectionLost("killed")

    monkeypatch.setattr(control.Connection, "call", killing)
    optimizer.step()
    assert two.item() == value
    assert sessions.session().recoveries == 1


def test_kill_during_requests(daemon: object) -> None:
    """The daemon dies at arbitrary moments of a run of steps.

    The killer waits for a step after each kill: on a loaded machine a daemon that is killed again
    and again while it starts would let the client give up.
    """
    expected = _train(60, {}, 0.2, width=256)
    stepped = threading.Event()
    finished = threading.Event()
    delays = random.Random(5)

    def killer() -> None:
        while stepped.wait() and not finished.wait(delays.uniform(0, 0.03)):
            stepped.clear()
            pid = sessions.session().daemon_pid
            daemon.killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        got = _train(60, dict.fromkeys(range(0, 60, 3), stepped.set), 0.2, width=256)
    finally:
        finished.set()
        stepped.set()
        thread.join()
    _assert_equal_bits(got, expected)
    assert sessions.session().recoveries >= 1


def test_stopped_daemon_is_started_again(daemon: object) -> None:
    model = ORTModule(Net(), strict=True)
    loss_of(model(*batch())).backward()
    daemon.process.terminate()
    daemon.process.wait(60)
    model.zero_grad()
    loss_of(model(*batch())).backward()
    assert sessions.session().recoveries == 1


def test_recovery_says_so_once(daemon: object, caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Net(), strict=True)
    loss = loss_of(model(*batch()))
    daemon.kill()
    with caplog.at_level(logging.WARNING, "gradd"):
        loss.backward()
    said = [r.getMessage() for r in caplog.records if "parameters are safe" in r.getMessage()]
    assert len(said) == 1


def test_without_autostart_the_error_names_the_directory(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModule(Net(), strict=True)
    loss = loss_of(model(*batch()))
    monkeypatch.setenv("GRADD_AUTOSTART", "0")
    monkeypatch.setattr("gradd.session.daemon.START_SECONDS", 0.2)
    monkeypatch.setattr("gradd.session.daemon.connect.__defaults__", (0.2,))
    daemon.kill()
    start = time.monotonic()
    with pytest.raises(errors.SessionError, match=str(daemon.directory)):
        loss.backward()
    assert time.monotonic() - start < 15, "it waited for the 20 s of a start, not for 0.2 s"
    del loss, model
    client.close_all()


def test_lazy_output_can_be_read_after_a_restart(daemon: object) -> None:
    model = ORTModule(Net(dropout=0.3), strict=True)
    torch.manual_seed(3)
    _, first = model(*batch())
    value = first.clone()
    torch.manual_seed(3)
    _, second = model(*batch())
    daemon.kill()
    assert torch.equal(second.clone(), value)


def test_a_run_whose_graph_is_gone_is_given_up() -> None:
    """As an exception of a signal handler leaves it, which no object holds any more."""
    ledger = replay.Ledger()
    ledger.plans[7] = {"plan": 7, "graph": b"gone"}
    ledger.runs[3] = {"run": 3, "plan": 7}, None
    sent: list[str] = []

    def send(verb: str, fields: dict, frames: Sequence[bytes]) -> Any:
        sent.append(verb)
        if verb != "about":
            raise errors.StaleError("unknown plan")

    assert ledger.resend(send) == (0, 1)
    assert sent == ["about"] and 3 in ledger.lost and not ledger.runs
