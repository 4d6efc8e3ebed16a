"""`forward` of the wrapped module itself is replaced, behind the wrapper: each call is the new one.

Patches come and go in turn; attributes that only one of the forwards reads change in between. The
self-check is off: it would notice some of it, later.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.nets import assert_close
from helpers.selection import one_in

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.scale = 1.0
        self.shifts = [0.5]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scale + self.shifts[0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).tanh()


class Times:
    """A callable object."""

    def __init__(self, net: Inner, factor: float) -> None:
        self.net, self.factor = net, factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.lin(x) * self.factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self.net.lin(x) - self.factor


class Slotted(Times):
    __slots__ = ()


def _times(net: Inner, factor: float, x: torch.Tensor) -> torch.Tensor:
    return net.lin(x) * factor


def _by_default(net: Inner, factor: float) -> Callable:
    def forward(x: torch.Tensor, factor: float = factor) -> torch.Tensor:
        return net.lin(x) * factor

    return forward


def _of_class(net: Inner, factor: float) -> Callable:
    def forward(self: Inner, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * factor

    return types.MethodType(forward, net)


# The same code each time, with something else in it.
MAKERS: dict[str, Callable[[Inner, float], Callable]] = {
    "closure": lambda net, factor: lambda x: net.lin(x) * factor,
    "default": _by_default,
    "method": _of_class,
    "partial": lambda net, factor: functools.partial(_times, net, factor),
    "object": Times,
    "slots": Slotted,
    "method of an object": lambda net, factor: Times(net, factor).method,
    "features": lambda net, factor: net.features,
}


@pytest.fixture(autouse=True)
def _unchecked(shared_daemon: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


def _put(net: Inner, make: Callable, factor: float) -> None:
    net.forward = make(net, factor)


def _take(net: Inner) -> None:
    net.__dict__.pop("forward", None)


def _attribute(net: Inner, value: float) -> None:
    net.scale = value


def _content(net: Inner, value: float) -> None:
    net.shifts[0] = value


def _swap_and_restore(net: Inner, make: Callable, factor: float) -> Iterator[None]:
    before = net.forward
    net.forward = make(net, factor)
    yield
    net.forward = before
    yield


def _one_after_another(net: Inner, make: Callable) -> Iterator[None]:
    for factor in (2.0, 3.0, 2.0):
        _put(net, make, factor)
        yield
    _take(net)
    yield
    _put(net, make, 5.0)
    yield
    yield from _swap_and_restore(net, make, 7.0)


def _changes_after_an_excursion(net: Inner, make: Callable) -> Iterator[None]:
    yield
    _put(net, make, 2.0)
    yield
    _take(net)
    for value in (3.0, 4.0):
        _attribute(net, value)
        yield
        _content(net, value)
        yield
    _put(net, make, 2.0)
    _attribute(net, 9.0)
    yield
    _take(net)
    yield


STORIES = {"one after another": _one_after_another, "excursion": _changes_after_an_excursion}


def _agree(ours: ORTModule, theirs: nn.Module) -> None:
    for model in (ours, theirs):
        model.zero_grad()
    mine, right = ours(X), theirs(X)
    assert_close(mine, right)
    mine.square().sum().backward(), right.square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(a.grad, b.grad)


def _pair(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(kind())
    return made[0], made[1]


def _inner(net: Any) -> Inner:
    return net if isinstance(net, Inner) else net.inner


@pytest.mark.parametrize("kind", [Inner, Outer])
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("make", one_in(2, MAKERS))
def test_each_call_is_the_present_forward(kind: type, story: str, make: str) -> None:
    net, plain = _pair(kind)
    ours = ORTModule(net)
    stories = [STORIES[story](_inner(one), MAKERS[make]) for one in (net, plain)]
    for _ in zip(*stories, strict=True):
        _agree(ours, plain)
    assert ours.gradd_stats()["fallbacks"] == {}


@pytest.mark.parametrize("kind", [Inner, Outer])
@pytest.mark.parametrize("make", MAKERS)
def test_a_forward_that_was_there_before(kind: type, make: str) -> None:
    net, plain = _pair(kind)
    for one in (net, plain):
        _put(_inner(one), MAKERS[make], 3.0)
    ours = ORTModule(net)
    _agree(ours, plain)
    for one in (net, plain):
        _put(_inner(one), MAKERS[make], 4.0)
    _agree(ours, plain)
    for one in (net, plain):
        _take(_inner(one))
    _agree(ours, plain)


def test_a_forward_that_stays_is_captured_once() -> None:
    net, plain = _pair(Inner)
    for one in (net, plain):
        _put(one, _of_class, 3.0)
    ours = ORTModule(net)
    for _ in range(4):
        _agree(ours, plain)
    assert ours.gradd_stats()["captures"] == 1
