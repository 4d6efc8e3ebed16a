"""Translations of pointwise operations whose stock ones differ from torch at edges.

Bounds, ties, zeros, overflow, NaN: each function gives torch's value and torch's derivative there.
The formulas of derivatives reproduce torch's results, which serve as its documentation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    cast,
    is_float,
    narrow,
    op,
    own,
    refuse,
    scalar,
    stop_gradient,
    typed,
    wide,
    wide_type,
    with_slope,
    without_slope,
)
from gradd.graph.translation.doubles import DOUBLE, as_float, is_exact

_aten = torch.ops.aten
_FLOAT = int(ir.DataType.FLOAT)


def _value(x: Any, dtype: Any) -> Any:
    return scalar(x, dtype) if isinstance(x, (int, float)) else wide(x)


# --- bounds ----------------------------------------------------------------------------------


def hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """No gradient on the bounds, unlike clamp(), nor to NaN.

    (Where torch's vectors end, a NaN in the last few elements of a tensor has a gradient.) Values
    are cut to bounds in the type of x, gradients by bounds that are not rounded.
    """
    z = wide(x)
    low, high = scalar(min_val, z.dtype), scalar(max_val, z.dtype)
    inside = op.And(op.Greater(z, low), op.Less(z, high))
    value = op.Clip(x, scalar(min_val, x.dtype), scalar(max_val, x.dtype))
    return with_slope(value, x, inside)


def relu(x: Any) -> Any:
    """relu(), of integers as well."""
    return op.Relu(x) if is_float(x) else op.Max(x, scalar(0, x.dtype))


def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """elu(); the operator knows the side by the sign of its result, a negative alpha hides it."""
    is_exact_here = x.dtype != DOUBLE or is_exact(alpha)
    if alpha >= 0 and scale == 1 and input_scale == 1 and is_exact_here:
        return op.Elu(x, alpha=float(alpha))
    z = wide(x)
    zero, low = scalar(0.0, z.dtype), alpha * scale
    stretched = op.Mul(z, scalar(input_scale, z.dtype))
    left = op.Mul(expm1(stretched), scalar(low, z.dtype))
    value = op.Where(op.Less(z, zero), left, op.Mul(z, scalar(scale, z.dtype)))
    left = op.Mul(op.Exp(stretched), scalar(low * input_scale, z.dtype))
    right = op.Greater(z, zero)
    return with_slope(narrow(value, x), x, op.Where(right, scalar(scale, z.dtype), left))


def celu(x: Any, alpha: float = 1.0) -> Any:
    return elu(x, alpha, 1.0, 1.0 / alpha)


# --- logarithms and exponentials -------------------------------------------------------------


def expm1(x: Any) -> Any:
    """exp(x) - 1, exact for small x."""
    return own("Expm1", x)


def log1p(x: Any) -> Any:
    """log(1 + x), exact for small x."""
    return own("Log1p", x)


def log_sigmoid(x: Any) -> Any:
    """log(sigmoid(x)) = -softplus(-x): exact for any x, value and gradient."""
    return op.Neg(op.Softplus(op.Neg(x)))


def softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    """softplus(): log(1 + exp(beta x)) / beta, and x itself above the threshold."""
    if beta == 1 and threshold == 20 and x.dtype != DOUBLE:
        return op.Softplus(x)  # in fewer digits there is no difference above 20
    z = wide(x)
    steep, limit = (_number(v, z.dtype) for v in (beta, threshold))
    scaled = op.Mul(z, steep)
    beyond = op.Greater(scaled, limit)
    value = narrow(op.Where(beyond, z, op.Div(op.Softplus(scaled), steep)), x)
    if isinstance(beta, (int, float)) and math.isfinite(beta):
        return value
    # An infinite one times the zeros of the branch not taken would be NaN.
    return with_slope(value, x, op.Where(beyond, scalar(1.0, z.dtype), op.Sigmoid(scaled)))


def _number(v: Any, dtype: Any) -> Any:
    return scalar(v, dtype) if isinstance(v, (int, float)) else op.Cast(v, to=int(dtype))


def logit(x: Any, eps: float | None = None) -> Any:
    """log(x / (1 - x)), with x clamped to [eps, 1 - eps] if there is an eps."""
    z, clamped = wide(x), eps is not None and eps >= 0
    one = scalar(1.0, z.dtype)
    low, high = (eps, 1.0 - eps) if clamped else (0.0, 1.0)
    bounds = scalar(low, z.dtype), scalar(high, z.dtype)
    inner = op.Clip(z, *bounds) if clamped else z
    y = op.Log(op.Div(inner, op.Sub(one, inner)))
    outside = op.Or(op.Less(z, bounds[0]), op.Greater(z, bounds[1]))
    slope = op.Reciprocal(op.Mul(z, op.Sub(one, z)))
    beyond = scalar(0.0 if clamped else math.nan, z.dtype)
    return with_slope(narrow(y, x), x, op.Where(outside, beyond, slope))


def _log_add(a: Any, b: Any, unit: float) -> Any:
    """log(exp(a unit) + exp(b unit)) / unit: nothing overflows, equal infinities stay."""
    x, y = wide(a), wide(b)
    scale = scalar(unit, x.dtype)
    far = op.Mul(op.Sub(x, y), scale)
    small = op.Div(op.Softplus(op.Neg(op.Abs(far))), scale)
    twice = op.Add(x, scalar(math.log(2.0) / unit, x.dtype))
    value = op.Where(op.Equal(x, y), twice, op.Add(op.Max(x, y), small))
    slopes = (a, op.Sigmoid(far), b, op.Sigmoid(op.Neg(far)))
    return with_slope(narrow(value, a), *slopes)


def log_cum_sum_exp(x: Any, dim: int) -> Any:
    if len(x.shape) == 0:
        return op.Identity(x)
    return narrow(own("LogCumSumExp", wide(x), axis=dim), x)


def _x_log(x: Any, y: Any, log: Callable, pole: float, dtype: Any) -> Any:
    """x log(y), 0 for x = 0 and NaN for y = NaN; `pole` is where the logarithm is infinite."""
    a, b = _value(x, dtype), _value(y, dtype)
    zero, edge = scalar(0.0, dtype), scalar(pole, dtype)
    logs, none = log(b), op.Equal(a, zero)
    value = op.Where(none, zero, op.Mul(a, logs))
    value = op.Where(op.IsNaN(b), b, value)
    flat = op.And(none, op.LessOrEqual(b, edge))
    slopes = [None if _is_number(x) else x, op.Where(flat, zero, logs)]
    slopes += [None if _is_number(y) else y, op.Div(a, op.Sub(b, edge))]
    like = y if _is_number(x) else x
    return with_slope(narrow(value, like), *slopes)


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def _dtype_of(x: Any, y: Any) -> Any:
    return wide(y if _is_number(x) else x).dtype


def xlogy(x: Any, y: Any) -> Any:
    """x log(y); either may be a number."""
    return _x_log(x, y, op.Log, 0.0, _dtype_of(x, y))


def xlog1py(x: Any, y: Any) -> Any:
    """x log(1 + y); either may be a number."""
    return _x_log(x, y, log1p, -1.0, _dtype_of(x, y))


def entr(x: Any) -> Any:
    """-x log(x), 0 at 0 and -inf below."""
    z = wide(x)
    zero, below = scalar(0.0, z.dtype), scalar(-math.inf, z.dtype)
    logs = op.Log(z)
    value = op.Where(op.Less(z, zero), below, op.Neg(op.Mul(z, logs)))
    value = op.Where(op.Equal(z, zero), zero, value)
    return with_slope(narrow(value, x), x, op.Neg(op.Add(logs, scalar(1.0, z.dtype))))


# --- others ----------------------------------------------------------------------------------


def sinc(x: Any) -> Any:
    """sin(pi x) / (pi x), 1 at 0 with slope 0."""
    z = wide(x)
    zero, angle = scalar(0.0, z.dtype), op.Mul(z, scalar(math.pi, z.dtype))
    sine = op.Sin(angle)
    value = op.Where(op.Equal(z, zero), scalar(1.0, z.dtype), op.Div(sine, angle))
    bottom = op.Mul(angle, z)
    slope = op.Div(op.Sub(op.Mul(angle, op.Cos(angle)), sine), bottom)
    slope = op.Where(op.Equal(bottom, zero), zero, slope)
    return with_slope(narrow(value, x), x, slope)


def lerp(start: Any, end: Any, weight: Any) -> Any:
    """start + weight (end - start), from the nearer end."""
    a, b = wide(start), wide(end)
    w = _value(weight, a.dtype)
    one, half = scalar(1.0, a.dtype), scalar(0.5, a.dtype)
    way, rest = op.Sub(b, a), op.Sub(one, w)
    near = op.Less(op.Abs(w), half)
    value = op.Where(near, op.Add(a, op.Mul(w, way)), op.Sub(b, op.Mul(way, rest)))
    third = None if _is_number(weight) else weight
    return with_slope(narrow(value, start), start, rest, end, w, third, way)


def angle(x: Any) -> Any:
    """pi for negative numbers, 0 for others, NaN for NaN; the gradient is 0."""
    zero, half_turn = scalar(0.0, x.dtype), scalar(math.pi, x.dtype)
    value = op.Where(op.IsNaN(x), x, op.Where(op.Less(x, zero), half_turn, zero))
    return without_slope(value, x)


def signbit(x: Any) -> Any:
    """signbit(): also of -0.0 and NaN."""
    if is_float(x):
        return typed(own("SignBit", x), ir.DataType.BOOL)
    zero = scalar(0, ir.DataType.INT64)
    return op.Less(op.Cast(x, to=int(ir.DataType.INT64)), zero)


def _whole(x: Any, y: Any) -> tuple[Any, Any]:
    """floor(x / y) and x - y floor(x / y) by the remainder of a division without rounding."""
    zero = scalar(0.0, x.dtype)
    left = op.Mod(x, y, fmod=1)
    apart = op.Xor(op.Less(y, zero), op.Less(left, zero))
    apart = op.And(apart, op.Not(op.Equal(left, zero)))
    near = op.Div(op.Sub(x, left), y)  # a whole number, but for rounding
    near = op.Where(apart, op.Sub(near, scalar(1.0, x.dtype)), near)
    floor = op.Floor(op.Add(near, scalar(0.5, x.dtype)))
    floor = op.Where(op.Less(op.Abs(near), scalar(2.0**22, x.dtype)), floor, near)
    quotient = op.Where(op.Equal(y, zero), op.Div(x, y), floor)
    return quotient, op.Where(apart, op.Add(left, y), left)


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    dtype = (y if _is_number(x) else x).dtype
    return tuple(scalar(v, dtype) if _is_number(v) else v for v in (x, y))


def floor_divide(x: Any, y: Any) -> Any:
    """x // y, which is not floor(x / y): 1 // 0.1 is 9. torch has no derivative."""
    return stop_gradient(_floor(x, y))


def _floor(x: Any, y: Any) -> Any:
    like = y if _is_number(x) else x
    if not is_float(like):
        a, b = _pair(x, y)
        return op.Div(op.Sub(a, op.Mod(a, b)), b)
    dtype = wide(like).dtype
    a, b = (typed(_value(v, dtype), dtype) for v in (x, y))
    return narrow(_whole(a, b)[0], like)


def remainder(x: Any, y: Any) -> Any:
    """x % y, with the sign of y."""
    like = y if _is_number(x) else x
    a, b = _pair(x, y)
    if not is_float(like):
        return op.Mod(a, b)
    dtype = wide(like).dtype
    a, b = (typed(_value(v, dtype), dtype) for v in (x, y))
    quotient, left = _whole(a, b)
    first, second = (None if _is_number(v) else v for v in (x, y))
    one = scalar(1.0, dtype)
    return with_slope(narrow(left, like), first, one, second, op.Neg(quotient))


def divide_rounded(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """div() with a rounding mode: gradients are 0."""
    if rounding_mode == "floor":
        return without_slope(_floor(x, y), x, y)
    a, b = _pair(x, y)
    if rounding_mode is None or not is_float(y if _is_number(x) else x):
        return op.Div(a, b)
    if _is_number(y):
        z = wide(x)
        ratio = op.Div(z, scalar(y, z.dtype))
    else:
        ratio = op.Div(a, b)  # torch rounds to the type before it cuts, but not by a number
    whole = op.Mul(op.Sign(ratio), op.Floor(op.Abs(ratio)))
    return without_slope(narrow(whole, x) if _is_number(y) else whole, x, y)


def heaviside(x: Any, values: Any) -> Any:
    """0 below 0, 1 above, `values` at 0; 0 for NaN."""
    step = op.Cast(op.Greater(x, scalar(0, x.dtype)), to=int(x.dtype))
    return op.Where(op.Equal(x, scalar(0, x.dtype)), values, step)


# --- of doubles ------------------------------------------------------------------------------
# torch's own derivatives of hardsigmoid() and celu() have a number that is rounded to a float.


def rrelu(
    x: Any,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    """rrelu() in eval mode: the slope is in the middle."""
    del generator
    if training:
        return refuse("rrelu", "draws random slopes in training; use leaky_relu")()
    return leaky_relu(x, (lower + upper) / 2)


def leaky_relu(x: Any, negative_slope: float = 0.01) -> Any:
    """leaky_relu() with a slope that is no attribute."""
    slope = scalar(negative_slope, x.dtype)
    return op.Where(op.Greater(x, scalar(0.0, x.dtype)), x, op.Mul(x, slope))


def uniform(x: Any, low: Any = 0.0, high: Any = 1.0, generator: Any = None) -> Any:
    """uniform_(): numbers between two bounds, which may be inputs of the graph."""
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return op.RandomUniformLike(x, low=float(low), high=float(high))
    dtype = wide_type(x)
    low, high = (
        scalar(float(b), dtype) if isinstance(b, (int, float)) else cast(b, dtype)
        for b in (low, high)
    )
    drawn = op.Add(op.Mul(op.RandomUniformLike(x, dtype=int(dtype)), op.Sub(high, low)), low)
    return cast(drawn, x.dtype)


def hardsigmoid(x: Any) -> Any:
    """hardsigmoid(), which divides by 6; no gradient on the bounds."""
    three, six = scalar(3.0, x.dtype), scalar(6.0, x.dtype)
    shifted = op.Clip(op.Add(x, three), scalar(0.0, x.dtype), six)
    inside = op.And(op.Greater(x, scalar(-3.0, x.dtype)), op.Less(x, three))
    slope = op.Where(inside, scalar(as_float(1 / 6), x.dtype), scalar(0.0, x.dtype))
    return with_slope(op.Div(shifted, six), x, slope)


def celu_of_doubles(x: Any, alpha: float = 1.0) -> Any:
    steep = 1.0 / as_float(alpha)
    left = op.Mul(op.Exp(op.Mul(x, scalar(steep, x.dtype))), scalar(alpha * steep, x.dtype))
    right = op.Greater(x, scalar(0.0, x.dtype))
    return with_slope(celu(x, alpha), x, op.Where(right, scalar(1.0, x.dtype), left))


def _is_infinite(sign: int) -> Callable:
    def translate(x: Any) -> Any:
        """isinf() and its relatives; the library looks at floats, among which 1e300 is infinite."""
        found = op.IsInf(x)
        if not sign:
            return found
        side = op.Greater if sign > 0 else op.Less
        return op.And(found, side(x, scalar(0.0, x.dtype)))

    return translate


def of_doubles() -> dict[Any, Callable]:
    """aten overload -> translation for doubles, where that of floats rounds numbers or values."""
    return {
        _aten.leaky_relu.default: leaky_relu,
        _aten.hardsigmoid.default: hardsigmoid,
        _aten.celu.default: celu_of_doubles,
        _aten.isinf.default: _is_infinite(0),
        _aten.isposinf.default: _is_infinite(1),
        _aten.isneginf.default: _is_infinite(-1),
    }


def power(x: Any, exponent: Any) -> Any:
    """pow() by a number, which may be an input of the graph: then a double."""
    number = isinstance(exponent, (int, float))
    if number and (is_float(x) or isinstance(exponent, int)):
        base = cast(x, ir.DataType.INT64) if x.dtype == ir.DataType.BOOL else x
        return op.Pow(base, scalar(exponent, base.dtype or ir.DataType.INT64))
    base = wide(x) if is_float(x) else typed(op.Cast(x, to=_FLOAT), ir.DataType.FLOAT, x.shape)
    other = scalar(exponent, base.dtype) if number else cast(exponent, base.dtype)
    result = op.Pow(base, other)
    return op.Cast(result, to=int(x.dtype)) if is_float(x) and x.dtype != base.dtype else result


def table() -> dict[Any, Callable]:
    return {
        _aten.pow.Tensor_Scalar: power,
        _aten.hardtanh.default: hardtanh,
        _aten.uniform.default: uniform,
        _aten.relu.default: relu,
        _aten.relu6.default: lambda x: hardtanh(x, 0.0, 6.0),
        _aten.rrelu.default: rrelu,
        _aten.elu.default: elu,
        _aten.softplus.default: softplus,
        _aten.celu.default: celu,
        _aten.selu.default: lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
        _aten.signbit.default: signbit,
        _aten.expm1.default: expm1,
        _aten.special_expm1.default: expm1,
        _aten.log1p.default: log1p,
        _aten.log_sigmoid.default: log_sigmoid,
        _aten.logit.default: logit,
        _aten.logaddexp.default: lambda a, b: _log_add(a, b, 1.0),
        _aten.logaddexp2.default: lambda a, b: _log_add(a, b, math.log(2.0)),
        _aten.logcumsumexp.default: log_cum_sum_exp,
        _aten.xlogy.Tensor: xlogy,
        _aten.xlogy.Scalar_Self: xlogy,
        _aten.xlogy.Scalar_Other: xlogy,
        _aten.special_xlog1py.default: xlog1py,
        _aten.special_xlog1py.self_scalar: xlog1py,
        _aten.special_xlog1py.other_scalar: xlog1py,
        _aten.special_entr.default: entr,
        _aten.sinc.default: sinc,
        _aten.special_sinc.default: sinc,
        _aten.lerp.Tensor: lerp,
        _aten.lerp.Scalar: lerp,
        _aten.floor_divide.default: floor_divide,
        _aten.div.Tensor_mode: divide_rounded,
        _aten.div.Scalar_mode: divide_rounded,
        _aten.remainder.Tensor: remainder,
        _aten.remainder.Scalar: remainder,
        _aten.remainder.Scalar_Tensor: remainder,
        _aten.angle.default: angle,
        _aten.heaviside.default: heaviside,
    }
