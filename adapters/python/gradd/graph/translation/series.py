"""Translations of special functions of which ONNX has none: Chebyshev series, in doubles.

The coefficients are those of torch's own function, interpolated where it is smooth. A series of
this length is within 3e-14 of the value, relative to it (erfcx, and i0e and i1e beyond 8) or to 1.
The results are rounded once, to the type of the operand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.polynomial import chebyshev

from gradd.graph.translation.build import (
    cast,
    first_of,
    ints,
    op,
    own,
    scalar,
    typed,
    wide_type,
    with_slope,
)
from gradd.graph.translation.doubles import DOUBLE
from gradd.spec import CaptureError

_aten = torch.ops.aten
_DEGREE, _LONG = 26, 38
_MIDDLE = 3.0  # of the axis that erfcx is expanded over: there its series is at 0
_FAR = 8.0  # from here on Bessel functions are expanded in 1 / x
_LARGEST = 1e300  # in place of infinity
_TAIL = math.exp(-2.0)  # probabilities below it have a series of their own
_QUANTILES = (1 / 37.5, 0.5)  # of 1 / sqrt(-2 log p); numbers below 1e-305 are just beside
_STEPS = 14  # of the recurrence of polygamma, behind which its asymptotic series is exact
# Of polygamma(2, z) / -z^2 in powers of 1 / z^2, behind 1 + 1 / z: (2 k + 1) times Bernoulli's.
_ASYMPTOTIC = (1 / 2, -1 / 6, 1 / 6, -3 / 10, 5 / 6, -691 / 210, 35 / 2)


def _number(value: float) -> Any:
    return scalar(value, DOUBLE)


def _double(x: Any) -> Any:
    return typed(cast(x, DOUBLE), DOUBLE, list(x.shape))


def _rounded(value: Any, slope: Any, x: Any) -> Any:
    """The result in the type of x, with its derivative, which may be that of a wider one."""
    slope = cast(typed(slope, DOUBLE), wide_type(x))
    return with_slope(cast(typed(value, DOUBLE), x.dtype), x, slope)


# --- series ----------------------------------------------------------------------------------


def _coefficients(
    function: Callable, low: float, high: float, degree: int = _DEGREE
) -> tuple[float, ...]:
    """Of a function of doubles on an interval, whose ends are not asked for."""

    def on_unit(t: np.ndarray) -> np.ndarray:
        points = torch.from_numpy(np.ascontiguousarray(t)).to("cpu", torch.float64)
        with torch.inference_mode(False), torch.no_grad():
            return function((points + 1) / 2 * (high - low) + low).numpy()

    return tuple(chebyshev.chebinterpolate(on_unit, degree).tolist())


def _sum(t: Any, numbers: tuple[float, ...]) -> Any:
    """The series at t in [-1, 1], by Clenshaw's recurrence."""
    double, behind, last = op.Mul(t, _number(2.0)), _number(0.0), _number(numbers[-1])
    for c in numbers[-2:0:-1]:
        step = op.Sub(op.Mul(double, last), behind)
        behind, last = last, op.Add(step, _number(c))
    return op.Add(op.Sub(op.Mul(t, last), behind), _number(numbers[0]))


def _within(x: Any, low: float, high: float) -> Any:
    """x, cut to an interval, which becomes [-1, 1]."""
    return _on_unit(op.Clip(x, _number(low), _number(high)), low, high)


def _on_unit(x: Any, low: float, high: float) -> Any:
    return op.Sub(op.Mul(op.Sub(x, _number(low)), _number(2 / (high - low))), _number(1.0))


# --- the normal distribution -----------------------------------------------------------------


@functools.cache
def _erfcx_numbers() -> tuple[float, ...]:
    """Of (1 + 2 x) erfcx(x) over (x - m) / (x + m) of x > 0."""

    def function(u: torch.Tensor) -> torch.Tensor:
        x = _MIDDLE * (1 + u) / (1 - u)
        return (1 + 2 * x) * torch.special.erfcx(x)

    return _coefficients(function, -1.0, 1.0)


def _scaled_tail(x: Any) -> Any:
    """erfcx() of doubles that are not negative."""
    u = op.Sub(_number(1.0), op.Div(_number(2 * _MIDDLE), op.Add(x, _number(_MIDDLE))))
    stretch = op.Add(op.Mul(x, _number(2.0)), _number(1.0))
    return op.Div(_sum(u, _erfcx_numbers()), stretch)


