"""Translations of embedding_bag(): rows of a table, brought together by bags.

A bag is a stretch of the indices, from its offset to the next one. The bag of each index is the
number of offsets up to it; rows are added to their bags in the order of the indices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    check_index,
    ints,
    narrow,
    op,
    scalar,
    size,
    stop_gradient,
    typed,
    wide,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten
_INT = ir.DataType.INT64
_SUM, _MEAN, _MAX = range(3)


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """embedding_bag(): the bags, the bag of each index, sizes of bags, places of maxima."""
    for option, given in (("scale_grad_by_freq", scale_grad_by_freq), ("sparse", sparse)):
        if given:
            raise CaptureError(
                "unsupported_operator", f"EmbeddingBag({option}=True) is not supported"
            )
    none = 0 in indices.shape
    indices, offsets = op.Cast(indices, to=_INT), op.Cast(offsets, to=_INT)
    one = ints(1)
    length = op.Shape(indices)
    bags = op.Shape(offsets)
    if include_last_offset:
        bags = op.Sub(bags, one)
    bag = _bag_of_each(offsets, length, bags)
    indices = typed(check_index(typed(indices, _INT), size(weight, 0)), _INT)
    rows = op.Gather(weight, indices)
    counted = None
    if padding_idx is not None:
        row = scalar(padding_idx, _INT)
        if padding_idx < 0:
            row = op.Add(row, size(weight, 0))
        counted = op.Not(op.Equal(indices, row))
    rows = wide(typed(rows, weight.dtype, [None, *weight.shape[1:]]))
    dtype = rows.dtype
    shape = op.Concat(bags, op.Shape(weight, start=1), axis=0)
    at = op.Unsqueeze(bag, ints(-1))
    ones = op.Expand(scalar(1, _INT), length) if counted is None else op.Cast(counted, to=_INT)
    counts = op.ScatterND(op.Expand(scalar(0, _INT), bags), at, ones, reduction="add")
    if mode == _MAX:
        values, places = _maxima(rows, at, bag, counts, counted, shape)
        if none:  # the table's gradient is of zeros: that of a sum of no rows
            few = op.Slice(weight, ints(0), ints(0), ints(0))
            values = op.Add(
                values, wide(typed(op.ReduceSum(few, ints(0), keepdims=1), weight.dtype))
            )
        return narrow(typed(values, dtype), weight), *_unread(bag, counts, places)
    if counted is not None:
        rows = op.Where(op.Unsqueeze(counted, ints(-1)), rows, scalar(0.0, dtype))
    if per_sample_weights is not None:
        rows = op.Mul(rows, op.Unsqueeze(wide(per_sample_weights), ints(-1)))
    total = op.ScatterND(op.Expand(scalar(0.0, dtype), shape), at, rows, reduction="add")
    if mode == _MEAN:
        number = op.Cast(op.Max(counts, scalar(1, _INT)), to=int(dtype))
        total = op.Div(total, op.Unsqueeze(number, ints(-1)))
    return narrow(typed(total, dtype), weight), *_unread(bag, counts, counts)


def _unread(*values: Any) -> list[Any]:
    """Results beside the bags: those of PyTorch are empty where its kernel needs none."""
    return [op.Identity(value) for value in values]


def _bag_of_each(offsets: Any, length: Any, bags: Any) -> Any:
    """The number of each index's bag, int64; those in front of the first offset are refused."""
    zero, one = scalar(0, _INT), scalar(1, _INT)
    last = op.Add(length, ints(1))
    checked = check_index(typed(offsets, _INT), op.Squeeze(last))
    hits = op.ScatterND(
        op.Expand(zero, last),
        op.Unsqueeze(checked, ints(-1)),
        op.Expand(one, op.Shape(offsets)),
        reduction="add",
    )
    upto = op.Slice(op.CumSum(hits, zero), ints(0), length, ints(0))
    return typed(check_index(typed(op.Sub(upto, one), _INT), op.Squeeze(bags)), _INT)


def _maxima(rows: Any, at: Any, bag: Any, counts: Any, counted: Any, shape: Any) -> tuple[Any, Any]:
    """The first largest element of each bag and column, and its place; 0 of an empty bag."""
    least = scalar(float("-inf"), rows.dtype)
    known = stop_gradient(rows)
    if counted is not None:
        known = op.Where(op.Unsqueeze(counted, ints(-1)), known, least)
    largest = op.ScatterND(op.Expand(least, shape), at, known, reduction="max")
    behind = size(rows, 0)
    order = op.Unsqueeze(op.Range(scalar(0, _INT), behind, scalar(1, _INT)), ints(-1))
    most = op.Gather(largest, bag)
    found = op.Or(op.Equal(known, most), op.And(op.IsNaN(known), op.IsNaN(most)))
    if counted is not None:
        found = op.And(found, op.Unsqueeze(counted, ints(-1)))
    places = op.Where(found, order, behind)
    first = op.ScatterND(op.Expand(behind, shape), at, places, reduction="min")
    empty = op.Unsqueeze(op.Equal(counts, scalar(0, _INT)), ints(-1))
    padded = op.Concat(rows, op.Expand(scalar(0.0, rows.dtype), _one_row(shape)), axis=0)
    values = op.GatherElements(padded, first, axis=0)
    return op.Where(empty, scalar(0.0, rows.dtype), values), first


def _one_row(shape: Any) -> Any:
    return op.Concat(ints(1), op.Slice(shape, ints(1), ints(2), ints(0)), axis=0)


def table() -> dict[Any, Callable]:
    return {
        _aten.embedding_bag.default: embedding_bag,
        _aten.embedding_bag.padding_idx: embedding_bag,
    }
