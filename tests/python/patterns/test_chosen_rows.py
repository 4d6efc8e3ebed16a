"""Rows that a mask chooses: losses, sums and assignments run in the daemon, with PyTorch's numbers.

Each case runs with some rows chosen, with all, with none and with one, and in other sizes; one
capture serves them all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils import torch_compilable_check

from gradd import ORTModule
from gradd.spec import CaptureError
from helpers.selection import one_in

pytestmark = pytest.mark.usefixtures("shared_daemon")
NAN = float("nan")


def _assigned(net: Any, h: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    x = h.clone()
    x[m] = net.head(h[m]).tanh()
    return x.square().sum()


def _scaled(net: Any, h: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    x = h * 1
    x[m] *= 2
    x[y == 1] += h[y == 1]
    return x.square().sum()


def _written_between(net: Any, h: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """The mask is another one behind the write, of as many rows."""
    x = h.clone()
    before = x[x[:, 0] > 0].sum()
    x[:, 0] = -x[:, 0] + 10
    return before + x[x[:, 0] > 0].square().sum()


def _of_pairs(net: Any, h: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    pairs = h[:, None] * h[None]
    both = m[:, None] & m[None]
    return pairs[both].mean() + pairs.sum(-1)[both].square().mean()


def _averaged(net: Any, h: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    rows = F.layer_norm(h[m], (4,)).softmax(-1)
    return (rows * h[m].detach()[:, :1]).sum() / max(rows.shape[0], 1) + rows.mean(0).max()


def _guarded(net: Any, h: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """At rows that are not chosen the logarithm is NaN, and its slope infinite."""
    h = h.where(m[:, None], h * 0)
    return h.abs()[m].log().mean() + (1 / h[m]).clamp(-3, 3).sum()


CASES: dict[str, Callable] = {
    "cross_entropy": lambda net, h, y, m: F.cross_entropy(net.head(h)[m], y[m]),
    "head of rows": lambda net, h, y, m: F.cross_entropy(
        net.head(h[m]), y[m], label_smoothing=0.1, weight=torch.tensor([1.0, 0.5, 2.0, 1.0]).to(h)
    ),
    "labels": lambda net, h, y, m: F.cross_entropy(h[y != 2], y[y != 2], reduction="sum"),
    "ignored too": lambda net, h, y, m: F.cross_entropy(h[m], y[m], ignore_index=1),
    "nll_loss": lambda net, h, y, m: F.nll_loss(h.log_softmax(-1)[m], y[m]),
    "loss of each": lambda net, h, y, m: F.cross_entropy(h[m], y[m], reduction="none").mean(),
    "mse_loss": lambda net, h, y, m: F.mse_loss(h[m], h.detach().sin()[m]),
    "bce": lambda net, h, y, m: F.binary_cross_entropy_with_logits(h[m], (h > 0).to(h)[m]),
    "kl_div": lambda net, h, y, m: F.kl_div(
        h[m].log_softmax(-1), h.detach().softmax(-1)[m], reduction="batchmean"
    ),
    "masked loss": lambda net, h, y, m: F.cross_entropy(h, y, reduction="none")[m].mean(),
    "masked_select": lambda net, h, y, m: torch.masked_select(h, m[:, None]).mean(),
    "positive": lambda net, h, y, m: h[h > 0].log().mean(),
    "by number": lambda net, h, y, m: h[m].sum() / h[m].shape[0],
    "at least one": _averaged,
    "pairs": _of_pairs,
    "assigned": _assigned,
    "scaled": _scaled,
    "written between": _written_between,
    "guarded": _guarded,
}


class Net(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.first(x), y, m)


def _masks(rows: int) -> list[torch.Tensor]:
    some = torch.arange(rows) % 3 != 1
    one = torch.arange(rows) == rows - 1
    return [some, torch.ones(rows).bool(), torch.zeros(rows).bool(), one]


def _compare(ours: nn.Module, theirs: nn.Module, args: tuple, near: dict[str, float]) -> None:
    results = []
    for net in (ours, theirs):
        net.zero_grad()
        result = net(*args)
        if result.requires_grad:
            result.backward()
        results.append(result.detach())
    assert results[0].dtype is results[1].dtype
    torch.testing.assert_close(*results, equal_nan=True, **near)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, equal_nan=True, **near)


@pytest.mark.parametrize("name", one_in(2, sorted(CASES)))
def test_rows_that_a_mask_chooses(name: str) -> None:
    theirs = Net(CASES[name]).double()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    generator = torch.Generator().manual_seed(1)
    for rows in (6, 9):
        for m in _masks(rows):
            x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
            y = torch.randint(4, (rows,), generator=generator)
            _compare(ours, theirs, (x, y, m), {"rtol": 1e-9, "atol": 1e-9})
    assert ours.gradd_stats()["captures"] == 1
    assert ours.gradd_stats()["in_torch"] == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    near = {"rtol": 1e-4, "atol": 1e-5}
    if dtype is torch.bfloat16:
        near = {"rtol": 4e-2, "atol": 4e-2}
    x, y, m = torch.randn(7, 4), torch.randint(4, (7,)), torch.arange(7) % 2 == 0
    for name in ("head of rows", "masked loss", "positive", "assigned"):
        theirs = Net(CASES[name]).to(dtype)
        ours = ORTModule(copy.deepcopy(theirs), strict=True)
        _compare(ours, theirs, (x.to(dtype), y, m), near)


def test_autocast() -> None:
    theirs = Net(CASES["head of rows"])
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        args = torch.randn(7, 4), torch.randint(4, (7,)), torch.arange(7) % 2 == 0
        _compare(ours, theirs, args, {"rtol": 4e-2, "atol": 4e-2})


def test_rows_that_are_not_chosen_may_hold_anything() -> None:
    theirs = Net(CASES["head of rows"])
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    x, y, m = torch.randn(6, 4), torch.randint(4, (6,)), torch.arange(6) % 2 == 1
    x[0], x[2] = NAN, float("inf")
    _compare(ours, theirs, (x, y, m), {"rtol": 1e-4, "atol": 1e-5})


def _added(net: Any, h: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Visual features of Qwen3-VL."""
    x = h.clone()
    x[m, :] = x[m, :] + v
    return net.head(x).square().sum()


