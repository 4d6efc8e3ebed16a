"""Calls of one form: what they have in common, and the short way of a call that is like another.

`Prepared` is a plan with its binding and the places of tensors. Runs hold it, which live as long as
a graph of autograd, so nothing here leads to the owner of the module (guards and descriptions of
the module do).

`ShortWay` is what a bridge does first. The long way of a call finds out which capture, plan and
binding it takes, from everything that a call may depend on. It leaves a `Way`, which says by which
look a later call of the same form sees that all is as it was. A look is made of functions of C
wherever there are some: the interpreter's calls are what a small model waits for.
"""

from __future__ import annotations

import operator
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from os import getpid
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from gradd import options, schema, transforms
from gradd.calls import run as runs
from gradd.calls import watch
from gradd.calls.watch import data_ptr
from gradd.check import checktimes
from gradd.check.checktimes import SHARE
from gradd.export import autocast
from gradd.session.shm import DTYPE_CODES, DTYPES, nbytes, round_up

if TYPE_CHECKING:
    from gradd.calls.captured import CapturedGraph, Plan
    from gradd.calls.liverows import Sizes
    from gradd.calls.parameters import Binding, State
    from gradd.calls.run import Run
    from gradd.calls.slots import SlotSet
    from gradd.calls.wish import Wish
    from gradd.check.checktimes import Kind as Checked
    from gradd.check.checktimes import Times
    from gradd.export.guards.check import Guards
    from gradd.export.keys import ModulePart
    from gradd.session.client import Client
    from gradd.session.ring import Block
    from gradd.tokens import Tokens

Kind = tuple[torch.dtype, tuple[int, ...]]  # element type and sizes
_facts = operator.attrgetter("dtype", "shape", "requires_grad", "layout", "is_nested", "device")
_kind = operator.attrgetter("dtype", "shape")
_requires_grad = operator.attrgetter("requires_grad")
_stride = torch._C.TensorBase.stride
_any_autocast = torch._C._is_any_autocast_enabled
# What transforms.py refuses.
_level = torch._C._functorch.maybe_current_level
_recording = torch._C._get_tracing_state
_n_modes = torch._C._len_torch_dispatch_stack
_SMALLEST = transforms.SMALLEST
_CALL = torch.nn.Module.__call__  # what is around the forward of every module
_CALL_IMPL = torch.nn.Module._call_impl
_Tensor = torch.Tensor
_INEXACT = (float, complex)  # of which == does not tell all values apart
_SIMPLE = frozenset({_Tensor, *schema.CONSTANTS})
_KEPT = 64  # ways of a bridge


