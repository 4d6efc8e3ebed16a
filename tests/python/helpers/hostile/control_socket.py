"""Bad input on the control socket: greetings, descriptors that are no segments, lies about sizes.

Rows on a fresh connection see what a stranger sees; the others use the session of the scene. See
raw_client.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from gradd.memory.shm import Segment
from helpers.hostile.raw_client import DROP, Raw, Row, many

SEAL, SHRINK, GROW, WRITE = 1, 2, 4, 8
ALL_SEALS = SEAL | SHRINK | GROW
BYTES = 8192


def stranger(name: str, code: str, parts: str, packet: Any, greet: bool = False) -> Row:
    """A packet on a connection of its own."""

    def send(s: Raw) -> dict[str, Any]:
        with Raw(s.path, greet) as other:
            return other.control(packet)

    return Row(f"control: {name}", code, tuple(parts.split("|")), send)


CONTROL = [
    stranger("no msgpack", "LIMIT", "kind 0xc1", b"\xc1"),
    stranger("a list", "LIMIT", "not a map", b"\x90"),
    stranger("deep", "LIMIT", "deeper than 8", b"\x91" * 1000),
    stranger("list of 2^32", "LIMIT", "claims", b"\x81\xa1v\xdd\xff\xff\xff\xff"),
    stranger("no verb", "TENSOR", "field 'v' is missing", {}),
    stranger("a verb that is a number", "TENSOR", "field 'v'|a text", {"v": 1}),
    stranger("an unknown verb", "UNSUPPORTED", "unknown control verb 'forward'", {"v": "forward"}),
    stranger("hello without versions", "TENSOR", "hello: field 'proto' is missing", {"v": "hello"}),
    stranger("hello with a number", "TENSOR", "hello: field 'proto'|a list", {"v": "hello",
        "proto": 1}),
    stranger("hello with one version", "VERSION", "'proto' has 1 entries", {"v": "hello",
        "proto": [1]}),
    stranger("hello with three versions", "LIMIT", "'proto' has 3 entries, more than 2",
        {"v": "hello", "proto": [1, 1, 1]}),
    stranger("hello with versions below zero", "TENSOR", "field 'proto[0]'|a negative",
        {"v": "hello", "proto": [-1, 1]}),
    stranger("a newer protocol", "VERSION",
        "speaks protocols 3 to 9|protocol 2|the daemon is the older", {"v": "hello",
        "proto": [3, 9]}),
    stranger("an older protocol", "VERSION",
        "speaks protocol 0, this daemon|the client is the older", {"v": "hello",
        "proto": [0, 0]}),
    stranger("versions upside down", "VERSION",
        "speaks protocols 9 to 1, this daemon", {"v": "hello",
        "proto": [9, 1]}),
    stranger("a name of 2000 bytes", "LIMIT", "field 'client' has 2000 bytes, more than 1024",
             {"v": "hello", "proto": [2, 2], "client": "n" * 2000}),
    stranger("a name that is bytes", "TENSOR", "field 'client'|a text", {"v": "hello", "proto": [2,
        2], "client": b"n"}),
    stranger("a version of 65 bytes", "LIMIT", "field 'version' has 65 bytes, more than 64",
             {"v": "hello", "proto": [2, 2], "version": "9" * 65}),
    stranger("a version that is a number", "TENSOR", "field 'version'|a text", {"v": "hello",
        "proto": [2, 2], "version": 2}),
    stranger("a segment before hello", "SESSION", "segment: say hello first", {"v": "segment",
        "id": 1, "bytes": 4096}),
    stranger("unsegment of nothing", "SHM", "unsegment: |unknown segment 5", {"v": "unsegment",
        "id": 5}, True),
    stranger("unsegment without id", "TENSOR", "unsegment: field 'id' is missing",
        {"v": "unsegment"}, True),
    stranger("unsegment with id nil", "TENSOR", "unsegment: field 'id'|nil", {"v": "unsegment",
        "id": None}, True),
    stranger("a field that is not known", "UNSUPPORTED",
        "unsegment: unknown field 'bytes' (known: id)", {"v": "unsegment", "id": 5,
        "bytes": 1}, True),
    Row("control: hello again", "SESSION", ("hello", "is attached already"),
        lambda s: s.control({"v": "hello", "proto": [2, 2]})),
]  # fmt: skip


# ---- descriptors ----


def memfd(size: int = BYTES, seals: int = ALL_SEALS, reserve: bool = True, flags: int = 0) -> int:
    """A memfd with these seals."""
    fd = os.memfd_create("bad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    if reserve and size:
        os.posix_fallocate(fd, 0, size)
    else:
        os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, 1033, seals)
    return fd


def reopened(how: int) -> int:
    """A good memfd, opened in another way."""
    fd = memfd()
    try:
        return os.open(f"/proc/self/fd/{fd}", how | os.O_CLOEXEC)
    finally:
        os.close(fd)


def regular_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(BYTES)
        return os.dup(file.fileno())


def pipe() -> int:
    ends = os.pipe()
    os.close(ends[0])
    return ends[1]


def unix_socket() -> int:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        return os.dup(made.fileno())


@contextlib.contextmanager
def opened(*makers: Callable[[], int]) -> Iterator[list[int]]:
    fds = [make() for make in makers]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def passes(name: str, code: str, parts: str, *makers: Callable[[], int], **changes: Any) -> Row:
    """The verb `segment` with these descriptors."""

    def send(s: Raw) -> dict[str, Any]:
        fields = {"v": "segment", "id": 40, "bytes": BYTES, **changes}
        with opened(*makers) as fds:
            return s.control({k: v for k, v in fields.items() if v is not DROP}, fds)

    return Row(f"segment: {name}", code, tuple(parts.split("|")), send)


def too_many_segments(s: Raw) -> dict[str, Any]:
    """One more than a session may have."""
    reply: dict[str, Any] = {"ok": 1}
    taken = []
    while reply["ok"] and len(taken) < 600:
        taken.append(1000 + len(taken))
        with opened(memfd) as fds:
            reply = s.control({"v": "segment", "id": taken[-1], "bytes": BYTES}, fds)
    for k in taken[:-1]:
        assert s.control({"v": "unsegment", "id": k})["ok"]
    return reply


def no_such_id(s: Raw) -> dict[str, Any]:
    """A segment that was taken back is not known any more."""
    segment = Segment(41, BYTES)
    try:
        assert s.control({"v": "segment", "id": 41, "bytes": segment.size}, [segment.fd])["ok"]
        assert s.control({"v": "unsegment", "id": 41})["ok"]
        return s.ask("bind", bind=60, tensors=many([41, 0, 1, [4]]))
    finally:
        segment.close()


SEGMENTS = [
    passes("no descriptor", "SHM", "0 descriptors came along, expected 1"),
    passes("two descriptors", "SHM", "2 descriptors came along, expected 1", memfd, memfd),
    passes("five descriptors", "LIMIT", "more than 4 descriptors", memfd, memfd, memfd, memfd,
        memfd),
    passes("not sealed", "SHM", "segment 40|must be sealed|it has 0x0", lambda: memfd(seals=0)),
    passes("sealed against growing only", "SHM", "segment 40|must be sealed|0x4",
        lambda: memfd(seals=GROW)),
    passes("seals may be added", "SHM", "segment 40|must be sealed|0x6",
        lambda: memfd(seals=SHRINK | GROW)),
    passes("sealed against writing", "SHM", "segment 40|sealed against writing",
        lambda: memfd(seals=ALL_SEALS | WRITE)),
    passes("open for reading only", "SHM", "open for reading and writing",
        lambda: reopened(os.O_RDONLY)),
    passes("open for writing only", "SHM", "open for reading and writing",
        lambda: reopened(os.O_WRONLY)),
    passes("open as a path", "SHM", "open for reading and writing", lambda: reopened(os.O_PATH)),
    passes("a pipe", "SHM", "segment 40", pipe),
    passes("a directory", "SHM", "segment 40", lambda: os.open("/", os.O_RDONLY | os.O_DIRECTORY)),
    passes("a regular file", "SHM", "segment 40", regular_file),
    passes("an eventfd", "SHM", "segment 40|not a memfd", lambda: os.eventfd(0)),
    passes("a socket", "SHM", "segment 40|not a memfd", unix_socket),
    passes("/dev/null", "SHM", "segment 40|not a memfd", lambda: os.open("/dev/null", os.O_RDWR)),
    passes("/dev/zero", "SHM", "segment 40|not a memfd", lambda: os.open("/dev/zero", os.O_RDWR)),
    passes("empty", "LIMIT", "segment 40|of 0 bytes", lambda: memfd(0)),
    passes("never reserved", "NOSPC", "of the segment's 8192 bytes are reserved",
        lambda: memfd(reserve=False)),
    passes("larger in words", "SHM", "has 8192 bytes, the message said 16384", memfd,
        bytes=2 * BYTES),
    passes("smaller in words", "SHM", "has 8192 bytes, the message said 4096", memfd,
        bytes=BYTES // 2),
    passes("no bytes in words", "SHM", "segment 40", memfd, bytes=0),
    passes("2^63 bytes in words", "SHM", "the message said 9223372036854775808", memfd,
        bytes=1 << 63),
    passes("bytes below zero", "TENSOR", "segment: field 'bytes'|a negative integer", memfd,
        bytes=-1),
    passes("bytes as text", "TENSOR", "segment: field 'bytes'|a text", memfd, bytes="8192"),
    passes("id below zero", "TENSOR", "segment: field 'id'|a negative integer", memfd, id=-1),
    passes("id nil", "TENSOR", "segment: field 'id'|nil", memfd, id=None),
    passes("id taken", "SHM", "segment 1 exists already", memfd, id=1),
    passes("another kind", "UNSUPPORTED",
        "segment: field 'kind': there is no kind of segment 'dmabuf', only 'memfd'|cuda-vmm", memfd,
        kind="dmabuf"),
    passes("a kind of no name", "UNSUPPORTED", "field 'kind'|no kind of segment ''", memfd,
        kind=""),
    passes("a kind that is a number", "TENSOR", "segment: field 'kind'|a text", memfd, kind=1),
    passes("an unknown device", "UNSUPPORTED",
        "segment: field 'device': there is no device 'abacus', only 'cpu'", memfd, device="abacus"),
    passes("a device that is a number", "TENSOR", "segment: field 'device'|a text", memfd,
        device=0),
    passes("memory of a GPU for a daemon without one", "UNSUPPORTED", "segment 40: ", memfd,
        kind="cuda-vmm"),
    passes("memory of a GPU without a descriptor", "SHM", "segment: 0 descriptors came along",
        kind="cuda-vmm"),
    passes("a purpose of no name", "UNSUPPORTED",
        "segment: field 'purpose': there is no purpose 'fun'|'gradients'", memfd, kind="cuda-vmm",
        purpose="fun"),
    passes("a handle and a descriptor", "SHM", "1 descriptors came along, expected 0", memfd,
        kind="cuda-ipc", handle=b"x" * 64),
    passes("a handle that is too short", "SHM", "field 'handle': expected 64 bytes, got 63",
        kind="cuda-ipc", handle=b"x" * 63),
    passes("no handle", "SHM", "field 'handle': expected 64 bytes, got 0", kind="cuda-ipc"),
    passes("a handle that is a text", "TENSOR", "segment: field 'handle'|a text", kind="cuda-ipc",
        handle="x" * 64),
    passes("a handle of no memory", "UNSUPPORTED", "segment 40: ", kind="cuda-ipc",
        handle=b"x" * 64),
    passes("a GPU that is not this daemon's", "UNSUPPORTED",
        "segment: field 'device': there is no device 'GPU-00'", memfd, kind="cuda-vmm",
        device="GPU-00"),
    passes("a header that is a text", "TENSOR", "segment: field 'header'|a text", memfd,
        header="1"),
    passes("no header", "SHM",
        "segment 40: header: field 'magic': expected 0x4745534444415247, got 0x0", memfd,
        header=True),
    passes("a header in a pipe", "SHM", "segment 40", pipe, header=True),
    passes("a header of another size in words", "SHM", "has 8192 bytes, the message said 4096",
        memfd, header=True, bytes=BYTES // 2),
    passes("a field that is not known", "UNSUPPORTED",
        "segment: unknown field 'seals' (known: id, bytes, kind, device, header, purpose, handle)",
        memfd, seals=7),
    passes("descriptors for another verb", "SHM",
        "unsegment: 1 descriptors came along, expected 0", memfd,
           v="unsegment", id=9, bytes=DROP),
    Row("segment: one too many", "LIMIT", ("at most 512 segments per session",), too_many_segments),
    Row("segment: used after unsegment", "SHM", ("bind: tensors[0]", "unknown segment 41"),
        no_such_id),
]  # fmt: skip

TABLES = {"control socket": CONTROL, "descriptors": SEGMENTS}
