"""Says in the graph that a buffer of floats is a mask, with casts to bool and back.

Buffers are graph inputs, so nobody who reads a graph knows what they hold. Where a graph has
1 - buffer and the buffer holds zeros and ones (mask_buffers.py), its readers get
Cast(Cast(buffer, to=BOOL), to=its type) instead: equal for these values, and a statement that
there are no others. Runs after the cleanup, whose rules would take the casts away or merge them.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

_FLOATS = frozenset(
    {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE}
)
_MOVES = frozenset({"Expand", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def mark(graph: ir.Graph, buffers: dict[str, ir.Value], binary: Collection[str]) -> None:
    """Inserts the casts, in place.

    Args:
        graph: A cleaned graph.
        buffers: Its inputs by name; without those that the graph changes.
        binary: Names of buffers that hold zeros and ones.
    """
    wanted = {buffers[name] for name in binary if name in buffers}
    if not wanted:
        return
    masks = dict.fromkeys(_origin(node.inputs[1]) for node in graph if _is_complement(node))
    for value in masks:
        if value in wanted:
            _cast(graph, value)


def _is_complement(node: ir.Node) -> bool:
    """True for 1 - x."""
    if node.op_type != "Sub" or node.domain:
        return False
    one = node.inputs[0].const_value
    return one is not None and one.size == 1 and one.numpy().item() == 1


def _origin(value: ir.Value) -> ir.Value:
    """What a value is made of by moving elements and rounding them."""
    node = value.producer()
    while node is not None and not node.domain and _keeps_binary(node):
        value = node.inputs[0]
        node = value.producer()
    return value


def _keeps_binary(node: ir.Node) -> bool:
    if node.op_type == "Cast":
        return node.attributes["to"].as_int() in _FLOATS
    return node.op_type in _MOVES


def _cast(graph: ir.Graph, value: ir.Value) -> None:
    readers = list(value.uses())
    users = {node for node, _ in readers}
    first = next(node for node in graph if node in users)
    to_bool = ir.Node("", "Cast", [value], [ir.AttrInt64("to", ir.DataType.BOOL)])
    back = ir.Node("", "Cast", to_bool.outputs, [ir.AttrInt64("to", value.dtype)])
    graph.insert_before(first, [to_bool, back])
    for node, position in readers:
        node.replace_input_with(position, back.outputs[0])
