"""The n-th allocation, system call or wait of the worker fails, in turn, until a pass is clean.

From `hello` to the end of a session each request is made on a session of its own, and while it runs
one allocation or system call fails, or a signal ends a wait (tests/scarce). Then the request
succeeds all the same, or is refused with a word about what is short and succeeds when it is made
again, or the session is lost: the daemon says so, or hangs up, as it does where the worker dies in
a library that cannot go on. The bits are the same in each case, and the owner lives. The owner's
calls fail in the same way: what it has passed on, it knows. And a training notices nothing of a
worker's failures.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import onnx
import pytest
import torch
from conftest import BUILD, PYTHONPATH, Daemon
from torch import nn

import gradd
from gradd import ORTModule, errors, optim
from gradd.memory.shm import Segment
from gradd.session import client, control
from helpers.hostile import raw_client
from helpers.hostile.raw_client import DROP, GW, SEGMENT, TABLE, M, Raw, V, many, put, tensor
from helpers.waiting import until

SCARCE = BUILD / "lib" / "scarce.so"
MOST = 20000  # allocations of one request
CLEAN = 5  # passes in a row: threads of libzmq allocate, too, one time more than another
# What a request is refused with; a descriptor that the kernel does not map is a fault of memory,
# and a packet whose descriptors are lost is one with too many.
REFUSALS = ("NOMEM", "SHM", "IO", "NOSPC", "LIMIT")
ONCE = ("hello", "attach", "segment")  # a nonce and an id serve once: another session goes on
FLOW = (
    "hello", "attach", "segment", "graph.put", "graph.plan", "bind", "forward", "backward", "step",
    "unbind",
)  # fmt: skip
OWNED = ("hello", "segment", "keep", "peek")  # goes through the owner, or is answered there
TAKEN_OVER = ("hello", "reattach", "adopt", "keep")  # the same, by the next client
KINDS = ("allocation", "system call", "wait")  # of scarce.c


class Shared(ctypes.Structure):
    """scarce_t of tests/scarce/scarce.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("pid", "at", "count", "kind")]
    _fields_ += [("name", ctypes.c_char * 16)]


class HungUp(Exception):
    """The worker is gone, or has ended the session."""


class Session(Raw):
    """Makes the requests of FLOW one by one; each plans a model that is its own."""

    fresh_models = itertools.count()

    def __init__(self, path: Path) -> None:
        super().__init__(path, greet=False)
        self.resources = contextlib.ExitStack()
        self.fd = -1
        model = onnx.load_from_string(raw_client.model())
        # Neither cached nor known to have crashed.
        model.producer_name = str(next(self.fresh_models))
        self.onnx = model.SerializeToString()

    def receive(self) -> dict[str, Any]:
        """The reply, or HungUp."""
        until(lambda: self.dealer.poll(5) or self.is_hung_up(), "a reply, or none for ever")
        if not self.dealer.poll(0):
            raise HungUp
        reply = super().receive()
        if reply.get("session") == "lost":
            raise HungUp
        return reply

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
            fields = {"v": "keep", "name": "scarce", "seconds": 600.0, "segments": [1]}
            with contextlib.closing(Segment(9, 4096)) as manifest:
                reply = self.control(fields, [manifest.fd])
        elif what == "peek":
            reply = self.control({"v": "peek", "name": "scarce", "at": 1})
        elif what == "reattach":
            reply = self.reattach(0)
            if reply["ok"]:
                reply = self.reattach(1)
        elif what == "adopt":
            reply = self.control({"v": "segment", "id": 1, "bytes": SEGMENT}, [self.fd])
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

    def reattach(self, at: int) -> dict[str, Any]:
        """A part of what the client before has kept; the descriptor of its segment stays here."""
        while True:
            request = {"v": "reattach", "name": "scarce", "at": at}
            try:
                self.ctl.sendall(msgpack.packb(request))
                packet, fds, _, _ = socket.recv_fds(self.ctl, 65536, 1)
            except (BrokenPipeError, ConnectionResetError):
                raise HungUp from None
            if not packet:
                raise HungUp
            if fds and at:
                self.fd = fds[0]
                self.resources.callback(os.close, self.fd)
            elif fds:
                os.close(fds[0])
            reply = msgpack.unpackb(packet)
            if reply.get("code") != "STALE":  # else the client before is about to end
                return reply

    def close(self) -> None:
        """Hangs up."""
        super().close()
        self.resources.close()

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
    """What became of a request during which number `at` fails, "" if it has fewer; and the results
    of the session, if it goes on."""
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
            where = f"{what}, {at} {shared.name.decode()}"
            assert reply["code"] in REFUSALS and reply["what"], f"{where}: {reply}"
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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FLOW)
def test_each_may_fail(shared: Shared, daemon: Daemon, what: str, kind: str) -> None:
    path = daemon.directory
    expected, worker = _undisturbed(path)
    shared.kind = KINDS.index(kind)
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
    """What became of a request while the owner's number `at` fails, "" if it has fewer."""
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
        where = f"{what}, {at} {shared.name.decode()}"
        assert failed and reply["code"] in REFUSALS, f"{where}: {reply}"
        assert shared.kind or "memory" in reply["what"], f"{where}: {reply}"
        if what not in ONCE:
            s.make_all(OWNED[first:])
        return "refused"


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_the_owner_may_fail(shared: Shared, daemon: Daemon, kind: str) -> None:
    found: collections.Counter[str] = collections.Counter()
    shared.kind = KINDS.index(kind)
    for what in OWNED:
        at = 1
        while outcome := _owner_attempt(daemon.directory, what, shared, at, daemon.process.pid):
            assert daemon.process.poll() is None, f"{what}, {at}: the owner has died"
            found[f"{what} {outcome}"] += 1
            at += 1
    if kind == "allocation":
        assert {f"{what} refused" for what in OWNED} <= found.keys(), dict(found)


