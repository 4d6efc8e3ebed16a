"""Recurrent layers in a graph of Dynamo: types and sizes of their results from one step.

torch's rules for tensors without values compute all steps, which takes as long as there are, and
fixes their number: each length would be a graph of its own. What a layer gives for one step says
all but that number.
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


def shorten(wanted: Callable[[], bool]) -> None:
    """Has rules of one step in place of torch's own, where that is wanted at the time."""
    for target in OPERATORS:
        for key, rule in list(target.py_kernels.items()):
            del target.py_kernels[key]
            target.py_impl(key)(functools.partial(_one_step, wanted, rule))


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
    given = [t for t in private.pytree.tree_leaves((x, hx, params)) if t.requires_grad]
    if not given or not torch.is_grad_enabled():
        return (y, *step[1:])
    return tuple(t.requires_grad_().clone() for t in (y, *step[1:]))
