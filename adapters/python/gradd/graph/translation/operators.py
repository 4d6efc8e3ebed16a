"""Translations of aten operators to ONNX that replace stock ones which are wrong for training.

Each function takes onnx_ir values and Python constants in the order of the aten schema and emits
opset-23 nodes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation import (
    bags,
    bits,
    clamps,
    convolutions,
    losses,
    norms,
    orders,
    pointwise,
    pools,
    products,
    quantised,
    recurrent,
    reductions,
    resampling,
    series,
    shapes,
    special,
)
from gradd.graph.translation.attention import attention
from gradd.graph.translation.build import (
    all_axes,
    cast,
    check_index,
    dropped,
    mark_sparse,
    op,
    stop_gradient,
    straight_through,
    typed,
)
from gradd.graph.translation.build import ints as _ints
from gradd.graph.translation.build import scalar as _scalar
from gradd.graph.translation.doubles import is_exact
from gradd.spec import CaptureError

_aten = torch.ops.aten

# Operators with mixed element types among their arguments for which that is no promotion.
TYPE_STABLE = frozenset(
    {
        *(_aten.embedding.default, _aten.index.Tensor, _aten.cross_entropy_loss.default),
        *(_aten.nll_loss.default, _aten.gather.default, _aten.scaled_dot_product_attention.default),
        *(_aten.masked_fill.Scalar,),
    }
)


def _static(size: Any, what: str) -> int:
    if isinstance(size, int):
        return size
    raise CaptureError("unsupported_operator", f"{what} must not depend on the call's sizes")


# --- dropout, embedding, casts ---------------------------------------------------------------


def dropout(value: Any, p: float, train: bool) -> Any:
    return dropped(value, p) if train and p != 0 else op.Identity(value)


def embedding(
    weight: Any,
    indices: Any,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Gather; rows of the padding index get no gradient, as torch defines it.

    A negative padding index of a table whose size is the call's is computed from that size. Where
    the gradient is sparse, the graph gives the indices away (model_bytes.py).
    """
    if scale_grad_by_freq:
        raise CaptureError(
            "unsupported_operator", "Embedding(scale_grad_by_freq=True) is not supported"
        )
    rows = op.Gather(weight, indices)
    if sparse:
        mark_sparse(rows, padding_idx)
    if isinstance(padding_idx, int):
        if padding_idx < 0:
            return rows
        row = _scalar(padding_idx, indices.dtype)
    else:
        row = op.Cast(padding_idx, to=int(indices.dtype))
    is_padding = op.Equal(indices, row)
    return op.Where(op.Unsqueeze(is_padding, _ints(-1)), stop_gradient(rows), rows)


def to_dtype(value: Any, dtype: int, *unused: Any, **unused_kw: Any) -> Any:
    """Tensor.to(dtype); Identity where nothing changes (removed later)."""
    return op.Identity(value) if int(value.dtype) == int(dtype) else op.Cast(value, to=int(dtype))


def to_dtype_layout(value: Any, dtype: int | None = None, **unused: Any) -> Any:
    """Tensor.to() with keyword arguments only."""
    if dtype is None or dtype == -1:
        return op.Identity(value)
    return to_dtype(value, dtype)


def identity(value: Any, *unused: Any, **unused_kw: Any) -> Any:
    """For operators that only affect memory."""
    return op.Identity(value)


def _default_float() -> ir.DataType:
    wide = torch.get_default_dtype() is torch.float64
    return ir.DataType.DOUBLE if wide else ir.DataType.FLOAT


def arange(*bounds: Any, dtype: int | None = None, **unused: Any) -> Any:
    """arange() of an end, or of a start, an end and a step."""
    start, end, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if dtype is None or dtype == -1:
        parts = [
            torch.tensor(v, device="cpu").dtype
            for v in (start, end, step)
            if isinstance(v, (int, float))
        ]
        is_float = any(d.is_floating_point for d in parts)
        dtype = _default_float() if is_float else ir.DataType.INT64
    dtype = ir.DataType(dtype)
    inner = dtype if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else ir.DataType.INT64
    if any(isinstance(v, float) for v in (start, end, step)) and inner == ir.DataType.INT64:
        inner = ir.DataType.FLOAT
    if inner == ir.DataType.FLOAT and any(map(_is_rounded, (start, end, step))):
        inner = ir.DataType.DOUBLE  # how many there are, torch decides in doubles
    bounds = [_number(v, inner) for v in (start, end, step)]
    result = op.Range(*bounds)
    return result if inner == dtype else op.Cast(result, to=int(dtype))


