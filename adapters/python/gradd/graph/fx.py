"""Pre-pass on the lowered graph that preserves information which differentiation needs.

The graph still shows detach(), and marks nodes that ran without gradients; the ONNX exporter would
drop both without a trace, and gradients would silently be wrong. This pass sends each value that
leaves such a region, and each detach(), through the registered operator gradd::stop_gradient, which
becomes com.gradd::StopGradient. It runs before any decomposition. In-place writes become values
where that is simple.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from gradd.graph import decompose, functional, numbers, types, writes
from gradd.graph.nodes import (
    DETACH,
    OFF,
    Operator,
    drop_assertions,
    is_float,
    is_mutable,
    rename_outputs,
    replace,
    stop,
)
from gradd.graph.translation import indices


def prepare(program: Any) -> None:
    """Rewrites a program in place: StopGradient explicit, assertions removed."""
    graph, signature = program.graph_module.graph, program.graph_signature
    drop_assertions(graph)
    numbers.make_explicit(graph, signature)
    decompose.decompose(graph, signature)
    _copy_attention(graph)
    _copy_dropout(graph)
    writes.make_explicit(graph, signature)
    functional.make_functional(graph, signature)
    types.make_explicit(graph, signature)
    _stop_detached(graph, signature)
    _stop_regions(graph, signature)
    indices.check(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)


def _copy_attention(graph: torch.fx.Graph) -> None:
    """contiguous() after an attention becomes a copy.

    With the strides that the traced kernel gave it may have nothing to do, and is then dropped;
    the decomposition's strides are others, and the view() that follows would fail. In ONNX a
    copy costs nothing.
    """
    aten = torch.ops.aten
    moves = (aten.transpose.int, aten.permute.default, aten.reshape.default, aten.view.default)
    for node in graph.nodes:
        if node.target is not aten.contiguous.default:
            continue
        source = node.args[0]
        while source.target in moves:
            source = source.args[0]
        if source.target is aten.scaled_dot_product_attention.default:
            node.target = aten.clone.default
            node.args, node.kwargs = node.args[:1], {"memory_format": torch.contiguous_format}


def _copy_dropout(graph: torch.fx.Graph) -> None:
    """Dropout in place becomes Dropout and a copy; torch's decomposition draws its own numbers."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.dropout_.default):
        with graph.inserting_before(node):
            dropped = graph.call_function(aten.dropout.default, node.args, node.kwargs)
        dropped.meta = {**node.meta, "val": node.meta["val"].clone()}
        node.target, node.args, node.kwargs = aten.copy_.default, (node.args[0], dropped), {}


def _is_impure(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and (
        is_mutable(node.target) or functional.moves_statistics(node)
    )


def _stop_detached(graph: torch.fx.Graph, signature: Any) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, Operator):
            continue
        if node.target.name() not in DETACH:
            continue
        source = node.args[0]
        if is_float(node):
            with graph.inserting_before(node):
                stopped = stop(graph, source)
            stopped.meta = {k: v for k, v in node.meta.items() if k != OFF}
            source = stopped
        replace(node, source, signature)
        graph.erase_node(node)


def _stop_regions(graph: torch.fx.Graph, signature: Any) -> None:
    """Puts a StopGradient where a value computed without gradients is used with them."""
    for node in list(graph.nodes):
        if not node.meta.get(OFF):
            continue
        if not is_float(node):
            continue
        outside = [u for u in node.users if not u.meta.get(OFF)]
        if not outside:
            continue
        with graph.inserting_after(node):
            stopped = stop(graph, node)
        for user in outside:
            user.replace_input_with(node, stopped)
            if user.op == "output":
                rename_outputs(signature, node.name, stopped.name)
