"""Every way to write in place to a buffer, an argument or a value: once, as in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from operator import iadd, ifloordiv, imod, imul, ipow, isub, itruediv
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


def _assigned(t: torch.Tensor) -> torch.Tensor:
    t[...] = t * 2 + 1
    return t


def _element(t: torch.Tensor) -> torch.Tensor:
    t[0] = 3
    return t


def _view(t: torch.Tensor) -> torch.Tensor:
    t.view(-1)[:2].add_(1)
    return t


def _data(t: torch.Tensor) -> torch.Tensor:
    t.data += 1
    return t


def _twice(t: torch.Tensor) -> torch.Tensor:
    t += 1
    t *= 1.5
    return t.view(-1)[1:]


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{
        f.__name__: partial(lambda f, t: f(t, 2), f)
        for f in (iadd, isub, imul, itruediv, ipow, ifloordiv, imod)
    },
    "add_": lambda t: t.add_(1),
    "lerp_": lambda t: t.lerp_(torch.ones_like(t), 0.25),
    "copy_": lambda t: t.copy_(t * 3 + 1),
    "fill_": lambda t: t.fill_(4),
    "zero_": lambda t: t.zero_(),
    "relu, inplace by position": lambda t: F.relu(t.sub_(1.5), True),
    "relu, inplace by name": lambda t: F.relu(t.sub_(1.5), inplace=True),
    "leaky_relu, inplace": lambda t: F.leaky_relu(t.sub_(1.5), 0.1, True),
    "dropout of nothing, inplace": lambda t: F.dropout(t, 0.0, True, True),
    "masked_fill_": lambda t: t.masked_fill_(t > 1, 0.5),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([0, 1]), t[:2].clone()),
    "whole": _assigned,
    "element": _element,
    "view": _view,
    "data": _data,
    "twice, a view": _twice,
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "operator of torch.ops": lambda t: torch.ops.aten.add_(t, 1),
    "out": lambda t: torch.add(t, 1, out=t),
}


class Net(nn.Module):
    """A write between two products, to a buffer, an argument or the first product."""

    def __init__(self, write: Callable[[torch.Tensor], Any], to: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("state", torch.arange(6.0) / 3 + 0.5)
        self.write, self.to = write, to

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> Any:
        hidden = self.first(x)
        with torch.set_grad_enabled(self.to == "value"):
            target = {"state": self.state, "given": given, "value": hidden * 1.25}[self.to]
            result = self.write(target)
        score = self.second(hidden * target)
        return score.square().mean(), result, target


# PyTorch itself refuses these of a value that records gradients, or gives no gradient.
NOT_OF_A_VALUE = ("data", "out", "ifloordiv")
CASES = [
    (name, to)
    for name in WRITES
    for to in ("state", "given", "value")
    if to != "value" or name not in NOT_OF_A_VALUE
]


@pytest.mark.parametrize(("name", "to"), CASES)
def test_a_write_happens_once(name: str, to: str) -> None:
    theirs = Net(WRITES[name], to)
    ours = ORTModule(copy.deepcopy(theirs))
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    for _ in range(3):
        found = []
        for model in (ours, theirs):
            given = torch.arange(6.0) / 3 + 0.5
            model.zero_grad()
            loss, result, target = model(x, given)
            loss.backward()
            values = [loss, target, given, model.state, result, model.first.weight.grad]
            found.append([v.detach().clone() for v in values if isinstance(v, torch.Tensor)])
        assert len(found[0]) == len(found[1])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Sliced(nn.Module):
    """A part of the daemon's result is overwritten behind another graph that has read it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) + 1
        torch._dynamo.graph_break()
        y = h * 3 + x
        torch._dynamo.graph_break()
        h[0] = 0.0
        return (y + h).square().sum()


def test_a_value_that_is_written_behind_its_reader() -> None:
    """As the filled rows of a Longformer's attention: PyTorch needs no value of it."""
    theirs = Sliced()
    ours = ORTModule(copy.deepcopy(theirs))
    x = torch.randn(4, 6)
    for model in (ours, theirs):
        model(x).backward()
    torch.testing.assert_close(ours.module.first.weight.grad, theirs.first.weight.grad)


class Chunked(nn.Module):
    """The size of a view is computed as a tensor, as a Longformer does it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.div(x.shape[0], 2, rounding_mode="trunc"), 2, -1)


def test_a_view_whose_size_is_a_tensor() -> None:
    x = torch.randn(8, 6)
    torch.testing.assert_close(ORTModule(Chunked())(x), Chunked()(x))


def test_a_copy_of_itself_ends_no_history(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return h.copy_(h).sum()

    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    net = Own()
    ORTModule(net)(torch.ones(3, 4)).backward()
    torch.testing.assert_close(net.lin.weight.grad, torch.full((4, 4), 3.0))
