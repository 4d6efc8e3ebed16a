"""Translations of clamp(), whose derivative on the bounds changed in torch 2.14.

Before, the interval is closed: a value on a bound has the gradient. Since then, it has none on a
bound that is a number, and half of it on a bound that is a tensor, which has the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import is_float, op, scalar, with_slope

_aten = torch.ops.aten


def _asked() -> bool:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros((), requires_grad=True, device="cpu")
        return not torch.autograd.grad(x.clamp(min=0.0), x)[0].item()


IS_OPEN = _asked()  # whether a value on a bound has no gradient in this torch


def _is_number(bound: Any) -> bool:
    """A number that type promotion has made a tensor of, a constant or one of sizes."""
    if len(bound.shape) != 0:
        return False
    node = bound.producer()
    if node is not None and "scalar_tensor" in (node.name or ""):
        return True
    while node is not None and node.op_type in ("Cast", "CastLike", "Identity"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type == "Constant"


def clamp_tensor(x: Any, min: Any = None, max: Any = None) -> Any:
    low, high = min, max
    if all(b is None or _is_number(b) for b in (low, high)):
        return _to_numbers(x, low, high)
    y = x if low is None else op.Max(x, low)
    y = y if high is None else op.Min(y, high)
    if not is_float(x):
        return y
    if not IS_OPEN:
        return _closed(y, x, low, high)
    return y if low is None or high is None else _halved(y, x, low, high)


def _closed(y: Any, x: Any, low: Any, high: Any) -> Any:
    """x has the gradient within the closed interval, bounds outside of it."""
    below = None if low is None else op.Less(x, low)
    above = None if high is None else op.Greater(x, high)
    inside = [] if low is None else [op.GreaterOrEqual(x, low)]
    inside += [] if high is None else [op.LessOrEqual(x, high)]
    if low is not None and high is not None:
        below = op.And(below, op.Less(low, high))
        above = op.Or(above, op.Less(high, low))
    mask = op.And(*inside) if len(inside) == 2 else inside[0]
    return with_slope(y, x, mask, low, below, high, above)


def _halved(y: Any, x: Any, low: Any, high: Any) -> Any:
    """On a bound both have a half of it; bounds that are equal, or crossed, hide x."""
    in_order, apart = op.LessOrEqual(low, high), op.Less(low, high)
    below, above = op.Less(x, low), op.Greater(x, high)
    on_low, on_high = op.And(op.Equal(x, low), apart), op.And(op.Equal(x, high), apart)
    outside, on_bound = op.Or(below, above), op.Or(on_low, on_high)
    above = op.Or(op.And(above, in_order), op.Less(high, low))

    def slope(whole: Any, half: Any) -> Any:
        one, two, none = (scalar(s, x.dtype) for s in (1.0, 0.5, 0.0))
        return op.Where(whole, one, op.Where(half, two, none))

    return with_slope(
        *(y, x, slope(op.Not(op.Or(outside, on_bound)), on_bound)),
        *(low, slope(op.And(below, in_order), on_low)),
        *(high, slope(above, on_high)),
    )


def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    def bound(given: Any) -> Any:
        if given is None:
            return None
        # A number of sizes is a value of the graph.
        computed = isinstance(given, ir.Value)
        return op.Cast(given, to=x.dtype) if computed else scalar(given, x.dtype)

    return _to_numbers(x, bound(min), bound(max))


def _to_numbers(x: Any, low: Any, high: Any) -> Any:
    value = op.Clip(x, low, high)
    if not IS_OPEN or not is_float(x):
        return value
    inside = [] if low is None else [op.Greater(x, low)]
    inside += [] if high is None else [op.Less(x, high)]
    return with_slope(value, x, op.And(*inside) if len(inside) == 2 else inside[0])


def table() -> dict[Any, Callable]:
    numbers = {
        _aten.clamp.default: clamp,
        _aten.clamp_min.default: clamp,
        _aten.clamp_max.default: lambda x, max: clamp(x, None, max),
    }
    return {
        **(numbers if IS_OPEN else {}),
        _aten.clip.default: clamp,
        _aten.clip.Tensor: clamp_tensor,
        _aten.clamp.Tensor: clamp_tensor,
        _aten.clamp_min.Tensor: clamp_tensor,
        _aten.clamp_max.Tensor: lambda x, max: clamp_tensor(x, None, max),
    }
