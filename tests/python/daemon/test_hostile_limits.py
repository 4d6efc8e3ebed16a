"""Limits on time, connections and messages: one client does not affect the others.

A graph that compiles too long, a client that never reads its replies, one that connects again and
again, one that truncates or empties its memory under a running step.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator

import conftest
import pytest
import zmq
from conftest import Daemon

from helpers.hostile.graphs import N, graph
from helpers.hostile.raw_client import (
    DROP,
    F32,
    ROWS,
    SEGMENT,
    TABLE,
    Balance,
    Raw,
    W,
    compile_graph,
    many,
    tensor,
)
from helpers.waiting import until


def chain(n: int) -> bytes:
    """n nodes in a row."""
    nodes = [N("Tanh", [f"v{i}" if i else "x"], [f"v{i + 1}"], name=f"t{i}") for i in range(n)]
    return graph(nodes, outputs=[f"v{n}"]).SerializeToString()


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Raw]:
    """An honest session."""
    with Raw(daemon.directory).open() as session:
        yield session


def test_compiling_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is set so low that an ordinary large graph passes it; the daemon goes on."""
    monkeypatch.setenv("GRADD_COMPILE_MS", "50")
    with conftest._serving(monkeypatch, lambda: True) as server, Raw(server.directory) as session:
        session.open()
        bits = session.step()
        gradients = {"grad": ["x"], "gmask": [0]}
        reply = compile_graph(session, chain(150_000), [[F32, [2, 3]]], **gradients)
        assert (reply["ok"], reply["code"]) == (0, "LIMIT"), reply
        assert "more than 50 ms, the limit (--compile-ms)" in reply["what"]
        assert re.match("graph.plan: (node|pass) ", reply["what"])
        assert compile_graph(session, chain(10), [[F32, [2, 3]]], **gradients)["ok"]
        assert session.step() == bits


def test_a_large_graph_compiles_within_the_limit(neighbour: Raw) -> None:
    reply = compile_graph(neighbour, chain(150_000), [[F32, [2, 3]]], grad=["x"], gmask=[0])
    assert reply["ok"], reply


def test_a_client_that_never_reads(daemon: Daemon, neighbour: Raw) -> None:
    """Thousands of requests without reading one reply: memory stays bounded, others are served."""
    bits = neighbour.step()
    with Raw(daemon.directory).share().attach() as mute:
        resident = _resident_mib(daemon)
        for q in range(20_000):
            mute.send({"v": "ps", "q": q + 100})
        assert neighbour.step() == bits
        assert _resident_mib(daemon) - resident < 64
        slowest = max(_seconds(neighbour) for _ in range(20))
        assert slowest < 20, f"a step took {slowest:.1f} s beside a client that never reads"
    assert neighbour.step() == bits


def test_a_flood_of_unread_replies(daemon: Daemon, neighbour: Raw) -> None:
    """A DEALER with a full queue stalls: its session is marked, nothing waits for it."""
    bits = neighbour.step()
    mute = Raw(daemon.directory)
    mute.dealer.setsockopt(zmq.RCVHWM, 1)
    mute.attach()
    try:
        for q in range(5000):
            mute.send({"v": "release", "runs": [], "q": q + 100, "t": mute.token})
        for _ in range(5):
            assert neighbour.step() == bits
    finally:
        mute.close()


def test_a_flood_of_connections_to_the_control_socket(daemon: Daemon, neighbour: Raw) -> None:
    bits = neighbour.step()
    flood = []
    for _ in range(400):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        try:
            sock.connect(str(daemon.directory / "ctl.sock"))
        except BlockingIOError:  # the backlog is full: so be it
            sock.close()
            continue
        flood.append(sock)
    assert neighbour.step() == bits
    sessions = neighbour.call({"v": "ps", "t": DROP})["sessions"]
    assert len(sessions) <= 256
    for sock in flood:
        sock.close()
    until(lambda: len(neighbour.call({"v": "ps", "t": DROP})["sessions"]) == 1, "it is still there")
    with Raw(daemon.directory) as late:
        late.open().step()


def test_a_flood_of_connections_to_the_command_socket(daemon: Daemon, neighbour: Raw) -> None:
    """They cost a descriptor each while they last, and nothing afterwards."""
    bits = neighbour.step()
    balance = Balance(daemon.pid(), neighbour)
    before = balance.read()
    for _ in range(4):
        flood = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(300)]
        for sock in flood:
            sock.setblocking(False)
            sock.connect_ex(str(daemon.directory / "cmd.sock"))
        assert neighbour.step() == bits
        for sock in flood:
            sock.close()
    assert balance.settled(before, 10) == before


