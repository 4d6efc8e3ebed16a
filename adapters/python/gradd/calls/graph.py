"""A captured graph as calls use it: its bound inputs, its sent inputs, and its gradients.

Each capture makes one. Graph inputs are of two kinds: a binding names the *bound* ones (parameters,
and buffers that the graph does not change) once; the *free* ones (the call's tensors, buffers that
the graph changes) are copied into the ring for every forward. Changed buffers travel as copies so
that a replay after a restart reads their original values.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gradd import errors, interrupts, options
from gradd.calls.liverows import LiveRows, Sizes
from gradd.calls.parameters import Binding, Entry, Home, State
from gradd.calls.slots import Layout
from gradd.memory.budget import Memory
from gradd.memory.shm import DTYPE_CODES, DTYPES
from gradd.memory.watch import data_ptr
from gradd.session import bases, protocol
from gradd.spec import Capture

logger = logging.getLogger("gradd")

_NAMED = 3  # of tensors that are copied
_PLANS = 64  # kept per graph; compiling again costs milliseconds


@dataclass(frozen=True, eq=False)
class Plan:
    """A graph compiled for concrete shapes and a choice of outputs and gradients.

    Attributes:
        key: Shapes and choices, by which its graph finds it.
        graph: Its source; a restarted daemon must know it as long as the plan.
        info: The daemon's reply.
        outputs: Wanted output names, in the order of the request.
        params: Names of the parameters whose gradient is wanted: the first of the gradients.
        input_grads: Names of the inputs whose gradient is wanted: the rest.
        grad_outputs: Positions in `outputs` whose gradient may arrive.
        param_types: Types and sizes of `params`.
        early: Positions in `params` of those whose gradient a forward forms.
        early_layout: Slot for these, which a run has from its forward on.
        layout: Slot for the others.
        live: Rows that it could leave out; None = none, or it leaves some out already.
    """

    client: Any
    key: tuple
    graph: protocol.GraphInfo
    info: protocol.PlanInfo
    outputs: tuple[str, ...]
    params: tuple[str, ...]
    input_grads: tuple[str, ...]
    grad_outputs: tuple[int, ...]
    param_types: list[tuple[torch.dtype, tuple[int, ...]]]
    early: tuple[int, ...]
    early_layout: Layout
    layout: Layout
    live: LiveRows | None = None
    over: str | None = None  # why no plan over all rows meets the budget; this one may not run


class Passes(NamedTuple):
    """Which rewrites the daemon leaves out."""

    plain: bool  # patterns that become one operator
    dense: bool  # a loss that never holds its logits

    @classmethod
    def read(cls) -> Passes:
        return cls(not options.get("GRADD_FUSE"), not options.get("GRADD_CHUNKED_LOSS"))


def check_supported(info: protocol.GraphInfo, cap: Capture) -> None:
    """Raises UnsupportedError with all kinds of operators that the daemon does not have."""
    kinds: dict[str, list[str]] = {}
    for node, op, domain in info.unsupported:
        kinds.setdefault(f"{domain}::{op}" if domain else op, []).append(node)
    if not kinds:
        return
    sources = dict(cap.sources)
    texts = []
    for op, nodes in kinds.items():
        location = ", ".join(filter(None, (f"node {nodes[0]}", sources.get(nodes[0]))))
        count = f"; {len(nodes)} of them" if len(nodes) > 1 else ""
        texts.append(f"{op} ({location}{count})")
    what, verb = ("operators", "are") if len(texts) > 1 else ("operator", "is")
    raise errors.UnsupportedError(f"{what} {', '.join(texts)} {verb} not in the daemon")


class Graph:
    """One capture that the daemon knows. The caller holds the client's lock."""

    def __init__(
        self,
        owner: Any,
        cap: Capture,
        info: protocol.GraphInfo,
        memory: Memory,
        entry: Callable[[str], Entry],
        passes: Passes,
    ) -> None:
        """Args:
        owner: Its `training` tells whether outputs may be left out, its `live_rows` counts rows,
            and its `reduction` tells whether gradients are averaged over processes.
        cap: The capture.
        info: The daemon's description of it.
        memory: The most that its plans may take.
        entry: Where a name is to be found.
        passes: The passes that the daemon leaves out.
        """
        self.cap = cap
        without = replace(memory, budget=0)
        self._memory = (without.fields(cap.checkpoints), memory.fields(cap.checkpoints))
        self._budget = None if memory.budget else 0  # where a call asks for all of it
        self.info = info
        self.owner = owner
        self.reduction = owner.reduction
        self.plain, self.dense = passes
        self.user = [o for o in cap.outputs if o.kind == "user"]
        self.changed = [o for o in cap.outputs if o.kind == "buffer"]
        self.rows = [o for o in cap.outputs if o.kind == "rows"]  # of sparse gradients
        self.hidden = tuple(o.name for o in (*self.changed, *self.rows))
        changed = {o.fqn for o in self.changed}
        states = set(cap.params) | set(cap.buffers)
        order = [name for name, _, _ in info.inputs]
        self.bound = [n for n in order if n in states and n not in changed]
        self.free = [n for n in order if n not in states or n in changed]
        self.specs = {s.name: s for s in cap.inputs}
        self.entries = [entry(n) for n in self.bound]
        is_param = set(cap.params)
        self.param_inputs = [i for i, n in enumerate(order) if n in is_param]
        self.param_at = [i for i, n in enumerate(self.bound) if n in is_param]
        self.changed_entries = [entry(o.fqn) for o in self.changed]
        # Results from bound and free inputs, as PyTorch computes them; None = it takes more.
        self.in_torch: Callable[[list, list], Sequence[torch.Tensor]] | None = None
        self.homes: list[Home] = []
        self.pointers: list[tuple] = []
        self.bound_types: list[tuple[torch.dtype, tuple[int, ...]]] = []  # when they were bound
        self.binding: Binding | None = None
        self.generation = -1
        self.plans: OrderedDict[Hashable, Plan] = OrderedDict()  # the last one was used last
        self.made: dict[Plan, Any] = {}  # of these, calls over live rows: see LiveRows.choose
        self.kinds: dict[Hashable, Any] = {}  # of plans, for the self-checks
        self.asked_for: set[str] = set()  # outputs that were left out and then needed after all
        self.asks_again = False  # these do not fit the budget: reading them runs a forward
        self.steps = 0  # of an optimizer while such an output was alive
        self.ahead: list[Any] = []  # references to those that it had computed ahead

    def differentiable(
        self, params: tuple[int, ...], input_grads: tuple[str, ...]
    ) -> tuple[list[bool], tuple[int, ...], tuple[str, ...]]:
        """Per user output whether it has a path to any of these, and those that have a path.

        Args:
            params: Positions in `bound` of parameters that require a gradient.
            input_grads: Names of free inputs that do.
        """
        wanted = {self.bound[i] for i in params} | set(input_grads)
        flags = [
            bool(self.info.reach[o.name] & wanted) and self.output_dtype(o.name).is_floating_point
            for o in self.user
        ]
        used: set[str] = set()
        for output, flag in zip(self.user, flags, strict=True):
            if flag:
                used |= self.info.reach[output.name]
        params = tuple(i for i in params if self.bound[i] in used)
        return flags, params, tuple(n for n in input_grads if n in used)

    def bind(self, state: State) -> tuple[Binding, list[torch.Tensor]]:
        """Compares addresses, re-homes moved tensors; returns the binding and the bound tensors."""
        tensors = [p.table[p.key] for p in self.entries]
        if bases.mapped:
            bases.settle(state.client, tensors)
        pointers = [_where(t) for t in tensors]
        if state.generation != self.generation or pointers != self.pointers:
            self._settle(state)
            tensors = [p.get() for p in self.entries]
        if state.mirrored:
            pairs = [
                (t, h) for t, h in zip(tensors, self.homes, strict=True) if h.mirror is not None
            ]
            if pairs:
                state.refresh_mirrors(pairs)
                if state.generation != self.generation:
                    self._settle(state)
                self._say_copied(tensors)  # not of those that were alone by now
        return self.binding, tensors  # type: ignore[return-value]

    def _say_copied(self, tensors: Sequence[torch.Tensor]) -> None:
        copied = any(home.mirror is not None for home in self.homes)
        if not (copied and self.owner.client.memory.moves and self.owner.is_new("copied")):
            return
        for held, why in (
            (False, "they are not contiguous (a model in channels_last, say)"),
            (
                True,
                "their memory has another owner (a view or array of it, share_memory() before "
                "ORTModule, load_state_dict() with assign=True, a hook that computes the weight "
                "again, FSDP, DeepSpeed)",
            ),
        ):
            names = [
                name
                for name, tensor, home in zip(self.bound, tensors, self.homes, strict=True)
                if home.mirror is not None and tensor.is_contiguous() is held
            ]
            if names:
                logger.warning(
                    "%s: %d parameters or buffers are copied before every forward, as %s: %s%s; "
                    "see docs/status.md#parameters-and-memory",
                    self.owner.title,
                    len(names),
                    why,
                    ", ".join(names[:_NAMED]),
                    ", ..." if len(names) > _NAMED else "",
                )

    def _settle(self, state: State) -> None:
        with interrupts.deferred:
            homes = state.settle(self.entries)
            if self.binding is None or homes != self.homes:
                self.binding = Binding(state.client, homes)
            self.homes = homes
            tensors = [p.get() for p in self.entries]
            self.pointers = list(map(_where, tensors))
            self.bound_types = list(map(_tensor_type, tensors))
            self.generation = state.generation

    def plan(
        self,
        client: Any,
        free_types: tuple[protocol.Type, ...],
        params: tuple[int, ...],
        input_grads: tuple[str, ...],
        outputs: tuple[str, ...],
        grad_outputs: tuple[int, ...],
        *,
        budget: int | None = None,
        live: Sizes = (0, 0, 0),
    ) -> Plan:
        """The plan for these shapes and selections, compiled when it is not cached.

        Args:
            client: The client.
            free_types: Types of the free inputs, in their order.
            params: Positions in `bound` of the parameters that need a gradient.
            input_grads: Names of the free inputs that need one.
            outputs: Names of the wanted outputs.
            grad_outputs: Positions in `outputs` whose gradient may arrive.
            budget: Share of the memory budget; 0 = without one, None = all of it.
            live: Sizes of its lists of live rows.
        """
        budget = self._budget if budget is None else budget
        key = (free_types, params, input_grads, outputs, grad_outputs, budget, live)
        plan = self.plans.get(key)
        if plan is not None:
            self.keep(plan)
            return plan
        types = dict(zip(self.free, free_types, strict=True))
        known = self.bound_types or [_tensor_type(e.get()) for e in self.entries]
        for name, (dtype, shape) in zip(self.bound, known, strict=True):
            types[name] = (DTYPE_CODES[dtype], shape)
        names = tuple(self.bound[i] for i in params)
        fields = protocol.plan_fields(
            self.info.id,
            [types[n] for n, _, _ in self.info.inputs],
            self.bound,
            [*names, *input_grads],
            outputs,
            grad_outputs,
            parameters=self.param_inputs,
            plain=self.plain,
            dense=self.dense,
            live=live,
        )
        if grad_outputs:
            fields |= {"memory_budget": budget} if budget else self._memory[budget is None]
        info, over = self._planned(client, fields, any(live))
        param_types = [known[i] for i in params]
        early = tuple(i for i in range(len(param_types)) if i < len(info.early) and info.early[i])
        plan = Plan(
            client,
            key,
            self.info,
            info,
            outputs,
            names,
            input_grads,
            grad_outputs,
            param_types,
            early,
            Layout.of([param_types[i] for i in early]),
            Layout.of([one for i, one in enumerate(param_types) if i not in early]),
            LiveRows.of(info.live, self.free, self.info, self.owner.live_rows),
            over,
        )
        # Runs hold their plan: the daemon keeps it until the last of them is released.
        client.ends.watch(plan, partial(client.later, "plan.drop", {"plan": info.id}))
        self.keep(plan)
        if over is not None and plan.live is None:
            del self.plans[key]
            raise errors.OutOfMemoryError(over)
        return plan

    @staticmethod
    def _planned(
        client: Any, fields: dict[str, Any], live: bool
    ) -> tuple[protocol.PlanInfo, str | None]:
        """A plan; if all rows exceed the budget, one that says which rows to leave out."""
        try:
            return client.plan(fields), None
        except errors.OutOfMemoryError as error:
            if live or "memory_budget" not in fields:
                raise
            over = error.what
        return client.plan({k: v for k, v in fields.items() if k != "memory_budget"}), over

    def keep(self, plan: Plan) -> None:
        """A call uses this plan: another one is the next to be given up."""
        self.plans[plan.key] = plan
        self.plans.move_to_end(plan.key)
        if len(self.plans) > _PLANS:
            _, oldest = self.plans.popitem(last=False)
            self.made.pop(oldest, None)

    def left_out(self) -> set[int]:
        """Positions of the user outputs on which the loss depends, and no other result."""
        cap = self.cap
        if cap.loss_leaf is None:
            return set()
        return {i for i, spec in enumerate(self.user) if spec.leaf in cap.loss_ancestors}

    def output_dtype(self, name: str) -> torch.dtype:
        return DTYPES[self.info.types[name][0]]

    def drop(self) -> None:
        """Gives up plans and binding; runs that are not released keep theirs."""
        self.plans.clear()
        self.made.clear()
        self.binding = None


def _where(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    """Where a tensor lies and how; its type is part of what makes two captures different."""
    return data_ptr(tensor), tensor.stride()


def _tensor_type(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def type_of(tensor: torch.Tensor) -> protocol.Type:
    return (DTYPE_CODES[tensor.dtype], tuple(tensor.shape))
