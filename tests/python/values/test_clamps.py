"""clamp() on its bounds: the derivative is that of the running torch, which changed in 2.14."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradd import ORTModule
from gradd.graph.translation import clamps

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("shared_daemon")]
VALUES = (-1.0, 0.0, 1.0, 0.5, float("nan"))
GRID = torch.tensor(list(itertools.product(VALUES, repeat=3))).T
FORMS: dict[str, Callable[..., Any]] = {
    "numbers": lambda x, a, b: x.clamp(-1, 0.5),
    "crossed numbers": lambda x, a, b: x.clamp(1, -1),
    "one number": lambda x, a, b: x.clamp(min=0) + x.clamp_max(0.5) * 3 + x.clamp_min(-1) * 5,
    "in place": lambda x, a, b: (x * 1).clamp_(-1, 1),
    "tensors": lambda x, a, b: x.clamp(a, b),
    "one tensor": lambda x, a, b: x.clamp(min=a) + x.clamp_max(b) * 3,
    "one of sizes": lambda x, a, b: x.clamp(1 - x.shape[0] // 63, x.shape[0] - 124),
    "made here": lambda x, a, b: x.clamp(torch.full((), -1.0), torch.ones(())),
}


class Form(torch.nn.Module):
    """One form of clamp()."""

    def __init__(self, form: Callable[..., Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Computes it."""
        return self.form(x, a, b)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_torch_s(form: str) -> None:
    results = []
    weights = torch.arange(1.0, GRID.shape[1] + 1)
    for module in (Form(FORMS[form]), ORTModule(Form(FORMS[form]))):
        given = [t.clone().requires_grad_() for t in GRID]
        value = module(*given)
        value.backward(weights)
        results.append([value.detach(), *(t.grad for t in given if t.grad is not None)])
    assert len(results[0]) == len(results[1])
    for mine, torchs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, torchs, equal_nan=True)
    assert module.gradd_stats()["fallbacks"] == {}


def test_the_rule_at_a_bound_is_torchs() -> None:
    x = torch.zeros((), requires_grad=True)
    x.clamp(min=0).backward()
    assert clamps.IS_OPEN is not bool(x.grad)
