"""What forward() learns from the memory layout of its arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from nets import assert_close
from selection import every_run
from torch import Tensor, nn

from gradd import ORTModule
from gradd.export import CaptureError

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Asks(nn.Module):
    def __init__(self, question: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.question = nn.Linear(4, 4), question

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum() * self.question(x)


ROWS = torch.arange(12.0).view(3, 4) / 10
LAYOUTS = {
    "rows": ROWS,
    "columns": ROWS.t().contiguous().t(),
    "slices": (torch.arange(24.0) / 10).view(3, 8)[:, ::2],
    "second": (torch.arange(24.0) / 10).view(6, 4)[3:],
    "expanded": (torch.arange(4.0) / 10).expand(3, 4),
}
QUESTIONS = {
    "contiguous": lambda x: 2 if x.is_contiguous() else 3,
    "stride": lambda x: x.stride(0) + 2 * x.stride()[1],
    "of a result": lambda x: torch.empty_like(x).stride(0),
    "of a view": lambda x: 2 if x.t().is_contiguous() else 3,
    "as_strided": lambda x: torch.as_strided(x, (3, 3), (4, 1)).sum(),
}


@pytest.mark.parametrize("question", every_run(("contiguous", "as_strided"), QUESTIONS))
@pytest.mark.parametrize("first", ["rows", "columns"])
def test_another_layout_is_another_capture(question: str, first: str) -> None:
    eager = Asks(QUESTIONS[question])
    model = ORTModule(copy.deepcopy(eager), strict=True)
    for name in (first, *LAYOUTS, "rows", "columns", first):
        gaps = name in ("slices", "expanded") or (question == "as_strided" and name == "columns")
        with pytest.raises(CaptureError, match="pass x.contiguous") if gaps else nullcontext():
            got = model(LAYOUTS[name])
            assert_close(got, eager(LAYOUTS[name]), name)
    assert model.gradd_stats()["captures"] == (1 if question == "as_strided" else 2)
    loose = ORTModule(copy.deepcopy(eager))
    for name in ("slices", "rows", "slices", "rows"):
        assert_close(loose(LAYOUTS[name]), eager(LAYOUTS[name]), name)
    assert loose.gradd_stats()["fallbacks"] == {"memory_layout": 2}


@pytest.mark.quick
def test_nobody_asks() -> None:
    model = ORTModule(Asks(lambda x: x.contiguous().mean()), strict=True)
    for x in LAYOUTS.values():
        model(x)
    assert model.gradd_stats()["captures"] == 1


@pytest.mark.parametrize("question", [lambda x: x.storage_offset(), lambda x: x._version])
def test_what_differs_in_every_call_is_refused(question: Callable) -> None:
    with pytest.raises(CaptureError, match="of an argument"):
        ORTModule(Asks(question), strict=True)(ROWS)


@pytest.mark.parametrize("name", ["weight", "argument"])
def test_a_gradient_that_is_read_is_refused(name: str) -> None:
    """It is None when the forward is captured, and something else after the first backward."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            grad = self.layer.weight.grad if name == "weight" else x.grad
            return self.layer(x) if grad is None else self.layer(x) * grad.sum()

    theirs = Reads()
    ours = ORTModule(copy.deepcopy(theirs))
    xs = [torch.ones(3, 4, requires_grad=True) for _ in range(2)]
    for _ in range(3):
        for model, x in zip((ours, theirs), xs, strict=True):
            model(x).square().sum().backward()
        assert_close(ours.layer.weight.grad, theirs.layer.weight.grad)
        assert_close(xs[0].grad, xs[1].grad)
    assert ours.gradd_stats()["fallbacks"] == {"outside_state": 3}
