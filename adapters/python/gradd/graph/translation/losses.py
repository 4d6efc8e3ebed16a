"""Translations of losses with torch's derivatives, even where probabilities are 0 or 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    SMALLEST,
    check_index,
    first_of,
    ints,
    narrow,
    op,
    own,
    reduced,
    scalar,
    size,
    typed,
    wide,
    wide_type,
    with_slope,
)
from gradd.graph.translation.doubles import DOUBLE, as_float, is_exact
from gradd.graph.translation.pointwise import log_sigmoid
from gradd.spec import CaptureError

_aten = torch.ops.aten
_IGNORED = -100


def binary_cross_entropy_with_logits(
    scores: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Any:
    """binary_cross_entropy_with_logits(), with the derivative in closed form."""
    x, t = wide(scores), wide(target)
    one = scalar(1.0, x.dtype)
    logs, share, rest = log_sigmoid(x), op.Sigmoid(x), op.Sub(one, t)
    if pos_weight is None:
        loss = op.Sub(op.Mul(rest, x), logs)
        slope, other = op.Sub(share, t), op.Neg(x)
    else:
        many = wide(pos_weight)
        factor = op.Add(op.Mul(op.Sub(many, one), t), one)
        loss = op.Sub(op.Mul(rest, x), op.Mul(logs, factor))
        slope = op.Sub(op.Mul(factor, share), op.Mul(many, t))
        other = op.Sub(op.Neg(op.Softplus(x)), op.Mul(many, logs))
    loss = with_slope(narrow(loss, scores), scores, slope, target, other)
    return reduced(loss if weight is None else op.Mul(loss, weight), reduction)


def binary_cross_entropy(prob: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """binary_cross_entropy(): logarithms of at least -100, p (1 - p) of at least 1e-12."""
    p, t = wide(prob), wide(target)
    one, least = scalar(1.0, p.dtype), scalar(-100.0, p.dtype)
    rest = op.Sub(one, p)
    log_of, log_rest = op.Log(p), own("Log1p", op.Neg(p))
    loss = op.Mul(op.Sub(t, one), op.Max(log_rest, least))
    loss = op.Sub(loss, op.Mul(t, op.Max(log_of, least)))
    least = scalar(as_float(1e-12), p.dtype)  # torch's, also of doubles
    spread = op.Max(op.Mul(rest, p), least)
    slopes = (prob, op.Div(op.Sub(p, t), spread), target, op.Sub(log_rest, log_of))
    loss = with_slope(narrow(loss, prob), *slopes)
    return reduced(loss if weight is None else op.Mul(loss, weight), reduction)


def smooth_l1(x: Any, target: Any, reduction: int = 1, beta: float = 1.0) -> Any:
    """smooth_l1_loss(): quadratic below beta; the slope never leaves [-1, 1]."""
    far, dtype = op.Sub(wide(x), wide(target)), wide(x).dtype
    length = op.Abs(far)
    if beta == 0:
        return reduced(op.Abs(op.Sub(x, target)), reduction)
    inside = op.Div(op.Mul(op.Mul(scalar(0.5, dtype), length), length), scalar(beta, dtype))
    outside = op.Sub(length, scalar(0.5 * beta, dtype))
    value = op.Where(op.Less(length, scalar(beta, dtype)), inside, outside)
    slope = op.Div(far, scalar(beta, dtype))
    slope = op.Clip(slope, scalar(-1.0, dtype), scalar(1.0, dtype))
    return reduced(with_slope(narrow(value, x), x, slope, target, op.Neg(slope)), reduction)


def huber(x: Any, target: Any, reduction: int = 1, delta: float = 1.0) -> Any:
    """huber_loss(): quadratic below delta; the slope never leaves [-delta, delta]."""
    far, dtype = op.Sub(wide(x), wide(target)), wide(x).dtype
    length = op.Abs(far)
    limit, half = scalar(delta, dtype), scalar(0.5, dtype)
    inside = op.Mul(op.Mul(half, length), length)
    outside = op.Mul(limit, op.Sub(length, scalar(0.5 * delta, dtype)))
    value = op.Where(op.LessOrEqual(length, limit), inside, outside)
    slope = op.Clip(far, scalar(-delta, dtype), limit)
    return reduced(with_slope(narrow(value, x), x, slope, target, op.Neg(slope)), reduction)


def multilabel_margin(x: Any, label: Any, reduction: int = 1) -> Any:
    """multilabel_margin_loss(): labels end at the first -1.

    The sum of max(0, 1 - x[y] + x[k]) over labels y and all k that are no label, over the classes.
    """
    single = len(x.shape) == 1
    if single:
        x = typed(op.Unsqueeze(x, ints(0)), x.dtype, [1, *x.shape])
        label = op.Reshape(label, ints(1, -1))
    none, one = scalar(-1, ir.DataType.INT64), scalar(1, ir.DataType.INT64)
    zero = scalar(0, ir.DataType.INT64)
    ends = op.Cast(op.Equal(label, none), to=int(ir.DataType.INT64))
    valid = op.Equal(op.CumSum(ends, one), zero)
    named = op.Where(op.Equal(label, none), zero, label)
    safe = op.Where(valid, check_index(named, size(x, 1)), zero)  # torch checks all of them
    marks = op.Cast(valid, to=int(ir.DataType.INT64))
    marked = op.ScatterElements(op.Mul(safe, zero), safe, marks, axis=1, reduction="add")
    right = op.Unsqueeze(op.GatherElements(x, safe, axis=1), ints(2))
    above = op.Add(op.Sub(scalar(1.0, x.dtype), right), op.Unsqueeze(x, ints(1)))
    others = op.Unsqueeze(op.Equal(marked, zero), ints(1))
    nothing = scalar(0.0, x.dtype)
    counts = op.And(op.And(op.Unsqueeze(valid, ints(2)), others), op.Greater(above, nothing))
    above = op.Where(counts, above, nothing)
    rows = op.ReduceSum(op.ReduceMean(above, ints(2), keepdims=0), ints(1), keepdims=0)
    return op.Squeeze(rows, ints(0)) if single and reduction == 0 else reduced(rows, reduction)


def cross_entropy(
    scores: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: Any = _IGNORED,
    label_smoothing: float = 0.0,
) -> Any:
    """cross_entropy(): one node, but for class probabilities."""
    name = ("none", "mean", "sum")[reduction]
    single = len(scores.shape) == 1
    if single:
        scores, target = (
            typed(op.Unsqueeze(v, ints(0)), v.dtype, [1, *v.shape]) for v in (scores, target)
        )
    if not isinstance(ignore_index, int):  # a size of the call, as in question answering
        ignored = op.Equal(target, op.Cast(ignore_index, to=int(target.dtype)))
        target = op.Where(ignored, scalar(_IGNORED, target.dtype), target)
        ignore_index = _IGNORED
    if target.dtype in SMALLEST:
        loss = _probability_loss(scores, target, weight, name, label_smoothing)
    elif label_smoothing > 0 and _has_word(scores, label_smoothing):
        loss = _smoothed(scores, target, weight, name, ignore_index, label_smoothing)
    elif label_smoothing > 0:
        loss = _smoothed_loss(scores, target, weight, name, ignore_index, label_smoothing)
    else:
        loss, _ = op.SoftmaxCrossEntropyLoss(
            scores, target, weight, reduction=name, ignore_index=ignore_index
        )
    return op.Squeeze(loss, ints(0)) if single and name == "none" else loss


def _per_class(weight: Any, rank: int) -> Any:
    """Class weights [C] shaped to multiply [N, C, d1, ...]."""
    return op.Reshape(weight, ints(1, -1, *([1] * (rank - 2))))


def _reduce(loss: Any, name: str, count: Any) -> Any:
    if name == "none":
        return loss
    total = op.ReduceSum(loss, keepdims=0)
    return total if name == "sum" else op.Div(total, count)


def _has_word(scores: Any, smoothing: float) -> bool:
    return scores.dtype != DOUBLE or is_exact(smoothing)


def _smoothed(
    scores: Any, target: Any, weight: Any, name: str, ignore: int, smoothing: float
) -> Any:
    """com.gradd::CrossEntropy, which has classes last and returns float for halves."""
    rank = len(scores.shape)
    if rank > 2:
        scores = typed(op.Transpose(scores, perm=[0, *range(2, rank), 1]), scores.dtype)
    known = {"reduction": name, "ignore_index": ignore, "smoothing": float(smoothing)}
    more = () if weight is None else (None, wide(weight))
    loss = first_of("com.gradd", "CrossEntropy", scores, target, *more, **known)
    return narrow(typed(loss, wide_type(scores)), scores)


def _number_of_classes(scores: Any) -> int:
    if isinstance(scores.shape[1], int):
        return scores.shape[1]
    raise CaptureError(
        "unsupported_operator", "the number of classes must not depend on the call's sizes"
    )


def _smoothed_loss(
    scores: Any, target: Any, weight: Any, name: str, ignore: int, smoothing: float
) -> Any:
    """Of doubles."""
    dtype, rank = scores.dtype, len(scores.shape)
    classes = _number_of_classes(scores)
    logs = op.LogSoftmax(scores, axis=1)
    plain = op.NegativeLogLikelihoodLoss(logs, target, weight, reduction=name, ignore_index=ignore)
    weighted = logs if weight is None else op.Mul(logs, _per_class(weight, rank))
    rows = op.Neg(op.ReduceSum(weighted, ints(1), keepdims=0))
    ignored = op.Equal(target, scalar(ignore, target.dtype))
    rows = op.Where(ignored, scalar(0.0, dtype), rows)
    valid = op.Cast(op.Not(ignored), to=int(dtype))
    if weight is not None:
        safe = op.Where(ignored, scalar(0, target.dtype), target)
        valid = op.Mul(valid, op.Gather(weight, safe))
    smooth = _reduce(rows, name, op.ReduceSum(valid, keepdims=0))
    return op.Add(
        op.Mul(plain, scalar(1.0 - smoothing, dtype)),
        op.Mul(smooth, scalar(smoothing / classes, dtype)),
    )


def _probability_loss(scores: Any, target: Any, weight: Any, name: str, smoothing: float) -> Any:
    """Halves as floats: neither rows nor parts of a label are numbers of a half."""
    given, classes = scores, _number_of_classes(scores)
    scores, target = wide(scores), wide(target)
    weight = None if weight is None else wide(weight)
    dtype, rank = scores.dtype, len(scores.shape)
    if smoothing > 0:
        target = op.Mul(target, scalar(1.0 - smoothing, dtype))
        target = op.Add(target, scalar(smoothing / classes, dtype))
    logs = op.LogSoftmax(scores, axis=1)
    if weight is not None:
        logs = op.Mul(logs, _per_class(weight, rank))
    rows = op.Neg(op.ReduceSum(op.Mul(logs, target), ints(1), keepdims=0))
    count = op.Cast(op.Size(rows), to=int(dtype)) if name == "mean" else None
    return narrow(_reduce(rows, name, count), given)


def table() -> dict[Any, Callable]:
    return {
        _aten.cross_entropy_loss.default: cross_entropy,
        _aten.binary_cross_entropy_with_logits.default: binary_cross_entropy_with_logits,
        _aten.binary_cross_entropy.default: binary_cross_entropy,
        _aten.smooth_l1_loss.default: smooth_l1,
        _aten.huber_loss.default: huber,
        _aten.multilabel_margin_loss.default: multilabel_margin,
    }
