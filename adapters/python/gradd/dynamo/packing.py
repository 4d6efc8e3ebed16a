"""Packed sequences in code that Dynamo traces: pack_padded_sequence(), a recurrent layer on the
result, pad_packed_sequence().

Dynamo does not trace the first, and the other two read the number of sequences out of a tensor.
Here a call of the first is one of pack(), between two graphs, since the lengths decide how many
rows there are; it says how many sequences these are (`sorted_indices`, always). With that the
others are code without such reads: the layer is the operator that torch has for packed sequences.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import rnn

from gradd import private
from gradd.dynamo.tracers import membership
from gradd.module_tables import BEFORE_FORWARD, HOOKS_OF_ALL

_CALLS = [dis.opmap[name] for name in ("CALL", "CALL_KW") if name in dis.opmap]
_FIELDS = 4  # of a packed sequence
_LAYERS = (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN)
_FUNCTIONS = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


@torch.compiler.disable(reason="the lengths of packed sequences decide how many rows there are")
def pack(
    input: torch.Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> rnn.PackedSequence:
    """pack_padded_sequence(), with the order of the sequences even where that is the given one."""
    mode = private.dispatch_mode()  # a copy of rows is no work that PyTorch does for the daemon
    with getattr(mode, "paused", contextlib.nullcontext)():
        found = rnn.pack_padded_sequence(input, lengths, batch_first, enforce_sorted)
        if found.sorted_indices is not None:
            return found
        order = torch.arange(int(found.batch_sizes[0]), device=input.device)
        return rnn.PackedSequence(found.data, found.batch_sizes, order, order)


def run(module: Any, packed: Any, hx: Any = None) -> Any:
    """What a recurrent layer makes of a packed sequence whose order is known."""
    rows = packed.sorted_indices.shape[0]
    weights = module.all_weights
    gates, state = weights[0][1].shape  # the module's own numbers may have become inputs
    is_lstm = module.mode == "LSTM"
    if hx is None:
        hx = packed.data.new_zeros(len(weights), rows, state)
        if is_lstm:
            hx = (hx, packed.data.new_zeros(len(weights), rows, gates // 4))
    elif is_lstm:
        hx = tuple([x.index_select(1, packed.sorted_indices) for x in hx])
    else:
        hx = hx.index_select(1, packed.sorted_indices)
    y, *last = _FUNCTIONS[module.mode](
        packed.data,
        packed.batch_sizes,
        hx,
        [weight for part in weights for weight in part],
        module.bias,
        module.num_layers,
        module.dropout,
        module.training,
        module.bidirectional,
    )
    last = [x.index_select(1, packed.unsorted_indices) for x in last]
    result = rnn.PackedSequence(
        y, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
    )
    return result, tuple(last) if is_lstm else last[0]


def pad(
    sequence: Any,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> Any:
    """pad_packed_sequence() of one whose order is known."""
    data, sizes = sequence.data, sequence.batch_sizes
    steps = sizes.shape[0]
    if total_length is not None and total_length < steps:
        raise ValueError(
            "Expected total_length to be at least the length of the longest sequence in input, "
            f"but got total_length={total_length} and max sequence length being {steps}"
        )
    here = sizes.to(data.device).unsqueeze(1)  # [T, 1]
    lanes = torch.arange(sequence.sorted_indices.shape[0], device=data.device)
    inside = lanes < here  # [T, B], in the order of the packed sequence
    places = (here.cumsum(0) - here + lanes).clamp(max=data.shape[0] - 1)
    inside = inside.index_select(1, sequence.unsorted_indices)
    places = places.index_select(1, sequence.unsorted_indices)
    lengths = inside.sum(0).cpu()
    if batch_first:
        inside, places = inside.t(), places.t()
    rows = data[places]
    inside = inside.reshape(inside.shape + (1,) * (data.dim() - 1))
    rows = torch.where(inside, rows, padding_value)
    if total_length is not None and total_length > steps:
        more = [0, 0] * (rows.dim() - 2) + [0, total_length - steps]
        if not batch_first:
            more = [0, 0, *more]
        rows = F.pad(rows, more, value=padding_value)
    return rows, lengths


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace these functions so where that is wanted at the time."""
    membership.trace_instead(wanted, _instead)
    for table in membership.tables():
        for code in _CALLS:
            table[code] = functools.partial(_call, wanted, table[code])


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    own = _own(fn) if args and _is_packed(tracer, args[0]) else None
    if own is None:
        return None
    if own is run:
        for name in BEFORE_FORWARD:  # Dynamo's guards say when there is a hook
            membership.attribute(tracer, fn.realize(), name)
        args = [fn, *args]
    return type(fn.realize()).build(tracer, own), args, kwargs


def _call(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Runs an instruction that calls; of a graph that ends there the result has to be pack()'s."""
    last = len(tracer.stack) - instruction.argval  # the first argument, or the one behind
    for at in range(max(last - 3, 0), last) if wanted() else ():
        item = tracer.stack[at]
        if membership.value_of(item) is rnn.pack_padded_sequence:
            make = type(item.realize()).build
            here = make(tracer, sys.modules[__name__], tracer.import_source(__name__))
            tracer.stack[at] = membership.attribute(tracer, here.realize(), pack.__name__)
    usual(tracer, instruction)


def _is_packed(tracer: Any, variable: Any) -> bool:
    """Whether it stands for a packed sequence whose order is known."""
    if _type(variable) is not rnn.PackedSequence:
        return False
    fields = variable.realize().unpack_var_sequence(tracer)
    return len(fields) == _FIELDS and not any(x.is_python_constant() for x in fields)


def _type(variable: Any) -> Any:
    if hasattr(type(variable), "peek_type") and not variable.is_realized():
        return variable.peek_type()
    try:
        return variable.python_type()
    except NotImplementedError:  # Dynamo has no type for it
        return None


def _own(function: Any) -> Callable | None:
    """What takes the place of a function, or of a layer, for a packed sequence."""
    value = membership.value_of(function)
    if value is rnn.pad_packed_sequence:
        return pad
    if type(value) not in _LAYERS or any(HOOKS_OF_ALL):
        return None
    return None if any(getattr(value, name) for name in BEFORE_FORWARD) else run
