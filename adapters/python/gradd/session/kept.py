"""What a session that outlives its process is, to client and daemon: a name, segments, a manifest.

The daemon holds the descriptors and reads nothing. The manifest is a file in memory that clients
write and read: one msgpack map, in which a place is [segment, offset, dtype, dims], with the
segment's id of then. No class of Python is in it. Whatever a manifest says is checked against the
segments that come with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from gradd import errors
from gradd.memory.shm import DTYPES, Base, Segment, is_base, nbytes
from gradd.session import bases
from gradd.session.ring import Block

if TYPE_CHECKING:
    import torch

    from gradd.session.client import Client
    from gradd.session.control import Connection
    from gradd.session.protocol import Tensor

_VERSION = 1
_ENDING_SECONDS = 60.0  # for the former client's requests
_MANIFEST_BYTES = 64 << 20


class Names:
    """The names of a client's session; each new daemon, or worker, is told again."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[dict[str, Any], int]] = {}

    def say(self, client: Client, name: str, seconds: float, manifest: Manifest) -> None:
        """Names the session, or says what has changed.

        Raises:
            SessionError: Another process has the name, or it has left a session of that name.
        """
        fd = manifest.file()
        fields = {"name": name, "seconds": seconds, "segments": manifest.segments()}
        try:
            client.connected("keep a session", lambda connection: _keep(connection, fields, fd))
        except BaseException:
            os.close(fd)
            raise
        former = self._said.pop(name, None)
        self._said[name] = (fields, fd)
        if former is not None:
            os.close(former[1])

    def resend(self, connection: Connection) -> None:
        """Says all names to a new connection."""
        for fields, fd in self._said.values():
            _keep(connection, fields, fd)

    def drop(self, name: str) -> None:
        """The name is no more."""
        former = self._said.pop(name, None)
        if former is not None:
            os.close(former[1])

    def close(self) -> None:
        """The client ends; the daemon has descriptors of its own."""
        for name in list(self._said):
            self.drop(name)


def _patiently(ask: Any) -> Any:
    """Asks again while the name's former client is about to end."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while True:
        try:
            return ask()
        except errors.StaleError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def _keep(connection: Connection, fields: dict[str, Any], fd: int) -> None:
    _patiently(lambda: connection.keep(fields, fd))


class Manifest:
    """Places of named tensors, and plain values."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def segments(self) -> list[int]:
        """Ids of the segments in which something lies."""
        return sorted({place[0] for place in _places(self.content)})

    def file(self) -> int:
        """A descriptor of memory with the manifest, the caller's."""
        data = msgpack.packb({"version": _VERSION, **self.content}, use_bin_type=True)
        fd = os.memfd_create("gradd-manifest", os.MFD_CLOEXEC)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _places(node: Any) -> list[Sequence[Any]]:
    """All places below a part of a manifest: values of the key `at`."""
    if isinstance(node, dict):
        own = [node["at"]] if node.get("at") else []
        return own + [p for key, value in node.items() if key != "at" for p in _places(value)]
    if isinstance(node, list):
        return [p for value in node for p in _places(value)]
    return []


def place(tensor: Tensor) -> list[Any]:
    """A tensor's place as a manifest has it."""
    segment, offset, code, shape = tensor
    return [segment, offset, code, list(shape)]


@dataclass
class Taken:
    """A kept session that this process has taken over."""

    content: dict[str, Any]  # of the manifest
    seconds: float  # how long it is kept without a process
    blocks: dict[tuple[int, int], Block]  # by place: segment's former id, and offset
    tensors: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # that there are

    def tensor(self, at: Sequence[Any]) -> torch.Tensor:
        """The tensor at a place, on the memory itself."""
        segment, offset, code, shape = at
        known = self.tensors.get((segment, offset))
        if known is not None:
            return known
        return self.blocks[segment, offset].tensor(DTYPES[code], tuple(shape))

    def drop(self) -> None:
        """Tensors alone keep the memory from here on."""
        for block in self.blocks.values():
            block.drop()


