"""Splits a Concat with more operands than the daemon takes into several."""

from __future__ import annotations

import onnx_ir as ir

MOST = 64  # operands of a node


def narrow(graph: ir.Graph) -> None:
    """Groups operands of wide Concats, in place; the same values in the same order."""
    for node in list(graph):
        if node.op_type != "Concat" or len(node.inputs) <= MOST:
            continue
        operands, made = list(node.inputs), []
        while len(operands) > MOST:
            groups = [operands[i : i + MOST] for i in range(0, len(operands), MOST)]
            joined = [_joined(node, group) for group in groups]
            made += joined
            operands = [join.outputs[0] for join in joined]
        made.append(_joined(node, operands))
        (old,), (new,) = node.outputs, made[-1].outputs
        new.name, new.shape = old.name, old.shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], made, [old], [new])


def _joined(node: ir.Node, operands: list[ir.Value | None]) -> ir.Node:
    made = ir.Node(
        "",
        "Concat",
        operands,
        list(node.attributes.values()),
        metadata_props=dict(node.metadata_props),
    )
    made.outputs[0].type = node.outputs[0].type
    return made
