"""Evaluates captured graphs with torch operations, so that torch's autograd differentiates them.

A loss comparison cannot see a lost detach() or a wrong gradient path; evaluating the graph with
torch and comparing every gradient can. Covers the operators that captures of the tested models
contain; an unknown operator raises. com.gradd::StopGradient is detach(), StraightThrough has its
first operand's values and its second's gradient, CheckIndex asserts, Dropout draws from torch's
generator (so that p > 0 graphs can at least be run).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

_TYPES = {
    1: torch.float32,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    11: torch.float64,
    16: torch.bfloat16,
}
Tensor = torch.Tensor


def evaluate(data: bytes, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runs a serialised model.

    Args:
        data: ModelProto bytes.
        feeds: Graph inputs by name; tensors that require a gradient are differentiated through.

    Returns:
        Graph outputs by name.
    """
    graph = onnx.ModelProto.FromString(data).graph
    values: dict[str, Tensor | None] = {"": None}
    for tensor in graph.initializer:
        values[tensor.name] = _constant(tensor)
    values.update({i.name: feeds[i.name] for i in graph.input})
    for node in graph.node:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        function = _OPS[f"{node.domain}:{node.op_type}" if node.domain else node.op_type]
        result = function([values[name] for name in node.input], attributes, len(node.output))
        results = result if isinstance(result, tuple) else (result,)
        values.update(zip(node.output, results))
    return {o.name: values[o.name] for o in graph.output}


def _constant(tensor: onnx.TensorProto) -> Tensor:
    array = numpy_helper.to_array(tensor)
    if tensor.data_type == onnx.TensorProto.BFLOAT16:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _list(value: Tensor) -> list[int]:
    return [int(v) for v in value.reshape(-1).tolist()]


def _reshape(x: list, a: dict, n: int) -> Tensor:
    shape = _list(x[1])
    if not a.get("allowzero", 0):
        shape = [x[0].shape[i] if s == 0 else s for i, s in enumerate(shape)]
    return x[0].reshape(shape)


def _slice(x: list, a: dict, n: int) -> Tensor:
    data, starts, ends = x[0], _list(x[1]), _list(x[2])
    axes = _list(x[3]) if len(x) > 3 and x[3] is not None else range(len(starts))
    steps = _list(x[4]) if len(x) > 4 else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps):
        size = data.shape[axis]
        index = torch.arange(size)[start:end:step] if step > 0 else None
        if index is None:
            raise NotImplementedError("negative step")
        data = data.index_select(axis, index)
    return data


def _gather(x: list, a: dict, n: int) -> Tensor:
    axis, index = a.get("axis", 0), x[1]
    size = x[0].shape[axis]
    flat = torch.where(index < 0, index + size, index).reshape(-1)
    axis %= x[0].dim()
    shape = (*x[0].shape[:axis], *index.shape, *x[0].shape[axis + 1 :])
    return x[0].index_select(axis, flat).reshape(shape)


def _gather_nd(x: list, a: dict, n: int) -> Tensor:
    if a.get("batch_dims", 0):
        raise NotImplementedError("batch_dims")
    return x[0][tuple(x[1].unbind(-1))]


def _pad(x: list, a: dict, n: int) -> Tensor:
    pads, rank = _list(x[1]), x[0].dim()
    axes = _list(x[3]) if len(x) > 3 and x[3] is not None else range(rank)
    half, order = len(pads) // 2, [0] * (2 * rank)
    for i, axis in enumerate(axes):
        order[2 * (rank - 1 - axis)] = pads[i]
        order[2 * (rank - 1 - axis) + 1] = pads[half + i]
    value = x[2].item() if len(x) > 2 and x[2] is not None else 0
    return torch.nn.functional.pad(x[0], order, value=value)


def _reduce(function: Callable) -> Callable:
    def run(x: list, a: dict, n: int) -> Tensor:
        axes = _list(x[1]) if len(x) > 1 and x[1] is not None else list(range(x[0].dim()))
        return function(x[0], axes, bool(a.get("keepdims", 1))) if axes else x[0]

    return run


def _split(x: list, a: dict, n: int) -> tuple:
    axis = a.get("axis", 0)
    if len(x) > 1 and x[1] is not None:
        return torch.split(x[0], _list(x[1]), axis)
    return torch.chunk(x[0], a.get("num_outputs", n), axis)


def _gemm(x: list, a: dict, n: int) -> Tensor:
    left = x[0].T if a.get("transA") else x[0]
    right = x[1].T if a.get("transB") else x[1]
    result = a.get("alpha", 1.0) * (left @ right)
    return result + a.get("beta", 1.0) * x[2] if len(x) > 2 and x[2] is not None else result


