"""The two sockets of a session as one object: control socket and ZeroMQ DEALER.

`Connection(path)` connects, says hello on the control socket and remembers the nonce; segments may
be passed from then on; `attach()` presents the nonce on the DEALER. `call()` sends one envelope and
waits for the reply with its number while it watches the control socket: its hang-up means that the
daemon is gone, which is raised as ConnectionLost. One thread at a time; the client has the lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from os import sched_yield
from pathlib import Path
from time import perf_counter as now
from typing import Any

import msgpack
import zmq

from gradd import __version__, about, errors, interrupts
from gradd.memory.devices import HOST, Gpu, Host
from gradd.memory.gpu_segments import GpuSegment
from gradd.memory.shm import HEADER_VERSION, Base, Segment
from gradd.session import daemon, protocol, versions

logger = logging.getLogger("gradd")

_CONTROL_SECONDS = 30.0
_SAY_MS = 5000  # without an answer: then the client says what it waits for
_WHY_MS = 200
_VERSION_MS = 2000  # nothing more than the version is lost if it takes longer
_HELLO_SECONDS = 60.0  # for a daemon that is ending, or one that hangs up, to make room
# The client polls for a reply that comes within a millisecond: a sleeping core takes a tenth of
# that to wake up. If another thread wants the core, the client yields it and then sleeps while it
# waits for the next replies, as it does for slower ones.
_SPIN_SECONDS = 1.5e-3
_QUICK_SECONDS = 1e-3
_GLANCE_SECONDS = 30e-6
_OTHERS_SECONDS = 200e-6  # a yield that takes as long has let another thread run
_SLEPT_FOR = 32  # replies
_POLL_MS = 500  # how soon a second Ctrl-C is seen
_ASK_AFTER = 4  # polls without a reply: then the daemon says whether it is drained
_ASK_AGAIN = 20
_UNHEARD_SECONDS = 10
_LAST_REPLY_MS = 20
_END_SECONDS = 1
# Every request bypasses zmq.Socket, whose Python code makes enumerations of numbers.
_Socket = zmq.backend.Socket
_READABLE = int(zmq.POLLIN)
_context: tuple[int, zmq.Context] | None = None
_until_the_end: list[object] = []


class ConnectionLost(Exception):
    """The daemon is gone or does not know the session; the client recovers from this."""


class SessionLost(ConnectionLost):
    """The daemon answers that it does not know the session."""


def _zmq_context() -> zmq.Context:
    """The ZeroMQ context of this process; a fork must not touch its parent's."""
    global _context
    if _context is None or _context[0] != os.getpid():
        _context = (os.getpid(), zmq.Context())
    return _context[1]


def warm_up() -> None:
    """Starts ZeroMQ's threads of this process, which stay until it ends."""
    _zmq_context().socket(zmq.DEALER).close(linger=0)


