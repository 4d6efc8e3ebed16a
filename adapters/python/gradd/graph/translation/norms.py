"""Translations of normalisations of doubles: ONNX holds epsilon and momentum as floats.

They are written out, with constants of doubles. The running statistics of a batch norm have no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradd.graph.translation.build import count, ints, op, scalar, stop_gradient, typed

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
    """layer_norm()."""
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
    """group_norm()."""
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
    rank, axes = len(x.shape), [0, *range(2, len(x.shape))]
    if training:
        mean, spread = _moments(x, axes)
        before = running_mean, running_var, momentum
        new_mean, new_var = _remembered(x, axes, mean, spread, before)
    else:
        mean, spread = _per_channel(running_mean, rank), _per_channel(running_var, rank)
        new_mean, new_var = op.Identity(running_mean), op.Identity(running_var)
    y = _scaled(_normalised(x, mean, spread, eps), weight, bias, rank)
    return y, op.Identity(new_mean), op.Identity(new_var), new_mean, new_var


def _remembered(x: Any, axes: list[int], mean: Any, spread: Any, before: tuple) -> tuple[Any, Any]:
    """The new running statistics; of the variance torch remembers the unbiased one."""
    running_mean, running_var, momentum = before
    dtype = x.dtype
    one, new = scalar(1.0, dtype), scalar(momentum, dtype)
    kept = scalar(1.0 - momentum, dtype)
    number = count(x, axes, dtype)
    unbiased = op.Mul(spread, op.Div(number, op.Sub(number, one)))
    results = []
    for old, now in ((running_mean, mean), (running_var, unbiased)):
        now = op.Squeeze(stop_gradient(typed(now, dtype)), ints(*axes))
        results.append(op.Add(op.Mul(old, kept), op.Mul(now, new)))
    return results[0], results[1]


def batch_norm_no_stats(
    x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    """_native_batch_norm_legit.no_stats: statistics of the batch, nothing remembered."""
    del training, momentum
    rank, axes = len(x.shape), [0, *range(2, len(x.shape))]
    mean, spread = _moments(x, axes)
    y = _scaled(_normalised(x, mean, spread, eps), weight, bias, rank)
    along = ints(*axes)
    return y, op.Squeeze(mean, along), op.Squeeze(spread, along)


def instance_norm(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *unused: Any,
    **unused_kw: Any,
) -> Any:
    """instance_norm(); one that remembers is refused, as a buffer that the graph does not write."""
    rank = len(x.shape)
    if use_input_stats:
        mean, spread = _moments(x, list(range(2, rank)))
    else:
        mean, spread = _per_channel(running_mean, rank), _per_channel(running_var, rank)
    return _scaled(_normalised(x, mean, spread, eps), weight, bias, rank)


def of_doubles() -> dict[Any, Callable]:
    """aten overload -> translation for doubles."""
    return {
        _aten.layer_norm.default: layer_norm,
        _aten.group_norm.default: group_norm,
        _aten.instance_norm.default: instance_norm,
        _aten._native_batch_norm_legit_functional.default: batch_norm,
        _aten._native_batch_norm_legit.no_stats: batch_norm_no_stats,
    }
