"""`in` among numbers that change: each call gets its own answer, and numbers stay inputs."""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers import ROOT
from helpers.nets import assert_close

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Layers(nn.Module):
    """Runs chosen layers, and counts calls: a self-check cannot run this forward again."""

    def __init__(self, ask: Callable[[int, Any], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2)
        self.ask, self.calls, self.held = ask, 0, [0]

    def forward(self, x: torch.Tensor, chosen: Any) -> torch.Tensor:
        self.calls += 1
        for i, layer in enumerate(self.layers):
            if self.ask(i, chosen):
                x = layer(x)
        return self.last(x)


def _agrees(ask: Callable[[int, Any], bool], calls: list[Any], x: torch.Tensor = X) -> ORTModule:
    plain, net = Layers(ask), ORTModule(Layers(ask))
    for chosen in calls:
        expected, found = plain(x, chosen), net(x, chosen)
        assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        for one, other in zip(net.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert_close(one.grad, other.grad)
        plain.zero_grad()
        net.zero_grad()
    assert net.gradd_stats()["in_torch"] == {}
    return net


@pytest.mark.slow
def test_layers_chosen_by_a_list(shared_daemon: Any) -> None:
    _agrees(lambda i, chosen: i in chosen, [[2], [0, 2], [1, 2], [0, 1]])


def _pairs(i: int, chosen: Any) -> bool:
    return (i, 1) in [(k, 1) for k in chosen]


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda i, chosen: i not in chosen, tuple),
        (lambda i, chosen: i in chosen, collections.deque),
        (lambda i, chosen: i / 2 in chosen, list),
        (lambda i, chosen: bool(i) in (chosen[0], 7), list),
        (_pairs, list),
    ],
)
def test_other_ways_to_ask(
    ask: Callable[[int, Any], bool], kind: Callable, shared_daemon: Any
) -> None:
    _agrees(ask, [kind(k) for k in ([2], [1], [0], [0, 1], [2, 1])])


def test_a_list_that_the_module_holds(shared_daemon: Any) -> None:
    plain, net = Layers(operator.eq), ORTModule(Layers(operator.eq))
    plain.ask, net.module.ask = (lambda i, _, held=m.held: i in held for m in (plain, net.module))
    for held in (2, 1, 0, 2):
        plain.held[0] = net.module.held[0] = held
        assert_close(net(X, None), plain(X, None))


def test_floats_and_sizes(shared_daemon: Any) -> None:
    _agrees(lambda i, chosen: i + 0.5 in chosen, [[2.5], [0.5], [1.5]])
    _agrees(
        lambda i, chosen: i + 3 in chosen.shape, [X, X[:2], X.repeat(2, 1)[:5], torch.cat([X, X])]
    )


def test_numbers_that_are_not_asked_for_cost_no_capture(shared_daemon: Any) -> None:
    def ask(i: int, chosen: Any) -> bool:
        return "a" in chosen or i in chosen[:1]

    net = _agrees(ask, [[1, n] for n in (3, 4, 5, 6)] + [[n, 3] for n in (5, 6, 7, 8)])
    # One for each answer, one as the number begins to change.
    assert net.gradd_stats()["captures"] <= 4


class Doubled(nn.Module):
    """Asks by a function."""

    def __init__(self, contains: Callable[[Any, int], bool]) -> None:
        super().__init__()
        self.layer, self.contains = nn.Linear(4, 4), contains

    def forward(self, x: torch.Tensor, chosen: Any) -> torch.Tensor:
        return self.layer(x) * (2 if self.contains(chosen, 5) else 3)


@pytest.mark.parametrize("contains", [operator.contains, lambda chosen, i: chosen.__contains__(i)])
def test_calls_of_contains_are_as_in_torch_compile(
    contains: Callable, shared_daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.compiler.reset()
    plain = Doubled(contains)
    compiled, net = (f(copy.deepcopy(plain)) for f in (_compiled, ORTModule))
    for chosen in ([2], [3]):
        for m in (compiled, net):
            assert_close(m(X, chosen), plain(X, chosen))
    assert not torch.allclose(compiled(X, [5]), plain(X, [5]))
    assert_close(net(X, [5]), compiled(X, [5]))
    assert "`operator.contains()`" in (ROOT / "docs/dynamo.md").read_text()


def _compiled(net: nn.Module) -> Any:
    return torch.compile(net, backend="eager")
