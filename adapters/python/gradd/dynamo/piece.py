"""One graph of the daemon as part of a compiled function: its calls, and its reference.

Dynamo has compared everything that a call may depend on except the addresses of its tensors, so a
call that repeats an earlier one only compares addresses. Everything else is as in `calls`: plans
per sizes, lazy outputs, live rows, runs as steps of autograd.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from os import getpid
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from gradd import errors
from gradd.calls import run as runs
from gradd.calls.call import Call
from gradd.calls.graph import Graph, check_supported
from gradd.calls.parameters import Binding, Entry
from gradd.calls.planned import Planned
from gradd.calls.selection import Selection, selection_of
from gradd.check.cut import Data
from gradd.dynamo import locks, planned_numbers
from gradd.memory import watch
from gradd.memory.devices import DeviceError
from gradd.memory.tensor_classes import is_plain, refusal
from gradd.memory.watch import data_ptr
from gradd.session import bases
from gradd.spec import Capture, CaptureError

if TYPE_CHECKING:
    from gradd.dynamo.inputs import Input
    from gradd.dynamo.modes import Modes
    from gradd.dynamo.own_forward import OwnForward
    from gradd.dynamo.owner import Owner
    from gradd.session.client import Client

_FAILURES = 4  # of different forms, and no success: no other is tried
_KEPT = 64  # calls of a piece that are known
_facts = operator.attrgetter("shape", "requires_grad")
_requires_grad = operator.attrgetter("requires_grad")
_is_contiguous = torch.Tensor.is_contiguous


class _Known:
    """A call by its form: a plan bound to places.

    Attributes:
        call: The plan, its binding, and the places of tensors.
        pointers: Addresses of the bound tensors.
        requires: Whether each wants a gradient.
        kind: Of its self-checks; None = there are none.
        all_train: All bound tensors get a gradient, in their order.
    """

    __slots__ = ("all_train", "asked_for", "grad_inputs", "kind", "params", "pointers")
    __slots__ += ("call", "requires")

    def __init__(self, call: Call, bound: list[torch.Tensor], kind: Any) -> None:
        self.call = call
        self.pointers = list(map(data_ptr, bound))
        self.requires = list(map(_requires_grad, bound))
        self.kind = kind
        self.params = call.selection.params
        self.all_train = list(self.params) == list(range(len(bound)))
        self.grad_inputs = call.grad_inputs
        self.asked_for = len(call.graph.asked_for)


class Piece:
    """A graph of the daemon. See the top of this file.

    Attributes:
        inputs: Its arguments.
        in_torch: The same computed by PyTorch.
        own_forward: The user's forward, where that computes this piece and nothing else.
    """

    def __init__(
        self,
        owner: Owner,
        cap: Capture,
        inputs: Sequence[Input],
        in_torch: Callable[..., Sequence[Any]],
        fits: Callable[[Sequence[Any], bool], bool],
        *,
        lazy: bool,
    ) -> None:
        """Args:
        owner: The common state of the pieces of one compiled function.
        cap: The graph.
        inputs: Of its arguments; constants are not among them.
        in_torch: The same in PyTorch.
        fits: Whether it may take arguments of other sizes, or of fewer than its guards allow.
        lazy: Outputs that only the loss needs may be left out.
        """
        self.owner = owner
        self.client, self.state, self.slots = owner.client, owner.state, owner.slots
        # Without their tensors: Dynamo may keep a graph longer than its parameters live.
        self.inputs_ = [replace(i, tensor=None) for i in inputs if i.position >= 0]
        self._planned = {i.position for i in self.inputs_ if i.planned}
        self.in_torch = in_torch
        self.lazy = lazy and owner.lazy
        self._fits = fits
        self._tensors: list[Any] = []
        self.counts, self.fallback = owner.counts, owner.fallback
        at = {i.name: i.position for i in self.inputs_}
        info = self.client.put_graph(cap.onnx, cap.sources)
        check_supported(info, cap)
        self.graph = Graph(
            owner,
            cap,
            info,
            owner.memory,
            entry=lambda name: Entry(self._tensors, at[name], name),
            passes=owner.passes,
        )
        owner.alive.add(self.graph)
        owner.pieces.add(self)
        self._bound_at = [p.key for p in self.graph.entries]
        self._free_at = [at[n] if n in at else self.graph.specs[n].leaf for n in self.graph.free]
        varying = {i.position for i in self.inputs_ if i.varies}
        self._fixed = frozenset(
            k
            for k, i in enumerate(self._free_at)
            if i in self._planned or varying and i not in varying
        )
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()
        self._refused: dict[Hashable, str] = {}
        self._has_run = False  # in the daemon
        self.own_forward: Callable[[], OwnForward | None] = lambda: None
        self.title = owner.title

    # ---- the call ----

    def __call__(self, args: Sequence[Any], share: int | None = None) -> Sequence[Any]:
        """The outputs, in the order of the graph.

        Args:
            args: One for each input.
            share: Of the memory budget; None = all of it.
        """
        if not self.graph.changed:
            return self._call(args, share)
        try:
            with self.client.lock:  # what is written is looked up when it has been computed
                return self._call(args, share)
        finally:
            self._tensors.clear()

    def tensors(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The arguments of a call, with tensors for numbers."""
        return [
            x if isinstance(x, torch.Tensor) else planned_numbers.given(x, i in self._planned)
            for i, x in enumerate(args)
        ]

    def plan(self, args: Sequence[Any], values: bool) -> Planned:
        """Plans such a call without running it.

        Args:
            args: One for each input; on the meta device if need be.
            values: They have those of a call.
        """
        with self.client.lock:
            self._tensors[:] = args
            try:
                bound, inputs = ([args[i] for i in at] for at in (self._bound_at, self._free_at))
                return Planned.of(
                    self.client, self.graph, bound, inputs, lazy=self.lazy, values=values
                )
            finally:
                self._tensors.clear()

    def _call(self, args: Sequence[Any], share: int | None) -> Sequence[Any]:
        try:
            with self.client.lock:
                found = self._look_up(args, share)
        except Exception:  # the slow path names the error
            found = None
        if found is None:
            return self._slow(args, share)
        run, tensors = found
        return run.differentiated(tensors)

    def _overlap(self, args: Sequence[Any]) -> bool:
        """Whether a tensor that the graph writes shares its memory with another argument."""
        storages = [watch.untyped_storage(args[i.position]) for i in self.inputs_]
        spans = [(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]  # arrays have parts
        written = {p.key for p in self.graph.changed_entries}
        return any(
            spans[n][0] < end and start < spans[n][1]
            for n, i in enumerate(self.inputs_)
            if i.position in written
            for m, (start, end) in enumerate(spans)
            if m != n
        )

    def _form(self, args: Sequence[Any], share: int | None) -> Hashable:
        return (
            share,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            *map(_facts, map(args.__getitem__, self._free_at)),
        )

    def _look_up(
        self, args: Sequence[Any], share: int | None
    ) -> tuple[runs.Run, list[torch.Tensor]] | None:
        client, graph = self.client, self.graph
        if client.closed or client.pid != getpid() or self.state.mirrored:
            return None
        if graph.changed and self._overlap(args):
            return None
        inputs = list(map(args.__getitem__, self._free_at))
        form = (  # _form(), without a call
            share,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            *map(_facts, inputs),
        )
        known = self._known.get(form)
        if known is None or self.state.generation != graph.generation:
            return None
        if len(graph.asked_for) != known.asked_for:
            return None
        kind = known.kind
        if kind is not None and (kind.failed or kind.calls + 1 >= kind.due):
            if kind.is_due(kind.calls + 1, self.owner.checks.last):  # type: ignore[union-attr]
                return None
        if list(map(watch.on_class, watch.NAMES)) != watch.found:
            return None
        bound = list(map(args.__getitem__, self._bound_at))
        if bases.mapped:
            bases.settle(client, bound)
        if list(map(data_ptr, bound)) != known.pointers:
            return None
        if not all(map(_is_contiguous, bound)):  # guards of torch 2.11 do not compare strides
            return None
        if list(map(_requires_grad, bound)) != known.requires:
            return None
        call = known.call
        plan = call.plan
        graph.plans.move_to_end(plan.key)  # KeyError: it was given up
        if kind is not None:
            kind.calls += 1
        if plan.live is not None:
            call, inputs = call.live(inputs)
        if graph.changed:
            self._tensors.extend(args)
        self.owner.last.append(call.last)
        run = runs.Run(call, bound, inputs, self.counts, self.owner.flags)
        tensors = bound if known.all_train else list(map(bound.__getitem__, known.params))
        if known.grad_inputs:
            tensors = tensors + list(map(inputs.__getitem__, known.grad_inputs))
        return run, tensors

    def _slow(self, args: Sequence[Any], share: int | None) -> Sequence[Any]:
        form = self._form(args, share)
        start = time.perf_counter()
        failure: Exception | None = None
        reason = None if self.fallback.retry else self._reason(form)
        if reason is None:
            try:
                self.client.check_process()
                # A self-check may run the user's forward, which Dynamo may have to compile.
                runs_forward = self.owner.checks is not None and not self.graph.changed
                lock = locks.both(self.client) if runs_forward else self.client.lock
                with lock, _waiting(self.client), watch.ours:
                    self._tensors[:] = args
                    try:
                        run, tensors = self._prepare(args, form, share)
                    finally:
                        if not self.graph.changed:
                            self._tensors.clear()
            except Exception as error:
                failure = error
            if failure is None:
                return run.differentiated(tensors)
        try:
            return self._by_torch(args, form, failure, reason, time.perf_counter() - start)
        finally:
            failure = None  # it holds this frame

    def _reason(self, form: Hashable) -> str | None:
        """Why calls of a form run in PyTorch; after a few other forms, why all of them do."""
        if not self._has_run and len(self._refused) >= _FAILURES:
            return next(iter(self._refused.values()))
        return self._refused.get(form)

    def _by_torch(
        self,
        args: Sequence[Any],
        form: Hashable,
        failure: Exception | None,
        reason: Any,
        tried: Any,
    ) -> Sequence[Any]:
        reason = self.fallback.decide(failure) if failure is not None else reason
        start = time.perf_counter()
        result = self.in_torch(args)
        self.owner.ran_in_torch(reason)
        if failure is not None:
            self._refused[form] = reason
            self._known.clear()
            if self.fallback.count(reason, str(failure) if reason == "self_check" else ""):
                took = time.perf_counter() - start
                self.fallback.warn(reason, failure, took, tried, len(self.owner.alive) > 1)
        else:
            self.fallback.count(reason)
        return result

    def _prepare(
        self, args: Sequence[Any], form: Hashable, share: int | None
    ) -> tuple[runs.Run, list[torch.Tensor]]:
        self._check_devices(args)
        if self.graph.changed and self._overlap(args):
            raise CaptureError(
                "input_mutation",
                "forward() writes in place to an argument that shares its memory with another one; "
                "clone it first",
            )
        graph = self.graph
        self.state.watch(args[i] for i in self._bound_at)
        binding, bound = graph.bind(self.state)
        inputs = [args[i] for i in self._free_at]
        selection = self._affordable(binding, bound, inputs, share)
        kind = None
        checks = self.owner.checks
        if checks is not None:
            kind, due = checks.due(graph.kinds, (selection.of_plan(), selection.asked))
            if due:
                checks.run(self, selection, kind, Data(inputs, fixed=self._fixed))
                self._tensors[:] = args
                binding, bound = graph.bind(self.state)
        call = self.call(graph, binding, inputs, selection)
        if not self.state.mirrored:
            self._keep(form, _Known(call, bound, kind))
        own, inputs = call.live(inputs)
        if self.owner.debug is not None and not self._has_run:
            self.owner.debug.save_plan(self.client, graph, own.plan, self.owner.module())
        self._has_run = True
        self.owner.last.append(own.last)
        run = runs.Run(own, bound, inputs, self.counts, self.owner.flags)
        tensors = [bound[i] for i in selection.params]
        return run, tensors + [inputs[i] for i in call.grad_inputs]

    def _keep(self, form: Hashable, known: _Known) -> None:
        """Calls whose plans were given up would keep those in the daemon."""
        self._known[form] = known
        plans = self.graph.plans
        gone = [f for f, k in self._known.items() if k.call.plan.key not in plans]
        for other in gone:
            del self._known[other]
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def _affordable(
        self, binding: Binding, bound: list, inputs: list[torch.Tensor], share: int | None
    ) -> Selection:
        """The selection of a call without outputs that exceed the memory budget."""
        graph, lazy = self.graph, self.lazy
        selection = replace(selection_of(graph, bound, inputs, lazy), budget=share)
        if not self.owner.memory.budget or graph.asks_again or not graph.asked_for:
            return selection
        try:
            self.call(graph, binding, inputs, selection).live(inputs)
            return selection
        except errors.OutOfMemoryError:
            graph.asks_again = True
            less = replace(selection_of(graph, bound, inputs, lazy), budget=share)
            if less.real == selection.real:
                raise
            self.owner.warn_asks_again()
            return less

    def call(
        self, graph: Graph, binding: Binding, inputs: list[torch.Tensor], selection: Selection
    ) -> Call:
        """The common part of runs with such inputs; compiles the plan if need be."""
        return Call.of(self.client, self.slots, graph, binding, inputs, selection)

    def _check_devices(self, args: Sequence[Any]) -> None:
        for i in self.inputs_:
            tensor = args[i.position]
            if not is_plain(type(tensor)):
                raise refusal(i.name if i.bound else repr(i.name), type(tensor))
            device = self.client.memory.device
            number = tensor.is_cpu and not i.bound and (i.planned or not tensor.dim())
            if tensor.device != device and not number:
                raise DeviceError(
                    f"{i.name} is on {tensor.device}; the daemon of this module computes on "
                    f"{'the CPU' if device.type == 'cpu' else device}"
                )

    # ---- self-checks ----

    def arguments(self, leaves: Sequence[torch.Tensor] | None = None) -> list[Any]:
        """Those of the present call, with other free inputs if need be."""
        args = list(self._tensors)
        if leaves is not None:
            for i, leaf in zip(self._free_at, leaves, strict=True):
                args[i] = leaf
        return args

    def fits(self, data: Data) -> bool:
        """Whether the graph may take data of other sizes.

        The user's forward has guards, which ask for as many rows as the choice of a kernel does.
        """
        return self._fits(self.arguments(data.leaves), self.own_forward() is None)

    def let_torch_repeat(self, n: int, around: Modes) -> None:
        """PyTorch may compute a run again from its inputs, if those are all arguments.

        Args:
            n: Of the arguments.
            around: Modes while the piece runs.
        """
        bound, free, in_torch = self._bound_at, self._free_at, self.in_torch
        if {*bound, *free} != set(range(n)):
            return

        def repeat(bound_: Sequence[Any], free_: Sequence[Any]) -> Sequence[Any]:
            pairs = [*zip(bound, bound_, strict=True), *zip(free, free_, strict=True)]
            with around.entered():
                return in_torch([x for _, x in sorted(pairs, key=operator.itemgetter(0))])

        self.graph.in_torch = repeat

    def close(self) -> None:
        self.graph.drop()
        self._known.clear()


@contextlib.contextmanager
def _waiting(client: Client) -> Iterator[None]:
    """In this context every reply is waited for; the caller has the lock."""
    client.catch_up()
    with client.timeline.waiting() if client.timeline is not None else contextlib.nullcontext():
        yield
