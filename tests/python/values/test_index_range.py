"""The daemon raises a named error for indices that torch refuses, and only for those.

For every operation: a valid call, then calls whose indices torch may refuse, each compared with
torch (value and gradient, or that both raise), and at last a valid call of the same session.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradd import ORTModule, errors
from helpers.graphs.captures import capture

pytestmark = pytest.mark.usefixtures("shared_daemon")

EDGES = (-1, -10, -11, 10, 2**31, -(2**31) - 1, 10**12)


class Op(nn.Module):
    """f(parameter of `shape`, indices)."""

    def __init__(self, f: Callable, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape))
        self.f = f

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.f(self.w, index).sin()


def _zeros(w: torch.Tensor) -> torch.Tensor:
    return torch.zeros(10, 4) + w.sum() * 0.125


ROWS = torch.tensor([3, 0, 9])
PLACES = torch.tensor([[3, 0, 9, 1], [9, 1, 2, 2]])
TABLE, FEW, MANY = (10, 4), (2, 4), (3, 4)
REFUSED: dict[str, tuple[Callable, tuple[int, ...], torch.Tensor]] = {
    "embedding": (lambda w, i: functional.embedding(i, w), TABLE, PLACES),
    "embedding_padding": (lambda w, i: functional.embedding(i, w, padding_idx=3), TABLE, PLACES),
    "embedding_last": (lambda w, i: functional.embedding(i, w, padding_idx=-1), TABLE, PLACES),
    "embedding_int32": (lambda w, i: functional.embedding(i, w), TABLE, PLACES.int()),
    "embedding_sum": (lambda w, i: functional.embedding(i, w) + w[1], TABLE, PLACES),
    "two_tables": (
        lambda w, i: functional.embedding(i, w) + functional.embedding(i, w * 2, padding_idx=0),
        TABLE,
        PLACES,
    ),
    "gather": (lambda w, i: w.gather(0, i), TABLE, PLACES),
    "gather_last": (lambda w, i: w.gather(-1, i), (4, 10), PLACES),
    "gather_int32": (lambda w, i: w.gather(0, i), TABLE, PLACES.int()),
    "gather_expanded": (lambda w, i: w.gather(0, i[:, None].expand(-1, 4)), TABLE, ROWS),
    "gather_keywords": (lambda w, i: torch.gather(input=w, index=i, dim=0), TABLE, PLACES),
    "index_select": (lambda w, i: w.index_select(0, i), TABLE, ROWS),
    "index_select_last": (lambda w, i: w.index_select(-1, i), (4, 10), ROWS),
    "scatter": (lambda w, i: _zeros(w).scatter(0, i, w), FEW, PLACES),
    "scatter_value": (lambda w, i: w.scatter(0, i, 0.5), TABLE, PLACES),
    "scatter_in_place": (lambda w, i: _zeros(w).scatter_(0, i, w), FEW, PLACES),
    "scatter_add": (lambda w, i: _zeros(w).scatter_add(0, i, w), FEW, PLACES),
    "scatter_add_in_place": (lambda w, i: _zeros(w).scatter_add_(0, i, w), FEW, PLACES),
    "scatter_sum": (lambda w, i: _zeros(w).scatter_reduce(0, i, w, "sum"), FEW, PLACES),
    "scatter_mean": (lambda w, i: _zeros(w).scatter_reduce(0, i, w, "mean"), FEW, PLACES),
    "scatter_amax": (lambda w, i: _zeros(w).scatter_reduce_(0, i, w, "amax"), FEW, PLACES),
    "index_add": (lambda w, i: _zeros(w).index_add(0, i, w, alpha=2), MANY, ROWS),
    "index_add_in_place": (lambda w, i: _zeros(w).index_add_(0, i, w), MANY, ROWS),
    "index_copy": (lambda w, i: _zeros(w).index_copy(0, i, w), MANY, ROWS),
    "index_copy_in_place": (lambda w, i: _zeros(w).index_copy_(0, i, w), MANY, ROWS),
    "take_along_all": (lambda w, i: torch.take_along_dim(w, i), (5, 2), ROWS),
    "one_hot": (lambda w, i: functional.one_hot(i, 10).float() @ w, TABLE, PLACES),
    "computed": (lambda w, i: functional.embedding(i * 1 + 0, w), TABLE, PLACES),
    "clamped_above": (lambda w, i: functional.embedding(i.clamp(max=9), w), TABLE, PLACES),
    "in_no_grad": (lambda w, i: w[:1] * _detached(w, i).sum(), TABLE, PLACES),
}
TAKEN: dict[str, tuple[Callable, tuple[int, ...], torch.Tensor]] = {
    "advanced": (lambda w, i: w[i], TABLE, PLACES),
    "advanced_columns": (lambda w, i: w[:, i], (4, 10), ROWS),
    "advanced_then_rows": (lambda w, i: functional.embedding(i % 3, w[i]), TABLE, ROWS),
    "index_put": (lambda w, i: _zeros(w).index_put((i,), w), MANY, ROWS),
    "assigned": (lambda w, i: _assigned(w, i), MANY, ROWS),
    "index_fill": (lambda w, i: w.index_fill(0, i, 0.5), TABLE, ROWS),
    "take": (lambda w, i: w.take(i), (5, 2), ROWS),
    "take_along_dim": (lambda w, i: torch.take_along_dim(w, i, 0), TABLE, PLACES),
    "wrapped": (lambda w, i: functional.embedding(i % 10, w), TABLE, PLACES),
    "clamped": (lambda w, i: functional.embedding(i.clamp(0, 9), w), TABLE, PLACES),
}


@torch.no_grad()
def _detached(w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return functional.embedding(index, w)


def _assigned(w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = _zeros(w)
    y[index] = w
    return y


def _result(module: Any, index: torch.Tensor) -> tuple[Any, ...] | Exception:
    """Value and gradients of a call, or the exception."""
    module.zero_grad()
    try:
        y = module(index)
        y.square().sum().backward()
    except (IndexError, RuntimeError) as error:
        return error
    return (y.detach(), *(p.grad for p in module.parameters()))


def _edge(index: torch.Tensor, value: int, at: int) -> torch.Tensor:
    changed = index.clone()
    changed.view(-1)[at % index.numel()] = value
    return changed


def _agree(module: nn.Module, index: torch.Tensor, values: Any) -> list[bool]:
    """Compares all calls; which of them torch refused."""
    ours, refused = ORTModule(copy.deepcopy(module), strict=True), []
    limits = torch.iinfo(index.dtype)
    edges = [_edge(index, v, k) for k, v in enumerate(values) if limits.min <= v <= limits.max]
    for given in (index, *(i for edge in edges for i in (edge, index))):
        want, got = _result(module, given), _result(ours, given)
        refused.append(isinstance(want, Exception))
        if not refused[-1]:
            torch.testing.assert_close(got, want)
            continue
        assert isinstance(got, errors.IndexOutOfRangeError), (given, want, got)
        wrong = next(v for v in values if (given == v).any())
        assert f"index {wrong} is out of range for size " in str(got)
    assert not refused[0] and not refused[-1]
    assert not ours.gradd_stats()["fallbacks"]
    return refused


@pytest.mark.parametrize("name", REFUSED)
def test_torch_refuses(name: str) -> None:
    f, shape, index = REFUSED[name]
    assert any(_agree(Op(f, shape), index, EDGES))


@pytest.mark.parametrize("name", TAKEN)
def test_torch_counts_from_the_end(name: str) -> None:
    f, shape, index = TAKEN[name]
    assert not any(_agree(Op(f, shape), index, (-1, -10)))


def test_the_only_index_of_a_scalar() -> None:
    module = Op(lambda w, i: w.sum().gather(0, i) * w, (3,))
    assert any(_agree(module, torch.tensor(0), (-1, 1)))


def test_module_with_padding_in_a_stack() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 2))
    assert any(_agree(module, PLACES, EDGES))


LABELS = torch.tensor([[1, 2, -1, 0, 0], [0, 3, -1, -1, 7]])


def test_labels_of_margin_losses() -> None:
    one = Op(functional.multi_margin_loss, (2, 10))
    assert any(_agree(one, LABELS[0, :2], EDGES))
    many = Op(functional.multilabel_margin_loss, (2, 10))
    wide = functional.pad(LABELS, (0, 5), value=-1)
    assert any(_agree(many, wide, EDGES[1:]))  # -1 ends the labels
    assert any(_agree(many, wide.flip(1), EDGES[1:]))  # they are looked at behind that as well


@pytest.mark.parametrize("f", [lambda x, i: x.gather(1, i), torch.take_along_dim])
def test_limits_that_are_sizes_of_the_call(f: Callable) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return f(x * self.scale, index)

    ours, torch_own = ORTModule(Sized(), strict=True), Sized()
    for n in (3, 6, 4):
        x, index = torch.randn(n, n + 2), torch.arange(n + 2).repeat(n, 1)
        torch.testing.assert_close(ours(x, index), torch_own(x, index))
        limit = n + 2 if f is not torch.take_along_dim else x.numel()
        for wrong in (-1, limit):
            bad = _edge(index, wrong, 1)
            with pytest.raises(RuntimeError, match="out of bounds"):
                torch_own(x, bad)
            with pytest.raises(
                IndexError, match=f"index {wrong} is out of range for size {limit}, at position 1"
            ):
                ours(x, bad)


@pytest.mark.quick
def test_the_message_names_the_layer() -> None:
    ours = ORTModule(nn.Sequential(nn.Embedding(10, 4), nn.Tanh()), strict=True)
    ours(PLACES)
    with pytest.raises(
        IndexError, match=r"index -1 is out of range for size 10, at position 0 \(from 0\)$"
    ):
        ours(_edge(PLACES, -1, 0))


class Positions(nn.Module):
    """Learned positions of as many steps as the call has: indices that a plan knows."""

    def __init__(self, table: int) -> None:
        super().__init__()
        self.table = nn.Embedding(table, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(torch.arange(x.shape[1])) * x[..., None]


def test_more_steps_than_positions() -> None:
    torch.manual_seed(0)
    module = Positions(6)
    ours = ORTModule(copy.deepcopy(module), strict=True)
    for length in (4, 7, 6, 9, 4):
        x = torch.randn(2, length)
        want, got = _result(module, x), _result(ours, x)
        if length <= 6:
            torch.testing.assert_close(got, want)
        else:
            assert isinstance(want, IndexError) and isinstance(got, errors.IndexOutOfRangeError)
            assert "index 6 is out of range for size 6, at position 6" in str(got)


def _checks(f: Callable, shape: tuple[int, ...], index: torch.Tensor) -> int:
    return capture(Op(f, shape), (index,)).operators.get("com.gradd::CheckIndex", 0)


@pytest.mark.quick
def test_only_what_torch_checks_is_checked() -> None:
    for f, shape, index in (TAKEN["advanced"], TAKEN["index_fill"], TAKEN["take"]):
        assert _checks(f, shape, index) == 0
    assert _checks(*REFUSED["gather"]) == 1
    assert _checks(lambda w, i: w.sort(0)[0] + w.max(1)[0][i[0]], TABLE, PLACES) == 0
