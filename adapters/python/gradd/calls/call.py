"""The common part of runs of one form: a plan with its binding, and the places of tensors.

Runs hold it and live as long as their autograd graph, so nothing here refers to the owner of the
module.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, options
from gradd.calls import function
from gradd.calls.groups import Groups
from gradd.memory.shm import DTYPE_CODES, DTYPES, nbytes, round_up

if TYPE_CHECKING:
    from gradd.calls.graph import Graph, Plan
    from gradd.calls.liverows import Sizes
    from gradd.calls.parameters import Binding
    from gradd.calls.run import Run
    from gradd.calls.selection import Selection
    from gradd.calls.slots import SlotSet
    from gradd.session.client import Client
    from gradd.session.ring import Block

TensorType = tuple[torch.dtype, tuple[int, ...]]  # element type and sizes


class Call:
    """A plan with its binding, and the order and places of tensors.

    Attributes:
        in_types: Element types and sizes of the free inputs.
        in_rows: Per free input its type, sizes, bytes, and place in the run's block of inputs.
        in_bytes: Of that block.
        out_rows: Per output of the plan its type, sizes and bytes.
        plain: The plan's results are the user's outputs, in this order.
        left_out: Types and sizes of outputs that the plan leaves out, as far as they are known.
        groups: In which the gradients come; None = together.
        averages: Fields of a backward whose gradients are averaged over processes, else nothing.
        apply: Makes a run a step of autograd.
    """

    def __init__(
        self,
        client: Client,
        slots: SlotSet,
        graph: Graph,
        plan: Plan,
        binding: Binding,
        in_types: Sequence[TensorType],
        *,
        selection: Selection,
        lists: Sequence[int] = (),
    ) -> None:
        """Args:
        client: The session.
        slots: Gradient slots of the compiled function.
        graph: The graph.
        plan: Its plan for these types.
        binding: The bound inputs as the daemon knows them.
        in_types: Of the free inputs.
        selection: The gradients and outputs of the call.
        lists: Sizes of the lists of live rows, which come behind the free inputs.
        """
        self.client = client
        self.slots = slots
        self.graph = graph
        self.plan = plan
        self.binding = binding
        self.in_types = list(in_types)
        self.selection = selection
        self.last = (weakref.ref(graph), weakref.ref(plan))
        self.trains = bool(plan.params or plan.input_grads)
        whole = bool(graph.rows) or not client.memory.moves  # gradients that are copied
        reduction = graph.reduction
        groups = Groups.of_plan(plan, reduction is not None)
        self.groups = None if whole else groups
        self.averages: dict[str, Any] = {}
        if reduction is not None:
            if graph.rows:
                raise errors.UnsupportedError(
                    "process_group: gradients of nn.Embedding(sparse=True) are not averaged over "
                    "processes: use sparse=False, or DistributedDataParallel"
                )
            # Also of one that comes together here: it may come in groups in another process.
            self.averages = {"reduce": reduction.id, "groups": groups and groups.of}
        self.apply = function.apply if self.groups is None else function.apply_in_groups
        all_types = [*self.in_types, *((torch.int64, (n,)) for n in lists)]
        self.in_rows, self.in_bytes = _side_by_side(all_types)
        self._in_offsets = [offset for *_, offset in self.in_rows]
        self._in_codes = [DTYPE_CODES[dtype] for dtype, _ in all_types]
        self._in_dims = [dims for _, dims in all_types]
        self.out_rows = [
            (DTYPES[code], dims, nbytes(DTYPES[code], dims)) for code, dims in plan.info.outputs
        ]
        self._out_codes = [code for code, _ in plan.info.outputs]
        self._out_dims = [dims for _, dims in plan.info.outputs]
        at = {name: i for i, name in enumerate(graph.free)}
        self.grad_inputs = [at[name] for name in plan.input_grads]
        user = range(len(graph.user))
        self.plain = not graph.hidden and selection.real == list(user)
        self.left_out: dict[str, TensorType] = {}
        self.all_differentiable = all(selection.differentiable)
        self.watches_readers = bool(graph.cap.depends)
        self.prints_memory = bool(options.get("ORTMODULE_PRINT_MEMORY_STATS"))

    @classmethod
    def of(
        cls,
        client: Client,
        slots: SlotSet,
        graph: Graph,
        binding: Binding,
        inputs: Sequence[torch.Tensor],
        selection: Selection,
    ) -> Call:
        """The common part of runs with such free inputs; compiles the plan if need be."""
        in_types = [(t.dtype, tuple(t.shape)) for t in inputs]
        types = tuple((DTYPE_CODES[dtype], shape) for dtype, shape in in_types)
        plan = graph.plan(client, types, *selection.of_plan(), budget=selection.budget)
        return cls(client, slots, graph, plan, binding, in_types, selection=selection)

    def with_lists(self, plan: Plan, lists: Sequence[int] = ()) -> Call:
        """The same call by another plan, which takes lists of live rows of these sizes."""
        return Call(
            *(self.client, self.slots, self.graph, plan, self.binding, self.in_types),
            selection=self.selection,
            lists=lists,
        )

    def live(
        self, inputs: list[torch.Tensor], quiet: bool = False
    ) -> tuple[Call, list[torch.Tensor]]:
        """The call that runs with these inputs, and its inputs: without rows that no loss reads.

        `quiet`: a call of gradd's own, of which nothing is printed.
        """
        live = self.plan.live
        if live is None:
            return self, inputs
        self.client.catch_up()  # values are read: the stream is waited for, under the lock
        return live.choose(self, inputs, self._compile_for, quiet)

    def _compile_for(self, sizes: Sizes) -> Plan:
        types = tuple((DTYPE_CODES[dtype], shape) for dtype, shape in self.in_types)
        selection = self.selection
        return self.graph.plan(
            self.client, types, *selection.of_plan(), budget=selection.budget, live=sizes
        )

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


def _side_by_side(in_types: Sequence[TensorType]) -> tuple[list[tuple], int]:
    """Rows of (type, sizes, bytes, offset) of tensors that lie in one block, and its bytes."""
    rows, end = [], 0
    for dtype, dims in in_types:
        size = nbytes(dtype, dims)
        rows.append((dtype, dims, size, end))
        end += round_up(size)
    return rows, end
