"""Descriptors: floods, few of them, and those that are no memory. Other sessions go on.

What ends a session or refuses a connection here would end or stall the daemon otherwise: libzmq
aborts where accept() runs out of descriptors, and closing what is no memory can take for ever.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import conftest
import msgpack
import pytest
from conftest import Daemon

from gradd.memory.shm import Segment
from helpers.hostile.blocking_file import StuckFile
from helpers.hostile.raw_client import DROP, SEGMENT, Balance, Raw

_PER_PROCESS = 64  # control connections


@pytest.fixture
def neighbour(daemon: Daemon) -> Iterator[Raw]:
    """An honest session."""
    with Raw(daemon.directory).open() as session:
        yield session


def _seconds(act: Callable[[], object]) -> float:
    start = time.monotonic()
    act()
    return time.monotonic() - start


def _connect(path: Path, kind: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.setblocking(False)
    sock.connect_ex(str(path))
    return sock


def _limit(server: Daemon, descriptors: int) -> None:
    for pid in (server.pid(), server.worker()):
        subprocess.run(["prlimit", f"--nofile={descriptors}:", "--pid", str(pid)], check=True)


@pytest.mark.parametrize("descriptors", [256, 1024])
@pytest.mark.parametrize("name", ["cmd.sock", "ctl.sock"])
def test_thousands_of_connections_come_and_go(
    descriptors: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = socket.SOCK_STREAM if name == "cmd.sock" else socket.SOCK_SEQPACKET
    with conftest._serving(monkeypatch, lambda: True) as server, Raw(server.directory) as session:
        session.open()
        bits = session.step()
        _limit(server, descriptors)
        slowest = 0.0
        for _ in range(6):
            flood = [_connect(server.directory / name, kind) for _ in range(500)]
            for _ in range(10):
                slowest = max(slowest, _seconds(lambda: _same(session, bits)))
            for sock in flood:
                sock.close()
        assert slowest < 20, f"a step took {slowest:.1f} s: the session waited"
        print(f"{name} with {descriptors}: a step took at most {slowest * 1e3:.0f} ms")
        _until_someone_can_work(server.directory)


def _same(session: Raw, bits: bytes) -> None:
    assert session.step() == bits


def _until_someone_can_work(folder: Path) -> None:
    """Newcomers wait while there is no room, and are served when there is."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with Raw(folder) as late:
                late.open().step()
            return
        except (OSError, KeyError, AssertionError):
            assert time.monotonic() < deadline, "no newcomer is served after the flood"
            time.sleep(0.1)