def _scaled(x: Any) -> Any:
    """erfcx() of doubles: below 0 it is 2 exp(x^2) - erfcx(-x)."""
    right = _scaled_tail(op.Abs(x))
    growth = op.Mul(op.Exp(op.Mul(x, x)), _number(2.0))
    return op.Where(op.Less(x, _number(0.0)), op.Sub(growth, right), right)


def erfcx(x: Any) -> Any:
    """special.erfcx(): exp(x^2) erfc(x)."""
    z = _double(x)
    value = _scaled(z)
    slope = op.Mul(op.Mul(z, value), _number(2.0))
    return _rounded(value, op.Sub(slope, _number(2 / math.sqrt(math.pi))), x)


def log_ndtr(x: Any) -> Any:
    """special.log_ndtr(), with as many digits in both tails."""
    z = _double(x)
    tail = _scaled_tail(op.Mul(op.Abs(z), _number(math.sqrt(0.5))))
    square, half = op.Mul(op.Mul(z, z), _number(-0.5)), op.Mul(tail, _number(0.5))
    left = op.Add(op.Log(half), square)
    right = own("Log1p", typed(op.Neg(op.Mul(half, op.Exp(square))), DOUBLE))
    negative = op.Less(z, _number(0.0))
    value = op.Where(negative, left, right)
    both = op.Where(negative, tail, op.Sub(op.Mul(op.Exp(op.Neg(square)), _number(2.0)), tail))
    return _rounded(value, op.Div(_number(math.sqrt(2 / math.pi)), both), x)


@functools.cache
def _quantile_numbers() -> tuple[float, ...]:
    """Of z (ndtri(p) + z) - log z over 1 / z of p < _TAIL, with z = sqrt(-2 log p)."""

    def function(v: torch.Tensor) -> torch.Tensor:
        z = 1 / v
        return (torch.special.ndtri(torch.exp(-z * z / 2)) + z) * z - torch.log(z)

    return _coefficients(function, *_QUANTILES, _LONG)


def ndtri(x: Any) -> Any:
    """special.ndtri(): the quantiles of the normal distribution; NaN outside of [0, 1]."""
    p, one = _double(x), _number(1.0)
    small = op.Min(p, op.Sub(one, p))
    z = op.Sqrt(op.Mul(op.Log(small), _number(-2.0)))
    series = _sum(_on_unit(op.Div(one, z), *_QUANTILES), _quantile_numbers())
    tail = op.Sub(op.Div(op.Add(series, op.Log(z)), z), z)
    tail = op.Where(op.Greater(p, _number(0.5)), op.Neg(tail), tail)
    centred = typed(op.Sub(op.Add(p, p), one), DOUBLE)
    middle = op.Mul(own("Erfinv", centred), _number(math.sqrt(2.0)))
    value = op.Where(op.Less(small, _number(_TAIL)), tail, middle)
    infinite = op.Equal(small, _number(0.0))
    signs = op.Mul(op.Sign(centred), _number(math.inf))
    value = op.Where(infinite, signs, value)
    half = op.Mul(op.Mul(value, value), _number(0.5))
    return _rounded(value, op.Mul(op.Exp(half), _number(math.sqrt(2 * math.pi))), x)


# --- Bessel functions ------------------------------------------------------------------------


