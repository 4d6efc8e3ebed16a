"""Finds and starts the daemon: directory, binary, control socket.

If no daemon listens on the directory's control socket, one is started: `gradd serve` by fork and
exec, in a session of its own so that Ctrl-C in the trainer does not reach it. If two clients start
one at once, the daemon's lock file lets only one win, and both clients connect to it.

Each device has a daemon of its own: the CPU's in the user's directory, a GPU's in a directory there
that is named by the GPU's UUID.

In a directory that the users of a group share, the user's is a folder (shared_directory.py), and a
supervisor starts the daemon.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import shlex
import shutil
import signal
import socket
import stat
import struct
import subprocess
import time
from pathlib import Path

import gradd
from gradd import errors, options
from gradd.memory.devices import HOST, DeviceError, Gpu, Host
from gradd.session import shared_directory

logger = logging.getLogger("gradd")

IDLE_EXIT_SECONDS = 600  # unless GRADD_IDLE_EXIT is set
START_SECONDS = 20.0
RESTART_SECONDS = 10.0  # of a daemon that this process may not start itself
_STARTS = 5  # of daemons that die before they listen
_EXIT_USAGE = 2  # of `gradd serve`: options that are none, which no other try changes
_EXIT_ALREADY = 4  # of `gradd serve`: another process holds the directory
_EXIT_DEVICE = 5  # of `gradd serve`: the device that it must have cannot be used
_PATH_LIMIT = 107
# Header of the linker's id of a binary: an ELF note named GNU, of type 3, with 20 bytes of content.
_BUILD_NOTE = struct.pack("<3I", 4, 20, 3) + b"GNU\0"
_NOTES_WITHIN = 1 << 16  # notes lie at the beginning of a file
started: list[subprocess.Popen] = []  # daemons that this process started, to reap them


def directory() -> Path:
    """The user's directory: GRADD_DIR, else under XDG_RUNTIME_DIR, else under the temp folder.

    Of a shared directory it is the user's folder.
    """
    named = options.get("GRADD_DIR")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if named:
        path = Path(str(named)).absolute()
    elif runtime and runtime.startswith("/"):
        path = Path(runtime) / "gradd"
    else:  # as the daemon does
        path = Path(os.environ.get("TMPDIR") or "/tmp") / f"gradd-{os.geteuid()}"
    return shared_directory.entered(path)


class DirectoryError(errors.IoError, errors.SessionError):
    """The daemon's directory is unfit: `gradd serve` says `IO`, too, and there is no session."""


def check_directory(path: Path, create: bool) -> None:
    """Makes sure that the directory is ours alone; creates it if asked.

    Raises:
        DirectoryError: It is a link, another user's, or open to others; or its path is too long.
    """
    length = len(os.fsencode(path / "ctl.sock"))
    if length > _PATH_LIMIT:
        raise DirectoryError(
            f"the socket path {path}/ctl.sock has {length} bytes, the limit is {_PATH_LIMIT}: "
            "set GRADD_DIR to a shorter directory"
        )
    if create and not shared_directory.holds(path):
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except FileExistsError:
            pass  # a file, or a link: named below
        except OSError as error:
            raise DirectoryError(f"cannot create {path}: {error.strerror}") from None
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    except PermissionError:
        raise DirectoryError(
            f"{path} is out of reach of this process: a directory that users share is for those "
            "of its group; set GRADD_DIR to one of your own"
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        what = "a link" if stat.S_ISLNK(info.st_mode) else "no directory"
        raise DirectoryError(f"{path} is {what}: set GRADD_DIR to a directory of your own")
    if info.st_uid != os.getuid():
        raise DirectoryError(
            f"{path} belongs to the user {info.st_uid}: set GRADD_DIR to a directory of your own"
        )
    if info.st_mode & 0o077:
        raise DirectoryError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}, others may use it; it must be "
            f"0700: chmod 700 {shlex.quote(str(path))}"
        )


def find_binary() -> str:
    """Path of the daemon's binary: GRADD_BIN, the package, the checkout's build, then PATH.

    Raises:
        SessionError: There is none; the message lists the paths.
    """
    named = options.get("GRADD_BIN")
    package = Path(gradd.__file__).resolve().parent
    build = Path(os.environ.get("GRADD_BUILD") or package.parents[2] / "build")
    candidates = [package / "_native" / "bin" / "gradd", build / "bin" / "gradd"]
    if named:
        candidates = [Path(str(named))]
    for path in candidates:
        if os.access(path, os.X_OK):
            return str(path)
    on_path = None if named else shutil.which("gradd")
    if on_path:
        return on_path
    paths = ", ".join(str(p) for p in candidates)
    raise errors.SessionError(
        f"no daemon listens in {directory()} and its binary was not found ({paths}): build it "
        "with `make`, or set GRADD_BIN"
    )


def build_id() -> str:
    """Which build the binary is that a client would start now, as its daemon says in hello.

    "" if there is no binary, or one without an id.
    """
    try:
        with open(find_binary(), "rb") as file:
            head = file.read(_NOTES_WITHIN)
    except (errors.SessionError, OSError):
        return ""
    at = head.find(_BUILD_NOTE)
    return "" if at < 0 else head[at + len(_BUILD_NOTE) :][:20].hex()


