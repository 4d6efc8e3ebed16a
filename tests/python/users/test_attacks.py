"""What a user of a shared directory tries against another one, whose trainer runs meanwhile.

B is in the group and has a daemon, too. At the end the trainer of A, its daemon and its worker are
the processes that they were, and the losses those of plain PyTorch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq

from gradd.session import shared_directory
from helpers import other_users
from helpers.other_users import A, B, Users, as_user, connect, error_of
from helpers.processes import user_trainer
from helpers.waiting import SECONDS, until

pytestmark = [
    pytest.mark.skipif(bool(other_users.why_not()), reason=other_users.why_not()),
    pytest.mark.skipif(not shutil.which("setpriv"), reason="there is no setpriv"),
]
_UNANSWERED_MS = 300  # for an answer that must not come; where it comes it takes one


class Victim(Users):
    """A shared directory in which a process of A trains, and B has a daemon.

    Attributes:
        trainer_process: That of A.
        owner, worker: Of A's daemon.
    """

    def __init__(self) -> None:
        super().__init__()
        self.daemon(B)
        self.trainer_process = self.trainer(A)
        self.losses = [self.train()]
        found = self.ps(A)
        self.owner, self.worker = found["pid"], found["worker"]

    def train(self) -> list[float]:
        """Lets it go on for some steps."""
        trainer = self.trainer_process
        assert trainer.stdin and trainer.stdout
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        return json.loads(trainer.stdout.readline())["losses"]

    def check(self) -> None:
        """Nothing has happened to it."""
        plain = user_trainer.net()
        self.losses.append(self.train())
        torch.testing.assert_close(self.losses, [user_trainer.losses(*plain) for _ in range(2)])
        found = self.ps(A)
        assert (found["pid"], found["worker"], found["workers_lost"]) == (
            self.owner,
            self.worker,
            0,
        )
        assert [s["pid"] for s in found["sessions"]] == [self.trainer_process.pid]

    def close(self) -> None:
        with self.trainer_process as trainer:
            trainer.kill()
        super().close()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    made = Victim()
    try:
        yield made
        made.check()
    finally:
        made.close()


def _processes(victim: Victim) -> dict[str, int]:
    return {
        "owner": victim.owner,
        "worker": victim.worker,
        "trainer": victim.trainer_process.pid,
        "supervisor": victim.process.pid,
    }


def test_memory_and_descriptors_are_out_of_reach(victim: Victim) -> None:
    for name, pid in _processes(victim).items():
        proc = Path(f"/proc/{pid}")
        memfds = [fd for fd in (proc / "fd").iterdir() if "memfd:gradd" in os.readlink(fd)]
        assert bool(memfds) == (name in ("owner", "trainer")), name
        tries: list[Callable[[], Any]] = [
            lambda proc=proc: os.open(proc / "mem", os.O_RDONLY),
            lambda proc=proc: os.listdir(proc / "fd"),
            lambda proc=proc: (proc / "maps").read_text(),
            *(lambda fd=fd: os.open(fd, os.O_RDONLY) for fd in memfds),
        ]
        for action in tries:
            assert as_user(B, lambda action=action: error_of(action)) == "PermissionError", name


def test_processes_take_no_signal(victim: Victim) -> None:
    for name, pid in _processes(victim).items():
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
            action = lambda pid=pid, number=number: os.kill(pid, number)  # noqa: E731
            assert as_user(B, lambda action=action: error_of(action)) == "PermissionError", name


def test_the_folder_is_closed(victim: Victim) -> None:
    folder = victim.folder(A)
    tries: list[Callable[[], Any]] = [
        lambda: os.listdir(folder),
        lambda: os.open(folder / "lock", os.O_RDWR),
        lambda: (folder / "daemon.log").read_text(),
        lambda: connect(folder / "ctl.sock"),
        lambda: connect(folder / "cmd.sock", socket.SOCK_STREAM),
        lambda: (folder / "cmd.sock").unlink(),
    ]
    for action in tries:
        assert as_user(B, lambda action=action: error_of(action)) == "PermissionError"


def test_nothing_in_the_directory_can_be_replaced(victim: Victim) -> None:
    shared, target = victim.directory, victim.folder(B)
    tries: list[Callable[[], Any]] = [
        lambda: os.rename(shared / str(B), shared / "moved"),
        lambda: os.rmdir(shared / str(B)),
        lambda: os.symlink(target, shared / "4242"),
        lambda: os.mkdir(shared / "4242"),
        lambda: os.unlink(shared / "users.sock"),
        lambda: os.unlink(shared / "lock"),
        lambda: os.open(shared / "lock", os.O_RDWR),
        lambda: os.chmod(shared, 0o777),
        lambda: os.chmod(shared / "users.sock", 0o777),
    ]
    for action in tries:
        assert as_user(B, lambda action=action: error_of(action)) == "PermissionError"


def _say(path: Path, packet: dict[str, Any]) -> bytes:
    """What comes back on a control socket; b"": it hangs up."""
    with connect(path) as sock, contextlib.suppress(ConnectionError):
        sock.send(msgpack.packb(packet))
        return sock.recv(65536)
    return b""


def _command(path: Path, request: dict[str, Any], wait_ms: int) -> bytes:
    """What comes back on a command socket; b"": nothing."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{path}")
        dealer.send(msgpack.packb(request))
        return dealer.recv() if dealer.poll(wait_ms) else b""


