"""Processes of other users, and a supervisor that serves them.

Only root can have these: `why_not()` is the reason for which a machine cannot.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from helpers import BUILD, ROOT
from helpers.waiting import SECONDS, until

T = TypeVar("T")
GROUP = 60123  # may use the directory; a number without a name
GRADD = BUILD / "bin" / "gradd"
_TRAINER = ROOT / "tests/python/helpers/processes/user_trainer.py"


def _two_users() -> list[int]:
    found = sorted(entry.pw_uid for entry in pwd.getpwall() if 0 < entry.pw_uid < 60000)
    return found[:2]


def _can_become(uid: int) -> bool:
    """Whether a child of this process can: not in a namespace that has no other users."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups((GROUP,))
            os.setresuid(uid, uid, uid)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@functools.cache
def why_not() -> str:
    """The reason for which there are no processes of other users; "": there are."""
    if os.geteuid() != 0:
        return "only root can start processes of other users"
    if len(_two_users()) < 2:
        return "the machine has no two users"
    return "" if all(map(_can_become, _two_users())) else "root is alone in this namespace"


A, B = _two_users() if not why_not() else (1, 2)


def _as_the_unit() -> list[str]:
    """A command before a supervisor's, which leaves it the capabilities that its unit has."""
    if not shutil.which("setpriv"):
        return []
    unit = (ROOT / "tools/systemd/gradd-users.service").read_text()
    (line,) = re.findall("^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    names = [word.removeprefix("CAP_").lower() for word in line.split()]
    kept = ",".join(["-all", *(f"+{name}" for name in names)])
    return ["setpriv", "--no-new-privs", "--inh-caps", "-all", "--bounding-set", kept]


def as_user(uid: int, action: Callable[[], T], groups: tuple[int, ...] = (GROUP,)) -> T:
    """What `action` returns in a child of this process that is another user's.

    The child has the modules that are imported here, and can import no others.
    """
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                result: Any = (action(), None)
            except Exception as error:
                result = (None, error)
            os.write(into, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as file:
        text = file.read()
    os.waitpid(pid, 0)
    result, error = pickle.loads(text)
    if error is not None:
        raise error
    return result


def error_of(action: Callable[[], Any]) -> str:
    """Name of the error of the system that an action ends with; "" if it ends well."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return ""


def connect(path: Path, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """A connection to that socket, which waits for at most a minute."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
    limit = struct.pack("@ll", int(SECONDS), 0)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # a full queue is waited for
    sock.connect(str(path))
    sock.settimeout(SECONDS)
    return sock


class Users:
    """A supervisor in a shared directory of its own.

    Attributes:
        directory: The shared directory.
    """

    def __init__(
        self,
        environment: dict[str, str] | None = None,
        descriptors: tuple[int, ...] = (),
        threads: int = 1,
    ) -> None:
        # Others can get there; the folders of pytest are root's alone.
        self._root = Path(tempfile.mkdtemp(prefix="gradd-users-", dir="/tmp"))
        self._root.chmod(0o755)
        self.directory = self._root / "run"
        self._words = ["--dir", str(self.directory), "--threads", str(threads)]
        self._environment = {"GRADD_IDLE_EXIT": "60", **(environment or {})}
        self.start(descriptors)

    def start(self, descriptors: tuple[int, ...] = ()) -> None:
        """Starts the supervisor; returns when it listens."""
        command = [str(GRADD), "serve", "--allow-group", str(GROUP), *self._words]
        with open(self._root / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*_as_the_unit(), *command],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, **self._environment},
                pass_fds=descriptors,
            )
        until(lambda: f"pid={self.process.pid} dir" in self.log(), "there is no supervisor")

    def log(self) -> str:
        """What supervisors have logged."""
        return (self._root / "log").read_text()

    def folder(self, uid: int) -> Path:
        """Of a user's daemon."""
        return self.directory / str(uid)

    def ask(self) -> dict[str, Any]:
        """As the present user: the supervisor's answer."""
        with connect(self.directory / "users.sock") as sock:
            return msgpack.unpackb(sock.recv(65536))

    def daemon(self, uid: int) -> int:
        """Asks for the daemon of a user; its pid, when it listens."""
        pid = 0

        def is_there() -> bool:
            nonlocal pid
            answer = as_user(uid, self.ask)
            assert answer["ok"] == 1, answer
            pid = answer["pid"]
            return bool(pid) and (self.folder(uid) / "ctl.sock").exists()

        until(is_there, f"uid {uid} gets no daemon")
        return pid

    def gradd(
        self,
        uid: int,
        *words: str,
        groups: tuple[int, ...] = (GROUP,),
        place: Path | None = None,
    ) -> tuple[int, str]:
        """A command of that user, in the shared directory or in `place`.

        Returns:
            Its exit code and what it prints.
        """
        done = subprocess.run(
            [str(GRADD), *words, "--dir", str(place or self.directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            user=uid,
            group=uid,
            extra_groups=groups,
        )
        return done.returncode, done.stdout

    def ps(self, uid: int) -> dict[str, Any]:
        """What `gradd ps --json` of a user says of the user's daemon."""
        code, text = self.gradd(uid, "ps", "--json")
        assert code == 0, text
        return json.loads(text.splitlines()[0])

    def trainer(self, uid: int) -> subprocess.Popen[str]:
        """A trainer of that user: user_trainer.py."""
        command = [sys.executable, str(_TRAINER)]
        reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
        # An interpreter in the home of root is for this trainer to read, too.
        ids = ["--reuid", str(uid), "--regid", str(uid), "--groups", str(GROUP), *reads]
        return subprocess.Popen(
            ["setpriv", *ids, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GRADD_DIR": str(self.directory), "HOME": str(self._root)},
        )

    def stop(self) -> int:
        """Ends supervisor and daemons; the exit code of the supervisor, which waits for none."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def close(self) -> None:
        """The same, and removes the directory."""
        if self.process.poll() is None:
            self.stop()
        shutil.rmtree(self._root, ignore_errors=True)
