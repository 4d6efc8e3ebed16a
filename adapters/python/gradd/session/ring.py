"""Pools of shared memory: blocks are allocated, exported as tensors, and come back by themselves.

A Pool owns segments and hands out Blocks with a first-fit list that merges neighbours. A block is
busy while its owner holds it (`hold`/`drop`) or any tensor made from it is alive: each exporter is
watched by a weak reference whose callback only appends to a queue (it may run in any thread and in
the middle of anything); the pool empties the queue at its next operation.

A client has a pool for each kind of memory: parameters, gradients, the state of optimizers, and the
ring of inputs and outputs, which is named after its reuse in each step: it is no ring buffer. The
caller holds the client's lock around every method except the weak reference's callback.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import memmove
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors
from gradd.memory import shm, watch
from gradd.memory.shm import ALIGN, DTYPE_CODES, Segment, nbytes, round_up
from gradd.session.finalizers import Tie

if TYPE_CHECKING:
    from gradd.session.client import Client
    from gradd.session.protocol import Tensor

_MOVED_BYTES = 1 << 20
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)  # a subclass may have no memory of its own
_EXACT_SEGMENTS = 16  # of a client, with just the bytes that were asked for
_SMALL = 64 << 10  # bytes of a block that may be taken again as it is
_IDLE = 32  # such blocks
_LATELY = 0xFF  # blocks, a power of two less one: what is in use is looked at as often
_AHEAD = 64 << 20  # bytes that a later one has beyond that, at most


class Block:
    """A range of a segment."""

    __slots__ = ("__weakref__", "offset", "pins", "pool", "returned", "segment", "size", "ties")

    def __init__(self, pool: Pool, segment: Segment, offset: int, size: int) -> None:
        self.pool = pool
        self.returned = pool.returned
        self.segment = segment
        self.offset = offset  # first byte, a multiple of 64
        self.size = size  # bytes, a multiple of 64
        self.pins = 1  # owners that hold the block, plus living exporters
        self.ties: set[Tie] = set()

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0, size: int = -1
    ) -> torch.Tensor:
        """A new tensor on the block; the block stays busy until no tensor shares its storage.

        `resize_` gives the shape without making a view: a view would keep its base and share one
        version counter. Tensors without elements own no shared memory.

        Args:
            dtype: Element type.
            shape: Sizes.
            offset: Bytes from the beginning of the block.
            size: Bytes, if the caller knows them.
        """
        if size < 0:
            size = nbytes(dtype, shape)
        if size == 0:
            return torch.empty(shape, dtype=dtype, device=self.segment.device)
        exporter = self._part(offset, size)
        end = Tie(exporter, self.returned.append)
        end.what = self
        self.ties.add(end)
        self.pins += 1
        count = size // dtype.itemsize
        return self.segment.make(exporter, dtype=dtype, count=count).resize_(shape)

    def _part(self, offset: int, size: int) -> Any:
        start = self.offset + offset
        return self.segment.view[start : start + size]

    def fill(self, source: torch.Tensor, row: tuple[torch.dtype, Sequence[int], int, int]) -> None:
        """Copies a tensor into the block.

        A small contiguous one is moved as bytes: torch's copy wakes its threads for a few hundred
        kilobytes already, which takes longer than the copy while the daemon's threads are busy.

        Args:
            source: The tensor.
            row: Its element type, sizes and bytes, and where in the block it goes.
        """
        dtype, shape, size, offset = row
        if size == 0:
            return
        if (
            size <= _MOVED_BYTES
            and type(source) in _PLAIN_TYPES
            and source.dtype is dtype
            and source.is_cpu
            and self.segment.is_host
            and source.layout is torch.strided
            and source.is_contiguous()
            and not source.is_neg()
            and not source.is_conj()
        ):  # the elements lie in memory just as they are to be written
            target = self.segment.address + self.offset + offset
            memmove(target, watch.data_ptr(source), size)
        else:
            # The owner holds the block, so that nothing needs to know when this tensor ends.
            part, count = self._part(offset, size), size // dtype.itemsize
            tensor = self.segment.make(part, dtype=dtype, count=count).resize_(shape)
            tensor.copy_(source.detach())

    def write(self, data: bytes) -> None:
        """Copies bytes to its beginning."""
        if self.segment.is_host:
            self.segment.view[self.offset : self.offset + len(data)] = data
        else:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.tensor(torch.uint8, source.shape).copy_(source)

    def wire(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> Tensor:
        """The protocol's description of a tensor in this block; see protocol.tensors."""
        return (self.segment.id, self.offset + offset, DTYPE_CODES[dtype], tuple(shape))

    def drop(self) -> None:
        """The owner lets go; safe in finalizers of any thread. Takes effect at the next drain."""
        self.returned.append(self)

    @property
    def idle(self) -> bool:
        """True if only the owner holds it (after `Pool.drain`)."""
        return self.pins <= 1


