"""Packed sequences: values and gradients are PyTorch's, whatever the lengths and their order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from gradd import ORTModule
from helpers.nets import assert_close

pytestmark = pytest.mark.usefixtures("shared_daemon")
F64 = torch.float64
UNSORTED = ([5, 7, 2], [1, 6, 6], [4, 4])
SORTED = ([7, 5, 1], [4, 4])


class Packs(nn.Module):
    """A linear layer, a recurrent one on packed sequences, and a head on results and states."""

    def __init__(self, cell: nn.Module, given: bool = False, **options: Any) -> None:
        super().__init__()
        self.cell, self.options = cell, options
        self.first = nn.Linear(3, cell.input_size)
        out = (cell.proj_size or cell.hidden_size) * (1 + cell.bidirectional)
        self.head = nn.Linear(out, 2)
        self.given = given

    def states(self, x: torch.Tensor) -> Any:
        cell, rows = self.cell, x.shape[0 if self.cell.batch_first else 1]
        layers = cell.num_layers * (1 + cell.bidirectional)
        sums = x.sum() / 9 + torch.arange(rows).to(x.dtype).unsqueeze(1)
        h = sums.cos().expand(layers, rows, cell.proj_size or cell.hidden_size)
        c = sums.sin().expand(layers, rows, cell.hidden_size)
        return (h, c) if isinstance(cell, nn.LSTM) else h

    def forward(self, x: torch.Tensor, lengths: Any, sort: bool) -> tuple[Any, ...]:
        cell = self.cell
        packed = pack_padded_sequence(self.first(x), lengths, cell.batch_first, not sort)
        y, last = cell(packed, self.states(x)) if self.given else cell(packed)
        y, found = pad_packed_sequence(y, batch_first=cell.batch_first, **self.options)
        return (self.head(y), found, *(last if isinstance(last, tuple) else (last,)))


def compare(
    theirs: nn.Module, lengths: Sequence[Sequence[int]], as_given: Callable = torch.tensor
) -> ORTModule:
    """Both train on batches with these lengths, nothing in PyTorch."""
    if isinstance(theirs.cell, nn.LSTM) and torch.__version__ < "2.13":
        pytest.skip("this torch traces states of doubles with another rank")
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    first = theirs.cell.batch_first
    for of_batch in lengths:
        sizes = (len(of_batch), 7) if first else (7, len(of_batch))
        x = torch.randn(*sizes, 3, dtype=F64)
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            results = model(leaf, as_given(of_batch), lengths is UNSORTED)
            draw = torch.Generator().manual_seed(1)
            total = sum(
                (y * torch.rand(y.shape, generator=draw)).sum()
                for y in results
                if y.is_floating_point()
            )
            total.backward()
            found.append([*results, leaf.grad, *(p.grad for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert ours.gradd_stats()["in_torch"] == {}
    return ours


DEEP = {"num_layers": 2, "bidirectional": True, "batch_first": True}
CELLS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "LSTM": (lambda: nn.LSTM(3, 4, batch_first=True), {}),
    "deep LSTM": (lambda: nn.LSTM(3, 4, **DEEP), {"given": True, "total_length": 9}),
    "deep GRU": (lambda: nn.GRU(3, 4, **DEEP), {"given": True, "padding_value": -2.0}),
    "projections": (lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), {}),
    "GRU without bias": (lambda: nn.GRU(3, 4, bias=False), {"total_length": 8}),
    "RNN": (lambda: nn.RNN(3, 4, **DEEP), {}),
    "RNN with relu": (lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True), {}),
}


@pytest.mark.parametrize("lengths", [UNSORTED, SORTED], ids=["unsorted", "sorted"])
@pytest.mark.parametrize("name", CELLS)
def test_packed_sequences(name: str, lengths: Sequence[Sequence[int]]) -> None:
    torch.manual_seed(0)
    cell, options = CELLS[name]
    ours = compare(Packs(cell(), **options).double(), lengths)
    stats = ours.gradd_stats()
    assert stats["breaks"] == len(lengths)


def test_lengths_in_a_list() -> None:
    torch.manual_seed(0)
    compare(Packs(nn.LSTM(3, 4, batch_first=True)).double(), UNSORTED, list)


class Reads(nn.Module):
    """What is made of packed sequences in other ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.LSTM(3, 4, batch_first=True)
        self.second = nn.GRU(4, 4, batch_first=True)
        self.way = way

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        if self.way == "given":
            packed = PackedSequence(packed.data.tanh(), *packed[1:])
        made, (h, _) = self.first(packed)
        if self.way == "last states":
            return h[-1].square().mean()
        if self.way == "rows":
            labels = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
            return F.cross_entropy(made.data, labels.data)
        made, _ = self.second(made)
        return pad_packed_sequence(made, batch_first=True)[0].square().mean()


@pytest.mark.parametrize("way", ["last states", "rows", "layers", "given"])
def test_other_uses(way: str) -> None:
    torch.manual_seed(0)
    theirs = Reads(way)
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    for lengths in UNSORTED:
        x, y = torch.randn(len(lengths), 7, 3), torch.randint(0, 4, (len(lengths), 7))
        grads = []
        for model in (ours, theirs):
            model.zero_grad()
            loss = model(x, torch.tensor(lengths), y)
            loss.backward()
            grads.append([loss.detach(), *(p.grad for p in model.parameters())])
        for a, b in zip(*grads, strict=True):
            if a is not None or b is not None:
                assert_close(a, b)
    assert ours.gradd_stats()["in_torch"] == {}


@pytest.mark.quick
def test_autocast_and_a_hook_that_comes_later() -> None:
    torch.manual_seed(0)
    theirs = Packs(nn.LSTM(3, 4, **DEEP))
    exact, ours = copy.deepcopy(theirs).double(), ORTModule(copy.deepcopy(theirs), strict=True)
    x, lengths = torch.randn(3, 7, 3), torch.tensor(UNSORTED[0])
    with torch.autocast("cpu", torch.bfloat16):
        a, b = ours(x, lengths, True)[0], theirs(x, lengths, True)[0]
    assert a.dtype is b.dtype
    wanted = exact(x.double(), lengths, True)[0]
    assert (a.double() - wanted).norm() <= 2 * (b.double() - wanted).norm() + 1e-6
    calls = []
    ours = ORTModule(theirs)
    ours(x, lengths, True)
    ours.cell.register_forward_hook(lambda *unused: calls.append(1))
    ours(x, lengths, True)
    assert calls == [1]


def test_what_torch_refuses() -> None:
    ours = ORTModule(Packs(nn.LSTM(3, 4, batch_first=True), total_length=3))
    x = torch.randn(2, 7, 3)
    with pytest.raises(ValueError, match="total_length"):
        ours(x, torch.tensor([5, 2]), False)
    with pytest.raises(RuntimeError, match="decreasing order"):
        ours(x, torch.tensor([2, 5]), False)
