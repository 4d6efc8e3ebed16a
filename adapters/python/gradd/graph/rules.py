"""Rules for operators where torch has none, or none that serves.

FakeTensor, decompositions of one operator (decompose.py), and those of a whole graph use them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from gradd import private

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# Where FakeTensor looks up the result of an operator on symbolic sizes, some of torch's entries are
# functions of its Python interface, whose parameters have another order than the operator's: the
# reduction of nll_loss arrives as `size_average`, and "none" has a mean's rank.
MISREAD = (
    *(_aten.nll_loss.default, _aten.std_mean.dim),
    *(_aten.add.Scalar, _aten.sub.Scalar, _aten.add_.Scalar, _aten.sub_.Scalar),
    *(_aten.baddbmm.dtype, _aten.baddbmm.dtype_out),
)
# Without a rule for types and sizes Dynamo cannot trace an operator.
_MASKED = (
    "fake_quantize_per_tensor_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fake_quantize_per_channel_affine_cachemask",
)


@contextlib.contextmanager
def sound() -> Iterator[None]:
    """torch computes those operators from their parts in C, as a call does."""
    table = private.decompositions
    taken = {target: table.pop(target) for target in MISREAD if target in table}
    try:
        yield
    finally:
        table.update(taken)


def _quantised(x: torch.Tensor, *unused: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def give_missing() -> None:
    """Registers those of fake quantisation, where torch has none."""
    for name in _MASKED:
        found = getattr(torch.ops.aten, name, None)
        if found is not None and not found.default.has_kernel_for_dispatch_key("Meta"):
            torch.library.register_fake(f"aten::{name}", _quantised)


def _zero(of: Any) -> Any:
    """0 whose gradient is 0; a product with 0 would be NaN for infinite values."""
    if not isinstance(of, torch.Tensor):
        return 0.0
    return torch.where(torch.zeros_like(of, dtype=torch.bool), of, torch.zeros_like(of))


def _normal(mean: Any, std: Any, *, generator: torch.Generator | None = None) -> torch.Tensor:
    drawn = mean + std * torch.randn_like(mean + std)
    return torch.ops.gradd.stop_gradient(drawn) + _zero(mean) + _zero(std)


def _fma(a: torch.Tensor, b: Any, c: torch.Tensor) -> torch.Tensor:
    """What Dynamo makes of addcmul_(value=) and addcdiv_(value=): rounded once."""
    if c.dtype in _HALVES:
        return (a.to(torch.float32) * b + c).to(c.dtype)
    return a * b + c


# torch's own, mean + deviation x normal number, would pass a gradient on to both operands, which
# get zeros in PyTorch.
DRAWS = {
    _aten.normal.Tensor_Tensor: _normal,
    _aten.normal.Tensor_float: lambda mean, std=1.0, **kw: _normal(mean, std, **kw),
    _aten.normal.float_Tensor: _normal,
}
# An operator that is there once torch's own compiler has been imported.
LATE: dict[str, Any] = {"prims::fma": _fma}


def _beyond(x: torch.Tensor, lambd: Any) -> torch.Tensor:
    """x where it is outside of [-lambd, lambd], a bound in the type of x; else 0 without slope."""

    def bound(of: Any) -> torch.Tensor:
        if isinstance(of, torch.Tensor):
            return of.to(x.dtype)
        return torch.full((), of, dtype=x.dtype, device=x.device)

    low, high = bound(-lambd), bound(lambd)
    return torch.where((x < low) | (x > high), x, torch.zeros_like(x))


def _hardshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    beyond = _beyond(x, lambd)
    value = torch.where(x.isnan(), x, beyond)
    return torch.ops.gradd.straight_through(value, beyond)


def _softshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    z = x.to(torch.float32) if x.dtype in _HALVES else x
    value = torch.where(z < -lambd, z + lambd, z * 0.0)
    value = torch.where(z > lambd, z - lambd, value).to(x.dtype)
    return torch.ops.gradd.straight_through(value, _beyond(x, lambd))


def _multi_margin(
    scores: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    x = scores if scores.dim() == 2 else scores.unsqueeze(0)
    label = torch.ops.gradd.check_index(target.reshape(-1, 1), x.shape[1])
    above = margin - x.gather(1, label) + x
    counts = (label != torch.arange(x.shape[1], device=x.device)) & (above > 0)
    nothing = torch.zeros_like(above)
    above = torch.where(counts, above, nothing)
    above = above * above if p == 2 else above
    if weight is not None:
        above = torch.where(counts, above * weight[label], nothing)
    rows = above.mean(1)
    if reduction == 0:
        return rows if scores.dim() == 2 else rows.squeeze(0)
    return rows.mean() if reduction == 1 else rows.sum()


# torch decomposes these into parts with other derivatives at ties and NaN.
LOST: dict[Any, Any] = {
    _aten.hardshrink.default: _hardshrink,
    _aten.softshrink.default: _softshrink,
    _aten.multi_margin_loss.default: _multi_margin,
}


def _gates(x: Any, h: Any, w_x: Any, w_h: Any, b_x: Any = None, b_h: Any = None) -> tuple:
    linear = torch.nn.functional.linear
    return linear(x, w_x, b_x), linear(h, w_h, b_h)


def _gru_cell(x: torch.Tensor, h: torch.Tensor, *weights: Any) -> torch.Tensor:
    of_x, of_h = (gates.chunk(3, 1) for gates in _gates(x, h, *weights))
    reset, update = (torch.sigmoid(of_h[i] + of_x[i]) for i in (0, 1))
    new = torch.tanh(of_x[2] + of_h[2] * reset)
    return (h - new) * update + new


def _lstm_cell(x: torch.Tensor, hx: Any, *weights: Any) -> tuple[torch.Tensor, torch.Tensor]:
    h, c = hx
    of_x, of_h = _gates(x, h, *weights)
    inward, forget, cell, outward = (of_h + of_x).chunk(4, 1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(inward) * torch.tanh(cell)
    return torch.sigmoid(outward) * torch.tanh(c), c


def _simple_cell(function: Any) -> Any:
    def cell(x: torch.Tensor, h: torch.Tensor, *weights: Any) -> torch.Tensor:
        of_x, of_h = _gates(x, h, *weights)
        return function(of_h + of_x)

    return cell


# One step of a recurrent layer: torch's own parts write in place.
CELLS: dict[Any, Any] = {
    _aten.gru_cell.default: _gru_cell,
    _aten.lstm_cell.default: _lstm_cell,
    _aten.rnn_tanh_cell.default: _simple_cell(torch.tanh),
    _aten.rnn_relu_cell.default: _simple_cell(torch.relu),
}
