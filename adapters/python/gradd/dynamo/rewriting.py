"""New nodes in a graph of Dynamo, with what Dynamo would know of them."""

from __future__ import annotations

from typing import Any

import torch.fx

from gradd.dynamo import modes
from gradd.dynamo.lower import value_of
from gradd.graph.nodes import fake_mode

Node = torch.fx.Node


class RewriteError(Exception):
    """There is no other form of a node."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node


class Rewriter:
    """Makes calls in front of a node, under its modes."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph  # of Dynamo; its nodes have been told their modes
        self.at: Node | None = None  # the present node

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> Node:
        """A call of a function, or of a method that a text names.

        Raises:
            RewriteError: torch refuses it.
        """
        assert self.at is not None
        with self.graph.inserting_before(self.at):
            make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
            node = make(target, args, kwargs)
        node.meta = {k: v for k, v in self.at.meta.items() if k not in ("val", "example_value")}
        given, named = torch.fx.map_arg((args, kwargs), value_of)
        sources = (*node.all_input_nodes, *self.at.all_input_nodes)
        mode = fake_mode(value_of(n) for n in sources)
        if mode is None:
            raise RewriteError(self.at)
        try:
            with mode, modes.of(self.at).entered():
                if isinstance(target, str):
                    value = getattr(given[0], target)(*given[1:], **named)
                else:
                    value = target(*given, **named)
        except Exception as error:
            raise RewriteError(self.at) from error
        node.meta["example_value"] = value
        return node
