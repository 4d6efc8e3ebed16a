"""Runs nodes of a graph of Dynamo in PyTorch, each under its own modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.fx

from gradd.dynamo import modes
from gradd.dynamo.lower import attribute, value_of
from gradd.dynamo.sizes import UnknownNumberError, is_number

Values = dict[torch.fx.Node, Any]


class InTorch:
    """Some nodes of a graph, to be run in order."""

    def __init__(
        self,
        nodes: Iterable[torch.fx.Node],
        owner: torch.fx.GraphModule,
        around: modes.Modes,
        same: Mapping[torch.fx.Node, torch.fx.Node] | None = None,
    ) -> None:
        """Args:
        nodes: In the order of the graph; modes are marked.
        owner: The module of the graph.
        around: Modes of the call, which are on already.
        same: Nodes that have run, and whose value is another node's.
        """
        self._same = same or {}
        self._around = around
        self._owner = owner
        self.nodes = [n for n in nodes if not modes.changes(n)]
        key = lambda n: (modes.of(n), modes.leaves_inference(n))  # noqa: E731
        self._groups = [(*m, list(group)) for m, group in groupby(self.nodes, key)]

    def run(self, known: Values, numbers: Callable[[Any], Any]) -> None:
        """Adds the values of the nodes.

        Args:
            known: Values so far, by node.
            numbers: What a number of the trace is in this call.
        """

        # A graph that was made without it may run in inference mode.
        inference = torch.is_inference_mode_enabled()
        for wanted, outside, nodes in self._groups:
            if inference and not outside:
                wanted = wanted._replace(inference=True)
            if wanted == self._around:
                self._run(nodes, known, numbers)
            else:
                with wanted.entered():
                    self._run(nodes, known, numbers)

    def _run(
        self,
        nodes: list[torch.fx.Node],
        known: Values,
        numbers: Callable[[Any], Any],
    ) -> None:
        operand: Callable[[torch.fx.Node], Any] = partial(self.value, known, numbers)
        for node in nodes:
            if node.op == "get_attr":
                known[node] = attribute(self._owner, node)
                continue
            if node in self._same:
                known[node] = known[self._same[node]]
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), operand)
            if node.op == "call_method":
                known[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def value(self, known: Values, numbers: Callable[[Any], Any], node: torch.fx.Node) -> Any:
        """The value of a node. (A closure that calls itself would hold all values for a while.)"""
        if node not in known:
            if node.op == "get_attr":  # the body of an operator, or a constant
                known[node] = attribute(self._owner, node)
            elif is_number(node):
                try:
                    known[node] = numbers(value_of(node))
                except UnknownNumberError:  # no size: the value of a tensor
                    self._run([node], known, numbers)
        return known[node]