class Connection:
    def __init__(self, path: Path, memory: Host | Gpu = HOST) -> None:
        self.path = path
        self.memory = memory  # of the device that a daemon started here computes on
        self.broken = False  # an answer was not waited for: nothing else may be asked here
        self._token = b""
        self._q = 0
        self._pack = protocol.packer()
        self._drained = ""  # why, as was said last
        self._wanted = 0  # bytes, the same
        self.session = 0  # its number, once it is attached
        self._are_quick = False  # the replies, as the last one was
        self._slept_for = 0  # of the next replies
        self._later: dict[int, dict[str, Any] | None] = {}  # replies that are collected later
        self._lent: dict[int, object] = {}  # memory that must live while the daemon has it open
        self._dealer: zmq.Socket | None = None
        self.held: set[int] = set()  # segments that the daemon has
        self.has_words = False  # it has the client's turns
        self._notice: dict[str, Any] | None = None  # of the next worker
        self.device = ""  # that it serves
        self.missed = ""  # why the daemon has not the device that it was asked for
        self._take_facts(self._greet())

    def _take_facts(self, hello: dict[str, Any]) -> None:
        self.daemon_pid = int(hello["pid"])
        self.worker_pid = int(hello.get("worker", self.daemon_pid))  # its process that computes
        self.uuid = str(hello.get("uuid", ""))  # its driver's name for it
        self.build = str(hello["build"])  # which build the daemon is, see daemon.build_id()
        self._nonce: bytes = hello["nonce"]
        self._checks_headers = hello.get("header") == HEADER_VERSION  # of segments

    # ---- control socket ----

    def _greet(self) -> dict[str, Any]:
        """Connects and says hello; returns the answer.

        A daemon that is ending finishes the requests in progress first, which may take minutes. It
        says so to every client that connects, and the client waits for as long as it does. At its
        end it hangs up. None of this is a failure of the daemon that comes after it.
        """
        deadline = time.monotonic() + _HELLO_SECONDS
        hello = {
            "v": "hello",
            "proto": list(protocol.PROTOCOL),
            "client": about.name(),
            "version": __version__,
            "replaced": 1,
        }
        pause, said = 0.005, False
        while True:
            self._control = daemon.connect(self.path, self.memory)
            try:
                return self._greeted(self._exchange(hello))
            except errors.StaleError as ending:
                self._control.close()
                deadline = time.monotonic() + _HELLO_SECONDS
                if not said:
                    logger.warning("waiting for the next daemon: %s", ending.what)
                said = True
            except ConnectionLost as lost:
                self._control.close()
                if time.monotonic() > deadline:
                    raise errors.SessionError(
                        f"no daemon in {self.path} has answered hello for {_HELLO_SECONDS:.0f} s "
                        f"({lost}); see {self.path}/daemon.log"
                    ) from None
            except BaseException:
                self._control.close()
                raise
            interrupts.deliver_if_due()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)

    def _greeted(self, packet: bytes) -> dict[str, Any]:
        """Checks the answer to hello, which any process on that socket may have sent.

        Raises:
            VersionError: A daemon that speaks another protocol.
            SessionError: No daemon of gradd.
        """
        reply = _from_anybody(packet, self.path)
        chosen = reply.get("proto")
        low, high = protocol.PROTOCOL
        if reply.get("code") == "VERSION" or (
            reply.get("ok") and not (isinstance(chosen, int) and low <= chosen <= high)
        ):
            raise versions.mismatch(self.path, reply, _version_at)
        if not reply.get("ok") and not isinstance(reply.get("code"), str):
            raise _no_daemon(self.path, "its answer to hello is neither ok nor an error")
        protocol.checked(reply)
        if not isinstance(reply.get("nonce"), bytes) or "pid" not in reply or "build" not in reply:
            raise _no_daemon(self.path, "its answer to hello has no nonce, pid or build")
        return reply

    def _ask(
        self,
        fields: dict[str, Any],
        fd: int | tuple[int, ...] | None = None,
        patient: bool = False,
    ) -> dict[str, Any]:
        return protocol.checked(protocol.unpack(self._exchange(fields, fd, patient)))

    def _exchange(
        self,
        fields: dict[str, Any],
        fd: int | tuple[int, ...] | None = None,
        patient: bool = False,
        fds: list[int] | None = None,
    ) -> bytes:
        """Sends one packet and returns the answer to it; `patient`: however long it takes.

        Descriptors that come with the answer are appended to `fds`. A packet that a worker has not
        answered before it died is lost with it; one that comes after is answered by the next.
        """
        given = () if fd is None else fd if isinstance(fd, tuple) else (fd,)
        try:
            socket.send_fds(self._control, [protocol.pack(fields)], given)
            self._control.settimeout(_CONTROL_SECONDS - _SAY_MS / 1000)
            while True:
                if not patient and not self._is_told(_SAY_MS):
                    self._say_unheard(fields["v"], _SAY_MS // 1000)
                while patient and not self._is_told(_POLL_MS):
                    interrupts.deliver_if_due()
                packet, got, _, _ = socket.recv_fds(
                    self._control, 65536, 0 if fds is None else 1, socket.MSG_CMSG_CLOEXEC
                )
                if not self._note(packet):
                    break
                if self._notice["dropped"]:  # type: ignore[index]
                    raise ConnectionLost("the daemon's worker has died")
            if fds is not None:
                fds += got
        except TimeoutError:
            raise ConnectionLost(f"no answer to {fields['v']} on the control socket") from None
        except OSError as error:
            raise ConnectionLost(f"control socket: {error.strerror}") from None
        except ConnectionLost:
            raise
        except BaseException:
            self.broken = True
            raise
        if not packet:
            raise ConnectionLost("the control socket hung up")
        return packet

    def segment(self, segment: Segment | GpuSegment) -> None:
        """Passes a segment and waits for the acknowledgement.

        In a GPU's daemon the engine thread maps it, and may be busy for long.
        """
        fields: dict[str, Any] = {"v": "segment", "id": segment.id, "bytes": segment.size}
        if segment.kind != "memfd":
            fields |= {
                "kind": segment.kind,
                "device": segment.uuid,
                "purpose": segment.header.purpose,
            }
        elif isinstance(segment, Base):
            fields["purpose"] = "base"
        elif segment.header is not None and self._checks_headers:
            fields["header"] = True
        if segment.lent is not None:
            fields["handle"] = segment.handle
            self._lent[segment.id] = segment.lent
        fd = segment.fd if segment.fd >= 0 else None
        try:
            self._ask(fields, fd, patient=self.memory is not HOST)
        except errors.GraddError:
            self._lent.pop(segment.id, None)  # it is refused
            raise
        self.held.add(segment.id)

    def keep(self, fields: dict[str, Any], manifest: int) -> None:
        """Names the session, which outlives this process then (session/kept.py)."""
        self._ask({"v": "keep", **fields}, manifest)

    def share(self, fields: dict[str, Any], fds: tuple[int, int]) -> None:
        """Names a base: its memory and its manifest (session/bases.py)."""
        self._ask({"v": "share", **fields}, fds)

    def reattach(self, name: str, at: int, verb: str = "reattach") -> tuple[dict[str, Any], int]:
        """Part of a kept session, which is this client's from now on: the reply and a descriptor.

        Args:
            name: Of the session.
            at: 0: the manifest; from 1 on: a segment.
            verb: "peek": it stays whose it is.
        """
        fds: list[int] = []
        try:
            packet = self._exchange({"v": verb, "name": name, "at": at}, fds=fds)
            reply = protocol.checked(protocol.unpack(packet))
            if len(fds) != 1:
                raise _no_daemon(self.path, f"{len(fds)} descriptors came with a kept session")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return reply, fds[0]

    def forget(self, name: str) -> None:
        self._ask({"v": "forget", "name": name})

    def timeline(self, segment: Segment) -> None:
        """Passes the memory of the client's turns (timeline.py)."""
        self._ask({"v": "timeline", "bytes": segment.size}, segment.fd)
        self.has_words = True

    def unsegment(self, segment_id: int) -> None:
        """Takes a segment back. Raises StaleError while something in the daemon uses it."""
        request = {"v": "unsegment", "id": segment_id}
        self._ask(request, patient=self.memory is not HOST)
        self.held.discard(segment_id)
        self._lent.pop(segment_id, None)

    # ---- the next worker ----

    def _is_told(self, wait_ms: int) -> bool:
        """Whether there is something to read on the control socket."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN | select.POLLHUP)
        return bool(poller.poll(wait_ms))

    def _note(self, packet: bytes) -> bool:
        """Notes the packet `replaced`; False if it is another one."""
        try:
            notice = protocol.read(packet)
        except (ValueError, msgpack.UnpackException):
            return False
        if type(notice) is not dict or notice.get("v") != "replaced":
            return False
        if self._notice is not None:
            notice["dropped"] |= self._notice["dropped"]
        self._notice = notice
        return True

    def move(self, wait_ms: int) -> bool:
        """Goes on with the next worker of this daemon: attach() has to follow.

        Args:
            wait_ms: For the daemon to say that there is one.

        Returns:
            False if there is none here: another connection is needed.
        """
        try:
            while not self.broken and self._is_told(0 if self._notice else wait_ms):
                if not self._note(self._control.recv(65536)):
                    return False
        except OSError:
            return False
        if self.broken or self._notice is None:
            return False
        self._take_facts(self._notice)
        self._notice = None
        self._token = b""
        self._later.clear()
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
        return True

    # ---- commands ----

    def attach(self) -> int:
        """Binds the DEALER to the session; returns the session's number."""
        dealer = _zmq_context().socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.connect(f"ipc://{self.path}/cmd.sock")
        self._dealer = dealer
        try:
            reply = self.call({"v": "attach", "nonce": self._nonce}, (), timeout=30.0)
        except errors.InternalError as error:
            raise _no_daemon(self.path, error.what) from None
        if not reply.get("ok") and reply.get("session") == "lost":
            raise ConnectionLost(str(reply.get("what")))  # it began to end after hello
        token = protocol.checked(reply).get("t")
        if not isinstance(token, bytes):
            raise _no_daemon(self.path, "its answer to attach has no token")
        self._token = token
        self.device = str(reply.get("device", ""))
        self.missed = str(reply.get("missed", ""))
        self.session = int(reply.get("session", 0))
        return self.session

    def send(self, envelope: dict[str, Any], frames: Sequence[bytes] = ()) -> int:
        """Sends an envelope (adding number and token); returns its number."""
        self._q += 1
        envelope["q"] = self._q
        if self._token:
            envelope["t"] = self._token
        if self._dealer is None:
            raise ConnectionLost("not attached")
        if frames:
            self._dealer.send_multipart([self._pack(envelope), *frames])
        else:
            _Socket.send(self._dealer, self._pack(envelope))
        return self._q

    def call(
        self,
        envelope: dict[str, Any],
        frames: Sequence[bytes],
        timeout: float | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Sends an envelope (adding number and token) and returns the reply, ok or not.

        Work that needs no reply is done `meanwhile`, when the envelope is on its way.

        A Ctrl-C that cannot wait for the reply leaves the connection broken. An optimizer's step
        is always waited for: half a step has to be finished before anything else.

        Raises:
            ConnectionLost: The daemon hung up, or nothing came within `timeout` seconds.
        """
        self.send(envelope, frames)
        dealer = self._dealer
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                if meanwhile is not None:
                    meanwhile()
                    meanwhile = None
                start = now()
                verb = envelope["v"]
                self._wait(dealer, deadline, patient=verb == "step", verb=verb)
                if self._slept_for:
                    self._slept_for -= 1
                self._are_quick = not self._slept_for and now() - start < _QUICK_SECONDS
                frame = _Socket.recv(dealer)  # a reply is one frame
            except ConnectionLost:
                raise
            except BaseException:
                self.broken = True
                raise
            try:  # _read(), without a call
                reply = protocol.read(frame)
                q = reply.get("q", self._q)
            except (ValueError, AttributeError, msgpack.UnpackException):
                reply = protocol.unpack(frame)  # which says what is wrong
                q = self._q
            # Another is one that is collected later, or of a request that was interrupted (Ctrl-C).
            if q == self._q:
                return reply
            if q in self._later:
                self._later[q] = reply

    def send_later(self, envelope: dict[str, Any]) -> int:
        """send() of a request whose reply is collected later."""
        q = self.send(envelope)
        self._later[q] = None
        return q

    def collect(self, q: int, wait: bool) -> dict[str, Any] | None:
        """The reply to a request of send_later(), ok or not; None = it has not come.

        Replies come in the order of the requests. A Ctrl-C waits for a reply that is waited for.

        Raises:
            ConnectionLost: The daemon hung up.
        """
        while self._later.get(q) is None:
            dealer = self._dealer
            if dealer is None:
                raise ConnectionLost("not attached")
            if not dealer.poll(0):
                if not wait and self.alive():
                    return None
                try:
                    self._wait(dealer, None, patient=True)
                except ConnectionLost:
                    raise
                except BaseException:
                    self.broken = True
                    raise
            reply = _read(_Socket.recv(dealer))
            if reply.get("q") in self._later:
                self._later[reply["q"]] = reply
        return self._later.pop(q)

    def _wait(
        self,
        dealer: zmq.Socket,
        deadline: float | None,
        patient: bool,
        verb: str = "a request of before",
    ) -> None:
        mine = [(dealer, _READABLE)]
        at = now()
        end = at + (_SPIN_SECONDS if self._are_quick else _GLANCE_SECONDS)
        while at < end:
            if zmq.zmq_poll(mine, 0):
                return
            before = now()
            sched_yield()
            at = now()
            if at - before > _OTHERS_SECONDS:
                self._slept_for = _SLEPT_FOR
                break
        fd = self._control.fileno()
        polls = 0
        while True:
            if self._notice is not None:
                raise ConnectionLost("the daemon's worker has died")
            polls += 1
            if polls == _ASK_AFTER or polls % _ASK_AGAIN == 0:
                self._say_why(verb, polls * _POLL_MS // 1000)
            if interrupts.noted and not patient:
                interrupts.deliver_if_due()
            ready = dict(zmq.zmq_poll([*mine, (fd, _READABLE)], _POLL_MS))
            if dealer in ready:
                return
            if fd in ready:
                # A daemon that ends answers first; the answer comes by another thread of ours.
                if dealer.poll(_LAST_REPLY_MS):
                    return
                raise ConnectionLost("the control socket hung up")
            if deadline is not None and time.monotonic() > deadline:
                raise ConnectionLost(f"no answer to {verb} in time")

    def _say_unheard(self, verb: str, seconds: int) -> None:
        logger.warning(
            "daemon %s in %s has not answered %s for %d s; see its daemon.log, and `gradd ps`",
            getattr(self, "daemon_pid", "?"),  # before hello is answered
            self.path,
            verb,
            seconds,
        )

    def _say_why(self, verb: str, seconds: int) -> None:
        """A warning, once, if the daemon begins no requests, or a run waits for memory.

        Another one, each time, if it does not say.
        """
        try:
            told = ask_daemon(self.path, "ps", _WHY_MS)
        except errors.GraddError:
            if seconds >= _UNHEARD_SECONDS:
                self._say_unheard(verb, seconds)
            return
        self._say_wait(told.get("sessions") or [])
        why = str(told.get("drained") or "")
        if why and why != self._drained:
            logger.warning(
                "daemon %d is drained (%s): training waits, and nothing is lost; "
                "`gradd drain --end` lets it go on",
                self.daemon_pid,
                why,
            )
        elif self._drained and not why:
            logger.warning("daemon %d is drained no more", self.daemon_pid)
        self._drained = why

    def _say_wait(self, sessions: list[dict[str, Any]]) -> None:
        mine = [s for s in sessions if s.get("session") == self.session]
        wanted = int(mine[0].get("wanted_bytes") or 0) if mine else 0
        if wanted and not self._wanted:
            others = [s for s in sessions if s not in mine and s.get("arena_bytes")]
            held = sorted(others, key=lambda s: s["arena_bytes"], reverse=True)[:3]
            behind = "; ".join(
                f"session {s['session']} ({s['client']}, pid {s['pid']}) has "
                f"{s['arena_bytes'] >> 20} MiB"
                for s in held
            )
            logger.warning(
                "a run waits for %d MiB of activations, which other sessions hold%s; "
                "gradd.wait_for_memory() sets for how long",
                wanted >> 20,
                f": {behind}" if behind else "",
            )
        self._wanted = wanted

    def alive(self) -> bool:
        """False once the daemon has hung up, or told of its next worker."""
        return self._notice is None and not self._is_told(0)

    # ---- end ----

    def close(self) -> None:
        """Closes both sockets; the control socket later, if the daemon has memory to close first.

        A daemon closes its end when it has let go of the session's memory.
        """
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None
        if not self._lent:
            self._control.close()
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        given = (self._control, self.worker_pid, self._lent)
        self._lent = {}
        try:
            threading.Thread(target=_keep_lent, args=given, daemon=True).start()
        except RuntimeError:  # the interpreter ends, and all memory with its process
            _until_the_end.append(given)

    def abandon(self) -> None:
        """In a forked child: closes the copy of the control socket, touches nothing of ZeroMQ."""
        self._control.close()


def _keep_lent(control: socket.socket, pid: int, lent: dict[int, object]) -> None:
    """Lets go of memory when a daemon has closed it: it hangs up after that, or has died."""
    control.settimeout(None)
    with control, contextlib.suppress(OSError):
        while control.recv(65536):
            pass
    # The sockets of a process that dies may end before its memory of the GPU.
    daemon.wait_for_end(pid, _END_SECONDS)
    lent.clear()


def _read(frame: bytes) -> dict[str, Any]:
    try:
        reply = protocol.read(frame)
        if type(reply) is not dict:
            raise ValueError
    except (ValueError, msgpack.UnpackException):
        reply = protocol.unpack(frame)  # which says what is wrong
    return reply


def _version_at(path: Path) -> str:
    """Version of the daemon there, from `ps`, which has it in every protocol; empty if missing."""
    try:
        return str(ask_daemon(path, "ps", _VERSION_MS).get("version") or "")
    except errors.GraddError:
        return ""


def _no_daemon(path: Path, why: str) -> errors.SessionError:
    return errors.SessionError(f"the process that answers in {path} is not a gradd daemon: {why}")


def _from_anybody(frame: bytes, path: Path) -> dict[str, Any]:
    """Unpacks a reply from the daemon's socket, which another process may have sent."""
    try:
        return protocol.unpack(frame)
    except errors.InternalError as error:
        raise _no_daemon(path, error.what) from None


def ask_daemon(path: Path, verb: str, timeout_ms: int = 5000, **fields: Any) -> dict[str, Any]:
    """One request that needs no session (`ps`, `stop`), over a DEALER of its own.

    Raises:
        SessionError: No answer within the time, or not from a daemon of gradd.
    """
    dealer = _zmq_context().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(f"ipc://{path}/cmd.sock")
        dealer.send(protocol.pack({"v": verb, "q": 1, **fields}))
        if not dealer.poll(timeout_ms, zmq.POLLIN):
            raise errors.SessionError(f"no daemon answers in {path}")
        return protocol.checked(_from_anybody(dealer.recv_multipart()[0], path))
    finally:
        dealer.close(linger=0)
