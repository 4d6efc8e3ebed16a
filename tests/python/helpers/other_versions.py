"""Peers of other versions: a daemon that is not ours, as far as a client or a command sees of it.

`Peer` listens at both sockets of a directory and answers with what a function makes of a packet; it
holds the lock of the directory, as a daemon does. The answers of a daemon of protocol 1 are here
word by word.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import zmq

Answer = Callable[[dict[str, Any]], Any]

OLD_WORDS = (
    "client speaks protocol 2 to 2, this daemon (gradd 0.0.9) 1 to 1: install the same version on "
    "both sides and restart the daemon"
)


class Peer:
    """A stranger in a daemon's place.

    Args:
        path: The directory; no other process may listen there.
        hello: The answer on the control socket: a map, or bytes as they are.
        command: The same on the command socket; the map of a request is its argument.
    """

    def __init__(self, path: Path, hello: Any, command: Answer | None = None) -> None:
        self.path = path
        self.hello = hello
        self.command = command or (lambda request: {"ok": 0, "q": request["q"], "code": "STALE"})
        self.heard: list[dict[str, Any]] = []  # packets of the control socket
        for name in ("ctl.sock", "cmd.sock"):
            (path / name).unlink(missing_ok=True)
        self._lock = open(path / "lock", "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock.write(f"{os.getpid()}\n")
        self._lock.flush()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path / "ctl.sock"))
        self._listener.listen()
        self._listener.settimeout(0.02)
        self._ended = threading.Event()
        ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._control),
            threading.Thread(target=self._commands, args=(ready,)),
        ]
        for thread in self._threads:
            thread.start()
        assert ready.wait(60), f"the stand-in of a daemon in {self.path} could not bind its sockets"

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        for name in ("ctl.sock", "cmd.sock"):
            (self.path / name).unlink(missing_ok=True)
        self._lock.close()

    def _control(self) -> None:
        open_ones: list[socket.socket] = []
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(0.02)
                open_ones.append(connection)
            except TimeoutError:
                pass
            for connection in open_ones:
                self._answer(connection)
        for connection in open_ones:
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        try:
            packet = connection.recv(65536)
        except (TimeoutError, OSError):
            return
        if packet:
            self.heard.append(msgpack.unpackb(packet))
            connection.send(_packed(self.hello))

    def _commands(self, ready: threading.Event) -> None:
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{self.path}/cmd.sock")
        ready.set()
        while not self._ended.is_set():
            if router.poll(20):
                route, envelope, *_ = router.recv_multipart()
                router.send_multipart([route, _packed(self.command(msgpack.unpackb(envelope)))])
        router.close()
        context.term()


def _packed(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else msgpack.packb(answer)


def old_daemon(path: Path) -> Peer:
    """A daemon of protocol 1, gradd 0.0.9: it ignores what it does not know."""
    refusal = {"ok": 0, "q": 0, "code": "VERSION", "what": OLD_WORDS, "session": "alive"}

    def command(request: dict[str, Any]) -> dict[str, Any]:
        head = {"ok": 1, "q": request["q"]}
        if request["v"] == "ps":
            return {**head, "version": "0.0.9", "pid": os.getpid(), "uptime_ms": 5, "threads": 2,
                    "memory_limit": 1 << 30, "sessions": [], "counters": {}}  # fmt: skip
        row = [
            0,
            0,
            "run",
            0,
            "Mul",
            "",
            "loop",
            0,
            "n",
            "Mul",
            "",
            "",
            [1, [2]],
            8,
            8,
            0,
            0,
            2.0,
            0,
        ]
        return {**head, "session": 1, "plan": 1, "plans": [], "n_rows": 1, "rows": [row],
                "fates": [[1, "Mul", 1]]}  # fmt: skip

    return Peer(path, refusal, command)


def new_daemon(path: Path) -> Peer:
    """A daemon of protocol 3, gradd 9.0.0."""
    what = "hello: the client speaks protocol 2, this daemon, gradd 9.0.0, protocol 3"
    refusal = {"ok": 0, "q": 0, "code": "VERSION", "what": what, "session": "alive",
               "proto": [3, 3], "version": "9.0.0"}  # fmt: skip
    return Peer(path, refusal)
