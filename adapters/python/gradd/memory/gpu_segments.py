"""Segments of a GPU's client: three ways in which its daemon gets the same memory.

* `CreatedSegment`: the GPU's memory, made by cuMemCreate. A descriptor names it, and it lives as
  long as one of the two maps it.
* `AllocatedSegment`: the GPU's memory, made by cuMemAlloc. A handle of 64 bytes names it, and it
  must not be freed while the daemon has it open: until then the connection keeps `lent`.
* `PinnedSegment`: pages of the host, which the drivers of both map. Tensors over them are tensors
  of the GPU, whose streams read and write over the bus. Nothing of the user's lies there: it is
  copied, in the order of the stream.

`WAYS` has them in the order in which they are tried (session/sharing.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from gradd.memory import driver, shm
from gradd.memory.driver import INT, SIZE, U64, Call, Driver
from gradd.memory.shm import Header, round_up

if TYPE_CHECKING:
    from gradd.memory.devices import Gpu

_BLOCK = 2 << 20  # of the driver: smaller allocations share one, and with it their handle


class _Memory:
    """Memory at an address of this process and its GPU, until nothing refers to it."""

    def __init__(
        self, driver: Driver, address: int, ends: Sequence[Call], kept: object = None
    ) -> None:
        """Args:
        driver: Of the GPU.
        address: See the attribute.
        ends: See the attribute.
        kept: Is let go after that.
        """
        self.address = address  # where it is
        self.ends = list(ends)  # what ends it
        self._driver, self._kept = driver, kept

    def end(self) -> None:
        if self.ends:
            self._driver.end(self.address, self.ends, self._kept)
            self.ends = []

    __del__ = end


class _Bytes:
    __slots__ = ("__weakref__", "address", "memory", "size")

    def __init__(self, memory: _Memory, start: int, size: int) -> None:
        self.memory = memory
        self.address = memory.address + start
        self.size = size


class _View:
    """`view[a:b]` of a segment."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory

    def __getitem__(self, part: slice) -> _Bytes:
        return _Bytes(self._memory, part.start, part.stop - part.start)


class GpuSegment:
    """What the three have in common.

    Attributes: those of Segment, and
        uuid: Of the GPU.
        handle: Of the driver's; None = a descriptor names the memory.
        lent: What must live as long as the daemon has the segment; None = it keeps it itself.
        text: For people.
        moves: Parameters and results lie there; False = they are copied.
    """

    kind: ClassVar[str]
    text: ClassVar[str]
    moves = True
    is_host = False
    start = 0  # no header: the daemon reads none from a GPU
    fd = -1
    handle: bytes | None = None
    lent: object = None

    def __init__(self, gpu: Gpu, number: int, size: int, header: Header) -> None:
        """Raises: OutOfMemoryError, DeviceLostError, NoSpaceError (pages of the host)."""
        self.id = number
        self.header = header
        self.uuid, self.device = gpu.uuid, gpu.device
        self._driver = gpu.driver
        self._memory: _Memory | None = None
        self.room = max(size, 1)
        try:
            self._fill()
        except BaseException:
            if self._memory is not None:
                self._memory.end()  # the error, which may be kept, keeps references
            self.close()
            raise
        self.size = self.reserved = self.start + self.room
        self.address = self._memory.address  # type: ignore[union-attr]
        self.view: _View | None = _View(self._memory)  # type: ignore[arg-type]
        self.make: Callable[..., torch.Tensor] = gpu.tensor

    def _fill(self) -> None:
        """Makes the memory of `room` bytes, or of some more, and what names it."""
        raise NotImplementedError

    def reserve(self, end: int) -> None:
        """All of it has its memory from the beginning."""

    def close(self) -> None:
        """Closes the descriptor and lets go of the memory; tensors on it stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.view = self._memory = self.lent = None


class CreatedSegment(GpuSegment):
    """Memory of cuMemCreate, mapped here and known to the daemon by a descriptor."""

    kind = "cuda-vmm"
    text = "memory of cuMemCreate"

    def _fill(self) -> None:
        call, grain = self._driver.call, SIZE()
        where = ctypes.byref(self._driver.properties)
        call("cuMemGetAllocationGranularity", ctypes.byref(grain), where, INT(0))
        self.room = round_up(self.room, grain.value)
        handle, fd, kind = U64(), INT(), INT(driver.DESCRIPTOR)
        call("cuMemCreate", ctypes.byref(handle), SIZE(self.room), where, U64(0))
        try:
            call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, kind, U64(0))
            self.fd = fd.value
            self._map(handle)
        finally:
            call("cuMemRelease", handle)  # the mapping keeps the memory

    def _map(self, handle: U64) -> None:
        call, size, at = self._driver.call, SIZE(self.room), U64()
        call("cuMemAddressReserve", ctypes.byref(at), size, SIZE(0), U64(0), U64(0))
        self._memory = _Memory(self._driver, at.value, [("cuMemAddressFree", at, size)])
        call("cuMemMap", at, size, SIZE(0), handle, U64(0))
        self._memory.ends.insert(0, ("cuMemUnmap", at, size))
        access = driver.Access(self._driver.properties.location, driver.READ_WRITE)
        call("cuMemSetAccess", at, size, ctypes.byref(access), SIZE(1))


class AllocatedSegment(GpuSegment):
    """Memory of cuMemAlloc, known to the daemon by a handle."""

    kind = "cuda-ipc"
    text = "handles of cuIpcGetMemHandle"

    def _fill(self) -> None:
        call, at, handle = self._driver.call, U64(), driver.Handle()
        self.room = round_up(self.room, _BLOCK)
        call("cuMemAlloc_v2", ctypes.byref(at), SIZE(self.room))
        self._memory = self.lent = _Memory(self._driver, at.value, [("cuMemFree_v2", at)])
        call("cuIpcGetMemHandle", ctypes.byref(handle), at)
        self.handle = bytes(handle.bytes)


class PinnedSegment(GpuSegment):
    """Pages of the host that the GPU reads and writes over the bus."""

    kind = "memfd"
    text = "pinned memory of the host"
    moves = False

    def _fill(self) -> None:
        call, there = self._driver.call, U64()
        pages = shm.Segment(self.id, self.room, self.header)
        self.start, self.room, self.fd, pages.fd = pages.start, pages.room, pages.fd, -1
        here = ctypes.c_void_p(pages.address)
        call("cuMemHostRegister_v2", here, SIZE(pages.size), INT(driver.MAPPED))
        self._memory = _Memory(self._driver, pages.address, [("cuMemHostUnregister", here)], pages)
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), here, INT(0))
        self._memory.address = there.value


WAYS: dict[str, type[GpuSegment]] = {
    "vmm": CreatedSegment,
    "handles": AllocatedSegment,
    "pinned": PinnedSegment,
}
