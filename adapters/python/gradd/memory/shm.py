"""Shared memory: sealed memfd segments and torch tensors on them.

A segment is created here, passed to the daemon by descriptor, and never changes its size: it is
sealed against shrinking and growing, so that neither side can take pages away from the other. Its
space is reserved before the first write, so that a full machine causes an error message instead of
a SIGBUS later: up front, or piece by piece if the data that moves in frees its old memory.

Tensors are made one by one with `torch.frombuffer` over a memoryview of their own. The memoryview
is the tensor's exporter: it lives exactly as long as any tensor shares that storage, so a weak
reference to it tells when the range is free. The mapping itself goes when the last exporter is
gone, even if the segment was closed before.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradd import errors

ALIGN = 64
PAGE = 4096
SEGMENT_BYTES = 512 << 20  # of the largest segment, unless a single block is larger
_CHECKED_BYTES = 16 << 20  # smaller segments are not worth reading /proc for
_AHEAD = 4 << 20  # bytes that are reserved beyond the requested ones
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW
_SEAL_WRITE = 0x8
BASE_SEALS = _SEALS | _SEAL_WRITE | 0x10  # and FUTURE_WRITE
_HEADER = struct.Struct("<QIIQQQI4x")  # gradd_header_t of shm/header.h
_MAGIC = int.from_bytes(b"GRADDSEG", "little")
HEADER_VERSION = 1
PURPOSES = ("other", "parameters", "gradients", "state", "ring")  # of segments, by number

# torch dtype -> ONNX element type code, which is also the code on the wire.
DTYPE_CODES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}


def round_up(n: int, unit: int = ALIGN) -> int:
    """`n` rounded up to a multiple of `unit`."""
    return (n + unit - 1) // unit * unit


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a contiguous tensor."""
    count = dtype.itemsize
    for n in shape:
        count *= n
    return count


def available_bytes() -> int:
    """Memory that is still available: the machine's, or the rest of the control group's.

    The kernel does not limit a memfd: reserving more than there is would not fail but wake the
    killer of processes.
    """
    free = 1 << 62
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                free = int(value.split()[0]) << 10
    try:
        with open("/proc/self/cgroup") as groups:
            path = next((g.split("::", 1)[1].strip() for g in groups if g.startswith("0::")), "/")
        folder = f"/sys/fs/cgroup{path}"
        with open(f"{folder}/memory.max") as limit, open(f"{folder}/memory.current") as used:
            top = limit.read().strip()
            if top != "max":
                free = min(free, int(top) - int(used.read()))
    except OSError:
        pass  # no control group v2, or not ours to read
    return max(free, 0)


@dataclass(frozen=True)
class Header:
    """The contents of the first page of a segment, beside its id and size."""

    purpose: str  # of the segment, one of PURPOSES
    owner: int  # a number that its client has drawn


