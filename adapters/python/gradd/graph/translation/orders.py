"""Translations of what is chosen by order, and of places in what is sorted.

Which of equal elements torch takes is not defined; here it is the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    ints,
    is_float,
    op,
    scalar,
    size,
    stop_gradient,
    typed,
    with_slope,
    without_slope,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten
_INT = ir.DataType.INT64


def _sorted(x: Any, axis: int) -> tuple[Any, Any]:
    """Values and places in rising order; NaN is the largest."""
    if x.dtype == ir.DataType.BOOL:
        raise CaptureError("unsupported_operator", "the order of booleans; cast them first")
    number = op.Shape(x, start=axis, end=axis + 1)
    return op.TopK(x, number, axis=axis, largest=0, sorted=1)


def _chosen(x: Any, rank: Any, axis: int, keepdim: bool) -> tuple[Any, Any]:
    """The element of that place in rising order, [..., 1, ...] or a number, and its index."""
    _, order = _sorted(x, axis)
    if isinstance(rank, int):
        where = op.Slice(order, ints(rank), ints(rank + 1), ints(axis))
    else:
        where = op.GatherElements(order, rank, axis=axis)
    values = op.GatherElements(x, where, axis=axis)
    if keepdim:
        return values, where
    return op.Squeeze(values, ints(axis)), op.Squeeze(where, ints(axis))


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if not isinstance(k, int):
        raise CaptureError("unsupported_operator", "kthvalue of a k that changes")
    if len(x.shape) == 0:
        return op.Identity(x), scalar(0, _INT)
    return _chosen(x, k - 1, dim % len(x.shape), keepdim)


def _row_shape(x: Any, axis: int) -> Any:
    """The sizes of x, with 1 along the axis."""
    parts = (op.Shape(x, start=0, end=axis), ints(1), op.Shape(x, start=axis + 1))
    return op.Concat(*parts, axis=0)


def _median_along(without_nan: bool) -> Callable:
    def translate(x: Any, dim: int, keepdim: bool = False) -> Any:
        """median(dim) and nanmedian(dim): the lower of two in the middle."""
        if len(x.shape) == 0:
            return op.Identity(x), scalar(0, _INT)
        axis, one = dim % len(x.shape), scalar(1, _INT)
        count = op.Expand(size(x, axis), _row_shape(x, axis))
        middle = op.Div(op.Sub(count, one), scalar(2, _INT))
        if is_float(x):
            numbers = op.Cast(op.Not(op.IsNaN(x)), to=_INT)
            known = op.ReduceSum(numbers, ints(axis), keepdims=1)
            last = op.Sub(count, one)
            if without_nan:
                least = op.Max(op.Sub(known, one), scalar(0, _INT))
                middle = op.Div(least, scalar(2, _INT))
            else:  # a NaN is the median
                middle = op.Where(op.Less(known, count), last, middle)
        return _chosen(x, middle, axis, keepdim)

    return translate


def _median(without_nan: bool) -> Callable:
    def translate(x: Any) -> Any:
        """median() and nanmedian() over everything: all that equal it share evenly."""
        if 0 in x.shape and is_float(x):
            return without_slope(scalar(math.nan, x.dtype), x)
        flat = typed(op.Reshape(x, ints(-1)), x.dtype, [None])
        value, _ = _median_along(without_nan)(flat, 0)
        if not is_float(x):
            return value
        hit = op.Or(op.Equal(x, value), op.And(op.IsNaN(x), op.IsNaN(value)))
        shares = x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        hits = op.Cast(hit, to=int(shares))
        slope = op.Div(hits, op.ReduceSum(hits, keepdims=0))
        return with_slope(stop_gradient(typed(value, x.dtype)), x, slope)

    return translate


def mode(x: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """mode(): of the most frequent the smallest, at its last place; a NaN equals nothing."""
    if len(x.shape) == 0:
        return op.Identity(x), scalar(0, _INT)
    axis = dim % len(x.shape)
    values, order = _sorted(x, axis)
    alike = op.Equal(op.Unsqueeze(values, ints(axis)), op.Unsqueeze(values, ints(axis + 1)))
    counts = op.ReduceSum(op.Cast(alike, to=int(_INT)), ints(axis), keepdims=0)
    counts = op.Max(counts, scalar(1, _INT))
    first = op.ArgMax(counts, axis=axis, keepdims=1)
    found = op.GatherElements(values, first, axis=axis)
    hit = op.Equal(x, found)
    last = op.ArgMax(op.Cast(hit, to=int(_INT)), axis=axis, keepdims=1, select_last_index=1)
    if is_float(x):
        nothing = op.IsNaN(found)
        last = op.Where(nothing, op.GatherElements(order, first, axis=axis), last)
    values = op.GatherElements(x, last, axis=axis)
    if keepdim:
        return values, last
    return op.Squeeze(values, ints(axis)), op.Squeeze(last, ints(axis))


def _running(largest: bool) -> Callable:
    def translate(x: Any, dim: int) -> Any:
        """cummax() and cummin(), by comparing all with all: of equal ones the last, NaN stays."""
        if len(x.shape) == 0:
            return op.Identity(x), scalar(0, _INT)
        axis, rank = dim % len(x.shape), len(x.shape)
        zero, one = scalar(0, _INT), scalar(1, _INT)
        at = op.Range(zero, size(x, axis), one)
        to = op.Unsqueeze(at, ints(*range(1, rank - axis + 1)))
        of = op.Unsqueeze(at, ints(0, *range(2, rank - axis + 1)))
        seen = op.LessOrEqual(of, to)  # [n, n, 1, ...]
        each = op.Unsqueeze(x, ints(axis))
        beyond = op.Where(seen, each, _least(x, largest))
        fold = op.ReduceMax if largest else op.ReduceMin
        best = op.Unsqueeze(fold(beyond, ints(axis + 1), keepdims=0), ints(axis + 1))
        hit = op.Equal(each, best)
        if is_float(x):
            hit = op.Or(hit, op.And(op.IsNaN(each), op.IsNaN(best)))
        where = op.Where(op.And(hit, seen), of, zero)
        where = op.ReduceMax(where, ints(axis + 1), keepdims=0)
        return op.GatherElements(x, where, axis=axis), where

    return translate


def _least(x: Any, largest: bool) -> Any:
    if is_float(x):
        return scalar(-math.inf if largest else math.inf, x.dtype)
    if x.dtype not in (_INT, ir.DataType.INT32):
        raise CaptureError("unsupported_operator", f"running extrema of {x.dtype}; cast them first")
    bits = 63 if x.dtype == _INT else 31
    return scalar(-(2**bits) if largest else 2**bits - 1, x.dtype)


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Both in one type, of which torch requires no more than that it holds them."""
    if a.dtype == b.dtype:
        return a, b
    wanted = ir.DataType.DOUBLE if is_float(a) or is_float(b) else _INT
    return op.Cast(a, to=int(wanted)), op.Cast(b, to=int(wanted))


