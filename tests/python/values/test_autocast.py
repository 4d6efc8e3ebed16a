"""Modules under autocast: results, their types and gradients are those of PyTorch.

Attention and losses differ more than others, because torch's kernels round less than the operations
that they are made of.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from gradd import ORTModule
from helpers.graphs.captures import Lambda

pytestmark = pytest.mark.usefixtures("shared_daemon")


def cast(**options: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, **options)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance of two tensors, relative to the length of the second."""
    return float((got.double() - want.double()).norm() / (want.double().norm() + 1e-30))


def check(module: nn.Module, x: torch.Tensor, bound: float = 2e-2) -> list[torch.Tensor]:
    """Compares a call and its gradients; returns the results of PyTorch."""
    ours = ORTModule(copy.deepcopy(module), strict=True)
    sides = []
    for model in (ours, module):
        with cast():
            found = pytree.tree_leaves(model(x))
        # The sum of what a norm gives has no gradient but rounding.
        weights = [torch.linspace(0.5, 1.5, t.numel()).view_as(t) for t in found]
        pairs = zip(found, weights, strict=True)
        sum((t.float() * w).sum() for t, w in pairs if t.requires_grad).backward()
        sides.append(found)
    for mine, theirs in zip(*sides, strict=True):
        assert mine.dtype is theirs.dtype and relative(mine, theirs) <= bound
    for (name, p), q in zip(module.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if p.grad is not None:
            assert q.grad.dtype is p.grad.dtype and relative(q.grad, p.grad) <= bound, name
    return sides[1]


X = torch.linspace(-1, 1, 24).reshape(6, 4)
FORMS = {
    "linear": lambda s, x: s.lin(x),
    "linear of bf16": lambda s, x: s.lin(x.bfloat16()),
    "mixed": lambda s, x: s.lin(x) * x + x * 2.5 + s.lin(x) * 1.5,
    "norm of bf16": lambda s, x: s.norm(s.lin(x)),
    "norm of f32": lambda s, x: s.norm(x) + s.lin(x),
    "softmax in f32": lambda s, x: torch.softmax(s.lin(x) * 9, -1, dtype=torch.float32) ** 2,
    "softmax": lambda s, x: torch.softmax(s.lin(x) * 9, -1) ** 2,
    "sum in f32": lambda s, x: s.lin(x).sum(0, dtype=torch.float32),
    "einsum": lambda s, x: torch.einsum("ij,kj->ik", x, s.lin.weight),
    "concat": lambda s, x: torch.concat([x, s.lin(x)]),
    "stack": lambda s, x: torch.stack([x, s.lin(x)]),
    "where": lambda s, x: torch.where(x > 0, s.lin(x), x),
    "where and numbers": lambda s, x: torch.where(
        s.lin(x) > 0, s.lin(x), torch.where(x > 0, x, 1.0)
    ),
    "bmm": lambda s, x: torch.bmm(x.reshape(2, 3, 4), s.lin(x).reshape(2, 3, 4).transpose(1, 2)),
    "addmm": lambda s, x: torch.addmm(s.lin.bias, x, s.lin.weight),
    "gelu": lambda s, x: F.gelu(s.lin(x)),
    "cross_entropy": lambda s, x: F.cross_entropy(s.lin(x), torch.arange(6) % 4),
    "nll": lambda s, x: F.nll_loss(torch.log_softmax(s.lin(x), -1), torch.arange(6) % 4),
    "mse": lambda s, x: F.mse_loss(s.lin(x), x),
}


class Forms(nn.Module):
    """Each form with layers of its own: one graph for all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forms = nn.ModuleList(
            Lambda(form, lin=nn.Linear(4, 4), norm=nn.LayerNorm(4)) for form in FORMS.values()
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [form(x) for form in self.forms]


def test_casts_are_those_of_torch() -> None:
    check(Forms(), X)


def test_regions_without_autocast_are_respected() -> None:
    """Nested regions, with no_grad inside and around them, in every order."""

    def forward(self, x):
        h = self.a(x)
        with cast(enabled=False):
            full = self.b(h.float())
            with torch.no_grad():
                stopped = self.b(h.float())
        with torch.no_grad():
            half = self.a(h)
            with cast(enabled=False):
                again = self.a(half.float())
                with cast():
                    inner = self.b(again)
        return (h + half).sum(), full + stopped, again * 1, inner * h

    torch.manual_seed(1)
    found = check(Lambda(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), X)
    half, full = torch.bfloat16, torch.float32
    assert [t.dtype for t in found] == [half, full, full, half]


def test_no_grad_first_keeps_the_gradient() -> None:
    """The cast of a weight under no_grad must not be the one that the other use gets."""

    def forward(self, x):
        with torch.no_grad():
            fixed = self.lin(x)
        return (self.lin(x) * fixed).sum()

    module = Lambda(forward, lin=nn.Linear(4, 4))
    check(module, X)
    assert float(module.lin.weight.grad.abs().max()) > 0


def test_autocast_stays_as_it_was() -> None:
    module = nn.Linear(4, 4)
    ours = ORTModule(copy.deepcopy(module), strict=True)
    with cast():
        assert ours(X).dtype is torch.bfloat16
        assert torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
        assert module(X).dtype is torch.bfloat16
    assert ours(X).dtype is torch.float32


def test_a_region_inside_of_forward() -> None:
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.lin(x).float().square().mean()

    module = Lambda(forward, lin=nn.Linear(4, 4))
    ours = ORTModule(copy.deepcopy(module), strict=True)
    torch.testing.assert_close(ours(X), module(X), rtol=1e-2, atol=1e-3)