@functools.cache
def _bessel_numbers(order: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """On [0, 8] of i0e(x) or i1e(x) / x, and of sqrt(x) i0e(x) or i1e(x) over 1 / x beyond."""
    function = (torch.special.i0e, torch.special.i1e)[order]

    def near(x: torch.Tensor) -> torch.Tensor:
        return function(x) / x**order

    def far(v: torch.Tensor) -> torch.Tensor:
        return function(1 / v) * torch.rsqrt(v)

    return _coefficients(near, 0.0, _FAR), _coefficients(far, 1e-9, 1 / _FAR)


def _bessel(z: Any, order: int) -> Any:
    """i0e(z) or i1e(z) / z of doubles; NaN for NaN."""
    length = op.Abs(z)
    near, far = _bessel_numbers(order)
    inner = _sum(_within(length, 0.0, _FAR), near)
    large = op.Max(length, _number(_FAR))
    outer = _sum(_within(op.Div(_number(1.0), large), 1e-9, 1 / _FAR), far)
    outer = op.Div(outer, op.Sqrt(large))
    if order:
        outer = op.Div(outer, large)
    value = op.Where(op.Less(length, _number(_FAR)), inner, outer)
    return op.Where(op.IsNaN(z), z, value)


def _times(quotient: Any, z: Any) -> Any:
    """i1e(z) of i1e(z) / z, which is 0 at infinity."""
    return op.Mul(quotient, op.Clip(z, _number(-_LARGEST), _number(_LARGEST)))


def _unscaled(z: Any, order: int) -> Any:
    """The same without the e."""
    return op.Mul(_bessel(z, order), op.Exp(op.Abs(z)))


def i0(x: Any) -> Any:
    """i0()."""
    z = _double(x)
    return _rounded(_unscaled(z, 0), op.Mul(_unscaled(z, 1), z), x)


def i0e(x: Any) -> Any:
    """special.i0e(): exp(-|x|) i0(x)."""
    z = _double(x)
    value, other = _bessel(z, 0), _times(_bessel(z, 1), z)
    return _rounded(value, op.Sub(other, op.Mul(op.Sign(z), value)), x)


def i1(x: Any) -> Any:
    """special.i1()."""
    z = _double(x)
    other, quotient = (_unscaled(z, order) for order in (0, 1))
    return _rounded(op.Mul(quotient, z), _of_nan(op.Sub(other, quotient), z), x)


def i1e(x: Any) -> Any:
    """special.i1e(): exp(-|x|) i1(x)."""
    z = _double(x)
    other, quotient = (_bessel(z, order) for order in (0, 1))
    value = _times(quotient, z)
    slope = op.Sub(op.Sub(other, quotient), op.Mul(op.Sign(z), value))
    return _rounded(value, _of_nan(slope, z), x)


def _of_nan(slope: Any, z: Any) -> Any:
    """torch takes the slope of 0 for that of NaN."""
    return op.Where(op.IsNaN(z), _number(0.5), slope)


# --- derivatives of the logarithm of the gamma function --------------------------------------


def _curvature(z: Any) -> Any:
    """polygamma(2) of doubles: steps up to 14, then a series; below 0 by reflection."""
    one, half = _number(1.0), _number(0.5)
    reflected = op.Less(z, half)
    right = op.Where(reflected, op.Sub(one, z), z)
    places = op.Constant(value=ir.tensor(np.arange(_STEPS, dtype=np.float64)))
    each = op.Add(op.Unsqueeze(right, ints(-1)), places)
    cubes = op.Div(one, op.Mul(op.Mul(each, each), each))
    steps = op.Mul(op.ReduceSum(cubes, ints(-1), keepdims=0), _number(-2.0))
    inverse = op.Div(one, op.Add(right, _number(float(_STEPS))))
    square = op.Mul(inverse, inverse)
    series = _number(_ASYMPTOTIC[-1])
    for c in _ASYMPTOTIC[-2::-1]:
        series = op.Add(op.Mul(series, square), _number(c))
    series = op.Add(op.Add(op.Mul(series, square), inverse), one)
    value = op.Sub(steps, op.Mul(series, square))
    angle = op.Mul(op.Sub(z, op.Round(z)), _number(math.pi))
    sine = op.Sin(angle)
    turn = op.Div(op.Cos(angle), op.Mul(op.Mul(sine, sine), sine))
    return op.Where(reflected, op.Sub(value, op.Mul(turn, _number(2 * math.pi**3))), value)


def polygamma(n: int, x: Any) -> Any:
    """polygamma() of order 0 and 1."""
    if n not in (0, 1):
        raise CaptureError("unsupported_operator", f"polygamma of order {n}; 0 and 1 are there")
    if n == 0:
        return own("Digamma", x)
    z = _double(x)
    value = first_of("com.gradd", "Trigamma", z)
    return _rounded(value, _curvature(z), x)


def table() -> dict[Any, Callable]:
    """aten overload -> translation."""
    return {
        _aten.special_erfcx.default: erfcx,
        _aten.special_log_ndtr.default: log_ndtr,
        _aten.special_ndtri.default: ndtri,
        _aten.special_i0.default: i0,
        _aten.i0.default: i0,
        _aten.special_i0e.default: i0e,
        _aten.special_i1.default: i1,
        _aten.special_i1e.default: i1e,
        _aten.polygamma.default: polygamma,
        _aten.special_polygamma.default: polygamma,
    }