def test_as_many_honest_sessions_as_there_are_descriptors_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 256 descriptors 40 sessions work: one takes three, and one for each segment."""
    with conftest._serving(monkeypatch, lambda: True) as server:
        _limit(server, 256)
        sessions = [Raw(server.directory).open() for _ in range(40)]
        extra = [Segment(100 + i, 4096) for i in range(60)]
        for i, segment in enumerate(extra):
            fields = {"v": "segment", "id": 100 + i, "bytes": segment.size}
            assert sessions[0].control(fields, [segment.fd])["ok"]
        assert len({session.step() for session in sessions}) == 1
        for held in (*sessions, *extra):
            held.close()


def test_segments_hold_a_descriptor_of_the_owner(daemon: Daemon, neighbour: Raw) -> None:
    def held() -> list[int]:
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    def settled() -> list[int]:
        """The numbers when other connections of the daemon have ended."""
        found = held()
        while (now := (time.sleep(0.2), held())[1]) != found:
            found = now
        return found

    pids = daemon.pid(), daemon.worker()
    before = settled()
    segments = [Segment(10 + i, 4096) for i in range(20)]
    for i, segment in enumerate(segments):
        fields = {"v": "segment", "id": 10 + i, "bytes": segment.size}
        assert neighbour.control(fields, [segment.fd])["ok"]
        segment.close()
    assert settled() == [before[0] + 20, before[1]]
    for i in range(20):
        assert neighbour.control({"v": "unsegment", "id": 10 + i})["ok"]
    assert settled() == before


def test_one_process_cannot_hold_all_control_connections(daemon: Daemon, neighbour: Raw) -> None:
    bits = neighbour.step()
    held = [Raw(daemon.directory) for _ in range(_PER_PROCESS - 1)]
    refused = Raw(daemon.directory, greet=False)
    reply = refused.control({"v": "hello", "proto": [2, 2]})
    assert (reply["ok"], reply["code"]) == (0, "LIMIT"), reply
    assert f"{_PER_PROCESS} connections of process {os.getpid()}" in reply["what"]
    code = (
        "from pathlib import Path; from helpers.hostile.raw_client import Raw; "
        f"Raw(Path({str(daemon.directory)!r})).open().step(); print('works')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": conftest.PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "works\n", done.stderr
    assert neighbour.step() == bits
    for raw in (*held, refused):
        raw.close()
    _until_someone_can_work(daemon.directory)


# ---- descriptors that are no memory ----


def _lingering() -> tuple[socket.socket, list[socket.socket]]:
    """A socket whose last close() waits 30 s for a peer that does not read; and the others."""
    listener = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(listener.getsockname())
    peer, _ = listener.accept()
    sender.setblocking(False)
    while select.select([], [sender], [], 0)[1]:
        try:
            sender.send(bytes(1 << 16))
        except BlockingIOError:
            break
    linger = (1).to_bytes(4, sys.byteorder) + (30).to_bytes(4, sys.byteorder)
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    return sender, [listener, peer]


def _packet(fd: int) -> tuple[list[bytes], list]:
    fields = msgpack.packb({"v": "segment", "id": 5, "bytes": 4096})
    return [fields], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]


def _refused(hostile: Raw) -> None:
    reply = msgpack.unpackb(hostile.ctl.recv(65536))
    assert (reply["ok"], reply["code"]) == (0, "SHM"), reply
    assert "not a memfd" in reply["what"]


def test_sockets_that_linger(daemon: Daemon, neighbour: Raw) -> None:
    bits, pid = neighbour.step(), daemon.pid()
    balance = Balance(pid, neighbour)
    with Raw(daemon.directory) as hostile:
        before = balance.read()
        given = [_lingering() for _ in range(20)]
        for sender, _ in given:
            os.kill(pid, signal.SIGSTOP)  # its close() is to be the last one
            hostile.ctl.sendmsg(*_packet(sender.fileno()))
            sender.close()
            os.kill(pid, signal.SIGCONT)
            _refused(hostile)
            assert _seconds(lambda: _same(neighbour, bits)) < 5
        for _, others in given:
            for sock in others:
                sock.close()
        assert balance.settled(before, 20) == before


def test_a_file_that_never_answers(daemon: Daemon, neighbour: Raw, tmp_path: Path) -> None:
    bits = neighbour.step()
    try:
        stuck = StuckFile(tmp_path)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error.strerror}")
    with stuck, Raw(daemon.directory) as hostile:
        for _ in range(3):
            hostile.ctl.sendmsg(*_packet(stuck.fd))
            _refused(hostile)
            assert _seconds(lambda: _same(neighbour, bits)) < 5
    assert neighbour.call({"v": "ps", "t": DROP})["ok"]


def test_memory_of_a_wrong_size_is_closed_at_once(daemon: Daemon, neighbour: Raw) -> None:
    before = Balance(daemon.pid(), neighbour).read()
    segment = Segment(9, SEGMENT)
    for _ in range(10):
        reply = neighbour.control({"v": "segment", "id": 9, "bytes": 4096}, [segment.fd])
        assert (reply["ok"], reply["code"]) == (0, "SHM")
    segment.close()
    assert Balance(daemon.pid(), neighbour).read() == before
