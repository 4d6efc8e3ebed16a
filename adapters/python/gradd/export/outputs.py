"""Meaning of graph outputs: which one is the loss, and what the loss depends on.

The loss is the result leaf named "loss" if it is a floating-point scalar, otherwise the first
result leaf that is a floating-point scalar. Result leaves on which the loss depends are its
ancestors: the adapter may leave those uncomputed until somebody reads them.
"""

from __future__ import annotations

import onnx_ir as ir

_FLOATS = {
    ir.DataType.FLOAT,
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.DOUBLE,
}


def output_name(path: tuple[str, ...]) -> str:
    """Readable base name of a result leaf: "loss", "output_0", "past_key_values_0_keys"."""
    if not path:
        return "output"
    text = "_".join(path)
    text = "".join(c if c.isalnum() or c in "_." else "_" for c in text)
    return f"output_{text}" if text[0].isdigit() else text


def find_loss(paths: list[tuple[str, ...]], values: list[ir.Value]) -> int | None:
    """Position of the loss among these results, or None (see the top of this file)."""
    scalars = [
        i
        for i, value in enumerate(values)
        if value.dtype in _FLOATS and value.shape is not None and len(value.shape) == 0
    ]
    named = [i for i in scalars if paths[i] and paths[i][-1] == "loss"]
    return (named or scalars or [None])[0]


def ancestors(values: list[ir.Value], loss: int | None) -> frozenset[int]:
    """Numbers of the values on which the loss depends (itself excluded)."""
    if loss is None:
        return frozenset()
    seen: set[ir.Value] = set()
    stack = [values[loss]]
    while stack:
        value = stack.pop()
        if value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        if producer is not None:
            stack.extend(v for v in producer.inputs if v is not None)
    return frozenset(i for i, v in enumerate(values) if i != loss and v in seen)
