"""forward() reads the memory layout of its arguments and of its own tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradd import ORTModule
from gradd.optim import AdamWMode, FusedAdam
from helpers.nets import assert_close
from helpers.selection import every_run

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


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("first", ["rows", "columns"])
def test_arguments_that_lie_otherwise(question: str, first: str) -> None:
    eager = Asks(QUESTIONS[question])
    model = ORTModule(copy.deepcopy(eager))
    for name in (first, *LAYOUTS, "rows", "columns", first):
        if question == "as_strided" and name == "expanded":
            continue  # behind the end of its memory
        assert_close(model(LAYOUTS[name]), eager(LAYOUTS[name]), name)


@pytest.mark.parametrize("name", ["weight", "argument"])
def test_a_gradient_that_is_read(name: str) -> None:
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


class Features(nn.Module):
    """Two maps of features, one of them beside its mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.first(x).relu()
        return y, self.second(y), y.mean((2, 3))


def test_results_lie_as_in_torch() -> None:
    torch.manual_seed(0)
    theirs = Features()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    for form in (torch.channels_last, torch.contiguous_format):
        for size in (6, 8):
            x = torch.randn(2, 3, 7, size).to(memory_format=form)
            pairs = [x.clone().requires_grad_() for _ in range(2)]
            results = [net(leaf) for net, leaf in zip((ours, theirs), pairs, strict=True)]
            for a, b in zip(*results, strict=True):
                assert a.stride() == b.stride()
                assert_close(a, b)
            for y, z, mean in results:
                z.mul_(2)  # as users may
                (y.square().sum() + z.sum() + mean.sum()).backward()
            assert_close(*(leaf.grad for leaf in pairs))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(p.grad, q.grad)


class AsksItself(nn.Module):
    """Asks how a parameter or a buffer lies; both are square, so that any layout fits."""

    def __init__(self, question: Callable[[Tensor], Tensor], name: str) -> None:
        super().__init__()
        self.layer, self.question, self.name = nn.Linear(4, 4), question, name
        self.register_buffer("table", torch.arange(16.0).view(4, 4) / 9)

    def forward(self, x: Tensor) -> Tensor:
        asked = self.table if self.name == "buffer" else self.layer.weight
        return (self.layer(x) @ self.table * self.question(asked)).square().mean()


def turn(model: nn.Module, name: str) -> None:
    """The tensor gets other strides: those of its transpose."""
    inner = getattr(model, "module", model)
    if name == "buffer":
        inner.table = inner.table.t()
    elif name == "data of buffer":
        inner.table.data = inner.table.data.t()
    else:
        inner.layer.weight.data = inner.layer.weight.data.t()


@pytest.mark.parametrize("question", every_run(("stride", "as_strided"), QUESTIONS))
@pytest.mark.parametrize("name", ["parameter", "buffer", "data of buffer"])
@pytest.mark.parametrize("turns", [(0,), (1, 3)])
def test_own_tensors_are_asked(question: str, name: str, turns: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs = AsksItself(QUESTIONS[question], name.removeprefix("data of "))
    ours = copy.deepcopy(theirs)
    if 0 in turns:
        turn(theirs, name), turn(ours, name)
    ours = ORTModule(ours)
    for step in range(5):
        if step and step in turns:
            turn(theirs, name), turn(ours, name)
        for model in (ours, theirs):
            model.zero_grad()
            model(ROWS).backward()
        assert_close(ours.module.layer.weight.grad, theirs.layer.weight.grad, f"step {step}")
        assert ours.module.layer.weight.stride() == theirs.layer.weight.stride()
        for model in (ours, theirs):
            torch.optim.SGD(model.parameters(), 0.1).step()


@pytest.mark.parametrize("optimizer", [FusedAdam, torch.optim.AdamW])
@pytest.mark.parametrize("gaps", [False, True])
def test_strides_of_parameters_stay(optimizer: type, gaps: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    weight = torch.randn(4, 8)[:, ::2] if gaps else torch.randn(4, 4).t()
    theirs[0].weight.data = weight
    ours = copy.deepcopy(theirs)
    ours[0].weight.data = weight.clone(memory_format=torch.preserve_format)
    if gaps:
        ours[0].weight.data = torch.empty(4, 8)[:, ::2].copy_(weight)
    ours = ORTModule(ours, strict=True)
    options = {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.01}
    torch_mode = {"adam_w_mode": AdamWMode.ADAMW_TORCH} if optimizer is FusedAdam else {}
    steppers = [optimizer(ours.parameters(), **options, **torch_mode)]
    steppers.append(torch.optim.AdamW(theirs.parameters(), **options))
    for _ in range(4):
        for model, stepper in zip((ours, theirs), steppers, strict=True):
            stepper.zero_grad()
            model(ROWS).square().sum().backward()
            stepper.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.stride() == b.stride() and a.grad.stride() == b.grad.stride()
        assert_close(a, b)