class Prepared:
    """A plan with its binding, and the order and places of tensors.

    Attributes:
        kinds: Element types and sizes of the free inputs.
        in_rows: Per free input its type, sizes, bytes, and place in the run's block of inputs.
        in_bytes: Of that block.
        out_rows: Per output of the plan its type, sizes and bytes.
        plain: What the plan computes is what the user gets, in this order.
    """

    def __init__(
        self,
        client: Client,
        slots: SlotSet,
        graph: CapturedGraph,
        plan: Plan,
        binding: Binding,
        kinds: Sequence[Kind],
        *,
        wish: Wish,
        lists: Sequence[int] = (),
    ) -> None:
        """Args:
        client: The session.
        slots: Gradient slots of the bridge.
        graph: The graph.
        plan: Its plan for these kinds.
        binding: The bound inputs as the daemon knows them.
        kinds: Of the free inputs.
        wish: What the call wants.
        lists: Sizes of the lists of live rows, which come behind the free inputs.
        """
        self.client = client
        self.slots = slots
        self.graph = graph
        self.plan = plan
        self.binding = binding
        self.kinds = list(kinds)
        self.wish = wish
        self.last = (weakref.ref(graph), weakref.ref(plan))
        self.trains = bool(plan.params or plan.input_grads)
        all_kinds = [*self.kinds, *((torch.int64, (n,)) for n in lists)]
        self.in_rows, self.in_bytes = _side_by_side(all_kinds)
        self._in_offsets = [offset for *_, offset in self.in_rows]
        self._in_codes = [DTYPE_CODES[dtype] for dtype, _ in all_kinds]
        self._in_dims = [dims for _, dims in all_kinds]
        self.out_rows = [
            (DTYPES[code], dims, nbytes(DTYPES[code], dims)) for code, dims in plan.info.outputs
        ]
        self._out_codes = [code for code, _ in plan.info.outputs]
        self._out_dims = [dims for _, dims in plan.info.outputs]
        at = {name: i for i, name in enumerate(graph.free)}
        self.grad_inputs = [at[name] for name in plan.input_grads]
        user = range(len(graph.user))
        self.plain = not graph.hidden and wish.real == list(user)
        self.all_differentiable = all(wish.differentiable)
        self.watches_readers = bool(graph.cap.depends)
        self.prints_memory = bool(options.get("ORTMODULE_PRINT_MEMORY_STATS"))

    @classmethod
    def of(
        cls,
        client: Client,
        slots: SlotSet,
        graph: CapturedGraph,
        binding: Binding,
        inputs: Sequence[torch.Tensor],
        wish: Wish,
    ) -> Prepared:
        """What runs with such free inputs have in common; compiles the plan if need be."""
        kinds = [(t.dtype, tuple(t.shape)) for t in inputs]
        types = tuple((DTYPE_CODES[dtype], shape) for dtype, shape in kinds)
        plan = graph.plan(client, types, *wish.of_plan(), budget=wish.budget)
        return cls(client, slots, graph, plan, binding, kinds, wish=wish)

    def for_plan(self, plan: Plan) -> Prepared:
        """The same call by another plan."""
        return self.with_lists(plan, ())

    def with_lists(self, plan: Plan, lists: Sequence[int]) -> Prepared:
        """The same call by a plan that takes lists of live rows of these sizes."""
        return Prepared(
            *(self.client, self.slots, self.graph, plan, self.binding, self.kinds),
            wish=self.wish,
            lists=lists,
        )

    def live(
        self, inputs: list[torch.Tensor], quiet: bool = False
    ) -> tuple[Prepared, list[torch.Tensor]]:
        """How a call with these free inputs runs, and its inputs: without rows nobody needs.

        `quiet`: a call of gradd's own, of which nothing is printed.
        """
        live = self.plan.live
        if live is None:
            return self, inputs
        return live.choose(self, inputs, self._compile_for, quiet)

    def _compile_for(self, sizes: Sizes) -> Plan:
        types = tuple((DTYPE_CODES[dtype], shape) for dtype, shape in self.kinds)
        wish = self.wish
        return self.graph.plan(self.client, types, *wish.of_plan(), budget=wish.budget, live=sizes)

    def fields(
        self, run: Run, inputs: Block | None, segments: list[int], offsets: list[int]
    ) -> dict[str, Any]:
        """Fields of a forward.

        Args:
            run: Which one.
            inputs: The block that holds the free inputs, None if there are none.
            segments: Of the outputs.
            offsets: The same.
        """
        n, segment, start = 0, 0, 0
        if inputs is not None:
            n, segment, start = len(self._in_offsets), inputs.segment.id, inputs.offset
        return {
            "plan": self.plan.info.id,
            "run": run.id,
            "seed": run.seed,
            "flags": run.flags,
            "b": self.binding.id,
            "in": {
                "segments": [segment] * n,
                "offsets": list(map(start.__add__, self._in_offsets)),
                "dtypes": self._in_codes,
                "dims": self._in_dims,
            },
            "out": {
                "segments": segments,
                "offsets": offsets,
                "dtypes": self._out_codes,
                "dims": self._out_dims,
            },
        }