class Segment:
    """One sealed memfd, mapped for reading and writing.

    Attributes:
        id: Number under which the daemon knows it, unique in the session.
        size: Bytes, a multiple of the page size.
        header: The contents of its first page; None = there is no such page.
        start: Where tensors may begin: behind that page.
        room: Bytes behind it.
        address: Where it is mapped.
        reserved: Bytes from the beginning that have their space.
        make: A tensor over a part of `view`, which it keeps: part, dtype, elements.
        kind: Of the memory, in the protocol.
    """

    device = torch.device("cpu")
    is_host = True
    kind = "memfd"
    lent = None  # the daemon's mapping keeps the memory
    make = staticmethod(torch.frombuffer)

    def __init__(
        self,
        segment_id: int,
        size: int,
        header: Header | None = None,
        in_pieces: bool = False,
    ) -> None:
        """Creates, maps and seals the memory; reserves it, unless that is done in pieces.

        Args:
            segment_id: Its number.
            size: Bytes for tensors.
            header: For the page in front of them, if there shall be one.
            in_pieces: The space is reserved by reserve().

        Raises:
            NoSpaceError: The machine cannot back that many bytes.
            LimitError: `ulimit -f` does not allow them.
        """
        self.id = segment_id
        self.header = header
        self.start = PAGE if header else 0
        self.room = round_up(max(size, 1), PAGE)
        self.size = self.start + self.room
        self.reserved = 0
        self.fd = self._memfd()
        try:
            self._truncate()
            self.reserve(self.start if in_pieces else self.size)
            self.map = mmap.mmap(self.fd, self.size)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
        except BaseException as error:
            os.close(self.fd)
            self.fd = -1
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise self._no_space(error.strerror) from None
            raise
        self._mapped()

    @classmethod
    def adopted(cls, fd: int, segment_id: int, owner: int) -> Segment:
        """Memory that a process left behind, with a new header.

        Args:
            fd: Its descriptor, which the segment takes over, also if it fails.
            segment_id: Its number from now on.
            owner: Of it from now on.

        Raises:
            SharedMemoryError: It is no segment with a header.
        """
        self = cls.__new__(cls)
        self.id, self.fd, self.start = segment_id, fd, PAGE
        try:
            self.size = self.reserved = os.fstat(fd).st_size
            self.room = self.size - PAGE
            if self.size <= PAGE or fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
                raise errors.SharedMemoryError(f"{self.size} bytes that are no sealed segment")
            magic, version, page, size, _, _, purpose = _HEADER.unpack(
                os.pread(fd, _HEADER.size, 0)
            )
            known = (magic, version, page, size) == (_MAGIC, HEADER_VERSION, PAGE, self.size)
            if not known or not 0 < purpose < len(PURPOSES):
                raise errors.SharedMemoryError(f"{self.size} bytes without a segment's header")
            self.map = mmap.mmap(fd, self.size)
        except BaseException:
            os.close(fd)
            raise
        self.header = Header(PURPOSES[purpose], owner)
        self._mapped()
        return self

    def _mapped(self) -> None:
        header = self.header
        anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(anchor)
        del anchor  # it would keep the mapping alive for ever
        self.view = memoryview(self.map)
        if header is not None:
            purpose = PURPOSES.index(header.purpose)
            fields = (HEADER_VERSION, PAGE, self.size, self.id, header.owner, purpose)
            _HEADER.pack_into(self.map, 0, _MAGIC, *fields)

    def reserve(self, end: int) -> None:
        """Gives the first `end` bytes their space, and some more to come back less often.

        Raises:
            NoSpaceError: The machine cannot back that many bytes.
        """
        end = min(self.size, round_up(end, PAGE))
        more = min(self.size, end + _AHEAD) - self.reserved
        if self.size > _CHECKED_BYTES and more > available_bytes():
            raise self._no_space(f"{available_bytes()} are free")
        try:
            os.posix_fallocate(self.fd, self.reserved, more)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise self._no_space(error.strerror) from None
            raise
        self.reserved += more

    @staticmethod
    def _memfd() -> int:
        try:
            return os.memfd_create("gradd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise errors.LimitError(
                f"no descriptor for a segment of shared memory: {error.strerror} (`ulimit -n`)"
            ) from None

    def _truncate(self) -> None:
        try:
            os.ftruncate(self.fd, self.size)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            raise errors.LimitError(
                f"cannot reserve {self.size} bytes of shared memory: it is a file for the "
                f"system, and this process may make files of {limit} bytes (`ulimit -f`)"
            ) from None

    def _no_space(self, why: str) -> errors.NoSpaceError:
        return errors.NoSpaceError(f"cannot reserve {self.size} bytes of shared memory: {why}")

    def close(self) -> None:
        """Closes the descriptor and lets go of the mapping; tensors on it stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.view = memoryview(b"")
        self.map = None


class Base(Segment):
    """A segment that no process can write, mapped privately: see session/bases.py.

    Attributes:
        name: By which it was loaded.
        said: Something in it was written, and the user knows.
    """

    def __init__(self, fd: int, segment_id: int, name: str) -> None:
        """Takes the descriptor over, also if it fails.

        Raises:
            SharedMemoryError: It is no such memory.
        """
        self.id, self.fd, self.name, self.said = segment_id, fd, name, False
        self.header, self.start = None, 0
        try:
            self.size = self.room = self.reserved = os.fstat(fd).st_size
            if not self.size or not is_base(fd):
                raise errors.SharedMemoryError(f"{self.size} bytes that are no base")
            self.map = mmap.mmap(fd, self.size, mmap.MAP_PRIVATE)
        except BaseException:
            os.close(fd)
            raise
        self._mapped()


def is_base(fd: int) -> bool:
    """Whether memory is sealed against writing."""
    try:
        return fcntl.fcntl(fd, _F_GET_SEALS) & (_SEALS | _SEAL_WRITE) == _SEALS | _SEAL_WRITE
    except OSError:
        return False
