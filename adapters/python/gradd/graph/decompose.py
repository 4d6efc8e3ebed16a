"""Decomposes operators that consist of others, one by one.

torch decomposes an operator for this one call: the resulting operators take the node's place.
Otherwise the whole program is decomposed, which takes several times as long as the translation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import make_fx

from gradd import private
from gradd.graph import rules as own
from gradd.graph.nodes import Operator, argument, fake_mode, is_mutable, replace_call

# Products and rearrangements whose operator in ONNX would not do, where it has one. What checks
# indices or has edges of its own stays whole until those are looked after.
_COMPOSED = {
    *("einsum", "tensordot", "kron", "inner", "outer"),
    *("linalg_multi_dot", "chain_matmul", "matrix_power", "linalg_matrix_power"),
    *("hstack", "vstack", "dstack", "column_stack"),
    *("trapezoid", "trapz", "cumulative_trapezoid", "gradient"),
}
_READ_SIZES = (torch.ops.aten.size.default, operator.getitem)  # torch.gradient() leaves some unread
Rules = Mapping[Any, Callable[..., Any]]
Wanted = Callable[[Any], bool]


def decompose(
    graph: torch.fx.Graph,
    signature: Any,
    wanted: Wanted | None = None,
    rules: Rules = own.DRAWS,
) -> None:
    """Replaces operators that consist of others, in place.

    Args:
        graph: The graph to change.
        signature: Follows its outputs.
        wanted: Which operators, if nothing of the kind is left then; None = what torch composes
            of others, as einsum(), and draws.
        rules: For operators that torch does not compose itself; the default are those of draws.
    """
    for node in list(graph.nodes):
        target = node.target
        if not isinstance(target, Operator) or is_mutable(target):
            continue
        parts = wanted is None and _is_open_split(node)
        if parts or (wanted or _is_composed)(target):
            rule = partial(_slices, len(node.meta["val"])) if parts else rules.get(target)
            rule = rule or own.LATE.get(target.name())
            body = _steps(node, rule)
            if body is None or wanted and not _is_enough(body, wanted, rules):
                continue
            _inline(graph, node, body, signature)


def replace(
    graph: torch.fx.Graph, node: torch.fx.Node, rule: Callable[..., Any], signature: Any
) -> None:
    """Puts a rule's steps in an operator's place; it stays if the rule cannot be traced.

    Args:
        graph: The graph to change.
        node: Of an operator.
        rule: Takes the operator's arguments.
        signature: Follows the outputs of the graph.
    """
    body = _steps(node, rule)
    if body is not None:
        _inline(graph, node, body, signature)


def _is_enough(body: torch.fx.Graph, wanted: Wanted, rules: Rules) -> bool:
    """Decomposes an operator; returns whether no wanted operators are left."""
    decompose(body, SimpleNamespace(output_specs=[]), wanted, rules)
    return not any(isinstance(n.target, Operator) and wanted(n.target) for n in body.nodes)


def _is_composed(target: Operator) -> bool:
    name = private.schema(target).name.removeprefix("aten::")
    ours = target in own.DRAWS or target.name() in own.LATE
    return ours or name in _COMPOSED and _is_torchs(target)


def _is_open_split(node: torch.fx.Node) -> bool:
    """Whether a split's size is a number of the call, as in chunk() along a free axis, or the axis.

    torch has fixed the number of parts, which the exporter's operator leaves open: a sequence, at
    which folding in onnxscript fails if the size has no value.
    """
    if node.target is not torch.ops.aten.split.Tensor:
        return False
    dim = argument(node, "dim") or 0
    return isinstance(node.args[1], torch.fx.Node) or not isinstance(
        node.args[0].meta["val"].shape[dim],
        int,  # type: ignore[union-attr]
    )


def _slices(count: int, x: torch.Tensor, size: Any, dim: int = 0) -> list[torch.Tensor]:
    ends = [size * (i + 1) for i in range(count - 1)] + [x.shape[dim]]
    return [torch.ops.aten.slice.Tensor(x, dim, size * i, end) for i, end in enumerate(ends)]


def _is_torchs(target: Operator) -> bool:
    """Whether torch composes an operator of others in C++."""
    return target.has_kernel_for_dispatch_key("CompositeImplicitAutograd")


def _steps(node: torch.fx.Node, rule: Callable[..., Any] | None) -> torch.fx.Graph | None:
    """The operator's decomposition for its operands; None if torch has none."""
    if rule is None:
        if not _is_torchs(node.target):  # type: ignore[arg-type]
            return None
        rule = node.target.decompose  # type: ignore[union-attr]
    operands = list(node.all_input_nodes)
    values = [operand.meta.get("val") for operand in operands]
    mode = fake_mode([*values, node.meta.get("val")])
    if mode is None:
        return None

    def run(*given: Any) -> Any:
        known = dict(zip(operands, given, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
        return rule(*args, **kwargs)

    try:
        with mode, private.enable_python_dispatcher():  # C++ would ask for sizes, and so fix them
            body = make_fx(run)(*values).graph
    except Exception:  # a step that depends on values: the whole program's way says what
        return None
    body.eliminate_dead_code(lambda step: step.target not in _READ_SIZES)
    if any(is_mutable(step.target) for step in body.nodes if isinstance(step.target, Operator)):
        return None  # only that way makes writes functional
    return body if _is_same(body.output_node().args[0], node.meta.get("val")) else None


def _is_same(results: Any, expected: Any) -> bool:
    """Whether decomposition leaves everything known of the results unchanged."""
    found = private.pytree.tree_leaves(torch.fx.map_arg(results, lambda n: n.meta.get("val")))
    wanted = private.pytree.tree_leaves(expected)
    return len(found) == len(wanted) and all(
        (a.dim(), a.dtype) == (b.dim(), b.dtype)
        for a, b in zip(found, wanted, strict=True)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    )


def _inline(graph: torch.fx.Graph, node: torch.fx.Node, body: torch.fx.Graph, sig: Any) -> None:
    steps = body.find_nodes(op="placeholder")
    known: dict[torch.fx.Node, Any] = dict(zip(steps, node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(body, known)
    for step in body.nodes:
        if step.op not in ("placeholder", "output"):
            known[step].meta = {**node.meta, "val": step.meta.get("val")}
    replace_call(graph, node, result, sig)
