"""Element types that torch's operators mix and their ONNX translations do not, made explicit.

softmax(x, dtype=float32) converts x first, its translation converts the result; the same holds
for sums and means. A normalisation takes bf16 values with f32 weights (autocast), computes in f32
and rounds once; ONNX wants one type. Both become casts around the operator in the exported
program, which neither decomposition nor translation can get wrong.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from gradd.export.nodes import argument

_aten = torch.ops.aten
_WITH_DTYPE = frozenset(
    {
        *(_aten.softmax.int, _aten.log_softmax.int),
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
        *(_aten.prod.default, _aten.prod.dim_int),
    }
)
_NORMS = frozenset({_aten.layer_norm.default, _aten.group_norm.default, _aten.rms_norm.default})


def make_explicit(graph: torch.fx.Graph, signature: Any) -> None:
    """Inserts the casts, in place.

    Args:
        graph: Of an exported program.
        signature: The program's; names of outputs may change.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _WITH_DTYPE:
            _convert_first(graph, node)
        elif node.target in _NORMS:
            _compute_in_one_type(graph, node, signature)


def _type(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _cast(graph: torch.fx.Graph, source: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    node = graph.call_function(_aten.to.dtype, (source, dtype))
    node.meta = dict(source.meta)
    with torch.no_grad():
        node.meta["val"] = source.meta["val"].to(dtype)
    return node


def _convert_first(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    wanted, source = argument(node, "dtype"), node.args[0]
    if wanted is None or _type(source) in (None, wanted):
        return
    with graph.inserting_before(node):
        node.replace_input_with(source, _cast(graph, source, wanted))


def _compute_in_one_type(graph: torch.fx.Graph, node: torch.fx.Node, signature: Any) -> None:
    source = node.args[0]
    own = _type(source)
    if own is None or all(_type(n) in (None, own) for n in node.all_input_nodes):
        return
    for operand in list(node.all_input_nodes):
        if _type(operand) is not torch.float32:
            with graph.inserting_before(node):
                node.replace_input_with(operand, _cast(graph, operand, torch.float32))
    users = list(node.users)
    with torch.no_grad():
        result = node.meta["val"].dtype
        node.meta["val"] = node.meta["val"].to(torch.float32)
    if result is torch.float32:
        return
    with graph.inserting_after(node):
        back = _cast(graph, node, result)
    for user in users:
        user.replace_input_with(node, back)
    for spec in signature.output_specs:
        if getattr(spec.arg, "name", None) == node.name:
            spec.arg.name = back.name
