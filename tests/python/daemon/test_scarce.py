"""The n-th allocation of the worker fails, one after the other, until a pass is clean.

From `hello` to the end of a session each request is made on a session of its own, and while it runs
one allocation fails (tests/scarce). Then the request succeeds all the same, or is refused with a
word about memory and succeeds when it is made again, or the daemon hangs up, as it does where the
worker dies in a library that cannot go on; the bits are the same in each case, and the owner lives.
The owner's allocations fail in the same way: what it has passed on, it knows.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from conftest import BUILD, Daemon

from gradd.memory.shm import Segment
from helpers.hostile import raw_client
from helpers.hostile.raw_client import DROP, GW, SEGMENT, TABLE, M, Raw, V, many, put, tensor
from helpers.waiting import until

SCARCE = BUILD / "lib" / "scarce.so"
MOST = 20000  # allocations of one request
CLEAN = 5  # passes in a row: threads of libzmq allocate, too, one time more than another
# What a request is refused with; a descriptor that the kernel does not map is a fault of memory.
REFUSALS = ("NOMEM", "SHM", "IO", "NOSPC")
ONCE = ("hello", "attach", "segment")  # a nonce and an id serve once: another session goes on
FLOW = (
    "hello", "attach", "segment", "graph.put", "graph.plan", "bind", "forward", "backward", "step",
    "unbind",
)  # fmt: skip


OWNED = ("hello", "segment", "keep", "peek")  # goes through the owner, or is answered there


class Shared(ctypes.Structure):
    """scarce_t of tests/scarce/scarce.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("pid", "at", "count")]


class HungUp(Exception):
    """The worker is gone, or has ended the session."""


class Session(Raw):
    """Makes the requests of FLOW one by one; each plans a model that is its own."""

    fresh_models = itertools.count()

    def __init__(self, path: Path) -> None:
        super().__init__(path, greet=False)
        model = onnx.load_from_string(raw_client.model())
        model.producer_name = str(
            next(self.fresh_models)
        )  # neither cached nor known to have crashed
        self.onnx = model.SerializeToString()

    def receive(self) -> dict[str, Any]:
        """The reply, or HungUp."""
        until(lambda: self.dealer.poll(5) or self.is_hung_up(), "a reply, or none for ever")
        if not self.dealer.poll(0):
            raise HungUp
        return super().receive()

    def control(self, *args: Any) -> dict[str, Any]:
        """The answer, or HungUp."""
        try:
            reply = super().control(*args)
        except (BrokenPipeError, ConnectionResetError):
            raise HungUp from None
        if reply.get("code") == "HUNG UP":
            raise HungUp
        return reply

    def is_hung_up(self) -> bool:
        """Whether the control socket ends."""
        poll = select.poll()
        poll.register(self.ctl, select.POLLIN)
        return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))

    def make(self, what: str) -> dict[str, Any]:
        """One request of FLOW."""
        if what == "hello":
            reply = self.control({"v": "hello", "proto": [2, 2]})
            self.nonce = reply.get("nonce", b"")
        elif what == "attach":
            reply = self.call({"v": "attach", "nonce": self.nonce, "t": DROP})
            self.token = reply.get("t")
        elif what == "segment":
            self.segment = self.segment or Segment(1, SEGMENT)
            fields = {"v": "segment", "id": 1, "bytes": SEGMENT}
            reply = self.control(fields, [self.segment.fd])
            self.fill()
        elif what == "keep":
            fields = {"v": "keep", "name": "scarce", "seconds": 60.0, "segments": [1]}
            with contextlib.closing(Segment(9, 4096)) as manifest:
                reply = self.control(fields, [manifest.fd])
        elif what == "peek":
            reply = self.control({"v": "peek", "name": "scarce", "at": 1})
        elif what == "graph.put":
            reply = put(self, self.onnx)
            self.graph = reply.get("graph")
        elif what == "bind":
            reply = self.ask("bind")
            for bind, offset in ((2, GW), (3, M), (4, V)):
                if reply["ok"]:
                    reply = self.ask("bind", bind=bind, tensors=many(tensor(offset, (TABLE, 4))))
        elif what == "unbind":
            reply = self.ask("unbind", bind=1)
        else:
            reply = self.ask(what)
        return reply

    def make_all(self, what: tuple[str, ...]) -> None:
        """Requests that must succeed."""
        for one in what:
            reply = self.make(one)
            assert reply["ok"], f"{one} after a failure of memory: {reply}"

    def results(self) -> bytes:
        """All that forward, backward and step have written."""
        return bytes(self.segment.view[: raw_client.JOURNAL])


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Shared]:
    """What the daemon that starts next reads."""
    if not SCARCE.exists():
        pytest.skip("make build/lib/scarce.so")
    path = tmp_path / "scarce"
    path.write_bytes(bytes(4096))
    monkeypatch.setenv("GRADD_SCARCE", str(path))
    monkeypatch.setenv("LD_PRELOAD", str(SCARCE))
    with open(path, "r+b") as file:
        yield Shared.from_buffer(mmap.mmap(file.fileno(), 4096))