def take(client: Client, name: str, verb: str = "reattach") -> Taken:
    """Takes a kept session over: its memory becomes the client's.

    Args:
        client: Of this process.
        name: Of the session, or of a base.
        verb: "peek": for a base, which many clients have.

    Raises:
        SessionError: There is none of that name, or another process has it.
        SharedMemoryError: What comes is no kept session.
    """
    with client.lock:
        for pool in (client.parameters, client.state):
            pool.drain()
    client.settle()
    files = _fetch(client, name, verb)
    try:
        content, seconds = _read(files[0][1]), files[0][2]
        if verb == "peek" and "small" in content:
            raise errors.SessionError(f"'{name}' is a kept session: gradd.reattach() takes it")
        sizes: dict[int, dict[int, int]] = {number: {} for number, _, _ in files[1:]}
        for at in _places(content):
            _check(at, sizes)
        blocks: dict[tuple[int, int], Block] = {}
        with client.lock:
            for number, fd, _ in files[1:]:
                found = _adopt(client, name, os.dup(fd), sizes[number])
                blocks.update({(number, block.offset): block for block in found})
        return Taken(content, seconds, blocks)
    finally:
        for _, fd, _ in files:
            os.close(fd)


def peek(
    client: Client, name: str, want: Callable[[dict[str, Any], Callable[[Any], bytes]], Any]
) -> Any:
    """What `want` finds in a kept session, which this process has from now on but does not map.

    Args:
        client: Of this process.
        name: Of the session.
        want: Gets the manifest's content, and what reads the bytes at a place.
    """
    files = _fetch(client, name)
    try:
        content = _read(files[0][1])
        sizes: dict[int, dict[int, int]] = {number: {} for number, _, _ in files[1:]}
        for at in _places(content):
            _check(at, sizes)
        fds = {number: fd for number, fd, _ in files[1:]}
        return want(content, lambda at: os.pread(fds[at[0]], nbytes(DTYPES[at[2]], at[3]), at[1]))
    finally:
        for _, fd, _ in files:
            os.close(fd)


def _adopt(client: Client, name: str, fd: int, sizes: dict[int, int]) -> list[Block]:
    """The client has the memory from now on; blocks in it, by their offsets."""
    if is_base(fd):
        base = Base(fd, client.next_id(), name)
        client.pass_segment(base)
        bases.note(base)
        return client.parameters.adopt(base, sizes)
    pools = {pool.purpose: pool for pool in (client.parameters, client.state)}
    for pool in pools.values():
        if (known := pool.segment_of(fd)) is not None:  # of another name, or taken before
            os.close(fd)
            return pool.adopt_more(known, sizes)
    segment = Segment.adopted(fd, client.next_id(), client.owner)
    pool = pools.get(segment.header.purpose)
    if pool is None:
        segment.close()
        raise errors.SharedMemoryError(f"a kept segment of {segment.header.purpose}")
    try:
        blocks = pool.adopt(segment, sizes)
    except BaseException:
        segment.close()
        raise
    client.pass_segment(segment)
    return blocks


def _fetch(client: Client, name: str, verb: str = "reattach") -> list[tuple[int, int, float]]:
    """(former id, descriptor, seconds) of the manifest and the segments."""
    found: list[tuple[int, int, float]] = []
    try:
        count = 0
        while len(found) <= count:
            at = len(found)
            reply, fd = client.connected(
                "take over a session",
                lambda connection, at=at: _patiently(lambda: connection.reattach(name, at, verb)),
            )
            found.append((int(reply["id"]), fd, float(reply["seconds"])))
            count = int(reply["segments"])
        return found
    except BaseException:
        for _, fd, _ in found:
            os.close(fd)
        raise


def _read(fd: int) -> dict[str, Any]:
    size = os.fstat(fd).st_size
    try:
        if size > _MANIFEST_BYTES:
            raise ValueError(f"it has {size} bytes")
        content = msgpack.unpackb(os.pread(fd, size, 0), raw=False)
        if not isinstance(content, dict) or content.get("version") != _VERSION:
            raise ValueError(f"expected version {_VERSION}")
    except (ValueError, msgpack.UnpackException) as error:
        raise errors.SharedMemoryError(f"the manifest of the session: {error}") from None
    return content


def _check(at: Any, sizes: dict[int, dict[int, int]]) -> None:
    """Whether a place is one, in a segment that there is; notes its bytes."""
    fine = isinstance(at, list) and len(at) == 4 and isinstance(at[3], list)
    numbers = [*at[:3], *at[3]] if fine else []
    fine = fine and all(isinstance(n, int) and n >= 0 for n in numbers) and at[2] in DTYPES
    if not fine or at[0] not in sizes:
        raise errors.SharedMemoryError(f"the manifest of the session: {at} is no place in it")
    sizes[at[0]][at[1]] = max(sizes[at[0]].get(at[1], 0), nbytes(DTYPES[at[2]], at[3]))
