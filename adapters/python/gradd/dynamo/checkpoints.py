"""Activation checkpoints and nested regions in a graph of Dynamo: replaces calls by their bodies.

The daemon decides itself what it keeps for a backward; a forward with checkpoints asks it to
recompute. Regions (torch.compiler.nested_compile_region) serve compilers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from gradd import private
from gradd.dynamo.lower import value_of
from gradd.graph.nodes import fake_mode, takes_graphs
from gradd.memory.watch import address

Node = torch.fx.Node

# Arguments in front of the operands: the body, and a region's name.
_BEFORE = {"tag_activation_checkpoint": 1, "wrap_activation_checkpoint": 1, "invoke_subgraph": 2}


def inline(module: torch.fx.GraphModule) -> int:
    """Inlines them, in place; returns how many checkpoints there were."""
    count = checkpoints = 0
    taken: set[torch.fx.GraphModule] = set()
    while found := [n for n in module.graph.nodes if takes_graphs(n.target, _BEFORE)]:
        for node in found:
            checkpoints += not takes_graphs(node.target, ("invoke_subgraph",))
            body = getattr(module, node.args[0].target)  # type: ignore[union-attr]
            made = _inline_one(module, node, body, count)
            if body in taken:
                _own_values(made)
            taken.add(body)
            count += 1
    return checkpoints


def _inline_one(
    module: torch.fx.GraphModule, node: Node, body: torch.fx.GraphModule, number: int
) -> dict[Node, Node]:
    """The nodes of the graph by those of the body."""
    operands = node.args[_BEFORE[node.target.name()] :]  # type: ignore[union-attr]
    known = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    with module.graph.inserting_before(node):
        for inner in body.graph.find_nodes(op="get_attr"):
            name = f"body_{number}_{inner.target}".replace(".", "_")
            setattr(module, name, getattr(body, str(inner.target)))
            known[inner] = module.graph.get_attr(name)
            known[inner].meta = dict(inner.meta)
        result: Any = module.graph.graph_copy(body.graph, known)
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(result[user.args[1]])
            module.graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    module.graph.erase_node(node)
    return known


def _own_values(known: dict[Node, Node]) -> None:
    """Other fake tensors than a body has that was inlined before: one tensor is one value."""
    mode = fake_mode(map(value_of, known))
    if mode is None:
        return
    copies: dict[int, torch.Tensor] = {}
    first: dict[int, torch.Tensor] = {}  # by storage: the others are its views
    for inner, node in known.items():
        if inner.op == "placeholder" and isinstance(value_of(inner), torch.Tensor):
            copies[id(value_of(inner))] = first[address(value_of(inner))] = value_of(node)

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in copies:
            return copies.get(id(value), value)
        form = (value.shape, value.stride())
        base = first.get(address(value))
        if base is not None and base.dtype is value.dtype:
            copy = base.as_strided(*form, value.storage_offset())
        else:
            copy = torch.empty_strided(*form, dtype=value.dtype, device=value.device)
            first.setdefault(address(value), copy)
        copies[id(value)] = copy
        return copy.requires_grad_(value.requires_grad)

    with mode, torch.no_grad():
        for inner, node in known.items():
            if inner.op not in ("placeholder", "get_attr"):
                node.meta["example_value"] = private.pytree.tree_map(copied, value_of(inner))
