"""Translations of batch normalisation, and of other normalisations of doubles.

A batch norm is com.gradd::BatchNorm; its running statistics are arithmetic on the operator's
results, without a gradient. Attributes hold epsilon as a float: normalisations of doubles are
written out, with constants of doubles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradd.graph.translation.build import (
    count,
    first_of,
    ints,
    op,
    scalar,
    several,
    stop_gradient,
    typed,
    wide,
    wide_type,
)
from gradd.graph.translation.doubles import DOUBLE

_aten = torch.ops.aten


def _normalised(x: Any, mean: Any, spread: Any, eps: float) -> Any:
    return op.Div(op.Sub(x, mean), op.Sqrt(op.Add(spread, scalar(eps, x.dtype))))


def _moments(x: Any, axes: list[int]) -> tuple[Any, Any]:
    """Mean and mean square of the deviations along the axes, which are kept."""
    along = ints(*axes)
    mean = op.ReduceMean(x, along, keepdims=1)
    left = op.Sub(x, mean)
    return mean, op.ReduceMean(op.Mul(left, left), along, keepdims=1)


def layer_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *unused: Any,
    **unused_kw: Any,
) -> Any:
    rank, last = len(x.shape), len(normalized_shape)
    y = _normalised(x, *_moments(x, list(range(rank - last, rank))), eps)
    y = y if weight is None else op.Mul(y, weight)
    return y if bias is None else op.Add(y, bias)


def rms_norm(x: Any, axis: int, weight: Any, eps: float | None) -> Any:
    """rms_norm() over the axes from `axis` on, which counts from the end."""
    eps = torch.finfo(torch.float64).eps if eps is None else eps
    square = op.ReduceMean(op.Mul(x, x), ints(*range(axis, 0)), keepdims=1)
    y = op.Div(x, op.Sqrt(op.Add(square, scalar(eps, x.dtype))))
    return y if weight is None else op.Mul(y, weight)


def _per_channel(value: Any, rank: int) -> Any:
    """[C] shaped to meet [N, C, d1, ...]."""
    return op.Unsqueeze(value, ints(*range(1, rank - 1))) if rank > 2 else value


def _scaled(y: Any, weight: Any, bias: Any, rank: int) -> Any:
    y = y if weight is None else op.Mul(y, _per_channel(weight, rank))
    return y if bias is None else op.Add(y, _per_channel(bias, rank))


def group_norm(
    x: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *unused: Any,
    **unused_kw: Any,
) -> Any:
    rank = len(x.shape)
    groups = ints(num_groups)
    rest = op.Div(op.ReduceProd(op.Shape(x, start=1), keepdims=1), groups)
    parts = op.Concat(op.Shape(x, start=0, end=1), groups, rest, axis=0)
    parted = typed(op.Reshape(x, parts), x.dtype)
    y = op.Reshape(_normalised(parted, *_moments(parted, [2]), eps), op.Shape(x))
    return _scaled(y, weight, bias, rank)


def batch_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """_native_batch_norm_legit_functional: 5 outputs, the last two the new running statistics."""
    if training:
        y, mean, spread = by_batch(x, weight, bias, eps)
        new_mean, new_var = _remembered(x, mean, spread, (running_mean, running_var, momentum))
    else:
        y = _by_given(x, weight, bias, running_mean, running_var, eps)
        mean, spread = op.Identity(running_mean), op.Identity(running_var)
        new_mean, new_var = (op.Identity(wide(v)) for v in (running_mean, running_var))
    return y, mean, spread, new_mean, new_var


def _affine(x: Any, weight: Any, bias: Any) -> list[Any]:
    """The two, with ones and zeros for what is absent."""
    dtype, size = wide_type(x), op.Shape(x, start=1, end=2)
    absent = (1.0, 0.0)
    given = zip((weight, bias), absent, strict=True)
    return [op.Expand(scalar(n, dtype), size) if v is None else v for v, n in given]


def by_batch(x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    """y, and mean and biased variance of the batch, [C], which are statistics: no gradient."""
    rank = len(x.shape)
    if x.dtype != DOUBLE:
        y, mean, spread = several(
            "com.gradd", "BatchNorm", 3, x, *_affine(x, weight, bias), epsilon=eps
        )
        return typed(y, x.dtype, x.shape), typed(mean, wide_type(x)), typed(spread, wide_type(x))
    axes = [0, *range(2, rank)]
    mean, spread = _moments(x, axes)
    y = _scaled(_normalised(x, mean, spread, eps), weight, bias, rank)
    statistics = (op.Squeeze(stop_gradient(typed(v, x.dtype)), ints(*axes)) for v in (mean, spread))
    return y, *(typed(v, x.dtype) for v in statistics)


def _by_given(x: Any, weight: Any, bias: Any, mean: Any, spread: Any, eps: float) -> Any:
    rank = len(x.shape)
    if x.dtype != DOUBLE:
        return first_of(
            "com.gradd", "BatchNorm", x, *_affine(x, weight, bias), mean, spread, epsilon=eps
        )
    mean, spread = (_per_channel(v, rank) for v in (mean, spread))
    return _scaled(_normalised(x, mean, spread, eps), weight, bias, rank)


def _remembered(x: Any, mean: Any, spread: Any, before: tuple) -> tuple[Any, Any]:
    """The new running statistics, in f32 for halves: of the variance the unbiased one.

    A batch without elements leaves them as they are.
    """
    running_mean, running_var, momentum = before
    dtype = wide_type(x)
    one = scalar(1.0, dtype)
    number = count(x, [0, *range(2, len(x.shape))], dtype)
    new = op.Mul(scalar(momentum, dtype), op.Min(number, one))
    kept = op.Sub(one, new)
    unbiased = op.Mul(spread, op.Div(number, op.Sub(number, one)))
    results = []
    for old, now in ((running_mean, mean), (running_var, unbiased)):
        value = op.Add(op.Mul(wide(old), kept), op.Mul(now, new))
        results.append(stop_gradient(typed(value, dtype, old.shape)))
    return results[0], results[1]


def of_doubles() -> dict[Any, Callable]:
    """aten overload -> translation for doubles."""
    return {
        _aten.layer_norm.default: layer_norm,
        _aten.group_norm.default: group_norm,
    }
