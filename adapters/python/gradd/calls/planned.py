"""A graph of a call that is planned but not run: for estimates, explanations and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from gradd.calls.graph import Graph, Plan, type_of
from gradd.calls.liverows import Sizes
from gradd.calls.selection import selection_of
from gradd.session.client import Client

_ALL: Sizes = (0, 0, 0)


@dataclass(frozen=True)
class Planned:
    """The plans of one graph of a call."""

    graph: Graph
    plan: Plan  # over all rows
    less: Plan | None  # over the rows that the call needs; None = over all
    rows: Sizes  # sizes of its lists of rows
    trained: dict[int, torch.Tensor]  # the parameters that get a gradient, by identity
    given: tuple[torch.Tensor, ...] = field(default=(), compare=False)  # of graph.free
    pinned: int = 0  # bytes of inputs that PyTorch has made for it, which stay until its backward

    @property
    def used(self) -> Plan:
        """The plan of such a call."""
        return self.plan if self.less is None else self.less

    @classmethod
    def of(
        cls,
        client: Client,
        graph: Graph,
        bound: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        lazy: bool,
        values: bool = True,
    ) -> Planned:
        """Plans a call, without a memory budget. The caller holds the client's lock.

        Args:
            client: The session.
            graph: The graph.
            bound: Its bound inputs.
            inputs: Its free inputs.
            lazy: Outputs that only the loss needs are left out of a training step.
            values: The inputs are those of a call, and tell which rows it needs.
        """
        selection = selection_of(graph, list(bound), list(inputs), lazy)
        if graph.binding is None:
            graph.bound_types = [(t.dtype, tuple(t.shape)) for t in bound]
        asked = (client, tuple(map(type_of, inputs)), *selection.of_plan())
        plan = graph.plan(*asked, budget=0)
        rows = plan.live.sizes(list(inputs)) if values and plan.live is not None else _ALL
        less = graph.plan(*asked, budget=0, live=rows) if any(rows) else None
        trained = {id(bound[i]): bound[i] for i in selection.params}
        return cls(graph, plan, less, rows, trained, tuple(inputs))

    def within(self, budget: int) -> Planned:
        """The same within a memory budget; 0 = without one."""
        if not budget:
            return self
        asked = (self.plan.client, *self.plan.key[:5])
        plan = self.graph.plan(*asked, budget=budget)
        less = None
        if self.less is not None:
            less = self.graph.plan(*asked, budget=budget, live=self.rows)
        return replace(self, plan=plan, less=less)