def _checked(index: Tensor, limit: Tensor) -> Tensor:
    assert ((index >= 0) & (index < limit)).all()
    return index


def _nll(x: list, a: dict, logs: Tensor) -> Tensor:
    weight = x[2] if len(x) > 2 else None
    reduction = a.get("reduction", b"mean").decode()
    return torch.nn.functional.nll_loss(
        logs, x[1], weight, reduction=reduction, ignore_index=a.get("ignore_index", -100)
    )


def _batch_norm(x: list, a: dict, n: int) -> Any:
    data, weight, bias, mean, var = x
    shape = [1, -1] + [1] * (data.dim() - 2)
    training = a.get("training_mode", 0)
    if training:
        axes = [i for i in range(data.dim()) if i != 1]
        now_mean, now_var = data.mean(axes), data.var(axes, unbiased=False)
    else:
        now_mean, now_var = mean, var
    inv = (now_var + a.get("epsilon", 1e-5)).rsqrt()
    y = (data - now_mean.reshape(shape)) * (inv * weight).reshape(shape) + bias.reshape(shape)
    if not training:
        return y
    keep = a.get("momentum", 0.9)
    return y, mean * keep + now_mean * (1 - keep), var * keep + now_var * (1 - keep)


def _batch_statistics(x: list, a: dict, n: int) -> Any:
    """com.gradd::BatchNorm: y, and the statistics that it was normalised by."""
    (data, weight, bias), given = x[:3], x[3:5]
    axes = [i for i in range(data.dim()) if i != 1]
    wide = data.float() if data.dtype.itemsize == 2 else data
    mean, var = given or (wide.mean(axes).detach(), wide.var(axes, unbiased=False).detach())
    eps = a.get("epsilon", 1e-5)
    statistics = given or (None, None)
    y = torch.nn.functional.batch_norm(data, *statistics, weight, bias, not given, 0.0, eps)
    return (y, mean, var, (var + eps).rsqrt())[:n]


def _shape(x: list, a: dict, n: int) -> Tensor:
    end = a.get("end")
    return torch.tensor(list(x[0].shape)[a.get("start", 0) : end], dtype=torch.int64)


def _squeeze(x: list, a: dict, n: int) -> Tensor:
    return x[0].squeeze(tuple(_list(x[1]))) if len(x) > 1 else x[0].squeeze()


def _unsqueeze(x: list, a: dict, n: int) -> Tensor:
    rank = x[0].dim() + x[1].numel()
    for axis in sorted(i % rank for i in _list(x[1])):
        x[0] = x[0].unsqueeze(axis)
    return x[0]


def _layer_norm(x: list, a: dict, n: int) -> Tensor:
    axis = a.get("axis", -1) % x[0].dim()
    bias = x[2] if len(x) > 2 else None
    return torch.nn.functional.layer_norm(
        x[0], x[0].shape[axis:], x[1], bias, a.get("epsilon", 1e-5)
    )


def _rms_norm(x: list, a: dict, n: int) -> Tensor:
    axis = a.get("axis", -1) % x[0].dim()
    return torch.nn.functional.rms_norm(x[0], x[0].shape[axis:], x[1], a.get("epsilon", 1e-5))


def _binary(function: Callable) -> Callable:
    return lambda x, a, n: function(x[0], x[1])


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, grad


class _Sloped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *pairs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*pairs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        given: list[Any] = [None]
        for x, slope in zip(ctx.saved_tensors[::2], ctx.saved_tensors[1::2], strict=True):
            zero = torch.zeros((), dtype=grad.dtype)
            part = torch.where(slope, grad, zero) if slope.dtype == torch.bool else grad * slope
            given += [part.sum_to_size(x.shape).to(x.dtype), None]
        return tuple(given)


def _attention(x: list, a: dict, n: int) -> Tensor:
    """Without dropout. Rows that may see no key are zeros."""
    q, k, v = x[:3]
    mask = x[3] if len(x) > 3 else None
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * a.get("scale", q.shape[-1] ** -0.5)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if a.get("is_causal", 0):
        hidden = hidden | torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    if mask is not None:
        hidden = hidden | (mask.logical_not() if mask.dtype == torch.bool else mask == -math.inf)
        scores = scores if mask.dtype == torch.bool else scores + mask.clamp(min=-1e30)
    none = hidden.all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden & ~none, -math.inf), -1)
    return torch.where(none, 0.0, weights @ v)


