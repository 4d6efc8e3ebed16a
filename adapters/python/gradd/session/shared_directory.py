"""A directory that the users of a group share: `gradd serve --allow-group`.

It belongs to root, and no other user can write to it. Each user has a folder in it, named by the
uid, which is used as any directory of a daemon; the supervisor that listens there makes it, and
starts the daemon under that uid. A client that finds no daemon connects to the supervisor, says
nothing, and reads one answer.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from pathlib import Path

from gradd import errors
from gradd.session import protocol

_SOCKET = "users.sock"
_MODE = 0o750
_SECONDS = 20.0  # for the supervisor, which answers at once
_AGAIN_SECONDS = 0.25
_ABSENT_SECONDS = 10.0  # in which another supervisor may come


class _AbsentError(errors.SessionError):
    """No supervisor answers."""


def is_shared(path: Path) -> bool:
    """Whether that is a shared directory, as `shared_dir_is` of the daemon decides it."""
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != 0 or info.st_mode & 0o777 != _MODE:
            return False
        if os.geteuid() != 0:
            return True
        listener = os.lstat(path / _SOCKET)
        return stat.S_ISSOCK(listener.st_mode) and listener.st_uid == 0
    except OSError:
        return False


def entered(path: Path) -> Path:
    """The user's folder in a shared directory; another path as it is."""
    return path / str(os.geteuid()) if is_shared(path) else path


def holds(path: Path) -> bool:
    """Whether that is the user's folder in a shared directory, which a supervisor makes."""
    return path.name == str(os.geteuid()) and is_shared(path.parent)


def ask(path: Path) -> int:
    """Asks the supervisor for the daemon of that folder.

    Returns:
        The pid of the daemon; 0 if one has died just now, and another one is started later.

    Raises:
        SessionError: There is no supervisor, it refuses the user, or the daemon dies again and
            again.
    """
    place = path.parent / _SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        # With a timeout of Python's, connect() fails where the queue is full, and does not wait.
        limit = struct.pack("@ll", int(_SECONDS), 0)  # struct timeval
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            sock.connect(str(place))
            sock.settimeout(_SECONDS)
            answer = sock.recv(65536)
        except OSError as error:
            raise _AbsentError(
                f"{path.parent} is root's, and no `gradd serve --allow-group` listens at {place} "
                f"({error.strerror or error}): ask its administrator, or set GRADD_DIR to a "
                "directory of your own"
            ) from None
    try:
        reply = protocol.checked(protocol.unpack(answer))
    except errors.InternalError as error:
        raise errors.SessionError(f"what {place} answers is no answer: {error.what}") from None
    return int(reply.get("pid") or 0)


def make_sure(path: Path) -> None:
    """Asks for the user's folder in a shared directory if it is missing.

    Raises:
        SessionError: As `ask`.
    """
    if holds(path) and not os.path.lexists(path):
        ask(path)


class Asks:
    """The daemon that the supervisor is starting, and those after it if it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answered = time.monotonic()
        self._ask()

    def _ask(self) -> None:
        try:
            ask(self._path)
            self._answered = time.monotonic()
        except _AbsentError:
            if time.monotonic() >= self._answered + _ABSENT_SECONDS:
                raise
        self._again = time.monotonic() + _AGAIN_SECONDS

    def look_after(self) -> None:
        """Asks for another one if this one has ended.

        Raises:
            SessionError: So many have died in a row that the next one would, too; or no supervisor
                has come for long.
        """
        if time.monotonic() >= self._again:
            self._ask()
