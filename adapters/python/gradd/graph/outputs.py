"""Finds which graph output is the loss, and which outputs depend on which.

The loss is the result leaf named "loss" if it is a floating-point scalar, otherwise the first
result leaf that is a floating-point scalar. Result leaves on which the loss depends are its
ancestors: the adapter may leave those uncomputed until they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def find_loss(names: Sequence[str], values: list[ir.Value]) -> int | None:
    """Position of the loss among these results, or None (see the top of this file)."""
    scalars = [
        i
        for i, value in enumerate(values)
        if value.dtype in _FLOATS and value.shape is not None and len(value.shape) == 0
    ]
    named = [i for i in scalars if names[i] == "loss"]
    return (named or scalars or [None])[0]


def dependencies(graph: ir.Graph, values: list[ir.Value]) -> list[frozenset[int]]:
    """Per value, the numbers of the values on which it depends."""
    own: dict[ir.Value, int] = {}
    for i, value in enumerate(values):
        own[value] = own.get(value, 0) | 1 << i
    below = {value: own.get(value, 0) for value in graph.inputs}  # a bit per value, its own among
    for node in graph:
        bits = 0
        for value in node.inputs:
            bits |= below.get(value, 0) if value is not None else 0
        for value in node.outputs:
            below[value] = bits | own.get(value, 0)
    masks = [below.get(value, 0) & ~own[value] for value in values]
    return [frozenset(i for i in range(len(values)) if mask >> i & 1) for mask in masks]
