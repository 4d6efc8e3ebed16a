"""Recurrent layers in a graph of Dynamo: types and sizes of their results from one step.

torch's rules for tensors without values compute all steps, which takes as long as there are, and
fixes their number: each length would be a graph of its own. What a layer gives for one step says
all but that number. So it does for packed sequences, whose rows are the steps of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from gradd import private

_aten = torch.ops.aten
OPERATORS = (*(_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input),)
PACKED = (*(_aten.lstm.data, _aten.gru.data, _aten.rnn_tanh.data, _aten.rnn_relu.data),)
LAYERS = (*OPERATORS, *PACKED)


def shorten(wanted: Callable[[], bool]) -> None:
    """Has rules of one step in place of torch's own, where that is wanted at the time."""
    for target, packed in zip(OPERATORS, PACKED, strict=True):
        for key, rule in list(target.py_kernels.items()):
            of_rows = packed.py_kernels.pop(key)
            del target.py_kernels[key]
            target.py_impl(key)(functools.partial(_one_step, wanted, rule))
            packed.py_impl(key)(functools.partial(_packed, wanted, rule, of_rows))


def _one_step(
    wanted: Callable[[], bool], rule: Callable, x: Any, hx: Any, params: Any, *rest: Any
) -> tuple[Any, ...]:
    """The results of a rule; without values those of one step, with the number of all steps."""
    if not isinstance(x, FakeTensor) or not wanted():
        return rule(x, hx, params, *rest)
    has_biases, num_layers, _, _, bidirectional, batch_first = rest
    axis = int(batch_first)
    with torch.no_grad():
        step = rule(  # detached: else another one than oneDNN's, with other types under autocast
            *(x.detach().narrow(axis, 0, 1), hx, params, has_biases, num_layers, 0.0, False),
            *(bidirectional, batch_first),
        )
        y = step[0].transpose(0, axis)
        y = y.new_empty((x.shape[axis], *y.shape[1:])).transpose(0, axis)
    return _with_gradients((y, *step[1:]), x, hx, params)


def _packed(
    wanted: Callable[[], bool], rule: Callable, usual: Callable, x: Any, sizes: Any, *rest: Any
) -> tuple[Any, ...]:
    """The same for a packed sequence, by the rule for others; the states say how many it has."""
    if not isinstance(x, FakeTensor) or not wanted():
        return usual(x, sizes, *rest)
    hx, params, has_biases, num_layers, _, _, bidirectional = rest
    first = hx if isinstance(hx, torch.Tensor) else hx[0]
    with torch.no_grad():
        step = rule(
            *(x.new_empty((1, first.shape[1], x.shape[1])), hx, params, has_biases, num_layers),
            *(0.0, False, bidirectional, False),
        )
        y = step[0].new_empty((x.shape[0], step[0].shape[2]))
    return _with_gradients((y, *step[1:]), x, hx, params)


def _with_gradients(results: tuple[Any, ...], x: Any, hx: Any, params: Any) -> tuple[Any, ...]:
    given = [t for t in private.pytree.tree_leaves((x, hx, params)) if t.requires_grad]
    if not given or not torch.is_grad_enabled():
        return results
    return tuple(t.requires_grad_().clone() for t in results)
