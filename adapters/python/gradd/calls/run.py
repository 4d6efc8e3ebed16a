"""One run: the inputs, seed and outputs of a forward, and its backward, release and re-reading.

A run pins its inputs in the ring until its release, so that a restarted daemon can run the same
forward again, and so that outputs that were not computed (lazy ones) can still be requested: the
same graph, inputs and seed, planned for that output, give the value that the first forward would
have given.
function.py makes a run a step of torch's autograd.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from gradd import errors, interrupts, private
from gradd.calls.lazy import LazyTensor, untouched
from gradd.memory import pss
from gradd.memory.devices import HOST
from gradd.memory.parameter_changes import Snapshot, steps, version_of
from gradd.memory.shm import DTYPE_CODES, DTYPES
from gradd.memory.watch import accesses
from gradd.session.finalizers import Tie
from gradd.session.protocol import DROPOUT_OFF, GRADIENT_CHECK, ONCE

if TYPE_CHECKING:
    from gradd.calls.call import Call, TensorType
    from gradd.calls.groups import Delivery
    from gradd.calls.slots import Layout, Slot
    from gradd.session.client import Client
    from gradd.session.ring import Block

Grads = Sequence[torch.Tensor | None]


class _Held:
    """Memory that a run holds until its release (outputs, early gradients) or end (inputs)."""

    __slots__ = ("client", "done", "early", "id", "inputs", "outputs")

    def __init__(self, client: Client, inputs: Block | None = None) -> None:
        self.client = client
        self.id = next(client.ids)
        self.done = False
        self.inputs = inputs
        self.outputs: list[Block] = []
        self.early: Slot | None = None  # gradients that the forward forms

    def release(self) -> None:
        """The daemon may forget the run."""
        if not self.done:
            self.done = True
            self.client.release(self.id)
            for block in self.outputs:
                block.returned.append(block)
            self.outputs = []
            if self.early is not None:
                self.early.free()
                self.early = None

    def end(self) -> None:
        if not self.done:
            self.release()
        if self.inputs is not None:
            self.inputs.returned.append(self.inputs)
            self.inputs = None


class Run:
    """A forward in the daemon. Methods take the client's lock themselves."""

    __slots__ = (
        *("__weakref__", "call", "client", "graph", "plan", "id", "seed", "flags", "counts"),
        *("given", "rows", "_held", "_sources", "_read", "_again_of", "_with_gradient"),
    )

    def __init__(
        self,
        call: Call,
        bound: list[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        counts: Counter[str],
        flags: int = 0,
    ) -> None:
        """Args:
        call: The common part of runs of this form.
        bound: The bound inputs.
        inputs: The free inputs, in order; copied into the ring by `start`.
        counts: Where "forwards" and "repeated_forwards" are counted.
        flags: Of the protocol.
        """
        self.call = call
        self.client = call.client
        self.graph = graph = call.graph
        self.plan = call.plan
        self.counts = counts
        if call.trains and torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            flags |= GRADIENT_CHECK
        self.flags = flags
        self.seed = 0
        if graph.info.random and not flags & DROPOUT_OFF:
            self.seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._sources: Sequence[torch.Tensor] | None = inputs
        self._again_of = ""  # the output that this run repeats another one for
        self.given: list[weakref.ref] = []  # the outputs as the user has them
        self.rows: list[torch.Tensor] = []  # indices of lookups that have a sparse gradient
        self._with_gradient: list[tuple[weakref.ref, int]] = []  # inputs, and their versions
        try:
            self._read = Snapshot(
                tensors=bound,
                versions=list(map(version_of, bound)),
                steps=steps.count,
                accesses=accesses.count,
                aliased=bool(accesses.given) and accesses.settle(bound),
            )
        except RuntimeError:  # a tensor of inference mode has no version
            self._read = Snapshot.of(bound)
        self._hold(_Held(self.client))

    def _hold(self, held: _Held) -> None:
        self._held = held
        self.id = held.id
        ends = self.client.ends
        end = Tie(self, ends.died.append)
        end.what = held.end
        ends.living.add(end)

    # ---- forward ----

    def start(self) -> list[torch.Tensor]:
        """Copies the inputs and runs the forward; returns the wanted outputs in order."""
        call, client, held = self.call, self.client, self._held
        with client.lock, interrupts.deferred:
            ring = client.ring
            if self._sources:
                held.inputs = ring.allocate(call.in_bytes)
                for source, row in zip(self._sources, call.in_rows, strict=True):
                    held.inputs.fill(source, row)
            self._sources = None
            segments, offsets = [], []
            for _, _, size in call.out_rows:
                block = ring.allocate(size)
                held.outputs.append(block)
                segments.append(block.segment.id)
                offsets.append(block.offset)
            tensors: list[torch.Tensor] = []

            def make_tensors() -> None:
                if not tensors:
                    for block, (dtype, dims, size) in zip(held.outputs, call.out_rows, strict=True):
                        tensors.append(block.tensor(dtype, dims, 0, size))

            fields = call.fields(self, held.inputs, segments, offsets)
            if call.plan.early:
                held.early = call.slots.acquire(call.plan.early_layout)
                fields["early"] = held.early.bind
            read = more = None
            if self._again_of:
                client.catch_up()  # what the first forward has read is known by its reply
                read, more = self._read, self._read.expected()
            elif call.trains:  # else it is over before anything can change
                read = self._read
                calm = accesses.quiet and not read.aliased
                more = {"look": 1 if calm else read.look()}
            if not client.forward(fields, read, more or {}, make_tensors, held.outputs):
                self._raise_changed(self._again_of)
            if not tensors:  # the request was never on its way, but one in its place
                make_tensors()
            self.counts["forwards"] += 1
            if call.prints_memory and not self.flags & ONCE:
                pss.print_after("forward", self)
            return tensors if client.memory is HOST else client.memory.taken(tensors)

    def outputs(self) -> list[torch.Tensor]:
        """Runs the forward for the user: all outputs, lazy ones among them; buffers change."""
        tensors = self.start()
        return tensors if self.call.plain else self.completed(tensors)

    def completed(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The user's outputs, of those of the plan."""
        graph, selection = self.graph, self.call.selection
        found: list[Any] = [None] * len(graph.user)
        for position, tensor in zip(selection.real, tensors, strict=False):
            found[position] = tensor
        if graph.changed:
            values = tensors[len(selection.real) :]
            with torch.no_grad():
                for entry, value in zip(graph.changed_entries, values, strict=False):
                    entry.get().copy_(value)
        if graph.rows:
            self.rows = tensors[-len(graph.rows) :]
        return [
            LazyTensor.make(self, spec) if tensor is None else tensor
            for spec, tensor in zip(graph.user, found, strict=True)
        ]

    def differentiated(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """outputs(), as a step of autograd if there are tensors with a gradient."""
        if tensors:
            return self.call.apply(self, *tensors)
        outputs = self.outputs()
        self.end()
        return outputs

    # ---- backward ----

    def check_readers(self, grads: Grads) -> None:
        """Refuses hooks on results through which, unlike in torch, no gradient passes.

        Raises:
            UnsupportedError: A hook or retain_grad() waits for what would have passed there.
        """
        depends, user = self.graph.cap.depends, self.graph.user
        through: set[int] = set()
        for spec, grad in zip(user, grads, strict=True):
            if grad is not None:
                through.update(depends.get(spec.leaf, ()))
        if not through:
            return
        for spec, ref in zip(user, self.given, strict=True):
            output = ref() if spec.leaf in through else None
            if output is not None and _is_waited_for(output):
                raise errors.UnsupportedError(
                    f"{spec.name!r}, an output on which another one depends, has a hook or "
                    "retain_grad(): the results of a graph pass no gradient through each other. "
                    "Compute the later one outside of the module, or that part in PyTorch"
                )

    def gradients(
        self, grads: Grads, keep: bool, delivery: Delivery | None = None
    ) -> list[torch.Tensor | None]:
        """backward() from the user's outputs, lazy ones among them; averaged, if that is due."""
        averages = self.call.averages
        if averages:
            self.graph.reduction.check(self.client)
        if self.call.plain:
            return self.backward(grads, keep, delivery, averages)
        real = self.call.selection.real
        if not any(g is not None and p not in real for p, g in enumerate(grads)):
            own = [grads[p] for p in real]
            own += [None] * (len(self.plan.outputs) - len(own))
            return self.backward(own, keep, delivery, averages)
        # A loss outside the graph used an output that was left out: run again with it.
        with self.client.lock:
            names = [self.graph.user[p].name for p, g in enumerate(grads) if g is not None]
            other = self.repeat(tuple(names), tuple(range(len(names))))
            try:
                other.start()
                given = [g for g in grads if g is not None]
                found = other.backward(given, False, averages=other.call.averages)
            finally:
                other.end()
            if not keep:
                self.release()
            return found

    def backward(
        self,
        grads: Grads,
        keep: bool,
        delivery: Delivery | None = None,
        averages: dict[str, Any] | None = None,
    ) -> list[torch.Tensor | None]:
        """Gradients of the plan's parameters and inputs, in that order; None where there is none.

        Args:
            grads: One per output of the plan; None = no gradient arrives.
            keep: The activations stay for another backward.
            delivery: May take the request over, and waits for the gradients then.
            averages: Fields by which the gradients are averaged over processes.
        """
        client, call, plan = self.client, self.call, self.plan
        with client.lock, interrupts.deferred:
            if self._held.done:
                raise errors.StaleError(
                    "backward through a run that was released: pass retain_graph=True to the "
                    "first backward"
                )
            if plan.info.recomputed and self.has_changed():
                raise errors.StaleError(
                    "a backward that computes part of the forward again (memory_budget, "
                    "ORTMODULE_MEMORY_OPT_LEVEL, checkpoints) needs the parameters and buffers as "
                    "that forward read them, and one of them has changed since"
                )
            slots: list[Slot] = []  # of this request
            early = self._held.early
            scratch: list[Block] = []
            try:
                slot = self._slot(slots, plan.layout) if plan.layout.items else None
                # Its gradients are needed again; or a daemon that repeats the forward writes them
                # again, when groups are in use.
                apart = early is not None and (keep or delivery is not None)
                if apart:
                    early = self._slot(slots, plan.early_layout)
                at: list[int] = []
                arriving = {"segments": [], "offsets": [], "dtypes": [], "dims": [], "at": at}
                for i, grad in enumerate(grads):
                    if grad is not None:
                        dtype, dims, size = call.out_rows[i]
                        block = self._scratch(scratch, arriving, dtype, dims, size)
                        block.fill(grad, (dtype, dims, size, 0))
                        at.append(i)
                wires: dict[str, list] = {"segments": [], "offsets": [], "dtypes": [], "dims": []}
                rows, blocks = [], []
                for i in call.grad_inputs:
                    rows.append(row := call.in_rows[i])
                    blocks.append(self._scratch(scratch, wires, *row[:3]))
                found: list[torch.Tensor | None] = []

                def make_tensors() -> None:
                    if found:
                        return
                    if slot:
                        found.extend(slot.tensors())
                    if early:
                        for i, tensor in zip(plan.early, early.tensors(), strict=True):
                            found.insert(i, tensor)
                    for block, (dtype, dims, size, _) in zip(blocks, rows, strict=True):
                        found.append(block.tensor(dtype, dims, 0, size))

                fields = {
                    "run": self.id,
                    "go": arriving,
                    "b": slot.bind if slot else None,
                    "g": wires,
                    "keep": keep,
                    **(averages or {}),
                }
                if apart:
                    fields["early"] = early.bind
                results = blocks
                if client.timeline is not None:
                    results = [*blocks, *(b for one in (slot, early) if one for b in one.blocks)]
                reply = None
                if delivery is not None:
                    places = self._places(slot, early, blocks)
                    reply = delivery.ask(self, fields, make_tensors, (slots, scratch), places)
                if reply is None:
                    reply = client.backward(fields, make_tensors, plan.info.id, results)
                    if client.memory is not HOST:
                        found = client.memory.taken(found)
                for i in reply.get("none", ()):
                    found[i] = self._flat_gradient(i, at)
            finally:
                asked = delivery is not None and delivery.pending is not None
                if not asked:
                    for one in slots:
                        one.free()
                    for block in scratch:
                        block.returned.append(block)
            if call.prints_memory and not self.flags & ONCE:
                pss.print_after("backward", self)
            if not (keep or asked):
                self._held.release()
            return found

    def _places(
        self, slot: Slot | None, early: Slot | None, blocks: Sequence[Block]
    ) -> list[tuple[int, int]]:
        """Addresses and bytes of the gradients in memory of a GPU; nothing on the host."""
        if self.client.memory is HOST:
            return []
        found = slot.places() if slot else []
        for i, place in zip(self.plan.early, early.places() if early else (), strict=True):
            found.insert(i, place)
        return found + [(b.segment.address + b.offset, b.size) for b in blocks]

    def _slot(self, slots: list[Slot], layout: Layout) -> Slot:
        slot = self.call.slots.acquire(layout)
        slots.append(slot)
        return slot

    def _scratch(
        self, scratch: list[Block], columns: dict, dtype: torch.dtype, dims: Any, size: int
    ) -> Block:
        """A block for the time of a request, as another row of a list of tensors."""
        block = self.client.ring.allocate(size)
        scratch.append(block)
        columns["segments"].append(block.segment.id)
        columns["offsets"].append(block.offset)
        columns["dtypes"].append(DTYPE_CODES[dtype])
        columns["dims"].append(dims)
        return block

    def _flat_gradient(self, index: int, arriving: Sequence[int]) -> torch.Tensor | None:
        """torch's gradient where the daemon has no path: zeros behind a step (round, sign)."""
        plan = self.plan
        name = (*plan.params, *plan.input_grads)[index]
        if not any(name in plan.graph.reach[plan.outputs[k]] for k in arriving):
            return None
        if index < len(plan.params):
            dtype, shape = plan.param_types[index]
        else:
            dtype, shape = self.call.in_types[self.graph.free.index(name)]
        return torch.zeros(shape, dtype=dtype, device=self.client.memory.device)

    # ---- for derivatives of a backward ----

    def keep_track(self, inputs: Sequence[torch.Tensor]) -> None:
        """Notes the inputs that have a gradient, in the order of the plan's."""
        self._with_gradient = [(weakref.ref(x), version_of(x)) for x in inputs]

    def inputs_with_gradient(self) -> list[torch.Tensor] | None:
        """These inputs, as they still are; None if one is gone, or was written to."""
        found = [(ref(), version) for ref, version in self._with_gradient]
        if any(x is None or version_of(x) != version for x, version in found):
            return None
        return [x for x, _ in found if x is not None]

    @property
    def bound(self) -> Sequence[torch.Tensor]:
        return self._read.tensors

    def sent(self) -> list[torch.Tensor]:
        """Copies of the free inputs as the forward got them."""
        held, rows = self._held.inputs, self.call.in_rows[: len(self.graph.free)]
        if held is None:
            return []
        with self.client.lock:
            self.client.catch_up()
            return [held.tensor(dtype, dims, at, n).clone() for dtype, dims, n, at in rows]

    # ---- values that were not computed ----

    def has_changed(self) -> bool:
        """True if the parameters have changed since the forward."""
        return self._read.has_changed()

    def check_unchanged(self, what: str) -> None:
        """Raises StaleError if the parameters have changed since the forward."""
        if self.has_changed():
            self._raise_changed(what)

    def _raise_changed(self, what: str) -> NoReturn:
        raise errors.StaleError(
            f"output '{what}' was not computed because only the loss was needed, and the "
            "parameters have changed since: read it before optimizer.step() (detach() does; a "
            "conversion such as float() alone does not), or set GRADD_LAZY=0; the next forwards "
            "compute it, as it has been asked for"
        )

    def _again(self, outputs: tuple[str, ...], grad_outputs: tuple[int, ...]) -> Run:
        """The same run, planned for other outputs; not started. Pins the inputs for itself."""
        plan = self.graph.plan(
            self.client,
            tuple((DTYPE_CODES[dtype], shape) for dtype, shape in self.call.in_types),
            tuple(self.graph.bound.index(n) for n in self.plan.params) if grad_outputs else (),
            self.plan.input_grads if grad_outputs else (),
            outputs,
            grad_outputs,
        )
        other = Run.__new__(Run)
        for name in ("client", "graph", "seed", "flags", "counts", "_sources", "_read"):
            setattr(other, name, getattr(self, name))
        other.call = self.call.with_lists(plan)
        other.plan, other._again_of, other.given = plan, "", []
        other.rows = []
        if self._held.inputs is not None:
            self._held.inputs.pins += 1
        other._hold(_Held(self.client, self._held.inputs))
        return other

    def repeat(
        self, outputs: tuple[str, ...], grad_outputs: tuple[int, ...], asked: bool = True
    ) -> Run:
        """The same run for outputs of which some were left out; not started.

        Such a run costs a whole forward, so it is counted, and the next calls compute the requested
        outputs: code that reads logits in one step usually does so in every step.

        Args:
            outputs: Their names.
            grad_outputs: Positions among them of those from which a backward starts.
            asked: False if the outputs have not been requested yet.

        Raises:
            StaleError: The parameters have changed since the forward; the next calls compute it.
        """
        missing = [name for name in outputs if name not in self.plan.outputs]
        if asked:
            self.graph.asked_for.update(missing)
        self.check_unchanged(missing[0])
        self.counts["repeated_forwards"] += 1
        other = self._again(outputs, grad_outputs)
        other._again_of = missing[0]
        return other

    def type_of_output(self, name: str) -> TensorType:
        """dtype and shape of an output that the plan leaves out."""
        known = self.call.left_out
        if name not in known:
            with self.client.lock:
                ((code, sizes),) = self._again((name,), ()).plan.info.outputs
            known[name] = DTYPES[code], sizes
        return known[name]

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of the optimizer changes values that the forward has read."""
        return self._read.is_stepped_by(optimizer)

    def read(self, output: str, asked: bool = True) -> torch.Tensor:
        """Value of an output that the plan left out; see repeat()."""
        with self.client.lock:
            other = self.repeat((output,), (), asked)
            try:
                return other.start()[0]
            finally:
                other.end()

    # ---- end ----

    def release(self) -> None:
        """The daemon may forget the run; the inputs stay for lazy outputs until `end`."""
        self._held.release()

    def end(self) -> None:
        self._held.end()
        self._sources = None


_retains_grad = torch.Tensor.retains_grad.__get__  # type: ignore[attr-defined]


# DeepSpeed gives each output a hook that notes the begin of a backward: that of the loss will do.
_ANNOUNCING = "deepspeed."


def _is_waited_for(output: torch.Tensor) -> bool:
    # A look is no reason to compute it.
    hooks = untouched(private.hooks, output) or {}
    if any(not f"{getattr(h, '__module__', '')}".startswith(_ANNOUNCING) for h in hooks.values()):
        return True
    return bool(untouched(_retains_grad, output))
