"""associative_scan() of a linear recurrence is one operator, and other scans stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

from gradd import ORTModule
from gradd.graph import scans

DOUBLES = {"dtype": torch.float64}


def recurrence(left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = left
    c, d = right
    return a * c, c * b + d


def other(left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = left
    c, d = right
    return a + c, b + d


class Scans(nn.Module):
    """A scan by a function of its own, as transformers' Mamba has."""

    def __init__(self, combine: Callable, dim: int = 1, reverse: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)
        self.combine, self.dim, self.reverse = combine, dim, reverse

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.linear(x).tanh().chunk(2, -1)
        return associative_scan(
            self.combine, (a, b), self.dim, reverse=self.reverse, combine_mode="generic"
        )


def grads(model: Any, x: torch.Tensor, both: bool) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    products, states = model(x)
    (states.square().sum() + (products.exp().sum() if both else 0)).backward()
    return [products.detach(), states.detach(), x.grad, *(p.grad for p in model.parameters())]


def compare(theirs: nn.Module, lengths: tuple[int, ...], both: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    theirs = theirs.double()
    ours = ORTModule(copy.deepcopy(theirs))
    for n in lengths:
        x = torch.randn(2, n, 3, **DOUBLES)
        for a, b in zip(grads(ours, x, both), grads(theirs, x, both), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    return ours.gradd_stats()


@pytest.mark.usefixtures("shared_daemon")
@pytest.mark.parametrize("dim, reverse", [(1, False), (-2, True)])
def test_a_recurrence_has_one_graph_for_all_lengths(dim: int, reverse: bool) -> None:
    stats = compare(Scans(recurrence, dim, reverse), (5, 8, 3), both=reverse)
    assert stats["captures"] == 1 and stats["in_torch"] == {}


@pytest.mark.usefixtures("shared_daemon")
def test_another_scan_is_no_recurrence() -> None:
    assert "func_transform" in compare(Scans(other), (4,))["in_torch"]


def test_what_is_a_recurrence() -> None:
    is_recurrence = scans._is_recurrence
    assert is_recurrence(recurrence)
    assert not is_recurrence(other)
    assert not is_recurrence(lambda p, q: (p[0] * q[0], q[0] * p[1] - q[1]))
    assert not is_recurrence(lambda p, q: [p[0] * q[0], q[0] * p[1] + q[1]])
    assert not is_recurrence(lambda p, q: (torch.mul(p[0], q[0]), q[1]))
    assert not is_recurrence(lambda p: p)


def test_other_back_ends_see_torchs_own_scan() -> None:
    """Also: the operator computes the same in PyTorch, with the same derivative."""
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Callable:
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    x = torch.randn(2, 4, 3)
    net = Scans(recurrence)
    _, states = torch.compile(net, backend=backend)(x)
    assert seen and not any("linear_scan" in name for name in seen)
    a, b = net.linear(x).tanh().chunk(2, -1)
    torch.testing.assert_close(torch.ops.gradd.linear_scan(a, b, 1, False), states)
    given = [torch.rand(2, 4, 3, requires_grad=True, **DOUBLES) for _ in range(2)]
    for reverse in (False, True):
        assert torch.autograd.gradcheck(
            lambda a, b, r=reverse: torch.ops.gradd.linear_scan(a, b, 1, r), given
        )
