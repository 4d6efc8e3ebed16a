"""Recurrent layers: values and gradients are PyTorch's, and one capture serves all lengths.

They keep lists of their weights beside the tables, which a capture must leave as they were.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.nets import assert_close

pytestmark = pytest.mark.usefixtures("shared_daemon")
HIDDEN = 4


class Reads(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.head = nn.Linear((cell.proj_size or HIDDEN) * (1 + cell.bidirectional), 2)

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = states[0] if len(states) == 1 else states or None
        y, last = self.cell(x, given)
        return (self.head(y), *(last if isinstance(last, tuple) else (last,)))


_USUAL = (torch.float32, torch.bfloat16)
DEEP = {"num_layers": 2, "bidirectional": True, "batch_first": True}
CELLS: dict[str, tuple[type, dict[str, Any]]] = {
    "RNN": (nn.RNN, {"batch_first": True}),
    "RNN with relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
    "LSTM": (nn.LSTM, DEEP),
    "LSTM with projections": (nn.LSTM, {**DEEP, "proj_size": 3}),
    "LSTM without bias": (nn.LSTM, {"bias": False}),
    "GRU": (nn.GRU, DEEP),
}


def made(name: str, dtype: torch.dtype = torch.float64) -> tuple[ORTModule, nn.Module]:
    torch.manual_seed(0)
    kind, options = CELLS[name]
    if kind is nn.LSTM and torch.__version__ < "2.13" and (options != DEEP or dtype not in _USUAL):
        pytest.skip("this torch traces such states with another rank")
    theirs = Reads(kind(3, HIDDEN, **options)).to(dtype)
    return ORTModule(copy.deepcopy(theirs)), theirs


def first_states(cell: nn.Module, batch: int) -> list[torch.Tensor]:
    rows = cell.num_layers * (1 + cell.bidirectional)
    sizes = [cell.proj_size or HIDDEN] + [HIDDEN] * isinstance(cell, nn.LSTM)
    return [torch.randn(rows, batch, n, dtype=torch.float64) for n in sizes]


def step(model: Any, *given: torch.Tensor) -> list[torch.Tensor]:
    """Results, and gradients of what goes in and of the parameters."""
    model.zero_grad()
    leaves = [x.clone().requires_grad_() for x in given]
    results = model(*leaves)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(y.shape, generator=generator).to(y.dtype) for y in results]
    sum((y * w).sum().double() for y, w in zip(results, weights, strict=True)).backward()
    grads = [x.grad for x in leaves] + [p.grad for p in model.parameters()]
    return [y.detach() for y in results] + grads


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_layers(name: str) -> None:
    ours, theirs = made(name)
    with_states = name.startswith("LSTM")
    for length, batch in ((5, 2), (7, 3), (3, 2)):
        sizes = (batch, length) if theirs.cell.batch_first else (length, batch)
        x = torch.randn(*sizes, 3, dtype=torch.float64)
        given = [x, *first_states(theirs.cell, batch)] if with_states else [x]
        for a, b in zip(step(ours, *given), step(theirs, *given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    stats = ours.gradd_stats()
    assert stats["captures"] == 1 and stats["in_torch"] == {}
    cell = ours.cell
    assert all(a is getattr(cell, n) for a, n in zip(cell._flat_weights, cell._flat_weights_names))
    assert not cell._weights_have_changed()


def test_one_step_and_no_sequence() -> None:
    ours, theirs = made("GRU")
    for sizes in ((2, 1), (0, 3)):
        x = torch.randn(*sizes, 3, dtype=torch.float64)
        for a, b in zip(step(ours, x), step(theirs, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert ours.gradd_stats()["in_torch"] == {}


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest distance of two results, relative to the latter's norm."""
    pairs = zip(a, b, strict=True)
    return max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs)


@pytest.mark.parametrize("name", ["LSTM", "LSTM with projections", "GRU", "RNN"])
@pytest.mark.parametrize("how", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
def test_precisions(name: str, how: Any) -> None:
    """No further from doubles than PyTorch, twice; types are its own, the bits always the same."""
    cast = how == "autocast"
    ours, theirs = made(name, torch.float32 if cast else how)
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(6, 5, 3, dtype=torch.float32 if cast else how)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        a, b, again = step(ours, x), step(theirs, x), step(ours, x)
    assert [t.dtype for t in a] == [t.dtype for t in b]
    assert all(map(torch.equal, a, again))
    wanted = step(exact, x.double())
    assert apart(a, wanted) <= 2 * apart(b, wanted) + 1e-6
    assert ours.gradd_stats()["in_torch"] == {}


def test_dropout_between_layers() -> None:
    torch.manual_seed(0)
    theirs = nn.LSTM(3, HIDDEN, 2, dropout=0.5)
    ours = ORTModule(copy.deepcopy(theirs))
    x = torch.randn(6, 2, 3)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(ours(x)[0].detach())
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    ours.eval(), theirs.eval()
    assert_close(ours(x)[0], theirs(x)[0])
    assert ours.gradd_stats()["in_torch"] == {}
