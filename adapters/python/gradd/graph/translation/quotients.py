"""Integer quotients of sizes: ONNX rounds towards zero, Python rounds down."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx


def round_down(program: Any) -> None:
    """Where one may be negative, a // b becomes (a - a % b) // b, which leaves no remainder."""
    graphs = [m.graph for m in program.graph_module.modules() if hasattr(m, "graph")]
    for graph in graphs:
        for node in graph.find_nodes(op="call_function", target=operator.floordiv):
            if isinstance(node.meta.get("val"), torch.SymInt) and not _is_positive(node):
                _round_one_down(graph, node)


def _round_one_down(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    over, under = node.args
    a, b = (x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in node.args)
    with graph.inserting_before(node):
        rest = graph.call_function(operator.mod, (over, under))
        whole = graph.call_function(operator.sub, (over, rest))
    rest.meta, whole.meta = {**node.meta, "val": a % b}, {**node.meta, "val": a - a % b}
    node.args = (whole, under)


def _is_positive(quotient: torch.fx.Node) -> bool:
    """Whether neither operand can be negative."""
    symbols = quotient.meta["val"].node.shape_env
    for operand in quotient.args:
        value = operand.meta["val"] if isinstance(operand, torch.fx.Node) else operand
        if isinstance(value, torch.SymInt):
            value = symbols.bound_sympy(value.node.expr).lower
        if not value >= 0:
            return False
    return True
