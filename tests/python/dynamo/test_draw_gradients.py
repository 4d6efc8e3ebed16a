"""The operands of a draw get a gradient of zeros, as in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bernoulli": lambda h: torch.bernoulli(h.sigmoid()),
    "bernoulli of a tensor": lambda h: h.sigmoid().bernoulli(),
    "normal": lambda h: torch.normal(h, h.sigmoid()),
    "normal of a mean": lambda h: torch.normal(h, 0.5),
    "normal of a deviation": lambda h: torch.normal(1.0, h.sigmoid()),
    "normal, broadcast": lambda h: torch.normal(h[:1], h.sigmoid()),
}


class Stochastic(nn.Module):
    """A layer behind whose result nothing flows back."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.outer, self.draw = nn.Linear(4, 6), nn.Linear(6, 4), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result of the outer layer."""
        return self.outer(self.draw(self.inner(x)))


@pytest.mark.parametrize("name", DRAWS)
def test_nothing_flows_through_a_draw(name: str) -> None:
    torch.manual_seed(0)
    theirs = Stochastic(DRAWS[name])
    ours = copy.deepcopy(theirs)
    model = ORTModule(ours, strict=True)
    for _ in range(2):
        theirs(torch.ones(3, 4)).sum().backward()
        model(torch.ones(3, 4)).sum().backward()
    for p, q in zip(theirs.inner.parameters(), ours.inner.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad) and not q.grad.any()
    assert ours.outer.weight.grad is not None and ours.outer.weight.grad.any()


def test_a_normal_draw_has_its_mean_and_deviation() -> None:
    theirs = Stochastic(lambda h: torch.normal(h * 0 + 3.0, (h * 0).exp() * 2.0))
    nn.init.eye_(theirs.outer.weight)
    nn.init.zeros_(theirs.outer.bias)
    y = ORTModule(theirs, strict=True)(torch.ones(4000, 4))
    assert abs(y.mean().item() - 3.0) < 0.1 and abs(y.std().item() - 2.0) < 0.1
