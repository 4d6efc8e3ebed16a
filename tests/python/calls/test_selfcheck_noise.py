"""Values that are exactly zero: roundings alone make the f32 ones, here and in PyTorch.

`model(x).sum()` of a model that ends in a softmax or a norm is such a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.calls import run
from gradd.check.modes import Precise
from gradd.fallback import SelfCheckError
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Ending(nn.Module):
    def __init__(self, end: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.linear, self.end = nn.Linear(width, width), end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.linear(x)).sum()


ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda y: F.layer_norm(y, y.shape[-1:]),
    "large layer_norm": lambda y: 1e3 * F.layer_norm(y * 1e3, y.shape[-1:]),
    "softmax": lambda y: y.softmax(-1),
    "log_softmax": lambda y: y.log_softmax(-1).exp(),
    "normalize": lambda y: F.normalize(y, dim=-1).square(),
    "centred": lambda y: y - y.mean(-1, keepdim=True),
}


SIZES = [(2, 2), (8, 5), (64, 1), (64, 33)]


@pytest.mark.parametrize("size", every_run([(8, 5)], SIZES))
@pytest.mark.parametrize("end", ENDS)
def test_what_roundings_leave_is_no_difference(end: str, size: tuple[int, int]) -> None:
    width, rows = size
    model = ORTModule(Ending(ENDS[end], width), strict=True)
    for _ in range(2):  # both are checked
        model(torch.randn(rows, width)).backward()


def test_an_encoder_layer() -> None:
    torch.manual_seed(0)
    model = ORTModule(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), strict=True)
    model(torch.randn(2, 5, 16)).sum().backward()


@pytest.mark.parametrize("end", ["layer_norm", "softmax"])
def test_more_than_that_is_convicted(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run.Run.backward

    def wrong(self: run.Run, grad_outputs: Any, keep: bool, *more: Any) -> list:
        grads = right(self, grad_outputs, keep, *more)
        grads[0].add_(1e-3)
        return grads

    monkeypatch.setattr(run.Run, "backward", wrong)
    model = ORTModule(Ending(ENDS[end], 8), strict=True)
    with pytest.raises(SelfCheckError, match=r"differs from PyTorch: the gradient of linear\."):
        model(torch.randn(5, 8)).backward()


def test_results_are_shaken_and_memory_is_not() -> None:
    x = torch.ones(1000, dtype=torch.float64)

    def product(draw: int) -> Tensor:
        with Precise(x.dtype, draw=draw):
            assert torch.equal(x.view(10, 100).t().t().view(-1), x), "nothing but looks at memory"
            return x * 1.0

    off = (product(0) - 1.0).abs()
    assert 0 < float(off.max()) <= 16 * 2.0**-23 and off.unique().numel() > 900
    assert torch.equal(product(0), product(0)) and torch.equal(x, torch.ones_like(x))
    torch.testing.assert_close(product(0) + product(1), 2 * x, rtol=1e-15, atol=0)
    assert not torch.equal(product(0), product(2))
