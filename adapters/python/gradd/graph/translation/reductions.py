"""Translations of reductions, norms, scans and choices that differ from torch at edges.

Values and gradients are torch's for zero norms, constant rows, ties and NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    FLOATS,
    all_axes,
    cast,
    check_index,
    count,
    first_of,
    ints,
    is_float,
    narrow,
    one,
    op,
    own_order,
    scalar,
    size,
    stop_gradient,
    straight_through,
    typed,
    wide,
    with_slope,
    without_slope,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten


# --- norms and deviations --------------------------------------------------------------------


def _slope_of_norm(x: Any, y: Any, p: float, axes: list[int]) -> Any:
    """Derivative of a p-norm: 0 where the norm is 0, and for p < 1 where x is."""
    zero, length = scalar(0.0, x.dtype), op.Abs(x)
    if math.isinf(p):
        both = op.And(op.IsNaN(x), op.IsNaN(y))
        hit = op.Cast(op.Or(op.Equal(length, y), both), to=int(x.dtype))
        return op.Mul(op.Sign(x), op.Div(hit, op.ReduceSum(hit, ints(*axes), keepdims=1)))
    rest = op.Pow(y, scalar(1.0 - p, x.dtype))
    if p < 1:
        power = op.Mul(op.Sign(x), op.Pow(length, scalar(p - 1.0, x.dtype)))
        return op.Mul(op.Where(op.Equal(x, zero), zero, power), rest)
    if p < 2:
        power = op.Mul(op.Sign(x), op.Pow(length, scalar(p - 1.0, x.dtype)))
    else:
        power = op.Mul(x, op.Pow(length, scalar(p - 2.0, x.dtype)))
    return op.Mul(power, op.Where(op.Equal(y, zero), zero, rest))


def vector_norm(
    x: Any, ord: float = 2.0, dim: Any = None, keepdim: bool = False, dtype: int | None = None
) -> Any:
    if not is_float(x):
        raise CaptureError("unsupported_operator", f"vector_norm of {x.dtype}; take real floats")
    source = x
    if dtype not in (None, -1) and dtype != x.dtype:
        source = typed(op.Cast(x, to=int(dtype)), ir.DataType(dtype), list(x.shape))
    p, axes = float(ord), all_axes(x, dim)
    if not axes:
        return op.Abs(source)
    if p in (1.0, 2.0):
        reduce = op.ReduceL2 if p == 2.0 else op.ReduceSum
        return reduce(op.Abs(source) if p == 1.0 else source, ints(*axes), keepdims=int(keepdim))
    z = wide(source)
    y = _norm_value(z, p, axes)
    result = narrow(y, source)
    if p != 0:  # torch gives None for 0, not zeros
        result = with_slope(result, source, _slope_of_norm(z, y, p, axes))
    return result if keepdim else op.Squeeze(result, ints(*axes))


def _norm_value(z: Any, p: float, axes: list[int]) -> Any:
    along = ints(*axes)
    if math.isinf(p):
        return (op.ReduceMax if p > 0 else op.ReduceMin)(op.Abs(z), along, keepdims=1)
    if p == 0:
        other = op.Not(op.Equal(z, scalar(0.0, z.dtype)))
        return op.ReduceSum(cast(other, z.dtype), along, keepdims=1)
    powers = op.ReduceSum(op.Pow(op.Abs(z), scalar(p, z.dtype)), along, keepdims=1)
    return op.Pow(powers, scalar(1.0 / p, z.dtype))


def std(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    """std(): the norm of the deviations from the mean, over sqrt(n - correction).

    In double, as torch's: a constant row is exactly that, and its norm has the gradient 0. The
    mean needs no gradient, because deviations add up to 0.
    """
    axes, double = all_axes(x, dim), ir.DataType.DOUBLE
    z = op.Cast(x, to=int(double))
    if not len(x.shape):
        z, axes, keepdim = op.Unsqueeze(z, ints(0)), [0], False
    along = ints(*axes)
    left = op.Sub(z, stop_gradient(op.ReduceMean(z, along, keepdims=1)))
    number = count(x, axes, double) if len(x.shape) else scalar(1.0, double)
    taken = scalar(1.0 if correction is None else float(correction), double)
    freedom = op.Max(op.Sub(number, taken), scalar(0.0, double))
    norm = op.ReduceL2(left, along, keepdims=1)
    result = op.Cast(op.Div(norm, op.Sqrt(freedom)), to=int(x.dtype))
    if _lacks_freedom(x, axes, correction):
        result = with_slope(typed(result, x.dtype), x, op.Mul(x, scalar(math.nan, x.dtype)))
    return result if keepdim else op.Squeeze(result, along)


def _lacks_freedom(x: Any, axes: list[int], correction: float | None) -> bool:
    """True if deviations are divided by 0, or all are 0: the gradient is NaN.

    Of sizes that are known, as those of 1 are: they are a form of call of their own.
    """
    sizes = [x.shape[axis] for axis in axes] if len(x.shape) else [1]
    if not all(isinstance(n, int) for n in sizes):
        return False
    return math.prod(sizes) == (1 if correction is None else correction)


def var(x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False) -> Any:
    """var(): mean square of deviations, from which their own mean is taken once more.

    The first mean is off by its rounding, of which the square would remain: of 1e4 +- 0.01 in f32
    a thousandth. Means need no gradient, because deviations add up to 0.
    """
    axes, z = all_axes(x, dim), wide(x)
    dtype = z.dtype
    if not len(x.shape):
        z, axes, keepdim = typed(op.Unsqueeze(z, ints(0)), dtype, [1]), [0], False
    along = ints(*axes)
    left = op.Sub(z, stop_gradient(op.ReduceMean(z, along, keepdims=1)))
    left = op.Sub(left, stop_gradient(op.ReduceMean(left, along, keepdims=1)))
    square = op.ReduceMean(op.Mul(left, left), along, keepdims=int(keepdim))
    taken = 1.0 if correction is None else float(correction)
    if taken:
        number = count(z, axes, dtype)
        freedom = op.Max(op.Sub(number, scalar(taken, dtype)), scalar(0.0, dtype))
        square = op.Mul(square, op.Div(number, freedom))
    return narrow(square, x)


def _with_mean(function: Callable) -> Callable:
    def translate(
        x: Any, dim: Any = None, correction: float | None = None, keepdim: bool = False
    ) -> Any:
        """std_mean() and var_mean()."""
        along = ints(*all_axes(x, dim))
        mean = op.ReduceMean(x, along, keepdims=int(keepdim)) if len(x.shape) else op.Identity(x)
        return function(x, dim, correction, keepdim), mean

    return translate


def cosine_similarity(x: Any, y: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """cosine_similarity(): norms of at least eps, which have the gradient of the norms."""
    x, y = _alike(x, y)
    parts = []
    for value in (x, y):
        norm = typed(op.ReduceL2(value, ints(dim), keepdims=1), value.dtype)
        bounded = straight_through(op.Clip(norm, scalar(eps, value.dtype)), norm)
        parts.append(op.Div(value, bounded))
    return op.ReduceSum(op.Mul(*parts), ints(dim), keepdims=0)


def cdist(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """cdist(): com.gradd::PairDistance, which computes as torch does by default."""
    if compute_mode not in (None, 0):
        raise CaptureError("unsupported_operator", "cdist with another compute_mode")
    if len(x.shape) != len(y.shape) or list(x.shape[:-2]) != list(y.shape[:-2]):
        raise CaptureError("unsupported_operator", "cdist that broadcasts; expand the operands")
    if 0 < p < math.inf:
        return first_of("com.gradd", "PairDistance", x, y, p=float(p))
    apart = op.Sub(op.Unsqueeze(x, ints(-2)), op.Unsqueeze(y, ints(-3)))
    return _length(typed(apart, x.dtype, [None] * (len(x.shape) + 1)), p)


def pdist(x: Any, p: float = 2.0) -> Any:
    """pdist(): the distances of rows i and j > i, in order."""
    zero, one = (scalar(n, ir.DataType.INT64) for n in (0, 1))
    rows = size(x, 0)
    at = op.Range(zero, rows, one)
    later = op.Less(op.Unsqueeze(at, ints(1)), at)
    many = op.Mul(rows, op.Sub(rows, one))
    pairs = op.Range(zero, op.Div(many, scalar(2, ir.DataType.INT64)), one)
    # The n-th pair is at the n-th place of those above the diagonal.
    ranks = op.CumSum(op.Reshape(op.Cast(later, to=int(ir.DataType.INT64)), ints(-1)), zero)
    before = op.LessOrEqual(ranks, op.Unsqueeze(pairs, ints(1)))
    flat = op.ReduceSum(op.Cast(before, to=int(ir.DataType.INT64)), ints(1), keepdims=0)
    first, second = op.Div(flat, rows), op.Mod(flat, rows)
    apart = op.Sub(op.Gather(x, first, axis=0), op.Gather(x, second, axis=0))
    return _length(typed(apart, x.dtype, [None, x.shape[1]]), p)


def _length(apart: Any, p: float) -> Any:
    """The p-norm of differences along the last axis, with the derivative of a distance."""
    if 0 < p < math.inf:
        return vector_norm(apart, p, -1)
    sizes, last = op.Abs(apart), ints(-1)
    if p == 0:
        some = op.Min(op.Ceil(sizes), scalar(1.0, apart.dtype))  # NaN stays one
        number = op.ReduceSum(some, last, keepdims=1)
        return op.Squeeze(without_slope(number, apart), last)
    far = op.ReduceMax(sizes, last, keepdims=1)  # all that are as far have the whole gradient
    slope = op.Mul(op.Sign(apart), op.Cast(op.Equal(sizes, far), to=int(apart.dtype)))
    return op.Squeeze(with_slope(far, apart, slope), last)


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Both in the wider type and of the sizes that they broadcast to."""
    dtype = max(x.dtype, y.dtype, key=FLOATS.index)
    a, b = (typed(cast(v, dtype), dtype, list(v.shape)) for v in (x, y))
    if list(a.shape) == list(b.shape):
        return a, b
    a, b = op.Expand(a, op.Shape(b)), op.Expand(b, op.Shape(a))
    return typed(a, dtype), typed(b, dtype)


