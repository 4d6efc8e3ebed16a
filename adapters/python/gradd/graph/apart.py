"""Operators that torch itself composes of others, taken apart one by one.

einsum() and its like have no operator in ONNX that would do, or none at all. torch says what they
consist of, for this one call: its steps take the node's place. Without this the call is refused, or
the whole program is taken apart, which costs as much as the rest of the translation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from gradd import private
from gradd.graph.nodes import Operator, is_mutable, replace_call

# Products and rearrangements; what checks indices or has edges of its own stays whole.
_COMPOSED = {
    *("einsum", "tensordot", "kron", "inner", "outer"),
    *("linalg_multi_dot", "chain_matmul", "matrix_power", "linalg_matrix_power"),
    *("hstack", "vstack", "dstack", "column_stack"),
    *("trapezoid", "trapz", "cumulative_trapezoid"),
}


def take_apart(graph: torch.fx.Graph, signature: Any) -> None:
    """Replaces what torch composes of other operators, in place."""
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_composed(node.target):
            body = _steps(node)
            if body is not None:
                _inline(graph, node, body, signature)


def _is_composed(target: Any) -> bool:
    if not isinstance(target, Operator) or is_mutable(target):
        return False
    name = private.schema(target).name.removeprefix("aten::")
    composed = target.has_kernel_for_dispatch_key
    return name in _COMPOSED and composed("CompositeImplicitAutograd")


def _steps(node: torch.fx.Node) -> torch.fx.Graph | None:
    """What the operator does with its operands; None where torch does not say."""
    operands = list(node.all_input_nodes)
    values = [operand.meta.get("val") for operand in operands]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    mode = getattr(tensors[0], "fake_mode", None) if tensors else None
    if mode is None:
        return None

    def run(*given: Any) -> Any:
        known = dict(zip(operands, given, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
        return node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

    try:
        with mode:
            return make_fx(run)(*values).graph
    except Exception:  # a step that depends on values: the whole program's way says what
        return None


def _inline(graph: torch.fx.Graph, node: torch.fx.Node, body: torch.fx.Graph, sig: Any) -> None:
    known: dict[torch.fx.Node, Any] = {}
    operands = iter(node.all_input_nodes)
    with graph.inserting_before(node):
        for step in body.nodes:
            if step.op == "placeholder":
                known[step] = next(operands)
            elif step.op != "output":
                known[step] = graph.node_copy(step, lambda n: known[n])
                known[step].meta = {**node.meta, "val": step.meta.get("val")}
    result = torch.fx.map_arg(body.output_node().args[0], lambda n: known[n])
    replace_call(graph, node, result, sig)
