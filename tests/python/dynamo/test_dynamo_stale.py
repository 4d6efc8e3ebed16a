"""Self-checks with the user's own forward: changes that Dynamo misses, and lost gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_values_beside_arguments import ALL_KNOWN, Scaled, X
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.calls import run
from gradd.check import checktimes
from gradd.check.reference import Reference
from gradd.dynamo.frontend import Compiled
from gradd.fallback import SelfCheckError

pytestmark = pytest.mark.usefixtures("shared_daemon")


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only the test moves: checks are never too expensive."""
    time = [0.0]
    monkeypatch.setattr(checktimes, "clock", lambda: time[0])
    return time


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each run of a user's forward could be compared."""
    found: list[bool] = []
    run_forward = Reference.run_forward

    def noted(self: Reference, *args: Any) -> bool:
        found.append(run_forward(self, *args))
        return found[-1]

    monkeypatch.setattr(Reference, "run_forward", noted)
    return found


# Their forwards have effects, or are more than one piece.
UNFOUND = {"_hook_of_a_tensor", "_window", "_size_that_is_drawn"}
PROGRAMS = [make for _, make in ALL_KNOWN if make.__name__ not in UNFOUND]


def given(module: nn.Module) -> Compiled:
    """Of a forward that is given, as trainers do it."""
    return Compiled(module, module.forward)


@pytest.mark.parametrize(
    "wrap, make", [*((ORTModule, make) for make in PROGRAMS), (given, PROGRAMS[0])]
)
def test_a_change_that_dynamo_does_not_see(
    wrap: Callable, make: Callable, now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A later check finds it; from there on calls run in PyTorch, by name."""
    ask, change = make()
    eager, model = Scaled(ask), wrap(Scaled(ask))
    for step in range(11):
        if step == 3:
            change()
        now[0] += 3600
        values = model(X)
        values.sum().backward()
    torch.testing.assert_close(values, eager(X))
    if torch.__version__[:4] != "2.13" and "of what that reads" not in caplog.text:
        pytest.skip("this torch sees the change")
    assert "of what that reads" in caplog.text
    stats = model.gradd_stats() if wrap is ORTModule else model.stats()
    assert set(stats["fallbacks"]) == {"self_check"}


class Counting(nn.Module):
    """A forward with an effect, or without one."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.lin, self.effect = nn.Linear(4, 4), effect
        self.calls, self.seen = 0, []
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        if self.effect == "number":
            self.calls += 1
        if self.effect == "list":
            self.seen.append(1)
        y = self.lin(x)
        if self.effect == "buffer":
            self.mean.mul_(0.5).add_(x.mean(0))
        if self.effect == "print":
            torch._dynamo.graph_break()
        return {"y": [y, y.sin()]}


@pytest.mark.parametrize("effect", ["none", "number", "list", "buffer", "print"])
def test_a_forward_with_effects_runs_once(effect: str, forwards: list[bool]) -> None:
    model = ORTModule(Counting(effect), strict=True)
    for _ in range(2):
        sum(model(X)["y"]).sum().backward()
    assert bool(forwards) is (effect == "none") and all(forwards)
    if effect in ("number", "list"):
        assert (model.module.calls, len(model.module.seen)) in ((2, 0), (0, 2))


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_forward_runs_on_few_rows_in_every_mode(
    mode: Any, forwards: list[bool], now: list[float]
) -> None:
    model = ORTModule(Counting("none"), strict=True)
    with mode():
        for _ in range(3):
            model(torch.randn(4, 40).t())
            now[0] += 3600
    assert forwards == [True, True]
    assert model.gradd_stats()["self_checks_on_few_rows"] == 1


def test_a_parameter_that_a_closure_holds(forwards: list[bool]) -> None:
    """The forward reads it past its module: the graph is compared."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.held = [self.lin.weight]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.lin(x), self.held[0])

    model = ORTModule(Tied(), strict=True)
    model(X).sum().backward()
    assert forwards == [False] and model.gradd_stats()["self_checks"] == 1
    assert model.module.lin.weight.grad is not None


class Gated(nn.Module):
    """ReZero: a branch behind a gate that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gate = nn.Linear(4, 4), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.gate * torch.tanh(self.inner(x))).square().mean()


def _lost(monkeypatch: pytest.MonkeyPatch, how: Callable[[torch.Tensor], Any]) -> None:
    backward = run.Run.backward

    def wrong(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = backward(self, grad_outputs, keep, *more)
        at = self.plan.params.index("inner.weight")
        grads[at] = how(grads[at])
        return grads

    monkeypatch.setattr(run.Run, "backward", wrong)


def test_a_gradient_of_zeros_is_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _lost(monkeypatch, lambda grad: None)
    with pytest.raises(SelfCheckError, match=r"the daemon has no gradient for inner\.weight"):
        ORTModule(Gated(), strict=True)(X)


def _train(model: ORTModule, steps: int, now: list[float]) -> int:
    """Trains; returns the number of checks."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).backward()
        optimizer.step()
        now[0] += 3600
    return model.gradd_stats()["self_checks"]


def test_a_gradient_that_was_zero_is_compared_again(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    assert _train(ORTModule(Gated(), strict=True), 9, now) == 2, "the gate has moved in step 1"
    stuck = ORTModule(Gated(), strict=True)
    stuck.gate.requires_grad_(False)
    assert _train(stuck, 30, now) == 10, "and a few more checks are enough"
    _lost(monkeypatch, torch.zeros_like)
    model = ORTModule(Gated(), strict=True)
    with pytest.raises(SelfCheckError, match=r"step 2 of .* the gradient of inner\.weight"):
        _train(model, 3, now)
