"""Gradients that leave a backward in groups, while the daemon computes the rest.

A backward gives the gradients of the last layers first. DistributedDataParallel reduces what it has
while the rest is computed, so a call whose gradients are reduced by it gets them in groups, in the
order in which the plan finishes them and of the sizes of that class's buckets. Each group is a step
of autograd (function.py). The first of them sends the request; each waits for its own group alone.

A group is handed out once. If the daemon dies, the next one computes the backward again, with the
same bits, but writes nothing where a group lies that was done: hooks may have changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors, options
from gradd.memory.budget import parse_bytes
from gradd.memory.shm import nbytes
from gradd.session import in_groups

if TYPE_CHECKING:
    from gradd.calls.graph import Plan
    from gradd.calls.run import Run
    from gradd.calls.slots import Slot
    from gradd.session.ring import Block
    from gradd.session.timeline import Pending

_FIRST, _NEXT = 1 << 20, 25 << 20  # bytes of the buckets of DistributedDataParallel
_MOST = 1024  # groups; the daemon takes 4096


@dataclass(frozen=True, eq=False)
class Groups:
    """How the gradients of a plan are grouped."""

    members: tuple[tuple[int, ...], ...]  # per group, positions among the plan's gradients
    of: list[int]  # per gradient its group

    @staticmethod
    def of_plan(plan: Plan, averaged: bool = False) -> Groups | None:
        """Those of a plan; None if all of its gradients come together.

        A group begins with the next gradient that is final when the one before is large enough. So
        that of a tied weight, which is final when the backward ends, is in the last group. There
        the gradients of inputs are as well.

        Args:
            plan: The plan.
            averaged: Over processes. Their plans may finish gradients in another order, and groups
                must be the same: that of the parameters counts, from the last to the first.
        """
        size = _size()
        if size is None or not plan.info.final:
            return None
        n = len(plan.params)
        sizes = [nbytes(*one) for one in plan.param_types]
        size = max(size, sum(sizes) // _MOST)
        members: list[list[int]] = [[]]
        room = min(size, _FIRST)
        # Of those that are final together the last parameters come first, as everywhere.
        final = [0] * n if averaged else plan.info.final
        for i in sorted(range(n), key=lambda i: (final[i], -i)):
            if room <= 0:
                members.append([])
                room = size
            members[-1].append(i)
            room -= sizes[i]
        if len(members) < 2:
            return None
        members[-1].extend(range(n, n + len(plan.input_grads)))
        of = [0] * (n + len(plan.input_grads))
        for group, positions in enumerate(members):
            for i in positions:
                of[i] = group
        return Groups(tuple(map(tuple, members)), of)


def _size() -> int | None:
    """Bytes of a group; None = there are none."""
    text = options.get("GRADD_GROUP_BYTES")
    if text is not None:
        return None if text == "0" else parse_bytes(text, "GRADD_GROUP_BYTES")
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return _NEXT if several and torch.distributed.get_world_size() > 1 else None


class _End:
    """What a request holds until its reply has come, or torch's stream waits for its end."""

    def __init__(
        self, run: Run, slots: Sequence[Slot], scratch: Sequence[Block], keep: bool
    ) -> None:
        self._run: Run | None = run
        self._slots, self._scratch, self._keep = slots, scratch, keep

    def forget(self) -> None:
        """Holds nothing any more."""
        self._run = None

    def __call__(self, end: dict[str, Any] | errors.GraddError) -> None:
        """Gives it back, once; a callback of Pending."""
        run, self._run = self._run, None
        if run is None:
            return
        for slot in self._slots:
            slot.free()
        for block in self._scratch:
            block.returned.append(block)
        if not (self._keep or isinstance(end, errors.GraddError)):
            run.release()


class Delivery:
    """One backward, whose groups are handed out one after the other.

    Attributes:
        found: The gradients that are not handed out; None also where there is none.
        pending: The request, while the daemon may be at work on it; None = all are there.
    """

    def __init__(self, run: Run) -> None:
        self._client = run.client
        self._groups: Groups = run.call.groups  # type: ignore[assignment]
        self.found: list[torch.Tensor | None] = []
        self.pending: Pending | None = None
        self.device = run.client.memory.device

    def __len__(self) -> int:
        return len(self._groups.members)

    def ask(
        self, run: Run, fields: dict[str, Any], meanwhile: Any, held: tuple, results: Sequence
    ) -> dict[str, Any] | None:
        """Sends a request; the reply of one of its kind, None if there was none: send it as usual.

        Args:
            run: Whose backward it is.
            fields: Of the request.
            meanwhile: Makes the tensors.
            held: Slots and blocks that it holds.
            results: Per gradient, addresses and bytes; empty on the host.
        """
        parts = [[results[i] for i in at] for at in self._groups.members] if results else []
        end = _End(run, *held, fields["keep"])
        try:
            found = in_groups.send(
                self._client,
                {**fields, "groups": self._groups.of},
                meanwhile,
                plan=run.plan.info.id,
                parts=parts,
                n=len(self),
                ended=end,
            )
        except BaseException:
            end.forget()  # the caller gives it back
            raise
        if found is None:
            return None
        self.pending, reply = found
        self._end = end
        return reply

    def take(self, group: int) -> list[torch.Tensor | None]:
        """The gradients of a group, once they are there; of a GPU, once its stream has come so far.

        Raises: What the backward has failed with.
        """
        if self.pending is not None:
            in_groups.wait(self._client, self.pending, group)
            if group + 1 == len(self):
                self._end({})
        taken = []
        for i in self._groups.members[group]:
            taken.append(self.found[i])
            self.found[i] = None  # autograd takes over what nothing else refers to
        return taken
