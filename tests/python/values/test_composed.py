"""Functions that torch composes of other operators (einsum and the like) run in the daemon."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.graph.translation import translate
from helpers.selection import every_run

pytestmark = pytest.mark.usefixtures("shared_daemon")
E = torch.einsum


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, 3))


# Of [B, 4, 6], for every B.
COMPOSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two": lambda x: E("bij,bkj->bik", x, x),
    "implicit": lambda x: E("bij,bjk", x, x.mT),
    "outer": lambda x: E("bi,bj->bij", x[:, 0], x[:, 1]),
    "ellipsis": lambda x: E("...ij,...kj->...ik", x, x),
    "diagonal": lambda x: E("bii->bi", x @ x.mT),
    "trace": lambda x: E("bii->b", x @ x.mT),
    "sum": lambda x: E("bij->", x),
    "permuted": lambda x: E("bij->jib", x),
    "three": lambda x: E("bij,bkj,bkl->bil", x, x, x),
    "numbers": lambda x: E(x, [0, 1, 2], x, [0, 3, 2], [0, 1, 3]),
    "elementwise": lambda x: E("bij,bij,j->bij", x, x, torch.arange(6.0).to(x.dtype)),
    "heads": lambda x: E("bqhd,bkhd->bhqk", heads(x), heads(x)),
    "attention": lambda x: E(
        "bhqk,bkhd->bqhd", E("bqhd,bkhd->bhqk", heads(x), heads(x)).softmax(-1), heads(x)
    ),
    "hstack": lambda x: torch.hstack([x, x * 2]),
    "vstack": lambda x: torch.vstack([x, x * 2]),
    "dstack": lambda x: torch.dstack([x, x * 2]),
    "stack of two types": lambda x: torch.stack([x, x.bfloat16()]),
    "concat of two types": lambda x: torch.concat([x, x.bfloat16()]),
    "hstack of two types": lambda x: torch.hstack([x.bfloat16(), x]),
    "tensordot": lambda x: torch.tensordot(x, x[0], ([2], [1])),
    "kron": lambda x: torch.kron(x[0], x[0]),
    "inner": lambda x: torch.inner(x, x[0]),
    "multi_dot": lambda x: torch.linalg.multi_dot([x[0], x[0].mT, x[0]]),
    "matrix_power": lambda x: torch.matrix_power(x[0] @ x[0].mT, 2),
    "trapezoid": lambda x: torch.trapezoid(x, dim=1),
    "gradient": lambda x: torch.gradient(x, dim=2)[0],
    "gradients": lambda x: torch.add(*torch.gradient(x, dim=(1, 2), spacing=0.5, edge_order=2)),
    "gradient of places": lambda x: torch.gradient(
        x, dim=1, spacing=(torch.tensor([0.0, 1.0, 3.0, 4.0]).to(x.dtype),)
    )[0],
}


class Scaled(nn.Module):
    def __init__(self, function: Callable, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(6, dtype=dtype)), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", every_run(("heads", "three", "hstack", "diagonal"), COMPOSED))
def test_composed(name: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(translate, "_decomposed", None)  # nothing else is decomposed for it
    torch.manual_seed(0)
    theirs = Scaled(COMPOSED[name], dtype)
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for rows in (3, 2, 1):
        x = torch.randn(rows, 4, 6).to(dtype)
        got, want = ours(x), theirs(x)
        dy = torch.randn(want.shape).to(dtype)
        got.backward(dy), want.backward(dy)
        pairs = ((got, want), (ours.module.weight.grad, theirs.weight.grad))
        for a, b in pairs:
            assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())


def test_results_of_a_composed_operator_may_be_views() -> None:
    """A permutation by einsum() shares its memory, and a write reaches the operand."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        E("bij->jib", y).mul_(2)
        return y

    ours = ORTModule(Scaled(forward, torch.float32), strict=True)
    x = torch.randn(2, 4, 6)
    torch.testing.assert_close(ours(x), x * 2)


def test_no_gradient_passes_what_is_detached() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shares = E("bij,bkj->bik", x, x)
        return E("bik,bkj->bij", shares, x)

    theirs = Scaled(forward, torch.float32)
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    x = torch.randn(2, 4, 6)
    for model in (ours, theirs):
        model(x).square().sum().backward()
    torch.testing.assert_close(ours.module.weight.grad, theirs.weight.grad)


CELLS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: nn.GRUCell(6, 4),
    "GRU without bias": lambda: nn.GRUCell(6, 4, bias=False),
    "LSTM": lambda: nn.LSTMCell(6, 4),
    "tanh": lambda: nn.RNNCell(6, 4),
    "relu": lambda: nn.RNNCell(6, 4, nonlinearity="relu", bias=False),
}


class Steps(nn.Module):
    """A loop over time around a cell."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, found = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1).float()


@pytest.mark.parametrize("how", ["float32", "float64", "bfloat16", "autocast"])
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_composed(name: str, how: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(translate, "_decomposed", None)  # it takes several times as long
    torch.manual_seed(0)
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    theirs = Steps(CELLS[name]()).to(dtype)
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    tolerance = 3e-2 if how in ("bfloat16", "autocast") else 1e-5
    for rows in (3, 2, 1):
        x = torch.randn(rows, 4, 6, dtype=dtype)
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                y = model(x)
            (y * torch.linspace(0.5, 1.5, y.numel()).view_as(y)).sum().backward()
            found.append([y, *(p.grad for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            assert float((a - b).detach().abs().max()) <= tolerance * float(b.detach().abs().max())