class Pool:
    """Segments for one purpose. See the top of this file."""

    def __init__(
        self,
        client: Client,
        purpose: str,
        grow: int = 0,
        keep: bool = False,
        watched: bool = False,
    ) -> None:
        """Args:
        client: Creates and drops the segments.
        purpose: Of the segments, see shm.PURPOSES.
        grow: Bytes of a segment when a request does not need more.
        keep: Keep empty segments for the next step while they were recently needed.
        watched: Note accesses to its memory past torch's version counters (watch.py).
        """
        self.client = client
        self.purpose = purpose
        self.grow = grow
        self.keep = keep
        self.watched = watched
        self.peak_bytes = 0
        self._emptied = self._allocated = 0
        self._ending: set[int] = set()  # segments that get no more blocks
        self.returned: deque[Tie | Block] = deque()
        self.ended = False  # tensors have, and nothing says yet that streams have read them
        # Without this table a block that only tensors hold would be a cycle of block and weak
        # references: the collector would take it, and the exporter's end would go unnoticed.
        self.busy: dict[tuple[int, int], Block] = {}
        self._free: dict[int, tuple[Segment, list[int], dict[int, int]]] = {}
        # Places of small blocks that the next ones of the same size take, by size: each step needs
        # the same ones. They are in no list of free ranges until something else needs room.
        self._idle: dict[int, list[tuple[Segment, int]]] = {}
        self._n_idle = 0
        self.busy_bytes = 0

    def drain(self) -> None:
        """Gives ranges whose last pin is gone back to the free list."""
        died, living = self.client.ends.died, self.client.ends.living
        while died:  # Ends.settle(), without a call
            end = died.popleft()
            living.discard(end)
            end.what()
        while self.returned:
            item = self.returned.popleft()
            if type(item) is Block:
                block = item
            else:
                block = item.what
                block.ties.discard(item)
                self.ended = True
            block.pins -= 1
            if block.pins == 0:
                size, segment = block.size, block.segment
                self.busy_bytes -= size
                self.busy.pop((segment.id, block.offset), None)
                may_wait = self.keep and size <= _SMALL and self._n_idle < _IDLE
                if may_wait and segment.id not in self._ending:
                    self._idle.setdefault(size, []).append((segment, block.offset))
                    self._n_idle += 1
                else:
                    self.merge()
                    self._give_back(segment, block.offset, size)

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes, held once by the caller.

        Raises:
            NoSpaceError: There is no memory for another segment.
        """
        if self.returned or self.client.ends.died:
            self.drain()
        if self.ended:
            self.go_on_behind_readers()
        size = (size + ALIGN - 1) // ALIGN * ALIGN or ALIGN
        self._allocated += 1
        if not self._allocated & _LATELY and self.keep:
            self.merge()
            self._end_large()
        idle = self._idle.get(size)
        if idle:
            segment, offset = idle.pop()
            self._n_idle -= 1
        else:
            segment, offset = self._found(size)
        self.busy_bytes += size
        if self.busy_bytes > self.peak_bytes:
            self.peak_bytes = self.busy_bytes
        block = Block(self, segment, offset, size)
        self.busy[segment.id, offset] = block
        return block

    def go_on_behind_readers(self) -> None:
        """Memory of tensors that have ended may be written again, in the order of streams.

        Any stream may still read it. A stream waits here, not in drain(): a thread that only tidies
        up gives no work to a GPU.
        """
        self.client.memory.go_on_behind_all()
        self.ended = False

    def _found(self, size: int) -> tuple[Segment, int]:
        """A free range, whose space is reserved."""
        found = self._take(size)
        if found is None and self._idle:
            self.merge()
            found = self._take(size)
        if found is None:
            self._add(self._new_segment(size))
            found = self._take(size)
        segment, offset = found  # type: ignore[misc]
        if segment.reserved < offset + size:
            segment.reserve(offset + size)
        return segment, offset

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A new tensor, which alone keeps its block."""
        block = self.allocate(nbytes(dtype, shape))
        made = block.tensor(dtype, tuple(shape))
        block.drop()
        return made

    def reserve(self, sizes: Sequence[int]) -> None:
        """Makes room for blocks of these sizes that are allocated next, in this order.

        Raises:
            NoSpaceError: There is no memory for them; nothing is reserved.
        """
        self.drain()
        self.merge()
        if self._has_room(blocks_bytes(sizes)):
            return
        added: list[Segment] = []
        try:
            for _, size in packed(sizes):
                added.append(self.client.create_segment(size, self.purpose))
                self._add(added[-1])
        except BaseException:
            for segment in added:
                self._drop(segment)
            raise

    def _add(self, segment: Segment) -> None:
        self._free[segment.id] = (segment, [segment.start], {segment.start: segment.room})
        if self.watched:
            watch.add(segment.address, segment.size)

    def adopt(self, segment: Segment, sizes: dict[int, int]) -> list[Block]:
        """Takes a segment whose contents were made elsewhere; it goes when its blocks are gone.

        Args:
            segment: It.
            sizes: Bytes of the blocks in it, by their offsets. It gets no others.

        Returns:
            These blocks, each held once.

        Raises:
            SharedMemoryError: They overlap, or lie outside.
        """
        starts, free, end = [], {}, segment.start
        for offset, size in sorted(sizes.items()):
            if offset < end or offset % ALIGN or size > segment.size - offset:
                raise errors.SharedMemoryError(
                    f"{size} bytes at {offset} of a kept segment of {segment.size} overlap others"
                )
            if offset > end:
                starts.append(end)
                free[end] = offset - end
            end = offset + round_up(max(size, 1))
        if end < segment.size:
            starts.append(end)
            free[end] = segment.size - end
        self._add(segment)
        self._free[segment.id] = (segment, starts, free)
        self._ending.add(segment.id)
        return [self._put(segment, at, round_up(max(n, 1))) for at, n in sorted(sizes.items())]

    def _put(self, segment: Segment, offset: int, size: int) -> Block:
        block = self.busy[segment.id, offset] = Block(self, segment, offset, size)
        self.busy_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.busy_bytes)
        return block

    def segment_of(self, fd: int) -> Segment | None:
        """The segment of this pool that a descriptor is of."""
        one = os.fstat(fd)
        segments = (segment for segment, _, _ in self._free.values())
        return next((s for s in segments if os.path.samestat(os.fstat(s.fd), one)), None)

    def adopt_more(self, segment: Segment, sizes: dict[int, int]) -> list[Block]:
        """Takes more blocks of a segment that was adopted; those that there are are held again.

        Raises:
            SharedMemoryError: They overlap others, or lie outside.
        """
        self.merge()
        _, starts, free = self._free[segment.id]
        wanted = {at: round_up(max(size, 1)) for at, size in sorted(sizes.items())}
        end = segment.start
        for offset, size in wanted.items():
            known = self.busy.get((segment.id, offset))
            i = bisect.bisect_right(starts, offset) - 1
            room = starts[i] + free[starts[i]] - offset if i >= 0 else 0
            fits = known.size == size if known is not None else room >= size
            if not fits or offset % ALIGN or offset < end:
                raise errors.SharedMemoryError(
                    f"{size} bytes at {offset} of a kept segment of {segment.size} overlap others"
                )
            end = offset + size
        blocks = []
        for offset, size in wanted.items():
            known = self.busy.get((segment.id, offset))
            if known is not None:
                known.pins += 1
            else:
                self._carve(segment, offset, size)
                known = self._put(segment, offset, size)
            blocks.append(known)
        return blocks

    def _carve(self, segment: Segment, offset: int, size: int) -> None:
        """Takes a part out of a free range."""
        _, starts, free = self._free[segment.id]
        i = bisect.bisect_right(starts, offset) - 1
        start = starts.pop(i)
        end = start + free.pop(start)
        for first, last in ((offset + size, end), (start, offset)):
            if first < last:
                starts.insert(i, first)
                free[first] = last - first

    @contextlib.contextmanager
    def filling(self, size: int) -> Iterator[None]:
        """Blocks of `size` bytes all together, whose space is reserved as they are allocated.

        The daemon knows them at the end of the context; if an exception ends it, their tensors
        live on, but the blocks are of no use.
        """
        segment = None
        self.merge()
        if not self._has_room(size):
            segment = self.client.new_segment(size, self.purpose, in_pieces=True)
            self._add(segment)
        try:
            yield
            if segment is not None:
                self.client.pass_segment(segment)
        except BaseException:
            if segment is not None:
                self._forget(segment)
                segment.close()
            raise

    def _has_room(self, size: int) -> bool:
        entries = self._free.values()
        return any(sizes[s] >= size for _, starts, sizes in entries for s in starts)

    def _new_segment(self, size: int) -> Segment:
        """A session has a limited number of segments: after the first few they get larger."""
        size = max(size, self.grow)
        ahead = min(self.bytes() // 2, _AHEAD)
        if ahead > size and len(self.client.segment_ids()) >= _EXACT_SEGMENTS:
            try:
                return self.client.create_segment(ahead, self.purpose)
            except errors.NoSpaceError:
                pass  # then only what is needed
        return self.client.create_segment(size, self.purpose)

    def retire(self) -> None:
        """Nothing will be allocated here again: segments go as soon as they are empty."""
        self.keep = False
        self.drain()
        self.merge()
        self.drop_empty()

    def drop_empty(self) -> None:
        """Gives back segments that reserve() has made and no block has used."""
        for segment, _, sizes in list(self._free.values()):
            if sizes.get(segment.start) == segment.room:
                self._drop_if_spare(segment)

    def unwatch(self) -> None:
        """Stops watching this memory: writes to it are no longer compared."""
        for segment, _, _ in self._free.values():
            watch.remove(segment.address)

    def forget_peak(self) -> None:
        """The past peak will not be needed again: its segments go if they are empty."""
        self.drain()
        self.merge()
        self.peak_bytes = self.busy_bytes
        for segment, _, sizes in list(self._free.values()):
            if sizes.get(segment.start) == segment.room > self.grow:
                self._drop(segment)

    def _end_large(self) -> None:
        """Segments of which lately less than half was in use go once they are empty.

        Without this one block that is always there, a loss that waits for the next one, would keep
        a segment that large outputs once needed.
        """
        lately, self.peak_bytes = self.peak_bytes, self.busy_bytes
        for segment, _, sizes in list(self._free.values()):
            if segment.room > 2 * max(self.grow, lately):
                self._ending.add(segment.id)
                if sizes.get(segment.start) == segment.room:
                    self._drop(segment)

    def bytes(self) -> int:
        return sum(segment.size for segment, _, _ in self._free.values())

    def _take(self, size: int) -> tuple[Segment, int] | None:
        for segment, starts, sizes in self._free.values():
            if segment.id in self._ending:
                continue
            for i, start in enumerate(starts):
                have = sizes[start]
                if have < size:
                    continue
                del sizes[start]
                if have == size:
                    del starts[i]
                else:
                    starts[i] = start + size
                    sizes[start + size] = have - size
                return segment, start
        return None

    def merge(self) -> None:
        """Places of small blocks become parts of the free ranges around them."""
        if self._idle:
            idle, self._idle, self._n_idle = self._idle, {}, 0
            for size, places in idle.items():
                for segment, offset in places:
                    self._give_back(segment, offset, size)

    def _give_back(self, segment: Segment, start: int, size: int) -> None:
        entry = self._free.get(segment.id)
        if entry is None:
            return  # the segment was dropped with its client
        _, starts, sizes = entry
        i = bisect.bisect_left(starts, start)
        if i < len(starts) and starts[i] == start + size:
            size += sizes.pop(starts.pop(i))
        if i > 0 and starts[i - 1] + sizes[starts[i - 1]] == start:
            sizes[starts[i - 1]] += size
        else:
            starts.insert(i, start)
            sizes[start] = size
        if sizes.get(segment.start) == segment.room:
            self._drop_if_spare(segment)

    def _drop_if_spare(self, segment: Segment) -> None:
        """Drops an empty segment unless the peak of the last steps needs it."""
        # Gradients that do not lie in segments are copied there in each step of FusedAdam.
        copies = self.purpose == "gradients" and not self.client.memory.moves
        if (self.keep or copies) and segment.id not in self._ending:
            self._emptied += 1
            if self._emptied % 64 == 0:
                self.peak_bytes = self.busy_bytes
                return
            if len(self._free) == 1 or self.bytes() - segment.size < self.peak_bytes:
                return
        self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        self._forget(segment)
        self.client.drop_segment(segment)

    def _forget(self, segment: Segment) -> None:
        del self._free[segment.id]
        self._ending.discard(segment.id)
        if self.watched:
            watch.remove(segment.address)


def blocks_bytes(sizes: Sequence[int]) -> int:
    """Bytes that blocks of these sizes take together when laid side by side."""
    return sum(round_up(max(n, 1), ALIGN) for n in sizes)


def packed(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """How blocks share segments in this order: of each segment how many blocks, and its bytes."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        more = round_up(max(size, 1), ALIGN)
        count, total = found[-1] if found else (0, 0)
        if count and total + more <= shm.SEGMENT_BYTES - shm.PAGE:  # which the header takes
            found[-1] = (count + 1, total + more)
        else:
            found.append((1, more))
    return found
