"""The bridge from a module and a callable to the daemon; ORTModule and ORTTrainer are thin users.

    bridge = Bridge(module, forward=module.forward)
    outputs = bridge(*args, **kwargs)      # what forward(*args, **kwargs) would return

A call finds its captured graph by key (several are kept), compares the addresses of the parameters,
finds or makes the plan for the concrete shapes, and runs. What cannot run in the daemon goes
through `fallback.py`. The seed of a forward is drawn from torch's default generator, but only if
the graph draws random numbers: without dropout torch's random stream is what it would be in
PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import time
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, interrupts, options, schema, transforms, unused_memory
from gradd.calls import tables, watch
from gradd.calls.captured import CapturedGraph, Plan, check_supported, type_of
from gradd.calls.parameter_changes import watch_optimizers
from gradd.calls.parameters import Binding, State
from gradd.calls.prepared import Prepared, ShortWay, Way, called_as_usual
from gradd.calls.run import Run
from gradd.calls.slots import SlotSet
from gradd.calls.wish import Wish, wish_of
from gradd.check import checktimes
from gradd.check.other_data import Data
from gradd.check.reference import Reference, Task
from gradd.check.selfcheck import Checks
from gradd.export.identity import Same
from gradd.fallback import DeviceError, Fallback, SelfCheckError
from gradd.memory import Memory
from gradd.session.client import Client, get_client
from gradd.tokens import Tokens

if TYPE_CHECKING:
    from gradd.explain import Explanation
    from gradd.export.guards.check import Guards

logger = logging.getLogger("gradd")
_KEPT_FORMS = 32  # forms of calls (structure, modes, attributes) whose captures are kept
_KEPT_READS = 8  # captures of one form that differ in what forward() read from outside
_KEPT_SIZES = 32  # captures of one form that differ in the sizes they hold for
_MANY_CHANGES = 16  # of one place that forward() reads, until its calls run in PyTorch


class Bridge(ShortWay):
    """Runs calls of one module through the daemon. See the top of this file."""

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[..., Any] | None = None,
        *,
        strict: bool = False,
        client: Client | None = None,
        on_capture: Callable[[Any, torch.nn.Module], None] | None = None,
        in_torch: Callable[..., Any] | None = None,
        memory_budget: int | str | None = None,
    ) -> None:
        """Args:
        module: Owner of parameters and buffers, which move into shared memory here.
        forward: What a call means (default: `module.forward`, as it is at each call).
        strict: Raise instead of falling back to PyTorch.
        client: Session to use (default: the one of the user's daemon, made when needed).
        on_capture: Called with every new capture and the module (DebugOptions).
        in_torch: What runs where PyTorch takes over (default: `forward`, else the module).
        memory_budget: The most that a training run may take, as bytes or text (default:
            GRADD_MEMORY_BUDGET).

        Raises:
            ValueError: A budget, or another option, that cannot be read.
            SessionError: No daemon could be reached, and the policy does not allow PyTorch then.
        """
        self.module = module
        tables.note(module)
        self.given_forward = forward
        own = inspect.getattr_static(type(module), "forward", None)
        self._of_class = own is not None and getattr(forward, "__func__", None) is own
        self._eager = next(f for f in (in_torch, forward, module) if f is not None)
        self.counts: Counter[str] = Counter()
        self.calls = self.clock = self.version = 0
        self._on_capture = on_capture
        # Forms and their captures; what was used last is tried first.
        self._graphs: OrderedDict[Hashable, list[CapturedGraph]] = OrderedDict()
        # Weakly, for a finalizer holds them: graphs and guards may lead to this bridge's owner.
        self._alive: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self._guards: weakref.WeakKeyDictionary[CapturedGraph, Guards] = weakref.WeakKeyDictionary()
        self._changes: Counter[str] = Counter()
        self._refused: dict[Hashable, Exception] = {}  # by form and layouts
        self.ways = {}
        self.described = None
        self.forwards = Tokens()
        self.fallback = Fallback(type(module).__name__, strict)
        self._disabled = bool(options.get("GRADD_DISABLE"))
        self._memory = Memory() if self._disabled else Memory.of(memory_budget)
        mode = options.self_check()
        self._checks = None if mode == checktimes.OFF else Checks(mode)
        self._lazy = bool(options.get("GRADD_LAZY"))
        self._failed: Exception | None = None
        self.last = None
        options.warn_ineffective()
        if not self._disabled:
            self._open(client or get_client())

    def _open(self, client: Client) -> None:
        watch_optimizers()
        self.client = client
        self.state = State(client, self.module)
        self.slots = SlotSet(client)
        weakref.finalize(self, _finish, self.state, self.slots, self._alive)
        try:
            with client.lock:
                client.connect()
                self.state.rehome_all()
                unused_memory.trim()  # what the parameters have left
        except errors.GraddError as error:
            self.fallback.decide(error)
            self._failed = error

    @property
    def title(self) -> str:
        """What messages call the module."""
        return type(self.module).__name__

    @property
    def forward(self) -> Callable[..., Any]:
        """What a call means: that of the module's class, if it was that; it may be replaced."""
        if self.given_forward is None:
            return self.module.forward
        found = inspect.getattr_static(type(self.module), "forward", None)
        if self._of_class and isinstance(found, types.FunctionType):
            return types.MethodType(found, self.module)
        return self.given_forward

    def _ordered(self, kwargs: dict) -> dict:
        """Keyword arguments in the order of their names, where forward() cannot see another."""
        if len(kwargs) < 2:
            return kwargs
        forward = type(self.module).forward if self._of_class else self.given_forward
        code = getattr(forward or self.module.forward, "__code__", None)
        if code is None or code.co_flags & inspect.CO_VARKEYWORDS:
            return kwargs
        return {name: kwargs[name] for name in sorted(kwargs)}

    # ---- the call ----

    def long_way(self, args: tuple, kwargs: dict) -> Any:
        """A call of which nothing is known, from its form to its result."""
        if self._disabled:
            return self._eager(*args, **kwargs)
        came, kwargs = kwargs, self._ordered(kwargs)
        transforms.check_nested(self.module)
        watch.install()
        if self._failed is not None:
            return self._in_torch(self._failed, None, args, kwargs)
        key = failure = graph = sizes = None
        start = time.perf_counter()
        try:
            transforms.check()
            if self.given_forward is None and not called_as_usual(self.module):
                self._check_call()
            self.client.check_process()
            # Another thread's capture puts stand-ins into the module.
            with self.client.lock, watch.ours:
                key = self._key(args, kwargs)
                reason = self.fallback.known(key)
                if reason is None:
                    leaves, _, _ = schema.flatten_inputs(args, kwargs)
                    graphs = self._captured(key)
                    sizes = _sizes(leaves)
                    graph, outdated = self._fitting(graphs, sizes, leaves, args, kwargs)
                    if graph is None:
                        reason = self.fallback.no_capture(
                            key, sizes, not graphs, lambda: self._changed_outside(outdated)
                        )
                    elif graph.refused and not self.fallback.retry:
                        reason = graph.refused.get((torch.is_grad_enabled(), *sizes))
                if reason is None:
                    graph = graph or self._new_graph(key, graphs, outdated, leaves, args, kwargs)
                    run, tensors, way = self._prepare(graph, leaves, args, kwargs)
                    self.leave_way(way, args, came, kwargs)
        except Exception as error:
            failure = error
        if failure is not None:
            try:  # not above: errors of what runs now have nothing to do with this one
                tried = time.perf_counter() - start
                return self._in_torch(failure, key, args, kwargs, (graph, sizes), tried)
            finally:
                failure = None  # it holds this frame
        if reason is not None:
            self.fallback.count(reason)
            return self._eager(*args, **kwargs)
        outputs = run.differentiated(tensors)
        return self.result(run, outputs, leaves)

    def is_disabled(self) -> bool:
        """True if all runs in PyTorch because somebody has said so."""
        return self._disabled

    def bypassed(self, seconds: float) -> None:
        """A call has been computed around this bridge, in so many seconds of PyTorch.

        Raises:
            CaptureError: "forward_replaced", where nothing may run in PyTorch.
        """
        from gradd.export import CaptureError

        error = CaptureError(
            "forward_replaced",
            "the forward that was put on the ORTModule computes without the one before it: wrap "
            "the part that it calls, as in `model.model = ORTModule(model.model)`",
        )
        reason = self.fallback.decide(error)
        if self.fallback.count(reason):
            self.fallback.warn(reason, error, seconds, 0.0)

    def _check_call(self) -> None:
        """Refuses a module whose class has got a call of its own, now or before."""
        from gradd.export.refuse import check_call

        check_call(self.module)

    def _key(self, args: tuple, kwargs: dict) -> tuple[Hashable, Hashable]:
        capture_key = _capture_key()
        # The module's own key does not know which parameters are frozen; neither does the graph.
        # Nor does it know which function a forward is that was put on the module itself.
        own = self.module.__dict__.get("forward") if self.given_forward is None else None
        which = None if own is None else self.forwards.of(own)
        return (capture_key(self.module, args, kwargs, self), (self.version, which))

    def result(self, run: Run, outputs: Sequence[Any], leaves: list) -> Any:
        """The module's result, from the graph's outputs and what the caller has already."""
        graph = run.graph
        results: dict[int, Any] = {
            spec.leaf: value for spec, value in zip(graph.user, outputs, strict=True)
        }
        if graph.shared is not None:
            with self.client.lock:
                sources = graph.shared.sources(leaves)
            graph.shared.fill(results, sources, leaves)
            run.watch_views(results)
        n = max(results) + 1 if results else 0
        return graph.cap.unflatten([results.get(i) for i in range(n)])

    def _in_torch(
        self,
        error: Exception,
        key: Hashable,
        args: tuple,
        kwargs: dict,
        call: tuple[CapturedGraph | None, tuple | None] = (None, None),
        tried: float = 0.0,
    ) -> Any:
        """Runs the call in PyTorch if the policy allows that after this error.

        Args:
            error: Why.
            key: Of the call, if it is known.
            args: The call's.
            kwargs: The same.
            call: The capture that fits it, and the sizes of its tensors; as far as they are known.
            tried: Seconds that went until then.
        """
        reason = self.fallback.decide(error)
        start = time.perf_counter()
        result = self._eager(*args, **kwargs)
        if key is not None and not isinstance(error, SelfCheckError):  # that is known by its sizes
            graph, sizes = call
            planned = graph is not None and sizes is not None
            if not planned or not graph.refuse((torch.is_grad_enabled(), *sizes), reason):
                self.fallback.remember(key, reason, None if graph is not None else sizes)
            self.ways.clear()  # one of them may be such a call
        # Another self-check that fails is news; what it says of a call that it knows is not.
        if self.fallback.count(reason, str(error) if reason == "self_check" else ""):
            self.fallback.warn(reason, error, time.perf_counter() - start, tried)
        return result

    # ---- captures ----

    def _fitting(
        self, graphs: list[CapturedGraph], sizes: tuple, leaves: list, args: tuple, kwargs: dict
    ) -> tuple[CapturedGraph | None, list[CapturedGraph]]:
        """The one of these captures that fits a call, whose sizes it allows.

        And those that would, but for what forward() reads from outside.
        """
        from gradd.export import check_dynamic

        outdated: list[CapturedGraph] = []
        for graph in reversed(list(graphs)):
            if not graph.intact():
                graphs.remove(graph)
                self._drop(graph)
                continue
            if sizes not in graph.sizes:
                if check_dynamic(graph.cap, args, kwargs) is not None:
                    continue
                graph.remember(sizes)
            guards = self._guards[graph]
            if not guards.fits(leaves):
                continue
            if not guards.holds():
                outdated.append(graph)
                continue
            if graph is not graphs[-1]:  # the one that was used last
                graphs.remove(graph)
                graphs.append(graph)
            for table, name, value in graph.filled:
                if table[name] is None:
                    table[name] = value
            return graph, outdated
        return None, outdated

    def _new_graph(
        self,
        key: tuple,
        graphs: list[CapturedGraph],
        outdated: list[CapturedGraph],
        leaves: list,
        args: tuple,
        kwargs: dict,
    ) -> CapturedGraph:
        """A capture for a call that none of `graphs` fits; it becomes one of them."""
        from gradd.export import same_but_filled_in

        with interrupts.held_for(f"the capture of {type(self.module).__name__}"):
            start = time.perf_counter()
            self._outside_changed(graphs, outdated)
            with unused_memory.unkept():
                graph = self._capture_of(key, leaves, args, kwargs)
            self.fallback.captured(key, graph.uses, time.perf_counter() - start)
            self.clock = graph.used = self.clock + 1
            graphs.append(graph)
            self._graphs[key] = graphs
            after = self._key(args, kwargs)
            if after != key and same_but_filled_in(key[0], after[0]):
                self._graphs.setdefault(after, graphs)
            self._forget_captures(graphs)
            return graph

    def _captured(self, key: tuple) -> list[CapturedGraph]:
        """Captures of this form, or of one that differs in attributes which no forward() read."""
        graphs = self._graphs.get(key)
        if graphs is None:
            return self._alike(key)
        self._graphs.move_to_end(key)
        return graphs

    def _alike(self, key: tuple) -> list[CapturedGraph]:
        from gradd.export.keys import changed_attributes

        for (other, version), graphs in reversed(self._graphs.items()):
            changed = changed_attributes(other, key[0]) if version == key[1] else None
            if changed is None:
                continue
            alike = [g for g in graphs if self._guards[g].ignores(changed)]
            if alike:
                self._graphs[key] = alike
                self._forget_forms(alike)
                return alike
        return []

    def _capture_of(self, key: tuple, leaves: list, args: tuple, kwargs: dict) -> CapturedGraph:
        """A new capture, unless one with such strides was refused before."""
        from gradd.export import CaptureError
        from gradd.export.guards.arguments import layouts
        from gradd.export.keys import unfilled

        call = (key, layouts(leaves))
        if call in self._refused:
            raise self._refused[call]
        empty = unfilled(self.module)
        try:
            graph = self._capture(args, kwargs)
        except CaptureError as error:
            if error.reason == "memory_layout" and len(self._refused) < _KEPT_FORMS:
                self._refused[call] = error.with_traceback(None)
            raise
        graph.filled = [(t, n, t[n]) for t, n in empty if t[n] is not None]
        return graph

    def _changed_outside(self, outdated: list[CapturedGraph]) -> str:
        """What differs from one of these captures, for a message."""
        from gradd.export.guards.check import describe

        if not outdated:
            return ""
        return f"what forward() reads outside ({describe(self._guards[outdated[0]].changed())})"

    def _outside_changed(self, graphs: list[CapturedGraph], outdated: list[CapturedGraph]) -> None:
        """Something that forward() read from outside of the module has another value.

        Raises:
            CaptureError: "outside_state": it does so again and again.
        """
        from gradd.export import CaptureError
        from gradd.export.guards.check import describe

        if not outdated:
            return
        changed = self._guards[outdated[0]].changed()
        text = describe(changed)
        logger.info("%s is captured again: %s", type(self.module).__name__, text)
        for slot in changed:
            self._changes[slot.label] += 1
            if self._changes[slot.label] > _MANY_CHANGES:
                raise CaptureError(
                    "outside_state",
                    f"forward() reads {slot.label}, which has had another value in "
                    f"{_MANY_CHANGES} captures: pass it as a tensor, or keep it in a buffer",
                )
        if len(outdated) >= _KEPT_READS:
            oldest = min(outdated, key=_used)
            graphs.remove(oldest)
            self._drop(oldest)

    def _forget_captures(self, newest: list[CapturedGraph]) -> None:
        """Something that changes in every call must not fill the memory."""
        while len(newest) > _KEPT_SIZES:
            oldest = min(newest, key=_used)
            newest.remove(oldest)
            self._drop(oldest)
        self._forget_forms(newest)

    def _forget_forms(self, newest: list[CapturedGraph]) -> None:
        while len(self._graphs) > _KEPT_FORMS:
            others = [k for k, graphs in self._graphs.items() if graphs is not newest]
            if not others:
                return
            forgotten = self._graphs.pop(min(others, key=self._form_used))
            kept = {g for group in self._graphs.values() for g in group}
            for graph in forgotten:
                if graph not in kept:
                    self._drop(graph)

    def _form_used(self, key: Hashable) -> int:
        return max(map(_used, self._graphs[key]), default=0)

    def _drop(self, graph: CapturedGraph) -> None:
        """A capture is given up, and with it the ways that lead to it."""
        graph.drop()
        self.ways.clear()

    def _capture(self, args: tuple, kwargs: dict) -> CapturedGraph:
        from gradd.export import CaptureError, capture

        self._check_devices(args, kwargs)
        start = time.perf_counter()
        cap = capture(self.module, args, kwargs, forward=self.forward)
        if cap.guards is None:
            raise CaptureError("outside_state", "what forward() reads was not recorded")
        info = self.client.put_graph(cap.onnx, cap.aliases, cap.sources)
        check_supported(info, cap)
        self.counts["captures"] += 1
        logger.info(
            "captured %s in %.1f s", type(self.module).__name__, time.perf_counter() - start
        )
        if self._on_capture is not None:
            self._on_capture(cap, self.module)
        graph = CapturedGraph(
            self.module, dataclasses.replace(cap, guards=None), info, self._memory
        )
        self._guards[graph] = cap.guards
        self._alive.add(graph)
        return graph

    def _check_devices(self, args: tuple, kwargs: dict) -> None:
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        leaves, _, paths = schema.flatten_inputs(args, kwargs)
        named += [(p, t) for t, p in zip(leaves, paths, strict=True) if torch.is_tensor(t)]
        for name, tensor in named:
            if tensor.device.type != "cpu":
                raise DeviceError(f"{name} is on {tensor.device}; this daemon computes on the CPU")

    # ---- one run ----

    def _prepare(
        self, graph: CapturedGraph, leaves: list, args: tuple, kwargs: dict
    ) -> tuple[Run, list[torch.Tensor], Way]:
        """The run for a call, the tensors with a gradient (none: inference), and its way."""
        graph.uses.calls += 1
        self.clock = graph.used = self.clock + 1
        binding, bound = graph.bind(self.state)
        inputs = self.inputs(graph, leaves)
        wish = self._affordable(graph, binding, bound, inputs)
        checked = None
        if self._checks is not None:
            kind, due = self._checks.due(graph, wish)
            checked = (self._checks.times, kind)
            if due:
                data = Data(args, kwargs, leaves, Same(self.module, leaves))
                self._checks.run(self, graph, wish, kind, data)
                binding, bound = graph.bind(self.state)
        prepared = self.prepared(graph, binding, inputs, wish)
        way = Way(prepared, self.described, self._guards[graph], checked, leaves)
        own, inputs = prepared.live(inputs)
        run = Run(own, bound, inputs, self.counts)
        self.last = own.last
        tensors = [bound[i] for i in wish.params]
        return run, tensors + [inputs[i] for i in prepared.grad_inputs], way

    def _affordable(
        self, graph: CapturedGraph, binding: Binding, bound: list, inputs: list[torch.Tensor]
    ) -> Wish:
        """What a call wants; not outputs that do not fit the memory budget beside the step."""
        wish = wish_of(graph, bound, inputs, self._lazy)
        if not self._memory.budget or graph.asks_again or not graph.asked_for:
            return wish
        try:
            self.prepared(graph, binding, inputs, wish).live(inputs)
            return wish
        except errors.OutOfMemoryError as error:
            graph.asks_again = True
            less = wish_of(graph, bound, inputs, self._lazy)
            if less.real == wish.real:
                raise
            logger.warning(
                "outputs of %s that are read beside the loss do not fit its memory budget in a "
                "step: whoever reads them runs another forward (repeated_forwards). %s",
                type(self.module).__name__,
                error.what,
            )
            return less

    def prepared(
        self, graph: CapturedGraph, binding: Binding, inputs: list[torch.Tensor], wish: Wish
    ) -> Prepared:
        """What runs with such inputs have in common; compiles the plan if need be."""
        return Prepared.of(self.client, self.slots, graph, binding, inputs, wish)

    @staticmethod
    def inputs(graph: CapturedGraph, leaves: list) -> list[torch.Tensor]:
        """The free inputs as tensors, in the order of the graph."""
        tensors = []
        for name in graph.free:
            spec = graph.specs.get(name)
            if spec is None:
                tensors.append(graph.free_places[name].get().detach())
            else:
                tensors.append(schema.as_tensor_leaf(leaves[spec.leaf]))
        return tensors

    # ---- for self-checks ----

    def reference(
        self,
        graph: CapturedGraph,
        task: Task,
        dtype: torch.dtype | None = None,
        shaken: int | None = None,
    ) -> Reference:
        """PyTorch's side of a check."""
        return Reference(self, graph, task, dtype, shaken)

    def buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Those that a call may change."""
        return self.module.named_buffers(remove_duplicate=False)

    @staticmethod
    def fits(graph: CapturedGraph) -> Callable[[Data], bool]:
        """Whether a capture may serve a call with such data."""
        from gradd.export import check_dynamic

        return lambda data: check_dynamic(graph.cap, data.args, data.kwargs) is None

    # ---- for users and wrappers ----

    def plan_of(self, args: tuple, kwargs: dict) -> tuple[CapturedGraph, Plan]:
        """Graph and plan of such a call, captured and compiled if need be; nothing is run.

        The plan leaves out the rows that such a call leaves out, if its tensors have values.
        """
        if self._disabled:
            raise errors.UnsupportedError("GRADD_DISABLE is set: nothing runs in the daemon")
        if self._failed is not None:
            raise self._failed
        kwargs = self._ordered(kwargs)
        leaves, _, _ = schema.flatten_inputs(args, kwargs)
        with self.client.lock:
            key = self._key(args, kwargs)
            graphs = self._captured(key)
            sizes = _sizes(leaves)
            graph, outdated = self._fitting(graphs, sizes, leaves, args, kwargs)
            graph = graph or self._new_graph(key, graphs, outdated, leaves, args, kwargs)
            _, bound = graph.bind(self.state)
            inputs = self.inputs(graph, leaves)
            types = tuple(type_of(t) for t in inputs)
            asked = (self.client, types, *wish_of(graph, bound, inputs, self._lazy).of_plan())
            plan = graph.plan(*asked)
            sizes = (0, 0, 0) if plan.live is None else plan.live.sizes(inputs)
            return graph, graph.plan(*asked, live=sizes) if any(sizes) else plan

    def explain(self, args: tuple, kwargs: dict) -> Explanation:
        """What the plan of such a call does; without arguments that of the last call.

        Raises:
            ValueError: No arguments, and no call has run in the daemon (or its plan is gone).
        """
        from gradd.explain import explain_plan

        if args or kwargs:
            graph, plan = self.plan_of(args, kwargs)
        else:
            graph, plan = (r() for r in self.last) if self.last else (None, None)
            if plan is None:
                raise ValueError(
                    "no call has run in the daemon yet, or its plan is gone: pass the arguments "
                    "of a call, which is then planned and not run"
                )
        return explain_plan(self.client, plan, graph, title=type(self.module).__name__)

    def signal_change(self) -> None:
        """Python state that forward() reads has changed: captures made so far do not apply."""
        self.version += 1
        self.ways.clear()

    def stats(self) -> dict[str, Any]:
        """Counts since construction: captures, forwards, fallbacks by reason, memory.

        `forwards` are all that the daemon ran, `repeated_forwards` among them those that ran again
        because an output that had been left out was read or got a gradient. `rows` are positions
        of batches, of those calls that were looked at; `flops_left_out` is what leaving some out
        has saved, forward and backward.
        """
        graphs = {g for group in self._graphs.values() for g in group}
        stats: dict[str, Any] = {
            "captures": self.counts["captures"],
            "plans": sum(len(g.plans) for g in graphs),
            "forwards": self.counts["forwards"],
            "repeated_forwards": self.counts["repeated_forwards"],
            **(self._checks or Checks(checktimes.OFF)).stats(),
            "fallbacks": dict(self.fallback.counts),
            **self._left_out(graphs),
        }
        if not self._disabled:
            stats["slots"] = len(self.slots)
            stats["mirrored"] = self.state.mirrored
            stats["recoveries"] = self.client.recoveries
            stats["shared_bytes"] = self.client.segment_bytes()
        return stats

    def _left_out(self, graphs: set[CapturedGraph]) -> dict[str, int]:
        """Rows that were left out, of those of the calls that were looked at; operations saved."""
        seen: Counter[str] = sum((g.live_rows for g in graphs), Counter())
        return {
            "rows": seen["rows"],
            "unlabelled_rows_left_out": seen["unlabelled"],
            "padding_rows_left_out": seen["padding"],
            "flops_left_out": 3 * seen["flops"],  # a backward has twice those of a forward
        }

    def close(self) -> None:
        """Gives up everything that the daemon holds for this bridge; parameters stay readable."""
        if not self._disabled:
            self._graphs.clear()
            self.ways.clear()
            _finish(self.state, self.slots, self._alive)


@functools.lru_cache(maxsize=1)
def _capture_key() -> Callable[..., Hashable]:
    """What takes seconds to import the first time, and would not survive half an import."""
    with interrupts.held_for("imports"):
        from gradd.export import capture_key
    return capture_key


def _used(graph: CapturedGraph) -> int:
    return graph.used


def _sizes(leaves: list) -> tuple:
    """Shapes of the tensors of a call."""
    return tuple(x.shape for x in leaves if isinstance(x, torch.Tensor))


def _finish(state: State, slots: SlotSet, alive: weakref.WeakSet[CapturedGraph]) -> None:
    """End of a bridge. Queues only: it may run in a finalizer."""
    for graph in list(alive):  # runs hold theirs
        graph.drop()
    slots.drop_all()
    state.drop_all()
