"""Activation checkpoints in a graph of Dynamo: replaces their calls by their bodies.

The daemon decides itself what it keeps for a backward; a forward with checkpoints asks it to
recompute.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from gradd.graph.nodes import takes_graphs

_NAMES = frozenset({"tag_activation_checkpoint", "wrap_activation_checkpoint"})


def inline(module: torch.fx.GraphModule) -> int:
    """Inlines them, in place; returns how many there were."""
    count = 0
    while found := [n for n in module.graph.nodes if takes_graphs(n.target, _NAMES)]:
        for node in found:
            _inline_one(module, node, count)
            count += 1
    return count


def _inline_one(module: torch.fx.GraphModule, node: torch.fx.Node, number: int) -> None:
    body = getattr(module, node.args[0].target)  # type: ignore[union-attr]
    known = dict(zip(body.graph.find_nodes(op="placeholder"), node.args[1:], strict=True))
    with module.graph.inserting_before(node):
        for inner in body.graph.find_nodes(op="get_attr"):
            name = f"checkpoint_{number}_{inner.target}".replace(".", "_")
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
