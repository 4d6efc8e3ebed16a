"""Tensors with a gradient that forward() reaches otherwise than as an argument or a Parameter.

PyTorch gives each its gradient. A graph of the daemon has none for them: such calls run in PyTorch,
by name, and those of the same module with plain tensors in the daemon.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nets import assert_close
from torch import nn

from gradd import ORTModule
from gradd.export import CaptureError

GLOBAL = torch.ones(3)


class Conditioned(nn.Module):
    """Multiplies with a tensor from many places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.scale = torch.ones(3)
        self.held = [torch.ones(3)]
        self.register_buffer("buffer", torch.ones(3))
        self.act = lambda h: h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.act(self.inner(x))
        return h * self.scale * self.held[0] * self.buffer * GLOBAL


def _attribute(net: Conditioned, t: torch.Tensor) -> None:
    net.scale = t


def _element(net: Conditioned, t: torch.Tensor) -> None:
    net.held = [t]


def _buffer(net: Conditioned, t: torch.Tensor) -> None:
    net.buffer = t


def _closure(net: Conditioned, t: torch.Tensor) -> None:
    net.act = lambda h: h * t


def _global(net: Conditioned, t: torch.Tensor) -> None:
    global GLOBAL
    GLOBAL = t


def _bias(net: Conditioned, t: torch.Tensor) -> None:
    del net.inner.bias
    net.inner.bias = t


PLACES = {f.__name__[1:]: f for f in (_attribute, _element, _buffer, _closure, _global, _bias)}
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leaf": lambda t: t,
    "computed": lambda t: torch.tanh(t),
    "view": lambda t: t[:],
}


@pytest.fixture(autouse=True)
def _plain_global():
    yield
    _global(None, torch.ones(3))


def _gradients(wrapped: bool, place: Callable, kind: Callable, frozen: bool) -> list:
    torch.manual_seed(0)
    net = Conditioned()
    net.requires_grad_(not frozen)
    model = ORTModule(net) if wrapped else net
    found = []
    for step in range(3):
        x, start = torch.randn(4, 5), torch.full((3,), 0.5 + step)
        given = start.clone().requires_grad_(step != 1)  # a plain one between
        place(net, kind(given))
        out = model(x).square().sum()
        found.append(out.detach())
        if out.requires_grad:
            out.backward()
        found.append(None if given.grad is None else given.grad.clone())
    return found


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("place", list(PLACES))
def test_it_gets_its_gradient(place: str, kind: str, frozen: bool, shared_daemon) -> None:
    ours, theirs = (_gradients(w, PLACES[place], KINDS[kind], frozen) for w in (True, False))
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine is None) == (right is None)
        if right is not None:
            assert_close(mine, right)


@pytest.mark.parametrize("place", ["attribute", "buffer", "global"])
def test_the_reason_says_what_it_is(place: str, shared_daemon) -> None:
    net = Conditioned()
    PLACES[place](net, torch.ones(3, requires_grad=True) * 2)
    with pytest.raises(CaptureError, match=r"shape \[3\].*would get no gradient"):
        ORTModule(net, strict=True)(torch.ones(4, 5))


def test_a_buffer_that_begins_to_want_a_gradient(shared_daemon) -> None:
    net = Conditioned()
    model = ORTModule(net)
    model(torch.ones(4, 5)).sum().backward()
    assert model.gradd_stats()["fallbacks"] == {}
    net.buffer.requires_grad_()
    model(torch.ones(4, 5)).sum().backward()
    assert net.buffer.grad is not None and net.buffer.grad.abs().sum() > 0
    net.buffer.requires_grad_(False)
    model(torch.ones(4, 5)).sum().backward()
    assert model.gradd_stats()["fallbacks"] == {"unsupported_parameter": 1}


def test_arguments_and_what_forward_makes_are_no_such_tensors(shared_daemon) -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            own = torch.ones(3, requires_grad=True)
            return self.inner(x) * own * y

    y = torch.ones(3, requires_grad=True)
    ORTModule(Makes(), strict=True)(torch.ones(4, 5), y * 2).sum().backward()
    assert y.grad is not None
