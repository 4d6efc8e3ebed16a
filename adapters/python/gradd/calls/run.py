"""One run: the inputs, seed and outputs of a forward, and its backward, release and re-reading.

A run pins its input blocks in the ring until it is released, so that a restarted daemon can be
given the same forward again, and so that outputs which were left uncomputed (lazy ones) can still
be asked for: the same graph, inputs and seed, planned for that output, give the value that the
first forward would have given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from gradd import errors, interrupts
from gradd.calls.captured import CapturedGraph, Plan
from gradd.calls.parameter_changes import Snapshot
from gradd.calls.slots import SlotSet
from gradd.session import protocol
from gradd.session.ring import Block
from gradd.session.shm import DTYPES, nbytes

if TYPE_CHECKING:
    from gradd.calls.parameters import Binding
    from gradd.session.client import Client


class _Held:
    """What a run holds until it is released (outputs) or has ended (inputs)."""

    __slots__ = ("client", "done", "id", "inputs", "outputs")

    def __init__(self, client: Client, inputs: Sequence[Block] = ()) -> None:
        self.client = client
        self.id = client.next_id()
        self.done = False
        self.inputs = list(inputs)
        self.outputs: list[Block] = []

    def release(self) -> None:
        """The daemon may forget the run."""
        if not self.done:
            self.done = True
            self.client.release(self.id)
            for block in self.outputs:
                block.drop()
            self.outputs = []

    def end(self) -> None:
        """Releases everything."""
        self.release()
        for block in self.inputs:
            block.drop()
        self.inputs = []


class Run:
    """A forward in the daemon. Methods take the client's lock themselves."""

    def __init__(
        self,
        client: Client,
        slots: SlotSet,
        graph: CapturedGraph,
        plan: Plan,
        binding: Binding,
        bound: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        seed: int,
        flags: int = 0,
        counts: Counter[str] | None = None,
    ) -> None:
        """Args:
        client: The client.
        slots: Gradient slots of the bridge.
        graph: The graph.
        plan: Its plan for these inputs.
        binding: The bound inputs as the daemon knows them.
        bound: The same as tensors.
        inputs: The free inputs, in order; copied into the ring by `start`.
        seed: Of the random numbers.
        flags: Of the protocol.
        counts: Where "forwards" and "repeated_forwards" are counted.
        """
        self.client = client
        self.slots = slots
        self.graph = graph
        self.plan = plan
        self.binding = binding
        self.seed = seed
        self.flags = flags
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._sources = list(inputs)
        self._types = [(t.dtype, tuple(t.shape)) for t in inputs]
        self._read = Snapshot(bound)
        self._again_of = ""  # the output that this run repeats another one for
        self._hold(_Held(client))

    def _hold(self, held: _Held) -> None:
        self._held = held
        self.id = held.id
        self.client.ends.watch(self, held.end)

    # ---- forward ----

    def start(self) -> list[torch.Tensor]:
        """Copies the inputs and runs the forward; returns the wanted outputs in order."""
        with self.client.lock, interrupts.held():
            if self._sources:
                self._copy_inputs()
            tensors, wires = [], []
            for dtype_code, dims in self.plan.info.outputs:
                dtype = DTYPES[dtype_code]
                block = self.client.ring.allocate(nbytes(dtype, dims))
                self._held.outputs.append(block)
                tensors.append(block.tensor(dtype, dims))
                wires.append(block.wire(dtype, dims))
            fields = self._forward_fields(self.id, self.plan, wires)
            trains = self.plan.params or self.plan.input_grads or self._again_of
            read = self._read if trains else None  # else it is over before anything can change
            if not self.client.forward(fields, read, bool(self._again_of)):
                self._raise_changed(self._again_of)
            self.counts["forwards"] += 1
            return tensors

    def _copy_inputs(self) -> None:
        with torch.no_grad():
            for source, (dtype, shape) in zip(self._sources, self._types, strict=True):
                block = self.client.ring.allocate(nbytes(dtype, shape))
                self._held.inputs.append(block)
                block.fill(source.detach(), dtype, shape)
        self._sources = []

    def _forward_fields(self, run: int, plan: Plan, outputs: list) -> dict:
        wires = [
            b.wire(dtype, shape)
            for b, (dtype, shape) in zip(self._held.inputs, self._types, strict=True)
        ]
        return {
            "plan": plan.info.id,
            "run": run,
            "seed": self.seed,
            "flags": self.flags,
            "b": self.binding.id,
            "in": protocol.tensors(wires),
            "out": protocol.tensors(outputs),
        }

    # ---- backward ----

    def backward(
        self, grad_outputs: Sequence[torch.Tensor | None], keep: bool
    ) -> list[torch.Tensor | None]:
        """Gradients of the plan's parameters and inputs, in that order; None where there is none.

        Args:
            grad_outputs: One per output of the plan; None = no gradient arrives.
            keep: The activations stay for another backward.
        """
        with self.client.lock, interrupts.held():
            if self._held.done:
                raise errors.StaleError(
                    "backward through a run that was released: pass retain_graph=True to the "
                    "first backward"
                )
            slot = self.slots.acquire(self.plan.layout) if self.plan.params else None
            scratch: list[Block] = []
            try:
                at, arriving = self._copy_grad_outputs(grad_outputs, scratch)
                wires, rest = self._input_grads(scratch)
                fields = {
                    "run": self.id,
                    "go": protocol.tensors(arriving, at),
                    "b": slot.bind if slot else None,
                    "g": protocol.tensors(wires),
                    "keep": keep,
                }
                untouched = set(self.client.backward(fields).get("none", ()))
                n = len(self.plan.params)
                grads = slot.tensors([i not in untouched for i in range(n)]) if slot else []
                grads += [None if n + i in untouched else t for i, t in enumerate(rest)]
                for i in untouched:
                    grads[i] = self._flat_gradient(i, at)
            finally:
                if slot:
                    self.slots.give_back(slot)
                for block in scratch:
                    block.drop()
            if not keep:
                self.release()
            return grads

    def _flat_gradient(self, index: int, arriving: Sequence[int]) -> torch.Tensor | None:
        """What torch gives where the daemon has no path: zeros behind a step (round, sign)."""
        name = (*self.plan.params, *self.plan.input_grads)[index]
        reach = self.plan.graph.reach
        if not any(name in reach[self.plan.outputs[k]] for k in arriving):
            return None
        if index < len(self.plan.params):
            dtype, shape = self.plan.layout.items[index]
        else:
            dtype, shape = self._types[self.graph.free.index(name)]
        return torch.zeros(shape, dtype=dtype)

    def _copy_grad_outputs(
        self, grad_outputs: Sequence[torch.Tensor | None], scratch: list[Block]
    ) -> tuple[list[int], list[protocol.Tensor]]:
        """Positions of the outputs whose gradients arrive, and copies of these."""
        at, arriving = [], []
        with torch.no_grad():
            for i, grad in enumerate(grad_outputs):
                if grad is None:
                    continue
                code, dims = self.plan.info.outputs[i]
                dtype = DTYPES[code]
                block = self.client.ring.allocate(nbytes(dtype, dims))
                scratch.append(block)
                block.fill(grad.detach(), dtype, dims)
                at.append(i)
                arriving.append(block.wire(dtype, dims))
        return at, arriving

    def _input_grads(
        self, scratch: list[Block]
    ) -> tuple[list[protocol.Tensor], list[torch.Tensor]]:
        wires, tensors = [], []
        for name in self.plan.input_grads:
            dtype, shape = self._types[self.graph.free.index(name)]
            block = self.client.ring.allocate(nbytes(dtype, shape))
            scratch.append(block)
            wires.append(block.wire(dtype, shape))
            tensors.append(block.tensor(dtype, shape))
        return wires, tensors

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
            "parameters have changed since: read it before optimizer.step(), or set "
            "GRADD_LAZY=0; the next forwards compute it, as somebody has asked for it"
        )

    def _again(self, outputs: tuple[str, ...], grad_outputs: tuple[int, ...]) -> Run:
        """The same run, planned for other outputs; not started. Pins the inputs for itself."""
        plan = self.graph.plan(
            self.client,
            self._wire_types(),
            tuple(self.graph.bound.index(n) for n in self.plan.params) if grad_outputs else (),
            self.plan.input_grads if grad_outputs else (),
            outputs,
            grad_outputs,
        )
        other = Run.__new__(Run)
        other.__dict__.update(self.__dict__)
        other.plan = plan
        for block in self._held.inputs:
            block.pins += 1
        other._hold(_Held(self.client, self._held.inputs))
        return other

    def repeat(
        self, outputs: tuple[str, ...], grad_outputs: tuple[int, ...], asked: bool = True
    ) -> Run:
        """The same run for outputs of which some were left out; not started.

        Such a run costs a whole forward, so it is counted, and the next calls compute what was
        asked for: who reads logits in one step mostly does so in every step.

        Args:
            outputs: Their names.
            grad_outputs: Positions among them of those from which a backward starts.
            asked: False if nobody has asked for them yet.

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

    def _wire_types(self) -> tuple[protocol.Type, ...]:
        from gradd.session.shm import DTYPE_CODES

        return tuple((DTYPE_CODES[dtype], shape) for dtype, shape in self._types)

    def type_of_output(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """dtype and shape of an output that the plan leaves out."""
        with self.client.lock:
            sizes = self.graph.output_shape(name, [shape for _, shape in self._types])
            if sizes is None:
                (kind,) = self._again((name,), ()).plan.info.outputs
                return DTYPES[kind[0]], kind[1]
            return self.graph.output_dtype(name), sizes

    def is_changed_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of the optimizer changes what the forward has read."""
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
        """Releases everything."""
        self._held.end()
        self._sources = []