def test_sockets_that_a_user_leaves_open_answer_to_the_user_alone(victim: Victim) -> None:
    folder = victim.folder(A)
    hello = {"v": "hello", "q": 1, "proto": [2, 2], "client": "B"}
    requests: list[dict[str, Any]] = [
        {"v": "ps", "q": 1},
        {"v": "stop", "q": 1, "now": 1},
        {"v": "attach", "q": 1, "nonce": bytes(16)},
        {"v": "release", "q": 1, "t": bytes(16), "runs": []},  # with a forged token
    ]
    modes = {path: path.stat().st_mode & 0o777 for path in (folder, *folder.glob("c*.sock"))}
    try:
        for path in modes:
            path.chmod(0o777)
        assert as_user(A, lambda: _say(folder / "ctl.sock", hello)), "B's would be answered"
        assert as_user(A, lambda: _command(folder / "cmd.sock", requests[0], int(SECONDS * 1000)))
        assert as_user(B, lambda: _say(folder / "ctl.sock", hello)) == b""
        for verb in ("kept", "restart"):
            assert as_user(B, lambda v=verb: _say(folder / "ctl.sock", {"v": v, "q": 1})) == b""
        for request in requests:
            got = as_user(B, lambda r=request: _command(folder / "cmd.sock", r, _UNANSWERED_MS))
            assert got == b"", request
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    log = (folder / "daemon.log").read_text()
    assert f"uid {B} may not use this daemon" in log and f"event=peer_refused uid={B}" in log


def test_commands_do_not_reach_it(victim: Victim) -> None:
    """Nor is there a word of A's session in what B's own daemon says."""
    for verb in ("ps", "stop", "restart", "drain", "quota", "logs", "forget x", "show 1"):
        words = verb.split()
        code, said = victim.gradd(B, *words, place=victim.folder(A))
        assert code != 0, said
        if verb in ("ps", "logs", "quota"):
            code, own = victim.gradd(B, *words)
            assert code == 0, own
            assert "user_trainer" not in own and str(victim.trainer_process.pid) not in own


def test_others_see_sums(victim: Victim) -> None:
    line = f"users of {victim.directory}: 2, with 1 session"
    for uid in (A, B):
        code, text = victim.gradd(uid, "ps")
        assert code == 0 and text.splitlines()[-1] == line
        assert victim.ps(uid)["shared"] == {"users": 2, "sessions": 1}
    code, text = victim.gradd(0, "ps")  # which has no daemon
    assert code == 3 and line in text
    assert f"{A}: 1" in text and f"{B}: 0" in text
    code, text = victim.gradd(B + 1, "ps", groups=())
    assert code == 3 and "users of" not in text


def test_a_flood_of_connections_keeps_none_out(victim: Victim) -> None:
    """B connects as fast as it can, and reads no answer."""
    before = len(os.listdir(f"/proc/{victim.process.pid}/fd"))
    pid = victim.daemon(B)

    def flood() -> int:
        held = []
        for _ in range(500):
            held.append(connect(victim.directory / "users.sock"))
            if len(held) == 100:
                held.pop(0).close()
        return os.getpid()

    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            try:
                as_user(B, flood)
            finally:
                os._exit(0)
        children.append(child)
    for _ in range(20):
        assert as_user(A, victim.ask) == {"ok": 1, "q": 0, "pid": victim.owner}
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert len(os.listdir(f"/proc/{victim.process.pid}/fd")) == before
    assert victim.daemon(B) == pid, "it has started no other one"


def test_a_full_queue_is_waited_for(victim: Victim) -> None:
    """B has taken all places in it, and the supervisor is busy for a while."""
    os.kill(victim.process.pid, signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        stack.callback(os.kill, victim.process.pid, signal.SIGCONT)
        with contextlib.suppress(BlockingIOError):
            while True:
                kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
                sock.connect(str(victim.directory / "users.sock"))
        later = threading.Timer(0.3, os.kill, (victim.process.pid, signal.SIGCONT))
        later.start()
        stack.callback(later.join)
        folder = victim.folder(A)
        assert as_user(A, lambda: shared_directory.ask(folder)) == victim.owner


def test_sessions_of_one_user_are_not_counted_for_another(victim: Victim) -> None:
    """B takes all that a process may have, and is refused more by its own daemon."""
    hello = msgpack.packb({"v": "hello", "q": 1, "proto": [2, 2], "client": "B"})

    def take() -> int:
        held, refusal = [], ""
        while not refusal:
            sock = connect(victim.folder(B) / "ctl.sock")
            sock.send(hello)
            answer = msgpack.unpackb(sock.recv(65536))
            refusal = "" if answer["ok"] == 1 else answer["what"]
            held.append(sock)
        return len(held)

    assert as_user(B, take) > 32
    assert len(victim.ps(A)["sessions"]) == 1
    assert as_user(A, lambda: _say(victim.folder(A) / "ctl.sock", msgpack.unpackb(hello)))


def test_a_log_that_is_none_is_not_written(victim: Victim) -> None:
    """B puts something else in place of its log, and the daemon starts all the same."""
    log, target = victim.folder(B) / "daemon.log", victim.directory / "target"
    target.write_text("root's")
    others: list[Callable[[], Any]] = [
        lambda: log.symlink_to(target),
        lambda: os.mkfifo(log),
        lambda: log.mkdir(),
    ]
    for replace in others:
        pid = victim.daemon(B)
        as_user(B, lambda pid=pid: os.kill(pid, signal.SIGKILL))
        ended = f"uid={B} pid={pid} status=137"
        until(lambda ended=ended: ended in victim.log(), "it is not buried")
        as_user(B, lambda: log.unlink(missing_ok=True))
        as_user(B, replace)
        assert victim.daemon(B) != pid
        assert target.read_text() == "root's"
    log.rmdir()
    target.unlink()