# --- choices ---------------------------------------------------------------------------------


def _extremum(largest: bool) -> Callable:
    def translate(x: Any) -> Any:
        """max() and min() over everything share evenly, also among NaNs."""
        y = (op.ReduceMax if largest else op.ReduceMin)(x, keepdims=0)
        if not is_float(x):
            return y
        hit = op.Equal(x, y)
        shares = x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        hit = cast(op.Or(hit, op.And(op.IsNaN(x), op.IsNaN(y))), shares)
        return with_slope(y, x, op.Div(hit, op.ReduceSum(hit, keepdims=0)))

    return translate


def _extremum_along(largest: bool) -> Callable:
    def translate(x: Any, dim: int, keepdim: bool = False) -> Any:
        """max(dim) and min(dim): the chosen element has all of the gradient."""
        if len(x.shape) == 0:
            return op.Identity(x), scalar(0, ir.DataType.INT64)
        where = (op.ArgMax if largest else op.ArgMin)(x, axis=dim, keepdims=1)
        values = op.GatherElements(x, where, axis=dim)
        if keepdim:
            return values, where
        return op.Squeeze(values, ints(dim)), op.Squeeze(where, ints(dim))

    return translate


def _extremum_over(largest: bool) -> Callable:
    def translate(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """amax() and amin(): all that equal the extremum share evenly."""
        axes = all_axes(x, dim)
        if not axes:
            return op.Identity(x)
        reduce = op.ReduceMax if largest else op.ReduceMin
        return reduce(x, ints(*axes), keepdims=int(keepdim))

    return translate


def aminmax(x: Any, *, dim: Any = None, keepdim: bool = False) -> Any:
    """aminmax(): both, with gradients as those of amin() and amax()."""
    return tuple(_extremum_over(largest)(x, dim, keepdim) for largest in (False, True))


def sort(x: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    """sort(): equal elements in the order in which torch leaves them; ONNX's TopK is stable."""
    if len(x.shape) == 0:
        return op.Identity(x), scalar(0, ir.DataType.INT64)
    axis = dim % len(x.shape)
    if not stable:
        return own_order("TorchSort", x, axis=axis, descending=int(descending))
    number = op.Shape(x, start=axis, end=axis + 1)
    return op.TopK(x, number, axis=axis, largest=int(descending), sorted=1)


def topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """topk(): among equal elements those that torch takes, and in its order."""
    if len(x.shape) == 0:
        return op.Identity(x), scalar(0, ir.DataType.INT64)
    flags = {"largest": int(largest), "sorted": int(sorted)}
    return own_order("TorchTopK", x, one(k), axis=dim % len(x.shape), **flags)


# --- places ----------------------------------------------------------------------------------


def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """diagonal(): its elements and no others are read, whatever is beside them."""
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    others = [i for i in range(rank) if i not in (first, second)]
    moved = op.Transpose(x, perm=[*others, first, second])
    places = _diagonal_places(x, offset, first, second)
    flat = op.Concat(op.Shape(moved, start=0, end=rank - 2), ints(-1), axis=0)
    return op.Gather(op.Reshape(moved, flat), places, axis=-1)


def _diagonal_places(x: Any, offset: int, first: int, second: int) -> Any:
    """Where the diagonal of two axes lies in these as one."""
    rows, columns = size(x, first), size(x, second)
    zero, one = scalar(0, ir.DataType.INT64), scalar(1, ir.DataType.INT64)
    skipped = scalar(abs(offset), ir.DataType.INT64)
    start = skipped if offset >= 0 else op.Mul(skipped, columns)
    if offset >= 0:
        length = op.Min(rows, op.Sub(columns, skipped))
    else:
        length = op.Min(op.Sub(rows, skipped), columns)
    steps = op.Range(zero, op.Max(length, zero), one)
    return op.Add(op.Mul(steps, op.Add(columns, one)), start)


def gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """gather(); the stock translation forgets the indices of a scalar, of which 0 alone is one."""
    if len(x.shape) and len(index.shape):
        return op.GatherElements(x, index, axis=dim)
    source = x if len(x.shape) else op.Reshape(x, ints(1))
    found = op.GatherElements(source, op.Reshape(index, ints(-1)), axis=dim)
    return op.Reshape(found, op.Shape(index))


def transposed(x: Any) -> Any:
    """mT: the stock translation is an Einsum."""
    rank = len(x.shape)
    return op.Transpose(x, perm=[*range(rank - 2), rank - 1, rank - 2])


def unbind(x: Any, dim: int = 0) -> Any:
    """unbind(); the stock translation makes a list where the trace has only learnt the size."""
    parts = str(x.shape[dim])
    if not parts.isdecimal():
        raise CaptureError("unsupported_operator", "unbind along an axis of changing size")
    at = ints(dim)
    cuts = (op.Slice(x, ints(i), ints(i + 1), at) for i in range(int(parts)))
    return tuple(op.Squeeze(cut, at) for cut in cuts)


def scatter_reduce(
    x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
) -> Any:
    """scatter_reduce(): "mean" divides by how many there are, "amax" and "amin" keep NaN."""
    if len(x.shape) == 0:
        raise CaptureError(
            "unsupported_operator", "scatter_reduce into a scalar; reshape it to [1]"
        )
    if reduce == "mean" and not is_float(x):
        raise CaptureError(
            "unsupported_operator", "scatter_reduce mean of integers; cast them first"
        )
    src, dtype = _cut_to(src, index), x.dtype
    inner = dtype if is_float(x) else ir.DataType.INT64
    ones = op.Expand(scalar(1, inner), op.Shape(index))
    none = op.Expand(scalar(0, inner), op.Shape(x))
    hits = op.ScatterElements(none, index, ones, axis=dim, reduction="add")
    base = x
    if not include_self:
        base = op.Where(op.Greater(hits, scalar(0, inner)), _neutral(reduce, x), x)
    how = {"sum": "add", "mean": "add", "prod": "mul", "amax": "max", "amin": "min"}[reduce]
    result = op.ScatterElements(base, index, src, axis=dim, reduction=how)
    if reduce in ("amax", "amin") and not include_self:
        return _share_with_replaced(result, base, x, index, src, dim)
    if reduce == "prod" and is_float(x):
        return _with_slopes_of_products(result, base, x, index, src, dim)
    if reduce != "mean":
        return result
    one = scalar(1, dtype)
    return op.Div(result, op.Add(hits, one) if include_self else op.Max(hits, one))


def _with_slopes_of_products(result: Any, base: Any, x: Any, index: Any, src: Any, dim: int) -> Any:
    """Of each factor the product of the others, as torch has it: two zeros leave none of one.

    The gradients are those of a sum of the factors times their slopes.
    """
    zero, one = scalar(0.0, x.dtype), scalar(1.0, x.dtype)

    def product(of: Any, factors: Any) -> Any:
        return op.ScatterElements(of, index, factors, axis=dim, reduction="mul")

    masked = op.Where(op.Equal(base, zero), one, base)
    of_base = op.Div(product(masked, src), masked)
    if base is not x:  # what is replaced has no gradient
        none = op.Expand(zero, op.Shape(index))
        of_base = op.ScatterElements(of_base, index, none, axis=dim)
    nothing = op.Equal(src, zero)
    each = op.Cast(nothing, to=int(x.dtype))
    counts = op.Expand(zero, op.Shape(x))
    counts = op.ScatterElements(counts, index, each, axis=dim, reduction="add")
    counts = op.GatherElements(counts, index, axis=dim)
    alone = op.And(nothing, op.Equal(counts, one))
    others = product(base, op.Where(alone, one, src))
    others = op.GatherElements(others, index, axis=dim)
    rest = op.Div(op.GatherElements(result, index, axis=dim), op.Where(nothing, one, src))
    of_src = op.Where(alone, others, rest)
    slopes = [stop_gradient(typed(slope, x.dtype)) for slope in (of_base, of_src)]
    parts = (op.Mul(x, slopes[0]), index, op.Mul(src, slopes[1]))
    return straight_through(
        typed(result, x.dtype), op.ScatterElements(*parts, axis=dim, reduction="add")
    )


def _share_with_replaced(result: Any, base: Any, x: Any, index: Any, src: Any, dim: int) -> Any:
    """torch counts a replaced element that equals the result among those that share, too."""
    one = scalar(1.0, x.dtype)
    found = op.Equal(src, op.GatherElements(result, index, axis=dim))
    found = op.Cast(found, to=int(x.dtype))
    none = op.Expand(scalar(0.0, x.dtype), op.Shape(x))
    hits = op.ScatterElements(none, index, found, axis=dim, reduction="add")
    counted, wanted = (
        op.Add(hits, op.Cast(op.Equal(v, result), to=int(x.dtype))) for v in (base, x)
    )
    touched = op.Greater(hits, scalar(0.0, x.dtype))
    ratio = op.Where(touched, op.Div(counted, wanted), one)
    return with_slope(result, typed(op.Identity(result), x.dtype), ratio)


def _neutral(reduce: str, x: Any) -> Any:
    if reduce in ("sum", "mean", "prod"):
        return scalar(int(reduce == "prod"), x.dtype)
    if is_float(x):
        return scalar(-math.inf if reduce == "amax" else math.inf, x.dtype)
    raise CaptureError(
        "unsupported_operator", f"scatter_reduce {reduce} of integers without their own; use floats"
    )


def scatter_onto(x: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    """scatter(reduce=...), which is scatter_reduce() under older names."""
    if isinstance(src, (int, float)):
        src = op.Expand(scalar(src, x.dtype), op.Shape(index))
        src = typed(src, x.dtype, list(index.shape))
    return scatter_reduce(x, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce])


def _cut_to(src: Any, index: Any) -> Any:
    """ONNX wants updates of the indices' sizes, torch takes the first of them."""
    if list(src.shape) == list(index.shape):
        return src
    rank = len(index.shape)
    return op.Slice(src, ints(*[0] * rank), op.Shape(index), ints(*range(rank)))


def index_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    """index_reduce(): scatter_reduce() of whole slices."""
    rank = max(len(x.shape), 1)
    axis = dim % rank
    places = check_index(index, size(x, axis) if len(x.shape) else 1)
    if rank > 1:
        places = op.Unsqueeze(places, ints(*(i for i in range(rank) if i != axis)))
    places = typed(op.Expand(places, op.Shape(source)), index.dtype, list(source.shape))
    return scatter_reduce(x, axis, places, source, reduce, include_self)


def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """diagonal_scatter(): a copy with another diagonal."""
    rank = len(x.shape)
    first, second = dim1 % rank, dim2 % rank
    others = [i for i in range(rank) if i not in (first, second)]
    order = [*others, first, second]
    moved = op.Transpose(x, perm=order)
    flat = op.Reshape(moved, op.Concat(op.Shape(moved, start=0, end=rank - 2), ints(-1), axis=0))
    places = op.Expand(_diagonal_places(x, offset, first, second), op.Shape(source))
    done = op.Reshape(op.ScatterElements(flat, places, source, axis=-1), op.Shape(moved))
    return op.Transpose(done, perm=[order.index(i) for i in range(rank)])


def histc(x: Any, bins: Any = 100, min: Any = 0, max: Any = 0) -> Any:
    """histc(): torch's formula for the bin of a value, in the type of the values, as on the CPU."""
    if not all(isinstance(v, (int, float)) for v in (bins, min, max)) or min == max:
        raise CaptureError("unsupported_operator", "histc takes its bounds from the values")
    flat = typed(op.Reshape(x, ints(-1)), x.dtype)
    low, high = scalar(min, x.dtype), scalar(max, x.dtype)
    inside = op.And(op.GreaterOrEqual(flat, low), op.LessOrEqual(flat, high))
    place = op.Div(op.Mul(op.Sub(flat, low), scalar(bins, x.dtype)), op.Sub(high, low))
    place = op.Cast(op.Where(inside, place, scalar(0, x.dtype)), to=int(ir.DataType.INT64))
    place = op.Min(place, scalar(bins - 1, ir.DataType.INT64))
    none = op.Expand(scalar(0, x.dtype), ints(bins))
    ones = op.Cast(inside, to=int(x.dtype))
    return typed(op.ScatterElements(none, place, ones, axis=0, reduction="add"), x.dtype, [bins])


def table() -> dict[Any, Callable]:
    return {
        _aten.linalg_vector_norm.default: vector_norm,
        _aten.std.correction: std,
        _aten.std_mean.correction: _with_mean(std),
        _aten.var.correction: var,
        _aten.var_mean.correction: _with_mean(var),
        _aten.cosine_similarity.default: cosine_similarity,
        _aten.cdist.default: cdist,
        _aten.pdist.default: pdist,
        _aten._pdist_forward.default: pdist,
        _aten.max.default: _extremum(True),
        _aten.min.default: _extremum(False),
        _aten.max.dim: _extremum_along(True),
        _aten.min.dim: _extremum_along(False),
        _aten.amax.default: _extremum_over(True),
        _aten.amin.default: _extremum_over(False),
        _aten.aminmax.default: aminmax,
        _aten.gather.default: gather,
        _aten.sort.default: lambda x, dim=-1, descending=False: sort(x, False, dim, descending),
        _aten.sort.stable: sort,
        _aten.topk.default: topk,
        _aten.mT.default: transposed,
        _aten.mH.default: transposed,
        _aten.index_reduce.default: index_reduce,
        _aten.diagonal_scatter.default: diagonal_scatter,
        _aten.unbind.int: unbind,
        _aten.diagonal.default: diagonal,
        _aten.diagonal_copy.default: diagonal,
        _aten.scatter_reduce.two: scatter_reduce,
        _aten.histc.default: histc,
        _aten.scatter.reduce: scatter_onto,
        _aten.scatter.value_reduce: scatter_onto,
    }