def _smoothed_loss(x: list, a: dict, n: int) -> Tensor:
    """com.gradd::CrossEntropy: classes last, float for halves."""
    rows = x[0].float().reshape(-1, x[0].shape[-1])
    labels, ignored = x[1].reshape(-1), a["ignore_index"]
    logs, e = torch.log_softmax(rows, 1), a["smoothing"]
    weights = x[3].float() if len(x) > 3 else torch.ones(rows.shape[1])
    own = labels.where(labels != ignored, 0)
    hard = -logs.gather(1, own[:, None])[:, 0] * weights[own]
    each = ((1 - e) * hard - e * (logs * weights).mean(1)) * (labels != ignored)
    reduction = a["reduction"].decode()
    if reduction == "none":
        return each.reshape(x[1].shape)
    count = (weights[own] * (labels != ignored)).sum()
    return each.sum() / (count if reduction == "mean" else 1)


def _unary(function: Callable) -> Callable:
    return lambda x, a, n: function(x[0])


_OPS: dict[str, Callable] = {
    "Add": _binary(torch.add),
    "And": _binary(torch.logical_and),
    "Attention": _attention,
    "BatchNormalization": _batch_norm,
    "Cast": lambda x, a, n: x[0].to(_TYPES[a["to"]]),
    "Concat": lambda x, a, n: torch.cat(x, a["axis"]),
    "Cos": _unary(torch.cos),
    "CumSum": lambda x, a, n: torch.cumsum(x[0], int(x[1])),
    "Div": lambda x, a, n: torch.div(
        x[0], x[1], rounding_mode=None if x[0].is_floating_point() else "trunc"
    ),
    "Dropout": lambda x, a, n: torch.nn.functional.dropout(x[0], float(x[1]), bool(x[2])),
    "Equal": _binary(torch.eq),
    "Exp": _unary(torch.exp),
    "Expand": lambda x, a, n: (
        x[0] * torch.ones(_list(x[1]), dtype=x[0].dtype)
        if x[0].dtype != torch.bool
        else x[0] & torch.ones(_list(x[1]), dtype=torch.bool)
    ),
    "Gather": _gather,
    "GatherElements": lambda x, a, n: torch.gather(x[0], a.get("axis", 0), x[1]),
    "GatherND": _gather_nd,
    "Gelu": lambda x, a, n: torch.nn.functional.gelu(
        x[0], approximate=a.get("approximate", b"none").decode()
    ),
    "Gemm": _gemm,
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Identity": _unary(lambda x: x),
    "LayerNormalization": _layer_norm,
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Log": _unary(torch.log),
    "LogSoftmax": lambda x, a, n: torch.log_softmax(x[0], a.get("axis", -1)),
    "MatMul": _binary(torch.matmul),
    "Max": _binary(torch.maximum),
    "Mul": _binary(torch.mul),
    "Neg": _unary(torch.neg),
    "NegativeLogLikelihoodLoss": lambda x, a, n: _nll(x, a, x[0]),
    "Not": _unary(torch.logical_not),
    "Or": _binary(torch.logical_or),
    "Pad": _pad,
    "Pow": _binary(torch.pow),
    "RMSNormalization": _rms_norm,
    "Range": lambda x, a, n: torch.arange(x[0].item(), x[1].item(), x[2].item(), dtype=x[0].dtype),
    "Reciprocal": _unary(torch.reciprocal),
    "ReduceMean": _reduce(lambda x, axes, keep: x.mean(axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keep)),
    "Relu": _unary(torch.relu),
    "Reshape": _reshape,
    "Shape": _shape,
    "Sigmoid": _unary(torch.sigmoid),
    "Sin": _unary(torch.sin),
    "Size": _unary(lambda x: torch.tensor(x.numel())),
    "Slice": _slice,
    "Softmax": lambda x, a, n: torch.softmax(x[0], a.get("axis", -1)),
    "SoftmaxCrossEntropyLoss": lambda x, a, n: _nll(x, a, torch.log_softmax(x[0], 1)),
    "Split": _split,
    "Sqrt": _unary(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Tanh": _unary(torch.tanh),
    "Transpose": lambda x, a, n: x[0].permute(a["perm"]),
    "Unsqueeze": _unsqueeze,
    "Where": lambda x, a, n: torch.where(x[0], x[1], x[2]),
    "com.gradd:CrossEntropy": _smoothed_loss,
    "com.gradd:BatchNorm": _batch_statistics,
    "com.gradd:CheckIndex": lambda x, a, n: _checked(x[0], x[1]),
    "com.gradd:StopGradient": _unary(torch.Tensor.detach),
    "com.gradd:SignBit": _unary(torch.signbit),
    "com.gradd:StraightThrough": lambda x, a, n: _Straight.apply(x[0], x[1]),
    "com.gradd:WithSlope": lambda x, a, n: _Sloped.apply(*x),
    "Softplus": _unary(torch.nn.functional.softplus),
    "com.gradd:Expm1": _unary(torch.expm1),
    "com.gradd:Log1p": _unary(torch.log1p),
}