def _kept(daemon: Daemon) -> bytes:
    """What the next client takes over: the bytes of a session that has ended by now."""
    said = "event=kept name=scarce"
    before = daemon.log().count(said)
    with Session(daemon.directory) as s:
        s.make_all(("hello", "segment", "keep"))
        found = s.results()
    until(lambda: daemon.log().count(said) > before, "the session is not kept")
    return found


def _kept_attempt(daemon: Daemon, what: str, shared: Shared, at: int) -> str:
    """What became of a request of the client that takes a kept session over, and of its bytes."""
    first = TAKEN_OVER.index(what)
    shared.at, shared.count = at, 0
    path, expected = daemon.directory, _kept(daemon)
    with Session(path) as s:
        s.make_all(TAKEN_OVER[:first])
        shared.pid = daemon.process.pid
        try:
            reply = s.make(what)
            outcome = "done" if reply["ok"] else "refused"
        except HungUp:
            outcome = "hung up"
        finally:
            shared.pid, failed = 0, shared.count >= at
        if outcome == "refused":
            where = f"{what}, {at} {shared.name.decode()}"
            assert failed and reply["code"] in REFUSALS, f"{where}: {reply}"
        if outcome == "done":
            s.make_all(TAKEN_OVER[first + 1 :])
    with Session(path) as s:
        s.make_all(TAKEN_OVER)
        assert os.pread(s.fd, len(expected), 0) == expected, f"{what}, {at}: other bytes"
        s.control({"v": "forget", "name": "scarce"})
    return outcome if failed else ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_session_is_not_lost(shared: Shared, daemon: Daemon, kind: str) -> None:
    found: collections.Counter[str] = collections.Counter()
    shared.kind = KINDS.index(kind)
    for what in TAKEN_OVER[1:]:
        at = 1
        while outcome := _kept_attempt(daemon, what, shared, at):
            assert daemon.process.poll() is None, f"{what}, {at}: the owner has died"
            found[f"{what} {outcome}"] += 1
            at += 1
    if kind == "allocation":
        assert {f"{what} refused" for what in TAKEN_OVER[1:]} <= found.keys(), dict(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_is_replaced_all_the_same(shared: Shared, daemon: Daemon, kind: str) -> None:
    """While the owner starts it something fails; what is kept is there all the same."""
    expected, worker = _undisturbed(daemon.directory)
    kept = _kept(daemon)
    shared.kind = KINDS.index(kind)
    started = "event=worker_start"
    for at in range(1, MOST):
        before = daemon.log().count(started)
        shared.at, shared.count, shared.name, shared.pid = at, 0, b"", daemon.process.pid
        os.kill(worker, signal.SIGKILL)
        until(lambda before=before: daemon.log().count(started) > before, f"{at}: no worker")
        shared.pid = 0
        found, worker = _undisturbed(daemon.directory)
        where = f"{at} {shared.name.decode()}"
        assert found == expected, f"{where}: other bits"
        assert daemon.process.poll() is None, f"{where}: the owner has died"
        if shared.count < at:
            break
    assert 1 < at < MOST - 1
    with Session(daemon.directory) as s:
        s.make_all(TAKEN_OVER)
        assert os.pread(s.fd, len(kept), 0) == kept


# A session whose requests, one after the other, it makes when it is told to.
CLIENT = """
import pathlib, sys
from helpers.hostile.raw_client import Raw
with Raw(pathlib.Path(sys.argv[1])).open() as session:
    print(session.step().hex(), flush=True)
    for line in sys.stdin:
        print(session.step().hex(), flush=True)
"""


def test_what_a_client_could_not_send_comes(shared: Shared, daemon: Daemon) -> None:
    command = [sys.executable, "-c", CLIENT, str(daemon.directory)]
    paths = os.pathsep.join([PYTHONPATH, str(Path(raw_client.__file__).parents[2])])
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        expected = process.stdout.readline()
        assert expected
        shared.kind, shared.pid = KINDS.index("system call"), process.pid
        sent = 0
        for at in itertools.count(1):
            shared.at, shared.count, shared.name = at, 0, b""
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == expected, f"{at} {shared.name.decode()}"
            sent += shared.name == b"send"
            if shared.count < at:
                break
        process.stdin.close()
    assert sent >= 2, sent  # of a forward and of a backward


def _train() -> list[torch.Tensor]:
    """Losses, parameters and the optimizer's state of a short training of two clients.

    The first one keeps its session, the second one takes it over.
    """
    try:
        model, optimizer = _net()
        gradd.keep("scarce", model, optimizer)
        found = [_step(model, optimizer, step) for step in range(3)]
        client.close_all()
        model, optimizer = _net()
        assert gradd.reattach("scarce", model, optimizer).steps == 3
        found.append(_step(model, optimizer, 3))
        found += [p.detach().clone() for p in model.parameters()]
        for state in optimizer.state_dict()["state"].values():
            found += [t.clone() for _, t in sorted(state.items()) if torch.is_tensor(t)]
        return found
    finally:
        client.close_all()
        with contextlib.suppress(errors.SessionError):  # it did not come to that
            gradd.forget("scarce")
        client.close_all()


def _net() -> tuple[ORTModule, optim.FusedAdam]:
    torch.manual_seed(5)
    model = ORTModule(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), strict=True)
    return model, optim.FusedAdam(model.parameters(), lr=0.01)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    x = torch.randn(3 + step % 2, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("system call", 7),
        pytest.param("system call", 1, marks=pytest.mark.nightly),
        pytest.param("wait", 1, marks=pytest.mark.nightly),
        pytest.param("allocation", 41, marks=pytest.mark.nightly),
    ],
)
def test_a_training_goes_on(shared: Shared, daemon: Daemon, kind: str, stride: int) -> None:
    expected = _train()
    refused: collections.Counter[str] = collections.Counter()
    shared.kind = KINDS.index(kind)
    for at in range(1, MOST, stride):
        shared.at, shared.count = at, 0
        shared.pid = control.ask_daemon(daemon.directory, "ps")["worker"]
        try:
            found = _train()
        except errors.GraddError as error:
            shared.pid = 0
            assert error.code in REFUSALS, f"{at} {shared.name.decode()}: {error}"
            refused[error.code] += 1
            found = _train()
        shared.pid = 0
        where = f"{at} {shared.name.decode()}"
        assert len(found) == len(expected), where
        assert all(map(torch.equal, found, expected)), f"{where}: other bits"
        assert daemon.process.poll() is None, f"{where}: the owner has died"
        if shared.count < at:
            break
    assert stride < at < MOST - stride
    assert refused.total() < at / stride / 2, dict(refused)
