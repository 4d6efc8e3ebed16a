"""Pre-pass on the exported program that keeps what differentiation must know.

The train-mode program still shows detach() and no_grad regions; the ONNX exporter would drop
both without a trace, and gradients would silently be wrong. Here every no_grad region is
inlined, and each value that leaves it, like each detach(), goes through the registered operator
gradd::stop_gradient, which becomes com.gradd::StopGradient. Runs before any decomposition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gradd.export import apart, types, writes
from gradd.export.nodes import (
    DETACH,
    OFF,
    is_float,
    is_mutable,
    rename_outputs,
    replace,
    replace_call,
    stop,
)
from gradd.export.places import place_of
from gradd.export.translation import indices
from gradd.spec import CaptureError

_ASSERTIONS = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_async.msg",
    "aten::_assert_scalar",
    "aten::_assert_tensor",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}
_TRANSFORMS = frozenset({"_add_batch_dim", "_remove_batch_dim", "_wrap_for_grad"})


def inline(program: Any) -> None:
    """Inlines the regions with or without gradients of an ExportedProgram, in place."""
    for module in list(program.graph_module.modules()):
        if isinstance(module, torch.fx.GraphModule):
            _mend_users(module.graph)
            _refuse_sized_outputs(module.graph)
            _inline_grad_regions(module, program.graph_signature)


def sized_by_data(nodes: Iterable[torch.fx.Node]) -> CaptureError | None:
    """What is said of the first node whose size only a run tells; None if none is so."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and free_unbacked_symbols(value.shape):
            return CaptureError(
                "unsupported_operator",
                f"{place_of(node)}: the number of results depends on data that is not known before "
                "the run",
            )
    return None


def _refuse_sized_outputs(graph: torch.fx.Graph) -> None:
    error = sized_by_data(graph.output_node().all_input_nodes)
    if error is not None:
        raise error


def _refuse_transforms(graph: torch.fx.Graph) -> None:
    """torch.vmap(), jvp() and their like leave the steps of their stack in the graph."""
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and (name in _TRANSFORMS or "_make_dual" in name):
            raise CaptureError(
                "func_transform",
                f"{place_of(node)}: forward() transforms a function ({name}: torch.vmap, "
                "torch.func or forward-mode derivatives), which a graph cannot hold",
            )


def prepare(program: Any) -> None:
    """Rewrites an inlined ExportedProgram in place: StopGradient explicit, assertions removed."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            _refuse_transforms(module.graph)
            _drop_assertions(module.graph)
            apart.take_apart(module.graph, program.graph_signature)
            _copy_attention(module.graph)
            _copy_dropout(module.graph)
            types.make_explicit(module.graph, program.graph_signature)
            writes.make_explicit(module.graph, program.graph_signature)
            _stop_detached(module.graph, program.graph_signature)
            _stop_regions(module.graph, program.graph_signature)
            indices.check(module.graph)
            module.graph.eliminate_dead_code(is_impure_node=_is_impure)
            module.delete_all_unused_submodules()
            module.recompile()


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


def _mend_users(graph: torch.fx.Graph) -> None:
    """Lists every reader of a node among its users.

    Where torch takes a graph apart by gradient modes, it forgets the readers of an output whose own
    results nobody reads, and torch.fx fails as soon as one of them is erased.
    """
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            operand.users.setdefault(node)


def _is_impure(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and is_mutable(node.target)


def _is_grad_region(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == (
        "wrap_with_set_grad_enabled"
    )


def _inline_grad_regions(module: torch.fx.GraphModule, signature: Any) -> None:
    """Inlines set_grad_enabled regions; nodes that ran without gradients get the mark OFF."""
    while regions := [n for n in module.graph.nodes if _is_grad_region(n)]:
        for node in regions:
            _inline_region(module, node, signature)


def _inline_region(module: torch.fx.GraphModule, node: torch.fx.Node, signature: Any) -> None:
    enabled, attribute, *operands = node.args
    body = getattr(module, attribute.target)
    env: dict[torch.fx.Node, Any] = {}
    places = iter(operands)
    outputs: tuple = ()
    with module.graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(places)
            elif inner.op == "output":
                outputs = torch.fx.map_arg(inner.args[0], lambda n: env[n])
            else:
                copy = module.graph.node_copy(inner, lambda n: env[n])
                if inner.op == "get_attr":
                    copy.target = _move_attribute(module, body, inner.target)
                copy.meta[OFF] = not enabled
                env[inner] = copy
    replace_call(module.graph, node, outputs, signature)


def _move_attribute(module: torch.fx.GraphModule, body: torch.fx.GraphModule, name: str) -> str:
    target, count = f"inlined_{name}", 0
    while hasattr(module, target):
        count += 1
        target = f"inlined_{name}_{count}"
    setattr(module, target, getattr(body, name))
    return target


def _drop_assertions(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and hasattr(node.target, "_schema"):
            if node.target.name() in _ASSERTIONS and not node.users:
                graph.erase_node(node)


def _stop_detached(graph: torch.fx.Graph, signature: Any) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
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