def searchsorted(
    sorted_: Any,
    values: Any,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """searchsorted(), by comparing all with all: NaN is behind all numbers."""
    if sorter is not None:
        raise CaptureError("unsupported_operator", "searchsorted with a sorter; gather it first")
    if isinstance(values, (int, float)):
        values = typed(scalar(values, sorted_.dtype), sorted_.dtype)
    row, column = _alike(sorted_, values)
    if len(sorted_.shape) > 1:
        row = op.Unsqueeze(row, ints(-2))
    column = op.Unsqueeze(column, ints(-1))
    before = (op.LessOrEqual if right or side == "right" else op.Less)(row, column)
    if is_float(values):
        before = op.Or(before, op.IsNaN(column))
    kind = ir.DataType.INT32 if out_int32 else _INT
    return op.ReduceSum(op.Cast(before, to=int(kind)), ints(-1), keepdims=0)


def table() -> dict[Any, Callable]:
    return {
        _aten.kthvalue.default: kthvalue,
        _aten.median.default: _median(False),
        _aten.median.dim: _median_along(False),
        _aten.nanmedian.default: _median(True),
        _aten.nanmedian.dim: _median_along(True),
        _aten.mode.default: mode,
        _aten.cummax.default: _running(True),
        _aten.cummin.default: _running(False),
        _aten.searchsorted.Tensor: searchsorted,
        _aten.searchsorted.Scalar: searchsorted,
        _aten.bucketize.Tensor: lambda x, bounds, **how: searchsorted(bounds, x, **how),
    }
