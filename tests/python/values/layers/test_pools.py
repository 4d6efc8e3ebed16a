"""Pooling with all of its options: values, places and gradients of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradd import ORTModule

# Of an input of rank 5 (volumes), 4 (images) or 3 (sequences).
SEQUENCES: dict[str, Callable] = {
    "max": lambda x: F.max_pool1d(x, 3, 2, 1),
    "max ceil": lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True),
    "max dilated": lambda x: F.max_pool1d(x, 4, 1, 2, dilation=2),
    "max gaps": lambda x: F.max_pool1d(x, 2, 3),
    "average": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "average alone": lambda x: F.avg_pool1d(x, 3, 2, 1, count_include_pad=False, ceil_mode=True),
    "adaptive average": lambda x: F.adaptive_avg_pool1d(x, 5),
    "adaptive max": lambda x: F.adaptive_max_pool1d(x, 4, return_indices=True),
    "power": lambda x: F.lp_pool1d(x, 2, 3),
}
IMAGES: dict[str, Callable] = {
    "max": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "max ceil": lambda x: F.max_pool2d(x, (3, 2), 2, (1, 0), ceil_mode=True, return_indices=True),
    "max dilated": lambda x: F.max_pool2d(x, (2, 3), 1, 1, (2, 3), return_indices=True),
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average alone": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "average ceil": lambda x: F.avg_pool2d(x, (3, 4), 2, (1, 2), ceil_mode=True),
    "average ceil alone": lambda x: F.avg_pool2d(x, 3, 2, 1, True, False),
    "divided": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=7),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (3, 10)),
    "adaptive kept": lambda x: F.adaptive_avg_pool2d(x, (None, 2)),
    "adaptive one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True),
    "adaptive max one": lambda x: F.adaptive_max_pool2d(x, 1),
}
VOLUMES: dict[str, Callable] = {
    "max": lambda x: F.max_pool3d(x, 2, 2, 1, ceil_mode=True, return_indices=True),
    "max dilated": lambda x: F.max_pool3d(x, (2, 1, 2), 1, dilation=(2, 1, 3)),
    "average": lambda x: F.avg_pool3d(x, 2, 1, 1, count_include_pad=False),
    "divided": lambda x: F.avg_pool3d(x, (2, 3, 2), divisor_override=5),
    "adaptive average": lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)),
    "adaptive max": lambda x: F.adaptive_max_pool3d(x, (2, 3, 1), return_indices=True),
}
TABLES = {1: SEQUENCES, 2: IMAGES, 3: VOLUMES}


class All(nn.Module):
    """Every pooling of a table, of weighted channels."""

    def __init__(self, table: dict[str, Callable], dtype: torch.dtype) -> None:
        super().__init__()
        self.table = table
        self.weight = nn.Parameter(torch.tensor([1.0, -0.5, 2.0], dtype=dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: list[torch.Tensor] = []
        channel = 1 if x.dim() == self.rank + 2 else 0
        x = (x.movedim(channel, -1) * self.weight).movedim(-1, channel)
        for pool in self.table.values():
            result = pool(x)
            found += result if isinstance(result, tuple) else [result]
        return tuple(found)


def _compare(table: dict, rank: int, inputs: list[torch.Tensor], **tolerance) -> None:
    nets = [All(table, inputs[0].dtype) for _ in range(2)]
    for net in nets:
        net.rank = rank
    wrapped = ORTModule(nets[0], strict=True)
    for x in inputs:
        given = [x.clone().requires_grad_() for _ in nets]
        results = [net(one) for net, one in zip((wrapped, nets[1]), given, strict=True)]
        for got, want in zip(*results, strict=True):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
        for one in results:
            floats = [r for r in one if r.is_floating_point()]
            sum((r * torch.arange(r.numel()).reshape(r.shape)).sum() for r in floats).backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, **tolerance)
    torch.testing.assert_close(nets[0].weight.grad, nets[1].weight.grad, rtol=1e-3, atol=1e-3)
    assert wrapped.gradd_stats()["in_torch"] == {}


SIZES = {1: (11,), 2: (9, 7), 3: (5, 6, 4)}


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_floats(rank, shared_daemon):
    torch.manual_seed(0)
    ties = torch.randint(-1, 2, (2, 3, *SIZES[rank])).float()
    other = [n + 2 for n in SIZES[rank]]  # sizes of another plan
    _compare(TABLES[rank], rank, [torch.randn(ties.shape), torch.randn(4, 3, *other), ties])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_one_sample(rank, shared_daemon):
    _compare(TABLES[rank], rank, [torch.randn(3, *SIZES[rank])])


@pytest.mark.parametrize("rank", [2, 3])
def test_doubles(rank, shared_daemon):
    x = torch.randn(2, 3, *SIZES[rank], dtype=torch.float64)
    _compare(TABLES[rank], rank, [x], rtol=1e-12, atol=1e-12)


def test_halves(shared_daemon):
    table = {name: pool for name, pool in IMAGES.items() if "max" not in name}
    ours, theirs = (All(table, torch.bfloat16) for _ in range(2))
    ours.rank = theirs.rank = 2
    wrapped = ORTModule(ours, strict=True)
    x = torch.randn(2, 3, 9, 7, dtype=torch.bfloat16)
    for got, want in zip(wrapped(x), theirs(x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_infinities_stay_within_their_windows(shared_daemon):
    x = torch.randn(1, 3, 9, 7)
    x[0, 0, 2, 2], x[0, 1, 8, 6], x[0, 2, 0, 0] = float("inf"), -float("inf"), float("nan")
    table = {name: pool for name, pool in IMAGES.items() if name != "adaptive kept"}
    nets = [All(table, torch.float32) for _ in range(2)]
    for net in nets:
        net.rank = 2
    wrapped = ORTModule(nets[0], strict=True)
    for got, want in zip(wrapped(x), nets[1](x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_an_empty_batch(shared_daemon):
    class Pool(nn.Linear):
        def forward(self, x):
            return F.avg_pool2d(F.max_pool2d(super().forward(x), 2), 2, 1)

    wrapped = ORTModule(Pool(8, 8), strict=True)
    x = torch.randn(0, 3, 6, 8, requires_grad=True)
    result = wrapped(x)
    result.sum().backward()
    assert result.shape == (0, 3, 2, 3) and x.grad.shape == x.shape
