"""torch.linalg.solve_triangular(): values and gradients of PyTorch, and what comes of zeros."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")
SIZES = {  # of A, and of B where A is on the left
    "matrices": ((3, 3), (3, 2)),
    "batches": ((2, 1, 3, 3), (5, 3, 4)),
    "one A": ((3, 3), (4, 3, 2)),
}
SIDES = ["left upper", "left lower unit", "right lower", "right upper unit"]


class Solves(nn.Module):
    def __init__(self, side: str) -> None:
        super().__init__()
        self.given = {"left": "left" in side, "unitriangular": "unit" in side}
        self.given["upper"] = "upper" in side
        self.scale = nn.Parameter(torch.ones(1).double())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve_triangular(a * self.scale, b, **self.given)


def step(model: nn.Module, *given: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    y = model(*leaves)
    (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize("sizes", every_run(("batches",), SIZES))
@pytest.mark.parametrize("side", SIDES)
def test_systems(side: str, sizes: str) -> None:
    torch.manual_seed(0)
    theirs = Solves(side)
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    a, b = (torch.randn(size).double() for size in SIZES[sizes])
    a, b = a + 3 * torch.eye(3), b.mT if "right" in side else b
    for x, y in zip(step(ours, a, b), step(theirs, a, b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_a_zero_on_the_diagonal() -> None:
    theirs = Solves("left lower")
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    a, b = torch.tensor([[1.0, 0.0], [0.5, 2.0]]).double(), torch.ones(2, 1).double()
    assert torch.equal(ours(a, b), theirs(a, b))
    a[1, 1] = 0
    assert torch.equal(ours(a, b), theirs(a, b)) and ours(a, b)[1].isinf().all()
