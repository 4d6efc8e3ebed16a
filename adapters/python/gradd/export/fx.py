"""Pre-pass on the exported program that keeps what differentiation must know.

The train-mode program still shows detach() and no_grad regions; the ONNX exporter would drop
both without a trace, and gradients would silently be wrong. Here every no_grad region is
inlined, and each value that leaves it, like each detach(), goes through the registered operator
gradd::stop_gradient, which becomes com.gradd::StopGradient. Runs before any decomposition.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from gradd.export import types

_library = torch.library.Library("gradd", "FRAGMENT")
_library.define("stop_gradient(Tensor x) -> Tensor")
_library.impl("stop_gradient", lambda x: x.detach().clone(), "CompositeExplicitAutograd")

_ASSERTIONS = {
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_async.msg",
    "aten::_assert_scalar",
    "aten::_assert_tensor",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}
_DETACH = {"aten::detach", "aten::detach_"}
_OFF = "gradd_no_grad"


def prepare(program: Any) -> None:
    """Rewrites an ExportedProgram in place: StopGradient made explicit, assertions removed."""
    for module in list(program.graph_module.modules()):
        if isinstance(module, torch.fx.GraphModule):
            _inline_grad_regions(module, program.graph_signature)
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            _drop_assertions(module.graph)
            _copy_attention(module.graph)
            types.make_explicit(module.graph, program.graph_signature)
            _stop_detached(module.graph, program.graph_signature)
            _stop_regions(module.graph, program.graph_signature)
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


def _is_impure(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    return node.op == "call_function" and is_mutable(node.target)


def is_mutable(target: Any) -> bool:
    """True if the operator writes to one of its arguments."""
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _is_grad_region(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == (
        "wrap_with_set_grad_enabled"
    )


def _inline_grad_regions(module: torch.fx.GraphModule, signature: Any) -> None:
    """Inlines set_grad_enabled regions; nodes that ran without gradients get the mark _OFF."""
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
                copy.meta[_OFF] = not enabled
                env[inner] = copy
    _replace_outputs(module.graph, node, outputs, signature)


def _move_attribute(module: torch.fx.GraphModule, body: torch.fx.GraphModule, name: str) -> str:
    target, count = f"inlined_{name}", 0
    while hasattr(module, target):
        count += 1
        target = f"inlined_{name}_{count}"
    setattr(module, target, getattr(body, name))
    return target


def _replace_outputs(graph: Any, node: torch.fx.Node, outputs: tuple, signature: Any) -> None:
    if isinstance(outputs, torch.fx.Node):
        _replace(node, outputs, signature)
    else:
        for user in list(node.users):
            _replace(user, outputs[user.args[1]], signature)
            graph.erase_node(user)
    graph.erase_node(node)


def _replace(old: torch.fx.Node, new: torch.fx.Node, signature: Any) -> None:
    old.replace_all_uses_with(new)
    _rename_outputs(signature, old.name, new.name)


def _rename_outputs(signature: Any, old: str, new: str) -> None:
    for spec in signature.output_specs:
        if getattr(spec.arg, "name", None) == old:
            spec.arg.name = new


def _drop_assertions(graph: torch.fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and hasattr(node.target, "_schema"):
            if node.target.name() in _ASSERTIONS and not node.users:
                graph.erase_node(node)


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _stop(graph: torch.fx.Graph, source: torch.fx.Node) -> torch.fx.Node:
    node = graph.call_function(torch.ops.gradd.stop_gradient.default, (source,))
    node.meta = {k: v for k, v in source.meta.items() if k != _OFF}
    return node


def _stop_detached(graph: torch.fx.Graph, signature: Any) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            continue
        if node.target.name() not in _DETACH:
            continue
        source = node.args[0]
        if _is_float(node):
            with graph.inserting_before(node):
                stopped = _stop(graph, source)
            stopped.meta = {k: v for k, v in node.meta.items() if k != _OFF}
            source = stopped
        _replace(node, source, signature)
        graph.erase_node(node)


def _stop_regions(graph: torch.fx.Graph, signature: Any) -> None:
    """Puts a StopGradient where a value computed without gradients is used with them."""
    for node in list(graph.nodes):
        if not node.meta.get(_OFF):
            continue
        if node.op == "call_function" and is_mutable(node.target):
            _stop_operands(graph, node)
        if not _is_float(node):
            continue
        outside = [u for u in node.users if not u.meta.get(_OFF)]
        if not outside:
            continue
        with graph.inserting_after(node):
            stopped = _stop(graph, node)
        for user in outside:
            user.replace_input_with(node, stopped)
            if user.op == "output":
                _rename_outputs(signature, node.name, stopped.name)


def _stop_operands(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """An in-place update under no_grad must not become a path for gradients once functional."""
    target = node.args[0] if node.args else None
    for source in list(node.all_input_nodes):
        if source is target or source.meta.get(_OFF) or not _is_float(source):
            continue
        with graph.inserting_before(node):
            node.replace_input_with(source, _stop(graph, source))