def _scattered(net: Any, h: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Image features of transformers, counted in front."""
    over = m[:, None].expand_as(h)
    torch_compilable_check(h[over].numel() == v.numel(), f"tokens: {m.sum()}")
    return net.head(h.masked_scatter(over, v)).square().sum()


def _put(net: Any, h: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    x = h * 1
    x[m] = net.head(v)
    return x.square().sum()


def _put_among_others(net: Any, h: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Numbers, one row for all, and a mask that an empty tensor has."""
    x = h.clone()
    x[m] = v
    x[~m] = 0.5
    x[x > 1] = net.head.bias.sum()
    x[torch.ones(len(x)).bool()] = net.head.bias + x.detach().mean(0)
    empty = h[:0].clone()
    empty[m[:0]] = 1.0
    return x.square().sum() + empty.sum() + h.square().mean()


def _put_in_pairs(net: Any, h: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """A mask of two axes."""
    x = torch.stack([h, h], 1)
    x[torch.stack([m, torch.zeros_like(m)], 1)] = v
    return net.head(x).square().sum()


COUNTED: dict[str, Callable] = {
    "added": _added,
    "scattered": _scattered,
    "put": _put,
    "in pairs": _put_in_pairs,
    "among others": _put_among_others,
    "sorted": lambda net, h, v, m: (h[m] * v).sort(0)[0].cumsum(0).square().mean(),
    "twice as long": lambda net, h, v, m: (
        (torch.cat([h, h])[torch.cat([m, m])] * v.repeat(2, 1)).view(2, -1, 4).mean(1).square()
    ).sum(),
}


@pytest.mark.parametrize("name", COUNTED)
def test_another_operand_says_how_many_rows_are_chosen(name: str) -> None:
    theirs = Net(COUNTED[name]).double()
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    generator = torch.Generator().manual_seed(1)
    for rows, count in ((6, 3), (9, 4), (9, 9), (6, 2)):
        m = torch.randperm(rows, generator=generator) < count
        x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
        v = torch.randn(count, 4, generator=generator, dtype=torch.float64)
        _compare(ours, theirs, (x, v, m), {"rtol": 1e-9, "atol": 1e-9})
    stats = ours.gradd_stats()
    assert stats["in_torch"] == {} and stats["breaks"] == 0
    assert stats["captures"] == 1 or (name == "scattered" and stats["captures"] <= 3)


@pytest.mark.parametrize("name", ["added", "put", "scattered"])
@pytest.mark.parametrize("count", [2, 4])
def test_another_number_of_rows_is_an_error(name: str, count: int) -> None:
    ours = ORTModule(Net(COUNTED[name]), strict=True)
    x, v = torch.randn(6, 4), torch.randn(3, 4)
    ours(x, v, torch.arange(6) < 3).backward()
    # Of v, masked_scatter() may leave rows.
    text = "as many rows under a mask" if (name, count) == ("scattered", 2) else "out of range"
    with pytest.raises(RuntimeError, match=text):
        ours(x, v, torch.arange(6) < count).item()


OPEN: dict[str, Callable] = {
    "probabilities": lambda net, h, y, m: F.cross_entropy(h[m], h.detach().softmax(-1)[m]),
    "sort": lambda net, h, y, m: h[m].sort(0)[0].mean(),
    "two masks": lambda net, h, y, m: (h[m] * h[y != 9][: m.sum()]).sum(),
    "cat": lambda net, h, y, m: torch.cat([h[m], h]).mean(),
    "rows as batch": lambda net, h, y, m: h[m].view(-1, 2).square().sum(),
    "loop": lambda net, h, y, m: sum((row.square().sum() for row in h[m]), h.sum()),
    "branch": lambda net, h, y, m: h[m].mean() if h[m].numel() else h.sum(),
    "unique": lambda net, h, y, m: h.sum() * torch.unique(y).sum(),
}


@pytest.mark.parametrize("name", OPEN)
def test_other_uses_break_the_graph_by_name(name: str) -> None:
    theirs = Net(OPEN[name])
    ours = ORTModule(copy.deepcopy(theirs))
    x, y, m = torch.randn(6, 4), torch.arange(6) % 3, torch.arange(6) % 2 == 0
    for _ in range(3):
        _compare(ours, theirs, (x, y, m), {"rtol": 1e-4, "atol": 1e-5})
    in_torch = ours.gradd_stats()["in_torch"]
    assert in_torch["graph_break"] >= 2, in_torch


def test_strict_names_what_depends_on_data() -> None:
    model = ORTModule(Net(OPEN["sort"]), strict=True)
    for _ in range(2):
        with pytest.raises(CaptureError, match="graph_break: no graph has .* in .* @ .*py:"):
            model(torch.randn(6, 4), torch.zeros(6).long(), torch.arange(6) % 2 == 0)
