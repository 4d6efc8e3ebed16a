"""The self-check keeps looking: at calls 2, 10, 100 on few rows, within its share of the time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradd import ORTModule, options
from gradd.calls import run
from gradd.check import checktimes
from gradd.check.checktimes import Kind, Times
from gradd.fallback import SelfCheckError
from helpers.nets import Heads, Net, assert_close, batch, loss_of

pytestmark = pytest.mark.usefixtures("shared_daemon")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test moves."""
    time = [0.0]
    monkeypatch.setattr(checktimes, "clock", lambda: time[0])
    return time


def _due(times: Times, kinds: dict, key: Any) -> Kind | None:
    """The kind, if something about it is due."""
    kind, is_due = times.due(kinds, key)
    return kind if is_due else None


def steps(model: Any, n: int, now: list[float], hours: float = 1.0) -> list[int]:
    """Trains n steps, each an hour long; returns the number of checks after each."""
    checks = []
    for _ in range(n):
        model.zero_grad()
        loss_of(model(*batch())).backward()
        now[0] += hours * 3600
        checks.append(model.gradd_stats()["self_checks"])
    return checks


def test_checks_at_1_2_10_and_100(now: list[float]) -> None:
    model = ORTModule(Net(), strict=True)
    assert steps(model, 12, now) == [1, *[2] * 8, *[3] * 3]
    stats = model.gradd_stats()
    assert stats["last_checked_step"] == 10 and stats["self_checks_on_few_rows"] == 2
    assert stats["forwards"] - stats["self_check_forwards"] == 12 and stats["plans"] <= 2
    assert steps(model, 89, now)[-2:] == [4, 4]
    assert model.gradd_stats()["last_checked_step"] == 100


def test_a_check_waits_until_it_is_half_a_percent_of_the_time(now: list[float]) -> None:
    times, kinds = Times("decades"), {}
    kind = _due(times, kinds, "k")
    assert kind is not None
    kind.succeed((), True)
    times.over(kind, 0.1)  # what a later check is expected to take: affordable after 20 s
    for second in range(1, 25):
        now[0] = second
        due = _due(times, kinds, "k")
        assert (due is not None) == (second >= 20), second
        if due is not None:
            break
    times.over(kind, 0.2)
    assert kind.due == 100
    while _due(times, kinds, "k") is None:
        now[0] += 0.5
    assert kind.calls >= 100 and now[0] == 20 + 40
    times.over(kind, 0.2)
    assert kind.due == 1000


def test_many_kinds_wait_for_their_time(now: list[float]) -> None:
    times, kinds = Times("decades"), {}
    for i in range(8):
        kind = _due(times, kinds, i)
        assert kind is not None
        kind.succeed((), True)
        times.over(kind, 1.0)
    assert _due(times, kinds, 8) is None
    now[0] = 1000.0
    assert _due(times, kinds, 8) is not None


def test_a_check_with_nothing_to_compare_is_repeated() -> None:
    times, kinds = Times("decades"), {}
    for _ in range(8):
        kind = _due(times, kinds, "k")
        assert kind is not None
        kind.succeed((), False)
        times.over(kind, 1.0)
    assert kind.done and _due(times, kinds, "k") is None


def test_sizes_that_failed() -> None:
    kind = Kind()
    kind.failed["a"] = "differs"
    assert kind.failure("a") == "differs" and kind.failure("b") is None
    for size in "bcd":
        assert kind.failure("e") is None
        kind.failed[size] = "differs"
    assert kind.failure("e") == "differs", "four sizes, and it is the kind"


def fault(monkeypatch: pytest.MonkeyPatch, where: Callable[[run.Run], bool]) -> None:
    backward = run.Run.backward

    def wrong(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, grad_outputs, keep, *more)
        if where(self):
            grads[self.plan.params.index("second.bias")].mul_(1.01)
        return grads

    monkeypatch.setattr(run.Run, "backward", wrong)


def test_a_fault_that_begins_at_step_5(
    now: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken: list[int] = []
    fault(monkeypatch, lambda run: bool(broken))
    strict, model, eager = ORTModule(Net(), strict=True), ORTModule(Net()), Net()
    for m in (strict, model):
        steps(m, 4, now)
    broken.append(1)
    for m in (strict, model):
        steps(m, 5, now)
    with pytest.raises(SelfCheckError, match=r"step 10 of Net .*second\.bias by"):
        strict(*batch())
    with caplog.at_level(logging.WARNING, "gradd"):
        steps(model, 3, now)
    (said,) = [r.getMessage() for r in caplog.records if "runs in PyTorch" in r.getMessage()]
    assert "step 10" in said and "second.bias" in said
    loss_of(eager(*batch())).backward()
    assert_close(model.second.bias.grad, eager.second.bias.grad)
    stats = model.gradd_stats()
    assert stats["fallbacks"] == {"self_check": 3} and stats["self_check_failures"] == 1


@pytest.mark.parametrize("few", [True, False])
def test_a_fault_of_some_sizes(
    few: bool, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of few rows: the whole batch is right and decides. Of whole batches: the first call shows."""
    fault(monkeypatch, lambda run: (run.call.in_types[0][1][0] < 6) is few)
    model = ORTModule(Net(), strict=True)
    if not few:
        with pytest.raises(SelfCheckError, match=r"second\.bias"):
            model(*batch())
        return
    assert steps(model, 10, now)[-1] == 3
    stats = model.gradd_stats()
    assert stats["self_check_failures"] == 0 and stats["self_checks_on_few_rows"] == 1


@pytest.mark.parametrize(
    ("text", "checks"), [("0", 0), ("off", 0), ("first", 1), ("1", 2), ("decades", 2)]
)
def test_options(text: str, checks: int, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", text)
    model = ORTModule(Net(), strict=True)
    assert steps(model, 3, now)[-1] == checks
    monkeypatch.setenv("GRADD_SELF_CHECK", "sometimes")
    with pytest.raises(ValueError, match="GRADD_SELF_CHECK='sometimes'"):
        options.self_check()


def _copy(grad: torch.Tensor | None) -> torch.Tensor:
    """Hooks run for parameters without a gradient too."""
    return torch.zeros(0) if grad is None else grad.clone()


def train(module: Any, now: list[float]) -> list[torch.Tensor]:
    """Weights, buffers, gradients and random state after some steps with all that could be lost."""
    torch.manual_seed(3)
    model = ORTModule(module, strict=True)
    taps: list[torch.Tensor] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: taps.append(_copy(p.grad)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(11):
        if step % 3:
            optimizer.zero_grad()
        x, y = batch(6, step)
        result = model(x, y) if isinstance(module, Net) else model(x)
        (result[0] if isinstance(result, tuple) else result["loss"]).backward()
        optimizer.step()
        now[0] += 3600
        with torch.no_grad():
            model.eval()
            model(x)
            model.train()
    state = [
        *model.state_dict().values(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]
    return [torch.get_rng_state(), *taps, *(t.clone() for t in state)]


@pytest.mark.parametrize("make", [lambda: Net(dropout=0.4), Heads], ids=["dropout", "buffers"])
def test_checks_change_no_bit(
    make: Callable, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_checks = train(make(), now)
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    without = train(make(), now)
    assert len(with_checks) == len(without)
    assert all(map(torch.equal, with_checks, without))
