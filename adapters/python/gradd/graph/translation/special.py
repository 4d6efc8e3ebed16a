"""Translations of special functions, and of pairs of numbers whose slopes ONNX does not have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    cast,
    narrow,
    op,
    own,
    scalar,
    typed,
    wide,
    wide_type,
    with_slope,
)

_aten = torch.ops.aten


def _function(name: str) -> Callable:
    def translate(*operands: Any) -> Any:
        return own(name, *operands)

    return translate


def _extremum(largest: bool) -> Callable:
    def translate(x: Any, y: Any) -> Any:
        """fmax() or fmin(): a number rather than NaN; of equal ones the first has the gradient."""
        fold, first = (op.Max, op.GreaterOrEqual) if largest else (op.Min, op.LessOrEqual)
        value = op.Where(op.IsNaN(x), y, op.Where(op.IsNaN(y), x, fold(x, y)))
        chosen = op.Or(first(x, y), op.IsNaN(y))
        return with_slope(value, x, chosen, y, op.Not(chosen))

    return translate


def hypot(x: Any, y: Any) -> Any:
    """sqrt(x^2 + y^2) without overflow; infinite beside an infinity, even with NaN."""
    a, b = wide(x), wide(y)
    zero = scalar(0.0, a.dtype)
    p, q = op.Abs(a), op.Abs(b)
    large, small = op.Max(p, q), op.Min(p, q)
    ratio = op.Div(small, large)
    root = op.Sqrt(op.Add(op.Mul(ratio, ratio), scalar(1.0, a.dtype)))
    value = op.Where(op.Equal(large, zero), zero, op.Mul(large, root))
    infinite = op.Or(op.IsInf(a), op.IsInf(b))
    value = op.Where(infinite, scalar(float("inf"), a.dtype), value)
    value = typed(value, a.dtype)
    return with_slope(narrow(value, x), x, op.Div(a, value), y, op.Div(b, value))


def copysign(x: Any, y: Any) -> Any:
    """The size of x with the sign of y, a value or a number."""
    number = isinstance(y, (int, float))
    other = scalar(float(y), x.dtype) if number else y
    signs = (typed(own("SignBit", v), ir.DataType.BOOL) for v in (x, other))
    value = op.Where(op.Xor(*signs), op.Neg(x), x)
    zero = scalar(0.0, x.dtype)
    slope = op.Where(op.Equal(x, zero), zero, op.Div(value, x))
    return with_slope(value, x, slope, None if number else y, op.Less(other, other))


def frexp(x: Any) -> tuple[Any, Any]:
    """frexp(): a mantissa in [0.5, 1) and an exponent; 0, infinities and NaN are their own."""
    double = ir.DataType.DOUBLE

    def number(value: float) -> Any:
        return scalar(value, double)

    def power(exponent: Any) -> Any:
        return op.Pow(number(2.0), exponent)

    length = op.Abs(cast(x, double))
    guess = op.Floor(op.Mul(op.Log(length), number(1 / math.log(2.0))))  # off by 1 at most
    odd = op.Or(op.Equal(length, number(0.0)), op.Or(op.IsInf(length), op.IsNaN(length)))
    guess = op.Where(odd, number(0.0), op.Add(guess, number(1.0)))
    part = op.Floor(op.Mul(guess, number(0.5)))  # 2 ** -guess alone may be infinite
    scaled = op.Mul(op.Mul(length, power(op.Neg(part))), power(op.Sub(part, guess)))
    above, below = op.GreaterOrEqual(scaled, number(1.0)), op.Less(scaled, number(0.5))
    change = op.Where(above, number(1.0), op.Where(below, number(-1.0), number(0.0)))
    exponent = op.Where(odd, number(0.0), op.Add(guess, change))
    mantissa = op.Mul(op.Mul(scaled, power(op.Neg(change))), op.Sign(cast(x, double)))
    mantissa = cast(typed(mantissa, double), x.dtype)
    slope = cast(typed(power(op.Neg(exponent)), double), wide_type(x))
    value = with_slope(op.Where(odd, x, mantissa), x, slope)
    return value, op.Cast(exponent, to=int(ir.DataType.INT32))


def table() -> dict[Any, Callable]:
    return {
        _aten.lgamma.default: _function("Lgamma"),
        _aten.digamma.default: _function("Digamma"),
        _aten.erfinv.default: _function("Erfinv"),
        _aten.atan2.default: _function("Atan2"),
        _aten.fmax.default: _extremum(True),
        _aten.fmin.default: _extremum(False),
        _aten.frexp.Tensor: frexp,
        _aten.hypot.default: hypot,
        _aten.copysign.Tensor: copysign,
        _aten.copysign.Scalar: copysign,
    }
