"""Operands of different floating types, and indices of small ones: PyTorch's results, or its error.

What PyTorch computes is as exact as there, of the same type; what it refuses raises the same.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from gradd.spec import CaptureError
from helpers.graphs.captures import Lambda

pytestmark = pytest.mark.usefixtures("shared_daemon", "unchecked")
_HALF, _BF16, _FLOAT, _DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
_MIXED = [
    *itertools.permutations((_HALF, _FLOAT, _DOUBLE), 2),
    *((_BF16, _FLOAT), (_FLOAT, _BF16), (_HALF, _BF16)),
]
_LABELS = torch.tensor([1, 2])
_ROWS = torch.tensor([1, 0])
_ZEROS = torch.zeros(1, 4, dtype=torch.long)
_Functions = dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


@pytest.fixture
def unchecked(monkeypatch):
    """The self-check would raise PyTorch's error, and hide what the daemon computes."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


# Of two tensors [2, 4]. PyTorch promotes these.
_PROMOTED: _Functions = {
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w[0]),
    "rms_norm eps": lambda x, w: F.rms_norm(x, (4,), w[0], 1e-6),
    "rms_norm 2 axes": lambda x, w: F.rms_norm(x, (2, 4), w),
    "pow": lambda x, w: x.abs() ** w,
    "pow 0-d": lambda x, w: x.abs() ** w[0, 0],
    "xlogy": lambda x, w: torch.xlogy(x, w.abs()),
    "xlog1py": lambda x, w: torch.special.xlog1py(x, w.abs()),
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "fmod": torch.fmod,
    "maximum": torch.maximum,
    "addcmul": lambda x, w: torch.addcmul(x, x, w, value=0.3),
    "addcdiv": lambda x, w: torch.addcdiv(w, x, x.abs() + 1),
    "clamp": lambda x, w: torch.clamp(x, w - 1, x + 1),
    "where": lambda x, w: torch.where(x > w, x, w),
    "where 0-d": lambda x, w: torch.where(x > 0, x, w[0, 0]),
    "cat": lambda x, w: torch.cat([x, w]),
    "stack": lambda x, w: torch.stack([w, x], 1),
    "kron": torch.kron,
    "outer": lambda x, w: torch.outer(x[0], w[0]),
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "bce with logits": lambda x, w: F.binary_cross_entropy_with_logits(x, w.sigmoid()),
    "bce with weights": lambda x, w: F.binary_cross_entropy_with_logits(
        x, x.sigmoid(), w.detach().abs()
    ),
    "probabilities": lambda x, w: F.cross_entropy(x, w.abs()),
    "kl": lambda x, w: F.kl_div(x, w, log_target=True, reduction="sum"),
    "slice_scatter": lambda x, w: torch.slice_scatter(x, w[:1], 0, 0, 1),
    "select_scatter": lambda x, w: torch.select_scatter(x, w[0], 0, 1),
    "diagonal_scatter": lambda x, w: torch.diagonal_scatter(x, w[0, :2]),
    "masked_fill": lambda x, w: x.masked_fill(x > 0, w[0, 0]),
    "bce's weight": lambda x, w: F.binary_cross_entropy(
        x.sigmoid(), x.sigmoid().detach(), w.abs().detach()
    ),
    "soft_margin": lambda x, w: F.soft_margin_loss(x, w.detach().sign()),
    "add_": lambda x, w: x.clone().add_(w),
}
# PyTorch refuses all of these, or some.
_REFUSED: _Functions = {
    "linear": F.linear,
    "linear's bias": lambda x, w: F.linear(x, x * 2, w[0, :2]),
    "matmul": lambda x, w: x @ w.t(),
    "mv": lambda x, w: x @ w[0],
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None]),
    "addmm": lambda x, w: torch.addmm(w[:, :2], x, x.t()),
    "addmm's factor": lambda x, w: torch.addmm(x[:, :2], x, w.t()),
    "addr": lambda x, w: torch.addr(w, x[:, 0], x[0]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "dot": lambda x, w: torch.dot(x[0], w[0]),
    "cdist": torch.cdist,
    "bilinear": lambda x, w: F.bilinear(x, x, w[:, None].expand(2, 4, 4)),
    "conv": lambda x, w: F.conv1d(x[None], w[None, :, :1]),
    "conv's bias": lambda x, w: F.conv1d(x[None], x[None, :, :1], w[0, :1]),
    "grid_sample": lambda x, w: F.grid_sample(
        x[None, None], w.view(1, 2, 2, 2), align_corners=False
    ),
    "embedding_bag": lambda x, w: F.embedding_bag(
        _LABELS[None] - 1, x, per_sample_weights=w[:1, :2], mode="sum"
    ),
    "weight_norm": lambda x, w: torch._weight_norm(x, w[:, :1], 0),
    "heaviside": lambda x, w: torch.heaviside(x.detach(), w.detach()) * x,
    "huber": F.huber_loss,
    "bce": lambda x, w: F.binary_cross_entropy(x.sigmoid(), w.sigmoid()),
    "cross_entropy's weight": lambda x, w: F.cross_entropy(x, _LABELS, w[0].detach().abs()),
    "nll's weight": lambda x, w: F.nll_loss(x, _LABELS, w[0].detach().abs()),
    "multi_margin's weight": lambda x, w: F.multi_margin_loss(
        x, _LABELS, weight=w[0].detach().abs()
    ),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w[0], w[1]),
    "layer_norm's bias": lambda x, w: F.layer_norm(x, (4,), None, w[1]),
    "layer_norm, bias of x": lambda x, w: F.layer_norm(x, (4,), w[0], x[1]),
    "group_norm": lambda x, w: F.group_norm(x, 2, w[0], w[1]),
    "group_norm's bias": lambda x, w: F.group_norm(x, 2, None, w[1]),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], True),
    "batch_norm's bias": lambda x, w: F.batch_norm(x, None, None, None, w[1], True),
    "batch_norm, given": lambda x, w: F.batch_norm(x, w[0].detach(), w[1].detach().abs()),
    "instance_norm": lambda x, w: F.instance_norm(x[None], weight=w[0, :2], bias=w[1, :2]),
    "lerp": lambda x, w: torch.lerp(x, w, 0.3),
    "prelu": lambda x, w: F.prelu(x, w[0]),
    "scatter_add": lambda x, w: x.scatter_add(0, _ZEROS, w),
    "index_copy": lambda x, w: x.index_copy(0, _ROWS, w),
}