def _is_rounded(bound: Any) -> bool:
    """True for numbers that a float may not hold: Python's, and those computed from sizes."""
    if isinstance(bound, (int, float)):
        return not is_exact(bound)
    return bound.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _number(value: Any, dtype: ir.DataType) -> Any:
    if isinstance(value, (int, float)):
        return _scalar(value, dtype)
    return value if dtype == ir.DataType.INT64 else op.Cast(value, to=int(dtype))


def eye(n: Any, m: Any = None, dtype: int | None = None, **unused: Any) -> Any:
    """eye(n) and eye(n, m): where row and column have the same number."""
    rows, columns = arange(n), arange(n if m is None else m)
    kind = ir.DataType.FLOAT if dtype in (None, -1) else dtype
    return op.Cast(op.Equal(op.Unsqueeze(rows, _ints(-1)), columns), to=int(kind))


def _window(make: Callable) -> Callable:
    """A window of torch's, of a size that is known: a constant."""

    def translate(size: Any, *shape: Any, dtype: int | None = None, **unused: Any) -> Any:
        kind = ir.DataType.FLOAT if dtype in (None, -1) else ir.DataType(dtype)
        wide = torch.float64 if kind == ir.DataType.DOUBLE else torch.float32
        values = make(_static(size, "the size of a window"), *shape, dtype=wide)
        constant = op.Constant(value=ir.tensor(values.numpy()))
        is_wide = kind in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        return constant if is_wide else op.Cast(constant, to=int(kind))

    return translate


def _windows() -> dict[Any, Callable]:
    names = ("hann", "hamming", "blackman", "bartlett", "kaiser")
    packets = [(getattr(_aten, f"{n}_window"), getattr(torch, f"{n}_window")) for n in names]
    return {
        getattr(packet, overload): _window(make)
        for packet, make in packets
        for overload in packet.overloads()
        if not overload.endswith("out")
    }


def safe_softmax(x: Any, dim: int, dtype: int | None = None) -> Any:
    """_safe_softmax(): a row that is minus infinity altogether gives zeros, gradients too."""
    kind = x.dtype if dtype in (None, -1) else ir.DataType(dtype)
    x = to_dtype(x, kind)
    zero, none = _scalar(0.0, kind), _scalar(-math.inf, kind)
    nothing = op.Equal(op.ReduceMax(x, _ints(dim), keepdims=1), none)
    return op.Where(nothing, zero, op.Softmax(op.Where(nothing, zero, x), axis=dim))


def index_fill(x: Any, dim: int, index: Any, value: Any) -> Any:
    """torch.index_fill: what several indices name is filled once, in the gradient too."""
    rank, value = len(x.shape), _filler(value, x)
    if rank == 0:
        return op.Where(_scalar(tuple(index.shape) == (0,), ir.DataType.BOOL), x, value)
    dim %= rank
    places = op.Reshape(index, _ints(-1))
    one, none = (_scalar(number, ir.DataType.INT64) for number in (1, 0))
    rows = op.Expand(none, op.Shape(x, start=dim, end=dim + 1))
    named = op.ScatterElements(rows, places, op.Expand(one, op.Shape(places)), axis=0)
    filled = op.Cast(named, to=int(ir.DataType.BOOL))
    if dim < rank - 1:
        filled = op.Unsqueeze(filled, _ints(*range(1, rank - dim)))
    return op.Where(filled, value, x)


