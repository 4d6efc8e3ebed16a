"""Translations of fake quantisation: values on a grid, whose gradient passes within its ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import cast, ints, narrow, op, scalar, typed, wide, with_slope
from gradd.graph.translation.doubles import as_float

_aten = torch.ops.aten


def _quantised(x: Any, step: Any, zero: Any, low: int, high: int) -> Any:
    """x on the grid of (q - zero) step for whole q in [low, high]; NaN and infinities are open."""
    z = wide(x)
    step, zero = (cast(v, z.dtype) for v in (step, zero))
    one = scalar(1.0, ir.DataType.FLOAT)
    inverse = cast(op.Div(one, cast(step, ir.DataType.FLOAT)), z.dtype)
    level = op.Add(op.Round(op.Mul(z, inverse)), zero)
    ends = [scalar(float(end), z.dtype) for end in (low, high)]
    inside = op.And(op.GreaterOrEqual(level, ends[0]), op.LessOrEqual(level, ends[1]))
    value = op.Mul(op.Sub(op.Clip(level, *ends), zero), step)
    return with_slope(narrow(typed(value, z.dtype), x), x, inside)


def per_tensor(x: Any, step: float, zero: int, low: int, high: int) -> Any:
    """fake_quantize_per_tensor_affine() with numbers; torch takes the step as a float."""
    kind = wide(x).dtype
    return _quantised(x, scalar(as_float(step), kind), scalar(float(zero), kind), low, high)


def by_tensors(x: Any, step: Any, zero: Any, low: int, high: int) -> Any:
    """The same with tensors of one element."""
    return _quantised(x, op.Reshape(step, ints()), op.Reshape(zero, ints()), low, high)


def per_channel(x: Any, step: Any, zero: Any, axis: int, low: int, high: int) -> Any:
    """fake_quantize_per_channel_affine(): a step and a zero for each place along an axis."""
    shape = ints(*[-1 if i == axis % len(x.shape) else 1 for i in range(len(x.shape))])
    return _quantised(x, *(op.Reshape(v, shape) for v in (step, zero)), low, high)


def table() -> dict[Any, Callable]:
    """aten overload -> translation."""
    return {
        _aten.fake_quantize_per_tensor_affine.default: per_tensor,
        _aten.fake_quantize_per_tensor_affine.tensor_qparams: by_tensors,
        _aten.fake_quantize_per_channel_affine.default: per_channel,
    }
