"""One more than a limit allows: it runs all the same, or the error names the limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from helpers.nets import assert_close, assert_same_grads
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")
MOST = 64  # operands of Concat, results of Split
RUNS = 1024  # forwards whose backward may still come


class Columns(nn.Module):
    def __init__(self, n: int, body: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.body, self.n = nn.Linear(4, n), body, n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.lin(x), self.n)


def _joined(h: torch.Tensor, n: int) -> torch.Tensor:
    return torch.cat([h[:, i : i + 1] * (i + 1) for i in range(n)], 1)


def _split(h: torch.Tensor, n: int) -> torch.Tensor:
    return sum(part * (i + 1) for i, part in enumerate(h.chunk(n, 1)))


def _agree(n: int, body: Callable) -> dict[str, int]:
    """Values and gradients are PyTorch's; what ran there, of two calls."""
    theirs, ours = Columns(n, body), ORTModule(Columns(n, body))
    x = torch.randn(3, 4)
    for model in (theirs, ours):
        model(x).square().sum().backward()
    assert_close(ours(x), theirs(x))
    assert_same_grads(ours, theirs)
    stats = ours.gradd_stats()
    return {**stats["fallbacks"], **stats.get("parts_in_torch", {})}


@pytest.mark.parametrize("n", every_run((MOST, MOST + 1), [MOST, MOST + 1, 5 * MOST + 3]))
def test_operands_of_a_concat(n: int) -> None:
    assert _agree(n, _joined) == {}


def test_results_of_a_split(caplog: pytest.LogCaptureFixture) -> None:
    assert _agree(MOST, _split) == {}
    assert sum(_agree(MOST + 1, _split).values()) == 2
    assert f"{MOST + 1}" in caplog.text and "Split" in caplog.text


def test_forwards_without_a_backward() -> None:
    model, x = ORTModule(nn.Linear(4, 2)), torch.randn(3, 4)
    kept = [model(x) for _ in range(RUNS)]
    with pytest.raises(errors.LimitError, match=f"{RUNS} unreleased runs, the limit"):
        model(x)
    kept.pop().sum().backward()
    assert_close(model(x), model.module(x))  # the session goes on
    kept[0].sum().backward()