def _side_by_side(kinds: Sequence[Kind]) -> tuple[list[tuple], int]:
    """Rows of (type, sizes, bytes, offset) of tensors that lie in one block, and its bytes."""
    rows, end = [], 0
    for dtype, dims in kinds:
        size = nbytes(dtype, dims)
        rows.append((dtype, dims, size, end))
        end += round_up(size)
    return rows, end


def _order(args: tuple, kwargs: dict, ordered: dict) -> list[int]:
    """Where the leaves of a call, as they come, are for the order of the capture."""
    n = len(schema.flatten_inputs(args, {})[0])
    order, places = list(range(n)), {}
    for name, value in kwargs.items():
        leaves = schema.flatten_inputs((), {name: value})[0]
        places[name] = range(n, n + len(leaves))
        n += len(leaves)
    for name in ordered:
        order += places[name]
    return order


class Way:
    """How a call sees that it is like the one that left this, and what it does then."""

    __slots__ = (
        *("prepared", "part", "guards", "asks", "tables", "keys", "pointers", "strides"),
        *(
            "requires",
            "chain",
            "careful",
            "filled",
            "kind",
            "times",
            "asked_for",
            "order",
            "leaf_at",
        ),
        *("numbers", "outside", "params", "grad_inputs", "flat", "outputs_at"),
    )

    def __init__(
        self,
        prepared: Prepared,
        part: ModulePart,
        guards: Guards,
        checked: tuple[Times, Checked] | None,
        leaves: list,
    ) -> None:
        """Args:
        prepared: What the call does.
        part: Description of the module.
        guards: Of its capture.
        checked: When self-checks of its kind of plan are due; None = never.
        leaves: Of the call, in the order of the capture.
        """
        graph = prepared.graph
        self.prepared = prepared
        self.part = part.key  # which another description may have as well
        self.guards = guards
        self.asks = guards.asks_arguments
        self.tables = [place.table for place in graph.places]
        self.keys = [place.key for place in graph.places]
        tensors = list(map(operator.getitem, self.tables, self.keys))
        self.pointers = list(map(data_ptr, tensors))
        self.strides = list(map(_stride, tensors))
        self.requires = list(map(_requires_grad, tensors))
        self.chain = graph.chain
        self.careful = bool(graph.ties) or graph.shared is not None
        self.filled = graph.filled
        self.times, self.kind = checked or (None, None)
        self.asked_for = len(graph.asked_for)
        self.params = prepared.wish.params
        self.grad_inputs = prepared.grad_inputs
        self._place_leaves(graph, leaves)
        self._place_outputs(graph)

    def _place_leaves(self, graph: CapturedGraph, leaves: list) -> None:
        """Where the free inputs are among the leaves of a call, or outside of it."""
        self.order: list[int] | None = None
        self.leaf_at, self.numbers, self.outside = [], [], []
        for i, name in enumerate(graph.free):
            spec = graph.specs.get(name)
            self.leaf_at.append(None if spec is None else spec.leaf)
            if spec is None:
                self.outside.append((i, graph.free_places[name].get))
            elif type(leaves[spec.leaf]) is not _Tensor:
                self.numbers.append(i)

    def _place_outputs(self, graph: CapturedGraph) -> None:
        """Where the leaves of a result of a simple form are among the outputs."""
        self.flat = graph.cap.flat if graph.shared is None else None
        at = {spec.leaf: i for i, spec in enumerate(graph.user)}
        self.outputs_at = [at[leaf] for leaf in self.flat[2]] if self.flat is not None else []

    def holds(self, state: State, part: ModulePart) -> list[torch.Tensor] | None:
        """The bound inputs if the module and what forward() reads are as they were, else None."""
        graph = self.prepared.graph
        if part.key is not self.part or state.generation != graph.generation or state.mirrored:
            return None
        if len(graph.asked_for) != self.asked_for:
            return None
        if list(map(watch.on_class, watch.NAMES)) != watch.found:
            return None
        kind = self.kind
        if kind is not None and (kind.failed or kind.calls + 1 >= kind.due):
            waits = (kind.done or kind.waits) and not kind.failed
            if not waits or checktimes.clock() - self.times.last >= kind.seconds / SHARE:
                return None
        for table, key, child in self.chain:
            if table.get(key) is not child:
                return None
        if self.careful and not graph.intact():
            return None
        tensors = list(map(operator.getitem, self.tables, self.keys))
        if list(map(data_ptr, tensors)) != self.pointers:
            return None
        if list(map(_stride, tensors)) != self.strides:
            return None
        if list(map(_requires_grad, tensors)) != self.requires:
            return None
        return tensors if self.guards.test() else None

    def inputs(self, leaves: list) -> list[torch.Tensor] | None:
        """The free inputs in order, None if one from outside has another type by now."""
        if not self.outside:
            found = list(map(leaves.__getitem__, self.leaf_at))
        else:
            found = [None if at is None else leaves[at] for at in self.leaf_at]
        for i in self.numbers:
            found[i] = schema.as_tensor_leaf(found[i])
        for i, get in self.outside:
            tensor = found[i] = get().detach()
            if _kind(tensor) != self.prepared.kinds[i]:
                return None
        return found

    def result(self, outputs: Sequence[Any]) -> Any:
        """The module's result, where it has a simple form."""
        kind, keys, _ = self.flat  # type: ignore[misc]
        if kind is None:
            return outputs[self.outputs_at[0]]
        values = map(outputs.__getitem__, self.outputs_at)
        return dict(zip(keys, values, strict=True)) if kind is dict else kind(values)