def test_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors: newcomers wait or are refused, sessions go on, then all is well."""
    with conftest._serving(monkeypatch, lambda: True) as server, Raw(server.directory) as session:
        session.open()
        bits = session.step()
        pid = server.pid()
        # A quarter stays free: 16 more leave the late session its three in whatever order.
        for one in (pid, server.worker()):
            now = len(os.listdir(f"/proc/{one}/fd"))
            subprocess.run(["prlimit", f"--nofile={now + 16}:", "--pid", str(one)], check=True)
        flood = []
        for _ in range(40):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            sock.connect_ex(str(server.directory / "ctl.sock"))
            flood.append(sock)
        busy = Balance(pid, session).cpu_ms()
        for _ in range(10):
            assert session.step() == bits
            time.sleep(0.05)
        assert Balance(pid, session).cpu_ms() - busy < 250, "the daemon spins"
        for sock in flood:
            sock.close()
        until(lambda: len(session.call({"v": "ps", "t": DROP})["sessions"]) == 1, "others stay")
        with Raw(server.directory) as late:
            assert late.attach().token


def test_memory_cannot_be_taken_away(neighbour: Raw) -> None:
    """A sealed segment cannot be truncated; emptying it harms only its owner."""
    assert neighbour.segment is not None
    for size in (0, SEGMENT // 2, 2 * SEGMENT):
        with pytest.raises(OSError) as caught:
            os.ftruncate(neighbour.segment.fd, size)
        assert caught.value.errno == errno.EPERM
    bits = neighbour.step()
    libc = __import__("ctypes").CDLL(None, use_errno=True)
    punch, keep_size = 2, 1
    assert libc.fallocate(neighbour.segment.fd, punch | keep_size, 0, SEGMENT) == 0
    assert neighbour.step() != bits  # zeros, and no fault
    neighbour.fill()
    assert neighbour.step() == bits


def test_a_binding_of_everything(neighbour: Raw) -> None:
    """65536 tensors in one list are the limit; one list more costs nothing."""
    listed = many(*[tensor(W, (1,))] * 30_000)
    assert neighbour.ask("bind", bind=7, tensors=listed)["ok"]
    assert neighbour.ask("unbind", bind=7)["ok"]
    assert neighbour.ask("bind", bind=7, tensors=many(*[tensor(W, (TABLE, 4))] * ROWS))["ok"]
    assert neighbour.ask("unbind", bind=7)["ok"]


def test_bindings_hold_a_bounded_number_of_tensors(daemon: Daemon, neighbour: Raw) -> None:
    """1024 bindings of 65536 tensors each would be gigabytes of the daemon's own memory."""
    listed = many(*[tensor(W, ())] * 30_000)
    bits = neighbour.step()
    held = _session(daemon)["tensors"]
    taken = 0
    while (reply := neighbour.ask("bind", bind=100 + taken, tensors=listed))["ok"]:
        taken += 1
        assert taken < 40
    assert (reply["code"], reply["session"]) == ("LIMIT", "alive"), reply
    assert "bind: bindings and unreleased runs of this session would hold" in reply["what"]
    assert taken == (1 << 20) // 30_000
    assert _session(daemon)["tensors"] == held + taken * 30_000
    assert neighbour.step() == bits  # a small request has room still
    for i in range(taken):
        assert neighbour.ask("unbind", bind=100 + i)["ok"]
    assert _session(daemon)["tensors"] == held


def _session(daemon: Daemon) -> dict[str, int]:
    return daemon.ps()["sessions"][0]


def _seconds(session: Raw) -> float:
    start = time.monotonic()
    session.step()
    return time.monotonic() - start


def _resident_mib(daemon: Daemon) -> float:
    with open(f"/proc/{daemon.worker()}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Wire:
    """A peer of cmd.sock that speaks ZMTP itself."""

    def __init__(self, daemon: Daemon) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(daemon.directory / "cmd.sock"))
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
        self.sock.sendall(greeting)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
        self.sock.sendall(bytes([4, len(ready)]) + ready)
        if not self.sock.recv(4096):
            raise ConnectionResetError("the daemon hangs up")

    def frame(self, data: bytes, more: bool) -> None:
        """One frame."""
        self.sock.sendall(bytes([2 | more]) + len(data).to_bytes(8, "big") + data)

    def is_ended(self) -> bool:
        """Whether the daemon hangs up; it waits for that."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return True


@pytest.mark.parametrize("size", [1, 8 << 20])
def test_a_message_without_an_end(daemon: Daemon, neighbour: Raw, size: int) -> None:
    """From a peer that is no session: the connection ends, long before memory does."""
    bits = neighbour.step()
    resident = _resident_mib(daemon)
    worker = daemon.worker()
    for _ in range(3):
        wire = Wire(daemon)
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                wire.frame(bytes(size), more=True)
        assert wire.is_ended()
        assert neighbour.step() == bits
    assert _resident_mib(daemon) - resident < 600
    assert daemon.worker() == worker
    why = "a message of more frames than any has" if size == 1 else "it sends more than is taken"
    until(lambda: why in daemon.log(), "it does not say why")


def test_connections_of_one_process(daemon: Daemon, neighbour: Raw) -> None:
    """Beyond so many a process gets no more, another one does."""
    bits = neighbour.step()
    wires = []
    with pytest.raises((ConnectionError, AssertionError)):
        for _ in range(110):
            wires.append(Wire(daemon))
            assert wires[-1].sock.fileno() >= 0
    assert 80 <= len(wires) <= 96
    assert neighbour.step() == bits
    assert daemon.ps()["pid"] == daemon.pid()
    wires.pop().sock.close()
    until(lambda: _connects(daemon), "there is no room again")


def _connects(daemon: Daemon) -> bool:
    try:
        Wire(daemon).sock.close()
    except ConnectionError:
        return False
    return True