def try_connect(path: Path) -> socket.socket | None:
    """Connects to the control socket; None if no process listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(str(path / "ctl.sock"))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise errors.SessionError(f"cannot connect to {path}/ctl.sock: {error.strerror}") from None
    return sock


def connect(path: Path, memory: Host | Gpu = HOST, wait: float = START_SECONDS) -> socket.socket:
    """Connects to the control socket; starts the daemon if no process listens.

    Args:
        path: The daemon's directory.
        memory: Of the device that a daemon started here computes on.
        wait: Seconds to wait for a daemon that is starting or being restarted.

    Raises:
        SessionError: No daemon, and none could be started.
        DirectoryError: The directory is unfit.
        DeviceError: A daemon cannot use that device.
    """
    autostart = bool(options.get("GRADD_AUTOSTART"))
    if memory.uuid:
        if autostart:
            shared_directory.make_sure(path.parent)
        check_directory(path.parent, create=autostart)
    check_directory(path, create=autostart)
    sock = try_connect(path)
    if sock is not None:
        return sock
    begin = time.monotonic()
    starts = _begin(path, memory) if autostart else None
    deadline = begin + (wait if autostart else min(wait, RESTART_SECONDS))
    pause = 0.002
    while time.monotonic() < deadline:
        sock = try_connect(path)
        if sock is not None:
            return sock
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
        if starts is not None:
            starts.look_after()
    took = time.monotonic() - begin
    hint = f"see {path}/daemon.log" if autostart else "GRADD_AUTOSTART is 0: run `gradd serve`"
    raise errors.SessionError(f"no daemon listens in {path} after {took:.1f} s ({hint})")


def _begin(path: Path, memory: Host | Gpu) -> _Starts | shared_directory.Asks:
    if shared_directory.holds(path):
        return shared_directory.Asks(path)
    return _Starts(path, memory)


class _Starts:
    """The daemon that is being started, and those after it if it ends."""

    def __init__(self, path: Path, memory: Host | Gpu) -> None:
        self._path = path
        self._memory = memory
        self._begin = time.monotonic()
        self._deaths = 0
        self._log_begin = _log_bytes(path)
        self._process = _start(path, memory)
        self._again = self._begin + 0.1  # not before

    def look_after(self) -> None:
        """Starts another one if this one has ended.

        Raises:
            SessionError: So many have died in a row that the next one would, too.
            DeviceError: It cannot use the device.
        """
        code = self._process.poll()
        if code is None or time.monotonic() < self._again:
            return
        # Another client's daemon has won the lock and will listen in a moment; or a former one has
        # closed its sockets and is about to give the lock back; or ours was stopped.
        pause = 0.5
        if code not in (0, _EXIT_ALREADY):
            self._deaths += 1
            if code == _EXIT_DEVICE:
                raise DeviceError(
                    f"no daemon can compute on {self._memory.device}{self._last_words()}; "
                    f"see {self._path}/daemon.log"
                )
            if code == _EXIT_USAGE:
                raise errors.SessionError(
                    f"the daemon does not start with these options{self._last_words()}; "
                    f"see {self._path}/daemon.log"
                )
            pause = 0.05 * self._deaths
            if self._deaths == _STARTS:
                raise self._failure(code)
            logger.warning(
                "the daemon died during its start, %s; starting another one", _end_of(code)
            )
        self._log_begin = _log_bytes(self._path)
        self._process = _start(self._path, self._memory)
        self._again = time.monotonic() + pause

    def _failure(self, code: int) -> errors.SessionError:
        took = time.monotonic() - self._begin
        words = self._last_words() if code > 0 else ""
        return errors.SessionError(
            f"the daemon was started {self._deaths} times in {took:.1f} s and has died each time, "
            f"the last one {_end_of(code)}{words}; see {self._path}/daemon.log"
        )

    def _last_words(self) -> str:
        """Its last words in the log, as a part of a message; "" if it is silent there.

        Its own words count more than those of the shell or the linker around it.
        """
        try:
            with open(_open_log(self._path, os.O_RDONLY), "rb") as log:
                log.seek(max(self._log_begin, os.fstat(log.fileno()).st_size - 4096))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = [line.strip() for line in lines if line.strip()]
        own = [line for line in said if line.startswith("gradd: ") or " level=error " in line]
        return f' ("{(own or said)[-1][:300]}")' if said else ""


def _end_of(code: int) -> str:
    """How a process ended, from its return code."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _log_bytes(path: Path) -> int:
    try:
        return os.stat(path / "daemon.log").st_size
    except OSError:
        return 0


def _open_log(path: Path, flags: int) -> int:
    """The daemon's log; OSError for what is no plain file: a fifo would make us wait."""
    log = os.open(path / "daemon.log", flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    if stat.S_ISREG(os.fstat(log).st_mode):
        return log
    os.close(log)
    raise OSError(errno.ENXIO, "it is no plain file")


def _start(path: Path, memory: Host | Gpu) -> subprocess.Popen:
    reap()
    command = [find_binary(), "serve", "--dir", str(path), *memory.serve]
    try:
        log = _open_log(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise DirectoryError(
            f"cannot write {path}/daemon.log: {error.strerror}; remove what is there, or set "
            "GRADD_DIR to another directory"
        ) from None
    # A trainer asks for its own plans (calls/graph.py), and its threads wait in their own way
    # (gradd_aliases); all trainers share the daemon.
    own = ("GRADD_FUSE", "GRADD_CHUNKED_LOSS", "GOMP_SPINCOUNT")
    env = {"GRADD_IDLE_EXIT": str(IDLE_EXIT_SECONDS)}
    env |= {name: text for name, text in os.environ.items() if name not in own}
    env |= memory.environment
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=env,
        )
    except OSError as error:
        raise errors.SessionError(f"cannot start {command[0]}: {error.strerror}") from None
    finally:
        os.close(log)
    started.append(process)
    logger.info("started the daemon, pid %d, directory %s", process.pid, path)
    return process


def wait_for_end(pid: int, seconds: float) -> bool:
    """Waits until a process has ended; False if it lives on. One that does not exist has ended."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        poller = select.poll()
        poller.register(process, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(process)


def reap() -> None:
    """Collects exit states of daemons that this process started."""
    for process in list(started):
        if process.poll() is not None:
            started.remove(process)
