"""interpolate() in all of its modes: values and gradients of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradd import ORTModule

SIZES = {1: (7,), 2: (6, 9), 3: (4, 3, 5)}
OUT = {1: (4, 7, 12, 1), 2: ((9, 4), (6, 9), (12, 18), (1, 5)), 3: ((3, 5, 5), (8, 6, 10))}
FACTORS = (1.7, 0.6, 2.0)
SMOOTH = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}


def _calls(rank: int) -> list[dict]:
    """Options of interpolate()."""
    goals = [{"size": size} for size in OUT[rank]]
    goals += [{"scale_factor": f} for f in FACTORS]
    calls = [{**goal, "mode": mode} for goal in goals for mode in ("nearest", "nearest-exact")]
    for mode in SMOOTH[rank]:
        for goal in goals:
            calls += [{**goal, "mode": mode, "align_corners": align} for align in (False, True)]
            if rank == 2:
                calls.append({**goal, "mode": mode, "antialias": True})
    return calls


class All(nn.Module):
    """Every call, of weighted channels."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.calls = _calls(rank)
        if dtype is torch.bfloat16:  # torch has no filters for it on the CPU
            self.calls = [call for call in self.calls if not call.get("antialias")]
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = (x.movedim(1, -1) * self.weight).movedim(-1, 1)
        return tuple(F.interpolate(x, **options) for options in self.calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_all_modes(rank, dtype, shared_daemon):
    torch.manual_seed(0)
    nets = [All(rank, dtype) for _ in range(2)]
    wrapped = ORTModule(nets[0], strict=True)
    near = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}[dtype]
    x = torch.randn(2, 2, *SIZES[rank], dtype=dtype)
    given = [x.clone().requires_grad_() for _ in nets]
    results = [net(one) for net, one in zip((wrapped, nets[1]), given, strict=True)]
    for options, got, want in zip(nets[0].calls, *results, strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape, options
        torch.testing.assert_close(
            got, want, rtol=near, atol=near, msg=lambda t, o=options: f"{o}: {t}"
        )
    for one in results:
        weights = [torch.linspace(-1, 1, r.numel()).reshape(r.shape) for r in one]
        sum((r.double() * w).sum() for r, w in zip(one, weights, strict=True)).backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=10 * near, atol=20 * near)
    assert wrapped.gradd_stats()["in_torch"] == {}


def test_sizes_of_the_call(shared_daemon):
    class Double(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            size = [2 * n for n in x.shape[2:]]
            return F.interpolate(y, size=size, mode="bilinear") + F.interpolate(y, scale_factor=2)

    theirs = Double(5, 5)
    wrapped = ORTModule(theirs, strict=True)
    for rows, height in ((2, 3), (3, 3), (2, 7), (4, 5)):
        x = torch.randn(rows, 2, height, 5)
        torch.testing.assert_close(wrapped(x), theirs(x))
    assert wrapped.gradd_stats()["captures"] == 1


def test_many_sizes_have_torchs_nearest_elements(shared_daemon):
    """Places are computed in floats, which decide between neighbours."""

    class Nearest(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x):
            x = x * self.weight
            return tuple(
                F.interpolate(x, size=n, mode=mode)
                for n in range(1, 160, 7)
                for mode in ("nearest", "nearest-exact")
            )

    theirs = Nearest()
    x = torch.arange(93.0).reshape(1, 1, 93)
    for got, want in zip(ORTModule(theirs, strict=True)(x), theirs(x), strict=True):
        assert torch.equal(got, want)
