"""Gradient slots: sets of gradient buffers in shared memory, one buffer per parameter.

The daemon overwrites a slot (it never adds to it); autograd gets the tensors made from it and takes
them over as `.grad` without a copy. From then on `.grad` is the slot, so a slot may be overwritten
only when no tensor refers to it any more: the user may keep `.grad` or the result of
`autograd.grad`, or accumulate. The usual loop needs one slot; an additional one is given back a few
backwards after it was needed.

A large slot lies in several segments, one block in each. When the slot is given up, each block goes
back as soon as no tensor refers to it.

Gradients that a forward forms have slots of their own: a run has one from its forward to its end,
and two forwards before a backward have two.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from gradd.memory.shm import nbytes, round_up
from gradd.session.finalizers import Tie
from gradd.session.ring import Block, packed

if TYPE_CHECKING:
    from gradd.session.client import Client

_KEPT = 4  # backwards, as long as which an idle slot waits for its next one
_pins = attrgetter("pins")
Row = tuple[torch.dtype, tuple[int, ...], int, int, int]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the gradients of one set of parameters lie in a slot; one object per set.

    Attributes:
        items: Types and sizes.
        parts: Per block of a slot its bytes, and per gradient in it, in order, type, sizes, offset,
            bytes and elements.
    """

    items: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    parts: tuple[tuple[int, tuple[Row, ...]], ...]

    @staticmethod
    def of(items: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
        """Lays the gradients side by side, each aligned to 64 bytes."""
        known = _layouts.get(tuple(items))
        if known is not None:
            return known
        sizes = [nbytes(dtype, shape) for dtype, shape in items]
        pairs = iter(zip(items, sizes, strict=True))
        parts = []
        for count, total in packed(sizes):
            rows, end = [], 0
            for (dtype, shape), size in itertools.islice(pairs, count):
                rows.append((dtype, shape, end, size, size // dtype.itemsize))
                end += round_up(max(size, 1))
            parts.append((total, tuple(rows)))
        return _layouts.setdefault(tuple(items), Layout(tuple(items), tuple(parts)))


_layouts: weakref.WeakValueDictionary[tuple, Layout] = weakref.WeakValueDictionary()


class Slot:
    """One set of buffers and the binding under which the daemon knows it."""

    __slots__ = ("bind", "blocks", "busy", "client", "dropped", "layout", "used")

    def __init__(self, client: Client, layout: Layout, blocks: list[Block], bind: int) -> None:
        self.client = client
        self.layout = layout
        self.blocks = blocks  # its memory, one per part of the layout
        self.bind = bind
        self.busy = False  # a request or a run has it
        self.used = 0  # when it was, on the set's clock
        self.dropped = False  # it is given up once it is no longer busy

    def free(self) -> None:
        """Returns the slot; safe in finalizers of any thread."""
        self.busy = False
        if self.dropped:
            self.drop()

    def drop(self) -> None:
        """Gives the slot up, once it is no longer busy; tensors over it keep their memory."""
        self.dropped = True
        if not self.busy:
            self.client.later("unbind", {"bind": self.bind})
            for block in self.blocks:
                block.drop()

    def places(self) -> list[tuple[int, int]]:
        """Addresses and bytes of the gradients, in order."""
        return [
            (block.segment.address + block.offset + offset, size)
            for block, (_, rows) in zip(self.blocks, self.layout.parts, strict=True)
            for _, _, offset, size, _ in rows
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Fresh tensors over the buffers, each the only owner of its storage.

        Block.tensor() for each, in one loop: models have hundreds of parameters. A slot is in use
        as long as one of its tensors is, so those of a block share what tells of their end.
        """
        made: list[torch.Tensor] = []
        for block, (total, rows) in zip(self.blocks, self.layout.parts, strict=True):
            segment, start = block.segment, block.offset
            whole = self._part(block, start, total) if segment.is_host else None
            for dtype, shape, offset, size, count in rows:
                if not size:
                    made.append(torch.empty(shape, dtype=dtype, device=segment.device))
                    continue
                if whole is not None:
                    tensor = torch.frombuffer(whole, dtype=dtype, count=count, offset=offset)
                else:
                    part = self._part(block, start + offset, size)
                    tensor = segment.make(part, dtype=dtype, count=count)
                made.append(tensor if len(shape) == 1 else tensor.resize_(shape))
        return made

    @staticmethod
    def _part(block: Block, start: int, size: int) -> Any:
        """A part of a block, which is busy for as long as this lives."""
        exporter = block.segment.view[start : start + size]
        end = Tie(exporter, block.returned.append)
        end.what = block
        block.ties.add(end)
        block.pins += 1
        return exporter


class SlotSet:
    """The slots of one compiled function. The caller holds the client's lock."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._slots: dict[Layout, list[Slot]] = {}
        self._acquired = 0

    def __len__(self) -> int:
        return sum(len(s) for s in self._slots.values())

    def acquire(self, layout: Layout) -> Slot:
        """Returns an unreferenced slot; the caller owns it until `Slot.free`."""
        pool = self.client.gradients
        if pool.returned or self.client.ends.died:
            pool.drain()
        if pool.ended:
            pool.go_on_behind_readers()
        self._acquired += 1
        found, old = None, self._acquired - _KEPT
        for slots in self._slots.values():
            for slot in slots[:]:
                if slot.busy or max(map(_pins, slot.blocks)) > 1:
                    slot.used = self._acquired  # gradients kept once may be kept again
                elif found is None and slot.layout is layout:
                    found = slot
                elif slot.used < old:
                    slots.remove(slot)
                    slot.drop()
        if found is None:
            found = self._create(layout)
        found.busy, found.used = True, self._acquired
        return found

    def drop_idle(self) -> None:
        """Gives up unreferenced slots: the next backward may belong to another plan."""
        self.client.gradients.drain()
        for slots in self._slots.values():
            for slot in slots[:]:
                if not slot.busy and max(map(_pins, slot.blocks)) <= 1:
                    slots.remove(slot)
                    slot.drop()
        self.client.gradients.drain()

    def drop_all(self) -> None:
        """Gives up every slot at the end; living tensors keep their memory."""
        for slots in self._slots.values():
            for slot in slots:
                slot.drop()
        self._slots.clear()

    def _create(self, layout: Layout) -> Slot:
        pool, blocks = self.client.gradients, []
        try:
            tensors = []
            for size, rows in layout.parts:
                block = pool.allocate(size)
                blocks.append(block)
                tensors += [block.wire(dtype, shape, offset) for dtype, shape, offset, *_ in rows]
            bind = self.client.next_id()
            self.client.bind(bind, tensors)
        except BaseException:
            for block in blocks:
                block.drop()
            raise
        slot = Slot(self.client, layout, blocks, bind)
        self._slots.setdefault(layout, []).append(slot)
        return slot