def called_as_usual(module: torch.nn.Module) -> bool:
    """Whether torch's own code is around the forward of this module."""
    kind = type(module)
    return kind.__call__ is _CALL and kind._call_impl is _CALL_IMPL


class ShortWay(ABC):
    """What a bridge does first with a call; whatever is not as it was goes the long way."""

    module: torch.nn.Module
    client: Client
    state: State
    described: ModulePart | None  # what the keys of captures know of the module
    forwards: Tokens  # of forwards that were put on the module itself
    given_forward: Callable[..., Any] | None  # with which the bridge was made
    version: int
    counts: Counter[str]
    clock: int
    calls: int
    last: tuple[weakref.ref, weakref.ref] | None  # graph and plan that ran last
    ways: dict[Hashable, Way]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `forward(*args, **kwargs)` returns, computed by the daemon."""
        self.calls += 1
        if (
            not self.ways
            or _level() is not None
            or forward_ad._current_level >= 0
            or _recording() is not None
            or _n_modes()
            or not _SMALLEST * 0.5
            or transforms.captures
        ):
            return self.long_way(args, kwargs)
        with self.client.lock:
            try:
                found = self._look_up(args, kwargs)
            except Exception:  # the long way says what is wrong
                found = None
            if found is not None:
                way, leaves, bound, inputs = found
                prepared, graph = way.prepared, way.prepared.graph
                live = prepared.plan.live
                if live is not None and live.waits:
                    live.waits -= 1
                elif live is not None:
                    prepared, inputs = prepared.live(inputs)
                if graph.evicted:
                    self._forget_evicted(graph)
                self.last = prepared.last
                run = runs.Run(prepared, bound, inputs, self.counts)
        if found is None:
            return self.long_way(args, kwargs)
        tensors = list(map(bound.__getitem__, way.params))
        tensors += map(inputs.__getitem__, way.grad_inputs)
        outputs = run.differentiated(tensors)
        return self.result(run, outputs, leaves) if way.flat is None else way.result(outputs)

    @abstractmethod
    def long_way(self, args: tuple, kwargs: dict) -> Any:
        """The same for any call."""

    @abstractmethod
    def result(self, run: Run, outputs: Sequence[Any], leaves: list) -> Any:
        """The module's result, from the graph's outputs."""

    def _look_up(self, args: tuple, kwargs: dict) -> tuple[Way, list, list, list] | None:
        """A call's way with its leaves, bound and free inputs; the caller has the lock."""
        client, part = self.client, self.described
        if client.closed or client.pid != getpid() or part is None or not part.is_fresh():
            return None
        form = self._form(args, kwargs, part)
        way = self.ways.get(form[0]) if form is not None else None
        if way is None:
            return None
        leaves = form[1]
        if way.order is not None:
            leaves = list(map(leaves.__getitem__, way.order))
        if way.asks and not way.guards.fits(leaves):
            return None
        bound = way.holds(self.state, part)
        inputs = way.inputs(leaves) if bound is not None else None
        if inputs is None:
            return None
        graph = way.prepared.graph
        graph.plans.move_to_end(way.prepared.plan.key)  # KeyError: it was given up
        for table, name, value in way.filled:
            if table[name] is None:
                table[name] = value
        if way.kind is not None:
            way.kind.calls += 1
        graph.uses.calls += 1
        self.clock = graph.used = self.clock + 1
        return way, leaves, bound, inputs

    def _form(self, args: tuple, kwargs: dict, part: ModulePart) -> tuple[tuple, list] | None:
        """Key of a call's form, sizes among it, and its leaves; None if it takes no short way."""
        leaves: list[Any] = [*args, *kwargs.values()]
        names: list[Any] = [*range(len(args)), *kwargs]
        structure: Hashable = (len(args), *kwargs)
        if not _SIMPLE.issuperset(map(type, leaves)):
            leaves, structure, names = schema.flatten_inputs(args, kwargs)
            if not _SIMPLE.issuperset(map(type, leaves)):
                return None
        form, tensors = [], []
        for name, leaf in zip(names, leaves, strict=True):
            kind = type(leaf)
            if kind is _Tensor:
                form.append(_facts(leaf))
                tensors.append(id(leaf))
            elif kind in (int, float) and name in schema.NUMERIC_INPUTS:
                form.append(kind)
            else:
                form.append((kind, repr(leaf) if kind in _INEXACT else leaf))
        if len(set(tensors)) != len(tensors) or not part.own.keys().isdisjoint(tensors):
            return None
        which = None
        if self.given_forward is None:
            if not called_as_usual(self.module):
                return None
            own = self.module.__dict__.get("forward")
            which = None if own is None else self.forwards.of(own)
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast.state() if _any_autocast() else None,
        )
        return (structure, *form, modes, self.version, which), leaves

    def leave_way(self, way: Way, args: tuple, kwargs: dict, ordered: dict) -> None:
        """Later calls that are like this one take this way.

        Args:
            way: Of the call.
            args: The call's.
            kwargs: The same, in the order in which they came.
            ordered: The same in the order of the capture.
        """
        if way.prepared.graph.evicted:
            self._forget_evicted(way.prepared.graph)
        part = self.described
        form = self._form(args, kwargs, part) if part is not None else None
        if form is None or part.key is not way.part or self.state.mirrored:
            return
        if list(kwargs) != list(ordered):
            way.order = _order(args, kwargs, ordered)
        # Ways by an earlier binding would keep the memory where the parameters have been.
        graph, binding = way.prepared.graph, way.prepared.binding
        for key, other in list(self.ways.items()):
            known = other.prepared
            if known.graph is graph and known.binding is not binding:
                self.ways.pop(key, None)
        if len(self.ways) >= _KEPT:
            self.ways.pop(next(iter(self.ways), None), None)
        self.ways[form[0]] = way

    def _forget_evicted(self, graph: CapturedGraph) -> None:
        """Ways go with their plans, which they would keep."""
        graph.evicted = False
        for form, way in list(self.ways.items()):
            plan = way.prepared.plan
            if way.prepared.graph is graph and graph.plans.get(plan.key) is not plan:
                self.ways.pop(form, None)
