"""Translations of recurrent layers: LSTM, GRU and plain RNNs.

Each layer and direction is a linear layer over all steps and com.gradd::Recurrence, with torch's
weights in torch's order of gates. What lies between is ordinary: halves that are joined, dropout.

A packed sequence has the rows of step 0, then those of step 1, and so on, of fewer and fewer
sequences. Linear layers take it as it is; the steps take it spread to [T, B, n], for the other
direction each sequence from its own end, and what comes behind an end keeps the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import onnx_ir as ir
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
    size,
    typed,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten
_END = 2**63 - 1
_INT = int(ir.DataType.INT64)
_FAR = 1e4  # of a gate: all of its kind of number round to it, or to 0, and f16 has it


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
    product = op.MatMul(x, op.Transpose(layer.of_input, perm=[1, 0]))
    if layer.input_bias is not None:
        product = op.Add(product, layer.input_bias)
    typed(product, x.dtype, [*x.shape[:2], layer.of_input.shape[0]])
    return _states(kind, product, layer, first, reverse)


def _states(kind: str, product: Any, layer: _Layer, first: tuple[Any, Any], reverse: bool) -> Any:
    """The same from the products of the inputs."""
    state, cells = first
    operands = [product, layer.of_state, state, cells, layer.state_bias, layer.projection]
    while operands[-1] is None:
        operands.pop()
    count = 3 if kind == "lstm" else 2
    found = several("com.gradd", "Recurrence", count, *operands, kind=kind, reverse=int(reverse))
    y, last, *rest = found
    typed(y, product.dtype, [*product.shape[:2], state.shape[-1]])
    typed(last, product.dtype, state.shape)
    for value in rest:
        typed(value, product.dtype, cells.shape)
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
    batch_first: bool = False,
    *,
    sizes: Any = None,
) -> tuple[Any, list[Any], list[Any]]:
    """All layers: the states of all steps, and each layer's last state and cells.

    With `sizes`, how many rows each step has, the sequence is a packed one.
    """
    states, cells = first
    projects = cells is not None and str(cells.shape[-1]) != str(states.shape[-1])
    directions = 1 + bool(bidirectional)
    layers = _layers(params, has_biases, projects)
    ways = num_layers * directions
    state_parts = _parts(states, ways)
    cell_parts = [None] * ways if cells is None else _parts(cells, ways)
    lasts, last_cells = [], []
    places = None if sizes is None else _places(x, sizes, states)
    x = _turned(x) if batch_first else x
    for depth in range(num_layers):
        if depth and train:
            x = typed(dropped(x, dropout), x.dtype, x.shape)
        made = []
        for way in range(directions):
            at = depth * directions + way
            given = state_parts[at], cell_parts[at]
            if places is None:
                found = _direction(kind, x, layers[at], given, way == 1)
            else:
                found = _packed_direction(kind, x, layers[at], given, places, way)
            y, last, last_cell = found
            made.append(y)
            lasts.append(last)
            last_cells.append(last_cell)
        width = directions * made[0].shape[-1]
        shape = [*x.shape[:-1], width]
        x = made[0] if directions == 1 else typed(op.Concat(*made, axis=-1), x.dtype, shape)
    return _turned(x) if batch_first else x, lasts, last_cells


class _Places(NamedTuple):
    """Of the rows of a packed sequence, [N, n], among those of the steps, [T, B, n]."""

    inside: Any  # [T, B, 1]: steps that a sequence has
    rows: tuple[Any, Any]  # [T, B]: the row of each step, from the first one on or from the last
    steps: tuple[Any, Any]  # [N]: where the step of each row is in [T * B, n]
    ends: Any  # [B]: where the last step is there
    steps_and_lanes: list[Any]  # T, B


def _places(x: Any, sizes: Any, states: Any) -> _Places:
    """Of rows x, so many in each step; the number of sequences is that of the states."""
    steps, lanes = sizes.shape[0], states.shape[1]
    zero, one = scalar(0, _INT), scalar(1, _INT)
    count = size(states, 1)
    lane = op.Unsqueeze(op.Range(zero, count, one), ints(0))  # [1, B]
    step = op.Unsqueeze(op.Range(zero, size(sizes, 0), one), ints(1))  # [T, 1]
    row = op.Range(zero, size(x, 0), one)
    begins = op.Sub(op.CumSum(sizes, zero), sizes)
    inside = op.Less(lane, op.Unsqueeze(sizes, ints(1)))
    lengths = op.ReduceSum(op.Cast(inside, to=_INT), ints(0), keepdims=0)  # [B]
    back = op.Max(op.Sub(op.Sub(op.Unsqueeze(lengths, ints(0)), one), step), zero)
    there = op.Min(op.Add(op.Unsqueeze(begins, ints(1)), lane), op.Sub(size(x, 0), one))
    # The step of each row: how many have begun, but for the first one.
    begun = op.LessOrEqual(op.Unsqueeze(begins, ints(0)), op.Unsqueeze(row, ints(1)))
    at = op.Sub(op.ReduceSum(op.Cast(begun, to=_INT), ints(1), keepdims=0), one)
    own = op.Sub(row, op.Gather(begins, at))
    other = op.Sub(op.Sub(op.Gather(lengths, own), one), at)
    ends = op.Add(op.Mul(op.Sub(lengths, one), count), op.Squeeze(lane, ints(0)))
    return _Places(
        op.Unsqueeze(inside, ints(2)),
        (there, op.Add(op.Gather(begins, back), lane)),
        (op.Add(op.Mul(at, count), own), op.Add(op.Mul(other, count), own)),
        ends,
        [steps, lanes],
    )


def _behind(kind: str, like: Any, width: int) -> Any:
    """What inputs are behind the end of a sequence: they keep cells, and let nothing grow."""
    values = [0.0] * width
    if kind == "lstm":  # the gates of inputs are shut, those that forget open
        part = width // 4
        values[: 2 * part] = [-_FAR] * part + [_FAR] * part
    elif kind == "relu":
        values = [-_FAR] * width
    return op.Cast(op.Constant(value=ir.tensor(values, ir.DataType.FLOAT)), to=int(like.dtype))


def _packed_direction(
    kind: str, x: Any, layer: _Layer, first: tuple[Any, Any], places: _Places, way: int
) -> Any:
    """The states of all rows, the last ones, and the last cells."""
    product = op.MatMul(x, op.Transpose(layer.of_input, perm=[1, 0]))
    if layer.input_bias is not None:
        product = op.Add(product, layer.input_bias)
    width = layer.of_input.shape[0]
    rows = op.Gather(product, places.rows[way], axis=0)
    rows = op.Where(places.inside, rows, _behind(kind, x, width))
    typed(rows, x.dtype, [*places.steps_and_lanes, width])
    y, _, cells = _states(kind, rows, layer, first, False)
    state = layer.of_state.shape[1]
    flat = op.Reshape(y, ints(-1, state))
    made = typed(op.Gather(flat, places.steps[way], axis=0), x.dtype, [x.shape[0], state])
    return made, typed(op.Gather(flat, places.ends, axis=0), x.dtype, first[0].shape), cells


def _network(kind: str, packed: bool = False) -> Callable:
    def translate(x: Any, *rest: Any) -> tuple[Any, ...]:
        """lstm(), gru(), rnn_tanh() and rnn_relu() of steps, or of a packed sequence."""
        sizes, (hx, params, *how) = (rest[0], rest[1:]) if packed else (None, rest)
        first = (hx[0], hx[1]) if kind == "lstm" else (hx, None)
        y, lasts, cells = _run(kind, x, first, params, *how, sizes=sizes)
        found = y, _joined(lasts)
        return (*found, _joined(cells)) if kind == "lstm" else found

    return translate


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
        _aten.lstm.input: _network("lstm"),
        _aten.gru.input: _network("gru"),
        _aten.rnn_tanh.input: _network("tanh"),
        _aten.rnn_relu.input: _network("relu"),
        _aten.lstm.data: _network("lstm", True),
        _aten.gru.data: _network("gru", True),
        _aten.rnn_tanh.data: _network("tanh", True),
        _aten.rnn_relu.data: _network("relu", True),
    }
