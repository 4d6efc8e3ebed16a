"""Integer quotients of sizes: ONNX rounds towards zero, Python rounds down."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx


def round_down(program: Any) -> None:
    """Where one may be negative, a // b becomes (a - a % b) // b, which leaves no remainder."""
    graph = program.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=operator.floordiv):
        if not isinstance(node.meta.get("val"), torch.SymInt) or _is_positive(node):
            continue
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