def _results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor] | Exception:
    """Value and gradients, or the error."""
    x = x.clone().requires_grad_()
    try:
        result = model(x)
        result.to(
            max(result.dtype, torch.float32, key=lambda t: t.itemsize)
        ).square().sum().backward()
    except Exception as error:
        return error
    return [t for t in (result.detach(), x.grad, next(model.parameters()).grad) if t is not None]


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-9))


def _compare(function: Callable, kinds: tuple[torch.dtype, torch.dtype]) -> Any:
    """Compares with PyTorch in these types, and in doubles; returns what PyTorch does."""
    torch.manual_seed(0)
    x, w = ((torch.randn(2, 4) * 2).to(kind) for kind in kinds)
    plain = Lambda(lambda self, x: function(x, self.w), w=nn.Parameter(w))
    wide = copy.deepcopy(plain).double()
    theirs, ours = _results(plain, x), _results(ORTModule(copy.deepcopy(plain)), x)
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        assert (type(ours), str(ours)) == (type(theirs), str(theirs)), kinds
        with pytest.raises((CaptureError, type(theirs))):
            _strict(plain, x)
        return theirs
    for got, want, exact in zip(ours, theirs, _results(wide, x.double()), strict=True):
        assert got.dtype is want.dtype and got.shape == want.shape, kinds
        bound = 4 * _error(want, exact) + 4 * torch.finfo(want.dtype).eps
        assert _error(got, exact) <= bound, (kinds, got, want)
    return theirs


def _strict(plain: nn.Module, x: torch.Tensor) -> None:
    error = _results(ORTModule(copy.deepcopy(plain), strict=True), x)
    if isinstance(error, Exception):
        raise error


@pytest.mark.parametrize("name", _PROMOTED)
def test_what_pytorch_promotes(name):
    for kinds in _MIXED:
        assert not isinstance(_compare(_PROMOTED[name], kinds), Exception), kinds


@pytest.mark.parametrize("name", _REFUSED)
def test_what_pytorch_refuses(name):
    assert any(isinstance(_compare(_REFUSED[name], kinds), Exception) for kinds in _MIXED)


_INDEXED: dict[str, Callable] = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll": lambda x, t: F.nll_loss(x, t),
    "multi_margin": lambda x, t: F.multi_margin_loss(x, t),
    "embedding": lambda x, t: F.embedding(t, x),
    "gather": lambda x, t: x.gather(0, t[:, None]),
    "getitem": lambda x, t: x[t],
    "index_select": lambda x, t: x.index_select(0, t),
    "index_add": lambda x, t: x.index_add(0, t, x),
    "index_copy": lambda x, t: x.index_copy(0, t, x),
    "index_put": lambda x, t: x.index_put((t,), x),
    "index_fill": lambda x, t: x.index_fill(0, t, 1.0),
    "scatter": lambda x, t: x.scatter(0, t[:, None], x),
    "scatter_add": lambda x, t: x.scatter_add(0, t[:, None], x),
    "scatter_reduce": lambda x, t: x.scatter_reduce(0, t[:, None], x, "sum"),
    "take": lambda x, t: x.take(t),
}


@pytest.mark.parametrize("name", _INDEXED)
def test_types_of_indices(name):
    plain = Lambda(lambda self, t: _INDEXED[name](self.w, t), w=nn.Parameter(torch.randn(2, 4)))
    for kind in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        found = []
        for model in (plain, ORTModule(copy.deepcopy(plain))):
            try:
                found.append(model(torch.tensor([1, 0], dtype=kind)))
            except (RuntimeError, IndexError) as error:
                found.append(error)
        want, got = found
        if isinstance(want, Exception) or isinstance(got, Exception):
            assert type(got) is type(want), (kind, got, want)
        else:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_autocast_makes_one_type(kind):
    """Operands that PyTorch refuses, but for autocast."""
    torch.manual_seed(0)
    plain = Lambda(
        lambda self, x, y: F.cross_entropy(self.norm(self.lin(x)) + x @ self.lin.weight, y),
        lin=nn.Linear(4, 4),
        norm=nn.LayerNorm(4),
    )
    x = torch.randn(3, 4).to(kind)
    with torch.autocast("cpu", torch.bfloat16):
        want = plain(x, torch.tensor([0, 1, 3]))
        got = ORTModule(plain, strict=True)(x, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
