"""Translations of recurrent layers: LSTM, GRU and plain RNNs.

Each layer and direction is a linear layer over all steps and com.gradd::Recurrence, with torch's
weights in torch's order of gates. What lies between is ordinary: halves that are joined, dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gradd.graph import scans
from gradd.graph.translation.build import (
    cast,
    dropped,
    ints,
    is_float,
    op,
    own,
    scalar,
    several,
    typed,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten
_END = 2**63 - 1


class _Layer(NamedTuple):
    """Weights of a layer and direction; without biases, or a projection, None."""

    of_input: Any
    of_state: Any
    input_bias: Any
    state_bias: Any
    projection: Any


def _layers(params: Sequence[Any], has_biases: bool, projects: bool) -> list[_Layer]:
    """torch's list of weights, layer by layer and direction by direction."""
    each = 2 + 2 * has_biases + projects
    found = []
    for at in range(0, len(params), each):
        part = list(params[at : at + each])
        projection = part.pop() if projects else None
        biases = part[2:] if has_biases else [None, None]
        found.append(_Layer(part[0], part[1], *biases, projection))
    return found


def _parts(states: Any, count: int) -> list[Any]:
    """[count, B, n] as so many [B, n]."""
    shape = list(states.shape[1:])
    parts = op.Split(states, num_outputs=count, axis=0) if count > 1 else states
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    return [typed(op.Squeeze(part, ints(0)), states.dtype, shape) for part in parts]


def _joined(parts: list[Any]) -> Any:
    """The other way round."""
    rows = [op.Unsqueeze(part, ints(0)) for part in parts]
    return op.Concat(*rows, axis=0) if len(rows) > 1 else rows[0]


def _turned(x: Any) -> Any:
    """[B, T, n] as [T, B, n], and the other way round."""
    first, second, *rest = x.shape
    return typed(op.Transpose(x, perm=[1, 0, 2]), x.dtype, [second, first, *rest])


def _direction(kind: str, x: Any, layer: _Layer, first: tuple[Any, Any], reverse: bool) -> Any:
    """The states of all steps, the last one, and the last cells."""
    state, cells = first
    product = op.MatMul(x, op.Transpose(layer.of_input, perm=[1, 0]))
    if layer.input_bias is not None:
        product = op.Add(product, layer.input_bias)
    operands = [product, layer.of_state, state, cells, layer.state_bias, layer.projection]
    while operands[-1] is None:
        operands.pop()
    count = 3 if kind == "lstm" else 2
    found = several("com.gradd", "Recurrence", count, *operands, kind=kind, reverse=int(reverse))
    y, last, *rest = found
    typed(y, x.dtype, [*x.shape[:2], state.shape[-1]])
    typed(last, x.dtype, state.shape)
    for value in rest:
        typed(value, x.dtype, cells.shape)
    return y, last, rest[0] if rest else None


def _run(
    kind: str,
    x: Any,
    first: tuple[Any, Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, list[Any], list[Any]]:
    """All layers: the states of all steps, and each layer's last state and cells."""
    states, cells = first
    projects = cells is not None and str(cells.shape[-1]) != str(states.shape[-1])
    directions = 1 + bool(bidirectional)
    layers = _layers(params, has_biases, projects)
    ways = num_layers * directions
    state_parts = _parts(states, ways)
    cell_parts = [None] * ways if cells is None else _parts(cells, ways)
    lasts, last_cells = [], []
    x = _turned(x) if batch_first else x
    for depth in range(num_layers):
        if depth and train:
            x = typed(dropped(x, dropout), x.dtype, x.shape)
        made = []
        for way in range(directions):
            at = depth * directions + way
            given = state_parts[at], cell_parts[at]
            y, last, last_cell = _direction(kind, x, layers[at], given, way == 1)
            made.append(y)
            lasts.append(last)
            last_cells.append(last_cell)
        width = directions * made[0].shape[-1]
        shape = [*x.shape[:2], width]
        x = made[0] if directions == 1 else typed(op.Concat(*made, axis=-1), x.dtype, shape)
    return _turned(x) if batch_first else x, lasts, last_cells


def lstm(x: Any, hx: Sequence[Any], params: Sequence[Any], *rest: Any) -> tuple[Any, Any, Any]:
    y, lasts, cells = _run("lstm", x, (hx[0], hx[1]), params, *rest)
    return y, _joined(lasts), _joined(cells)


def _without_cells(
    kind: str, x: Any, hx: Any, params: Sequence[Any], *rest: Any
) -> tuple[Any, Any]:
    """gru.input(), rnn_tanh.input() and rnn_relu.input()."""
    y, lasts, _ = _run(kind, x, (hx, None), params, *rest)
    return y, _joined(lasts)


def linear_scan(a: Any, b: Any, dim: int, reverse: bool) -> Any:
    """gradd::linear_scan(): h = a h + b along an axis."""
    return own("LinearScan", a, b, axis=dim, reverse=int(reverse))


def cumprod(x: Any, dim: int, dtype: int | None = None) -> Any:
    """cumprod(): the recurrence h = x h that begins with the first factor; its gradient divides by
    nothing, so zeros are no special case.
    """
    if dtype is not None and dtype != -1:
        x = cast(x, dtype)
    if not is_float(x):
        raise CaptureError("unsupported_operator", "cumprod() of integers is not supported")
    if not len(x.shape):
        return op.Identity(x)
    axis = ints(dim % len(x.shape))
    first, rest = op.Slice(x, ints(0), ints(1), axis), op.Slice(x, ints(1), ints(_END), axis)
    zeros = op.Expand(scalar(0.0, x.dtype), op.Shape(rest))
    begin = typed(op.Concat(first, zeros, axis=dim), x.dtype, x.shape)
    return own("LinearScan", x, begin, axis=dim, reverse=0)


def table() -> dict[Any, Callable]:
    return {
        scans.OPERATOR: linear_scan,
        _aten.cumprod.default: cumprod,
        _aten.lstm.input: lstm,
        _aten.gru.input: functools.partial(_without_cells, "gru"),
        _aten.rnn_tanh.input: functools.partial(_without_cells, "tanh"),
        _aten.rnn_relu.input: functools.partial(_without_cells, "relu"),
    }
