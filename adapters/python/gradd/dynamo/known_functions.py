"""Functions with a backward of their own that is the derivative of their forward: inlined.

A `torch.autograd.Function` has a backward in Python, which the daemon does not run. That of the
functions listed here gives what differentiating their forward gives, and saves memory or launches
in PyTorch alone; a test compares each with its own backward in f64. In a graph of Dynamo the body
of their forward takes their place. Others stay as they are, those with an estimate in place of a
derivative (straight-through, clipped) among them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from gradd import private
from gradd.dynamo.lower import CUSTOM, value_of
from gradd.dynamo.rewriting import RewriteError, Rewriter
from gradd.graph.nodes import takes_graphs

Node = torch.fx.Node

# Module and name. PEFT's HadaWeightCP is none: its gradients of the weights w1a and w2a are not
# those of its forward.
DECLARED = (
    ("transformers.models.bloom.modeling_bloom", "GeLUFunction"),
    ("transformers.models.sew_d.modeling_sew_d", "XSoftmax"),
    ("peft.tuners.loha.layer", "HadaWeight"),
    ("peft.tuners.randlora.layer", "UniqueBaseGrad"),
)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in forward\n')


def inline(module: torch.fx.GraphModule) -> int:
    """Puts the bodies of known functions in their place; returns how many there were.

    Args:
        module: A graph of Dynamo, whose modes are marked; it is changed.
    """
    found = [node for node in module.graph.nodes if takes_graphs(node.target, {CUSTOM})]
    lines = _lines() if found else {}
    return sum(_inlined(module, node, lines) for node in found)


def _lines() -> set[tuple[str, int]]:
    """Files and lines of known forwards, of modules that have been imported."""
    found = set()
    for name, kind in DECLARED:
        function = getattr(sys.modules.get(name), kind, None)
        code = getattr(getattr(function, "forward", None), "__code__", None)
        if code is not None:
            lines = {line for *_, line in code.co_lines() if line is not None}
            found |= {(code.co_filename, line) for line in lines}
    return found


def _inlined(module: torch.fx.GraphModule, node: Node, lines: set[tuple[str, int]]) -> bool:
    body, backward = (getattr(module, n.target) for n in node.args[:2])  # type: ignore[union-attr]
    operands = node.args[2:]
    if node.kwargs.get("non_differentiable_idx") or not _is_known(body.graph, lines):
        return False
    gradients = backward.graph.output_node().args[0]
    # The operands that the forward computes with, and does not only keep.
    given = body.graph.find_nodes(op="placeholder")
    read = [any(user.op != "output" for user in one.users) for one in given]
    if any(map(_is_left_out, operands, gradients, read)):
        return False
    rewriter = Rewriter(module.graph)
    rewriter.at = node
    before = set(module.graph.nodes)
    try:
        results = _copied(body.graph, operands, rewriter)
    except RewriteError:
        results = None
    if results is None:
        for made in reversed([n for n in module.graph.nodes if n not in before]):
            module.graph.erase_node(made)
        return False
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        module.graph.erase_node(user)
    sources = node.all_input_nodes
    module.graph.erase_node(node)
    for source in sources:  # the bodies, and views for the backward alone
        if not source.users and (source.op == "get_attr" or source.target is getattr):
            module.graph.erase_node(source)
    return True


def _is_known(graph: torch.fx.Graph, lines: set[tuple[str, int]]) -> bool:
    """Whether known forwards made all of a graph."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is private.set_grad_enabled:
            continue
        frames = _FRAME.findall(node.meta.get("stack_trace") or "")
        if not any((name, int(line)) in lines for name, line in frames):
            return False
    return True


def _is_left_out(operand: Any, gradient: Any, read: bool) -> bool:
    """Whether the backward returns None for an operand whose gradient the forward has."""
    value = value_of(operand) if isinstance(operand, Node) else None
    has = isinstance(value, torch.Tensor) and value.requires_grad
    return gradient is None and has and read


def _copied(graph: torch.fx.Graph, operands: Sequence[Any], rewriter: Rewriter) -> Any:
    """The results of a body that is computed in front of its call; None = of another form.

    Raises:
        RewriteError: torch refuses a part of it.
    """
    known: dict[Node, Any] = {}
    given = iter(operands)
    modes = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = next(given)
        elif node.target is private.set_grad_enabled:
            modes += 1
        elif node.op == "output":
            results, _ = torch.fx.map_arg(node.args[0], lambda n: known[n])
            return results if modes in (0, 2) else None
        elif node.op in ("call_function", "call_method"):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            known[node] = rewriter.call(node.target, *args, **kwargs)
        else:
            return None
    return None