def _undisturbed(path: Path) -> tuple[bytes, int]:
    """The results of a session, and the worker's pid; a worker that dies is waited for."""
    for _ in range(100):
        with contextlib.suppress(HungUp), Session(path) as s:
            s.make_all(FLOW)
            return s.results(), int(s.call({"v": "ps", "t": DROP})["worker"])
    raise AssertionError("hung up on again and again")


def _attempt(path: Path, what: str, shared: Shared, at: int, worker: int) -> tuple[str, bytes]:
    """What became of a request during which the allocation number `at` fails, "" if it has fewer;
    and the results of the session, if it goes on."""
    first = FLOW.index(what)
    shared.at, shared.count = at, 0
    shared.pid = worker if what == "hello" else 0  # the worker takes the connection, too
    with Session(path) as s:
        s.make_all(FLOW[:first])
        shared.pid = worker
        try:
            reply = s.make(what)
        except HungUp:
            return "hung up", b""
        finally:
            shared.pid, failed = 0, shared.count >= at
        if not failed:
            return "", b""
        if not reply["ok"]:
            assert reply["code"] in REFUSALS and reply["what"], f"{what}, {at}: {reply}"
            assert reply.get("session", "alive") == "alive", f"{what}, {at}: {reply}"
            if what in ONCE:
                return "refused", b""
        if what == "backward" and not reply["ok"]:
            first -= 1  # it may be done: there was no memory for the reply alone
        try:  # a thread of libzmq may have died of it meanwhile
            s.make_all(FLOW[first + bool(reply["ok"]) :])
        except HungUp:
            return "hung up", b""
        return "done" if reply["ok"] else "refused", s.results()


@pytest.mark.nightly
@pytest.mark.parametrize("what", FLOW)
def test_each_allocation_may_fail(shared: Shared, daemon: Daemon, what: str) -> None:
    path = daemon.directory
    expected, worker = _undisturbed(path)
    found: collections.Counter[str] = collections.Counter()
    clean = 0
    for at in range(1, MOST):
        outcome, results = _attempt(path, what, shared, at, worker)
        assert daemon.process.poll() is None, f"{what}, {at}: the owner has died"
        clean = 0 if outcome else clean + 1
        if clean == CLEAN:
            break
        found[outcome or "fewer"] += 1
        if not results:
            results, worker = _undisturbed(path)
        assert results == expected, f"{what}, {at}: other bits"
    print(f"{what}: {dict(found)}")
    assert found and clean == CLEAN, f"{what}: {dict(found)}"


def _owner_attempt(path: Path, what: str, shared: Shared, at: int, owner: int) -> str:
    """What became of a request while the owner's allocation `at` fails, "" if it has fewer."""
    first = OWNED.index(what)
    shared.at, shared.count = at, 0
    shared.pid = owner if what == "hello" else 0
    with Session(path) as s:
        s.make_all(OWNED[:first])
        shared.pid = owner
        try:
            reply = s.make(what)
        except HungUp:
            return "hung up"
        finally:
            shared.pid, failed = 0, shared.count >= at
        if reply["ok"]:  # what comes after relies on it
            s.make_all(OWNED[first + 1 :])
            s.control({"v": "forget", "name": "scarce"})
            return "done" if failed else ""
        assert failed and reply["code"] in REFUSALS, f"{what}, {at}: {reply}"
        assert "memory" in reply["what"], f"{what}, {at}: {reply}"
        if what not in ONCE:
            s.make_all(OWNED[first:])
        return "refused"


def test_each_allocation_of_the_owner_may_fail(shared: Shared, daemon: Daemon) -> None:
    found: collections.Counter[str] = collections.Counter()
    for what in OWNED:
        at = 1
        while outcome := _owner_attempt(daemon.directory, what, shared, at, daemon.process.pid):
            assert daemon.process.poll() is None, f"{what}, {at}: the owner has died"
            found[f"{what} {outcome}"] += 1
            at += 1
    assert {f"{what} refused" for what in OWNED} <= found.keys(), dict(found)