def _filler(value: Any, like: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return _scalar(value, like.dtype)
    return cast(value, like.dtype)


# --- norms -----------------------------------------------------------------------------------


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """rms_norm() in one node: as in torch, halves are computed in float and rounded once."""
    axis = -len(normalized_shape)
    if x.dtype == ir.DataType.DOUBLE:
        return norms.rms_norm(x, axis, weight, eps)
    if weight is None:
        weight = op.Expand(_scalar(1.0, x.dtype), op.Shape(x, start=axis))
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return op.RMSNormalization(x, weight, axis=axis, epsilon=eps)


def mean(value: Any, dtype: int | None = None) -> Any:
    """mean() over everything, in one node."""
    if dtype is not None and dtype != -1:
        value = to_dtype(value, dtype)
    return op.ReduceMean(value, keepdims=0)


def mean_dim(
    value: Any, dim: list[int] | None = None, keepdim: bool = False, dtype: int | None = None
) -> Any:
    """mean() over some axes; without any, over all, as in torch."""
    if dtype is not None and dtype != -1:
        value = typed(to_dtype(value, dtype), ir.DataType(dtype), list(value.shape))
    if not len(value.shape):
        return op.Identity(value)
    return op.ReduceMean(value, _ints(*all_axes(value, dim)), keepdims=int(keepdim))


def cat(tensors: Any, dim: int = 0) -> Any:
    """cat() without the tensors that PyTorch skips, of one axis and no element, at any rank."""
    kept = [tensor for tensor in tensors if tuple(tensor.shape) != (0,)] or tensors[:1]
    return op.Concat(*kept, axis=dim) if len(kept) > 1 else op.Identity(kept[0])


def copy(target: Any, source: Any, non_blocking: bool = False) -> Any:
    """copy() with the broadcasting of copy_()."""
    del non_blocking
    same = op.CastLike(source, target)
    if source.shape is not None and source.shape == target.shape:
        return same
    return op.Expand(same, op.Shape(target))


@functools.lru_cache(maxsize=1)
def table() -> dict[Any, Callable]:
    rows = {
        _aten.scaled_dot_product_attention.default: attention,
        _aten.dropout.default: dropout,
        _aten.embedding.default: embedding,
        _aten.mean.default: mean,
        _aten.mean.dim: mean_dim,
        _aten.rms_norm.default: rms_norm,
        _aten.alias.default: identity,
        _aten.reshape.default: shapes.reshape,
        _aten.flatten.using_ints: shapes.flatten,
        _aten.squeeze.dims: shapes.squeeze,
        _aten.pad.default: shapes.pad,
        _aten.cat.default: cat,
        _aten.copy.default: copy,
        _aten.arange.default: arange,
        _aten._safe_softmax.default: safe_softmax,
        _aten.index_fill.int_Scalar: index_fill,
        _aten.index_fill.int_Tensor: index_fill,
        _aten.arange.start: arange,
        _aten.arange.start_step: arange,
        _aten.eye.default: eye,
        _aten.eye.m: eye,
        _aten._native_batch_norm_legit_functional.default: norms.batch_norm,
        _aten._native_batch_norm_legit.no_stats: (
            lambda x, weight, bias, training, momentum, eps: norms.by_batch(x, weight, bias, eps)
        ),
        _aten._native_batch_norm_legit_no_training.default: (
            lambda *operands: norms.batch_norm(*operands[:5], False, *operands[5:])[:3]
        ),
        _aten.sym_numel.default: op.Size,
        _aten.to.dtype: to_dtype,
        # A graph has one device.
        _aten.to.device: lambda x, device, dtype, *unused, **unused_kw: to_dtype(x, dtype),
        _aten.to.dtype_layout: to_dtype_layout,
        _aten.contiguous.default: identity,
        torch.ops.gradd.check_index.default: check_index,
        torch.ops.gradd.stop_gradient.default: stop_gradient,
        torch.ops.gradd.straight_through.default: straight_through,
    }
    layers = (bags, convolutions, pools, recurrent, resampling)
    kinds = (bits, orders, products, quantised, reductions, losses, *layers)
    themes = (pointwise, special, series, clamps, *kinds)
    return functools.reduce(lambda known, theme: known | theme.table(), themes, rows | _windows())
