"""`x.requires_grad = True` in a forward, for a value that it has computed.

The encoders of wav2vec2 and its relatives do so with the samples, and T5 with its position bias, so
that a checkpoint has an argument with a gradient. Dynamo breaks its graph there. Here the graph
goes on, with a mark; where neither the value nor a view of it leaves the graph, nothing can ask for
its gradient, and the mark goes too. Another one runs in PyTorch, between pieces in the daemon.

And `x.grad` of a value that has a history: Dynamo takes it for a tensor, so that `x.grad is None`
is false. It is None here.
"""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from gradd.dynamo.lower import name_of, value_of
from gradd.dynamo.tracers import membership
from gradd.graph.nodes import takes_graphs
from gradd.memory.watch import address

MARK = "requires_grad_"  # the method that a mark calls
_ASKING = ("register_hook", "retain_grad")  # for a gradient, in the graph
_ALLOWED = "set_inplace_requires_grad_allowed"
_STORE, _LOAD = dis.opmap["STORE_ATTR"], dis.opmap["LOAD_ATTR"]


def mark(wanted: Callable[[], bool]) -> None:
    """Has Dynamo's tracers treat such values so where that is wanted at the time."""
    for table in membership.tables():
        table[_STORE] = functools.partial(_store, wanted, table[_STORE])
        table[_LOAD] = functools.partial(_load, wanted, table[_LOAD])


def _load(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Runs `variable.name`."""
    if instruction.argval == "grad" and wanted():
        variable = tracer.stack[-1].realize()
        proxy = None if variable.source else getattr(variable, "proxy", None)
        value = None if proxy is None else value_of(proxy.node)
        given = tracer.output.side_effects.has_pending_mutation_of_attr(variable, "grad")
        if isinstance(value, torch.Tensor) and not (value.is_leaf or given):
            tracer.popn(1)
            tracer.push(type(variable).build(tracer, None))
            return
    usual(tracer, instruction)


def _store(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Runs `variable.name = value`."""
    given, variable = tracer.stack[-2:]
    if instruction.argval == "requires_grad" and wanted() and _is_true(given):
        proxy = getattr(variable.realize(), "proxy", None)
        value = None if proxy is None or variable.source else value_of(proxy.node)
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.is_leaf:
            tracer.popn(2)
            if not value.requires_grad:  # else it says what is so
                made = tracer.output.create_proxy("call_method", MARK, (proxy,), {})
                made.node.meta["example_value"] = value.requires_grad_()
                variable.realize().requires_grad = True
            return
    usual(tracer, instruction)


def _is_true(variable: Any) -> bool:
    return variable.is_python_constant() and variable.as_python_constant() is True


def drop(graph: torch.fx.Graph) -> int:
    """Takes out of a graph of Dynamo the marks of what does not leave it.

    And what Dynamo puts around marks of its own, for transforms of functions.

    Returns:
        How many nodes it has taken out.
    """
    marks = [node for node in graph.nodes if node.op == "call_method" and node.target == MARK]
    around = [x for node in marks for x in (node.prev, node.next) if name_of(x) == _ALLOWED]
    for node in around:
        graph.erase_node(node)
    for node in marks:  # of its own Dynamo records no value
        node.meta.setdefault("example_value", value_of(node.args[0]))  # type: ignore[arg-type]
    if not marks or any(name_of(node) in _ASKING for node in graph.nodes):
        return len(around)
    results = [value_of(node) for node in graph.output_node().all_input_nodes]
    outside = {address(x) for x in results if isinstance(x, torch.Tensor)}
    given = [value_of(node) for node in graph.find_nodes(op="placeholder")]
    if any(map(_has_gradient, results)) and not any(map(_has_gradient, given)):
        return len(around)  # a result is to have a history, and has it from a mark
    inner = [node for node in marks if address(value_of(node)) not in outside]
    for node in inner:
        value_of(node).requires_grad_(False)
        graph.erase_node(node)
    return len(inner) + len(around)


def has_lost_hook(node: torch.fx.Node) -> bool:
    """Whether it is a mark behind a hook, which torch 2.11 traces as a function of the value.

    No gradient arrives there: the mark makes a leaf of what the function returns.
    """
    if node.op != "call_method" or node.target != MARK:
        return False
    source = node.args[0]
    function = source.args[0] if source.target is operator.getitem else source
    return takes_graphs(function.target, ("autograd_function_apply",))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
