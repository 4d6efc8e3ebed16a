"""Code that is exchanged between calls, as notebooks do: classes that come later, reloads."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo import frontend
from gradd.dynamo.traces import Frames
from helpers.nets import assert_same_grads
from helpers.selection import quick_or_slow

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


def _helper(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Helper:
    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.helper = nn.Linear(4, 4), Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.helper.of(self.layer(x)))

    def inner(self, x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
        return _helper(x).tanh() * by


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def _same(ours: ORTModule) -> None:
    """Two calls and a gradient, as in PyTorch."""
    twin = copy.deepcopy(ours.module)
    for _ in range(2):
        result, expected = ours(X), twin(X)
        torch.testing.assert_close(result, expected)
    ours.module.zero_grad()
    result.sum().backward()
    expected.sum().backward()
    for mine, theirs in zip(ours.module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def _other_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.layer(x).sigmoid()


def _other_inner(self: Any, x: torch.Tensor, by: float = 3.0) -> torch.Tensor:
    return x * by - 1


def _other_helper(x: torch.Tensor) -> torch.Tensor:
    return x * x


def _exchange(function: Any, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What IPython's autoreload does to a function."""
    monkeypatch.setattr(function, "__code__", other.__code__)


EXCHANGED: dict[str, tuple[Callable, Callable]] = {
    "forward": (Block.forward, _other_forward),
    "a method": (Block.inner, _other_inner),
    "a function": (_helper, _other_helper),
    "a helper's method": (Helper.of, lambda self, x: x * 5),
}


@pytest.mark.parametrize("name", EXCHANGED)
@pytest.mark.parametrize("kind", [Block, Top])
def test_code_of_a_function_is_exchanged(kind: type, name: str, monkeypatch: Any) -> None:
    ours = ORTModule(kind())
    _same(ours)
    _exchange(*EXCHANGED[name], monkeypatch)
    _same(ours)
    monkeypatch.undo()
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    _same(ours)


def _late() -> tuple[type[Block], type[Helper]]:
    """Classes that no call has seen."""

    class LateBlock(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu()

    class LateHelper(Helper):
        def of(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    return LateBlock, LateHelper


@pytest.mark.parametrize("how", quick_or_slow({"a child"}, ["a class", "a child", "a helper"]))
def test_a_class_that_comes_later_is_watched(how: str) -> None:
    late, helper = _late()
    ours = ORTModule(Top())
    _same(ours)
    if how == "a class":
        ours.module.block.__class__ = late
    elif how == "a child":
        ours.module.block = late()
    else:
        ours.module.block.helper = helper()
    _same(ours)
    for by in (5, 7, 9):
        if how == "a helper":
            helper.of = lambda self, x, by=by: x * by
        else:
            late.forward = lambda self, x, by=by: self.layer(x) * by
        _same(ours)


def test_a_class_that_is_away_for_a_while_is_watched() -> None:
    late, _ = _late()
    ours = ORTModule(Top())
    first, other = ours.module.block, late()
    _same(ours)
    ours.module.block = other
    _same(ours)
    late.forward = lambda self, x: self.layer(x) * 5
    ours.module.block = first
    _same(ours)
    late.forward = lambda self, x: self.layer(x) * 7
    ours.module.block = other
    _same(ours)


def test_a_layer_of_torch_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ORTModule(Top())
    _same(ours)
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 2)
    _same(ours)


def _with_closure(big: torch.Tensor) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def of(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * big

    return of


def test_closures_are_watched_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = _with_closure(torch.full((4,), 3.0)), _with_closure(torch.full((4,), 4.0))
    ours = ORTModule(Top())
    ours.module.block.helper.of = first.__get__(ours.module.block.helper)
    _same(ours)
    first.__code__ = (lambda big: lambda self, x: x - big)(0).__code__
    _same(ours)
    held = weakref.ref(first)
    ours.module.block.helper.of = second.__get__(ours.module.block.helper)
    del first
    _same(ours)
    torch.compiler.reset()
    gc.collect()
    assert held() is None


class Refusing(nn.Module):
    """Raises for some arguments, or for some values."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.error = error

    def forward(self, x: torch.Tensor, tag: str, n: int = 0) -> torch.Tensor:
        if tag == "bad" or n > 2:
            raise self.error("bad batch")
        return self.layer(x)


class Guarded(nn.Module):
    """Raises for some values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if torch.isnan(y).any():
            raise FloatingPointError("not a number")
        return y.tanh()


# Dynamo's error ends a trace; torch 2.14 traces it, and its handlers.
ENDS = torch.__version__ < "2.14"


class Nested(nn.Module):
    """Layers whose last one adds tensors that may not fit."""

    def __init__(self, caught: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.caught, self.calls = caught, 0

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        h = self.layers(x)
        try:
            return h + other
        except RuntimeError:
            if not self.caught:
                raise
            return h * 2


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_do_not_fit_cost_one_trace(strict: bool) -> None:
    """And PyTorch's own error comes, whether the call was the first or not."""
    ours = ORTModule(Nested(False), strict=strict)
    for at in range(6):
        before = Frames.now()
        if at % 2 == 0:
            with pytest.raises(RuntimeError, match="must match"):
                ours(X, torch.ones(3, 5))
            assert strict or not ENDS or Frames.now().total - before.total <= 1
        else:
            torch.testing.assert_close(ours(X, X), ours.module(X, X))
    assert ours.gradd_stats()["in_torch"] == {}


def test_an_operator_whose_error_forward_handles() -> None:
    eager = Nested(True)
    ours = ORTModule(copy.deepcopy(eager))
    for other in (torch.ones(3, 5), X, torch.ones(3, 5), torch.ones(2, 5), X):
        for model in (eager, ours):
            model.zero_grad()
            model(X, other).sum().backward()
        assert_same_grads(ours, eager)
    stats = ours.gradd_stats()
    assert ("untraced_function" in stats["in_torch"]) == ENDS and stats["graphs"] >= 1


def test_an_error_in_every_step_is_in_the_end_traced_no_more(monkeypatch) -> None:
    monkeypatch.setattr(frontend, "_AGAIN", 3)
    ours = ORTModule(Guarded())
    traced = []
    for _ in range(60):
        before = Frames.now()
        with pytest.raises(FloatingPointError):
            ours(X * float("nan"))
        torch.testing.assert_close(ours(X), ours.module(X))
        traced.append(Frames.now() != before)
    assert traced[0] and sum(traced[4:]) <= 3
    stats = ours.gradd_stats()
    assert stats["parts_in_torch"].get("untraced_function", 0) > 40 or stats["breaks"] > 40


@pytest.mark.parametrize("bad", [("bad", 0), ("good", 3)])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_calls_behind_errors_of_the_forward(
    error: type[BaseException], strict: bool, bad: tuple[str, int]
) -> None:
    ours = ORTModule(Refusing(error), strict=strict)
    for at in range(10):
        if at in (2, 3, 5, 8):
            with pytest.raises(error, match="bad batch"):
                ours(X, *bad)
        else:
            torch.testing.assert_close(ours(X, "good", 0), ours.module(X, "good"))
    stats = ours.gradd_stats()
    assert stats["forwards"] == 6 and stats["fallbacks"] == {}
