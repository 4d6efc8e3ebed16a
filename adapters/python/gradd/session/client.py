"""The client: one object per process and daemon directory, through which every request goes.

Commands travel over a ZeroMQ DEALER, descriptors over the control socket. A lock serialises the
requests of several threads (autograd may run backward in another thread). Dying objects never send:
their end is noted (finalizers.py), and releases and chores go out with, or before, the next
request, or by themselves a moment later (flusher.py).

The control socket hangs up when the daemon dies. Then the client connects again (starting a daemon
if it may), passes its segments, and repeats the requests of the ledger and the current one.

A child after fork is not the client: requests compare the process id.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gradd import errors, interrupts
from gradd.memory import devices
from gradd.memory.devices import HOST, Gpu, Host
from gradd.memory.gpu_segments import GpuSegment
from gradd.memory.parameter_changes import Snapshot
from gradd.memory.shm import DTYPES, Header, Segment, nbytes
from gradd.memory.waiting import wait_ms
from gradd.memory.watch import data_ptr
from gradd.session import control, daemon, moving, other_daemon, protocol, shared_directory, sharing
from gradd.session.control import ConnectionLost, SessionLost
from gradd.session.finalizers import Ends
from gradd.session.flusher import Flusher
from gradd.session.kept import Names
from gradd.session.replay import Ledger
from gradd.session.ring import Block, Pool
from gradd.session.said import Said, now
from gradd.session.timeline import MOST, Pending, Timeline

logger = logging.getLogger("gradd")

AnySegment = Segment | GpuSegment
_RING_BYTES = 1 << 20
_RUNS = ("forward", "backward")  # verbs that may wait for memory
_clients: dict[tuple[Path, torch.device], Client] = {}
_registry_lock = threading.Lock()


def _ignore(reply: dict[str, Any]) -> None:
    pass


class Client:
    """A session with one daemon. Use `get_client()`; the constructor does not connect."""

    def __init__(self, path: Path, memory: Host | Gpu = HOST) -> None:
        self.path = path
        self.memory = memory
        self.pid = os.getpid()
        self.lock = memory.lock()
        self.ledger = Ledger()
        self.recoveries = 0
        self.requests = 0
        self.session = 0
        self.daemon_pid = self.worker_pid = 0  # the latter: of its process that computes
        self.device, self.closed, self._key = "", False, (path, memory.device)
        self._connection: control.Connection | None = None
        self._moved: control.Connection | None = None  # to the next worker, and to be attached
        self.ids = itertools.count(1)  # see next_id()
        self._segments: dict[int, AnySegment] = {}
        self._unneeded: list[AnySegment] = []  # dropped while requests were pending
        self._releases: deque[int] = deque()
        self._chores: deque[tuple[str, dict[str, Any]]] = deque()
        self.ends = Ends()
        self.flusher = Flusher(self)
        self.owner = secrets.randbits(63) + 1  # in the headers of segments
        self.parameters = Pool(self, "parameters", watched=True)
        self.gradients = Pool(self, "gradients")
        self.state = Pool(self, "state")
        self.ring = Pool(self, "ring", _RING_BYTES, keep=True)
        self._retired: list[Pool] = []
        # Of requests whose replies are not waited for; None = all are.
        self.timeline = None if memory is HOST else Timeline.made(memory, self.ledger.plans)
        self.said, self.names = Said(), Names()
        self._settles, self._resending = memory is not HOST, False  # the first: before asking

    # ---- requests ----

    def request(
        self, verb: str, fields: dict[str, Any], frames: Sequence[bytes] = ()
    ) -> dict[str, Any]:
        """Sends one request and returns its reply; see ask(), by which all of them go.

        Args:
            verb: Name of the verb.
            fields: The rest of the envelope; must not change while the request may be repeated.
            frames: Payload frames.

        Raises:
            SessionError: No daemon, or this process is a fork of the one that connected.
            GraddError: The daemon's error, as the class of its code.
        """
        with self.lock, interrupts.deferred:
            return self.ask(verb, fields, frames)

    def ask(
        self,
        verb: str,
        fields: dict[str, Any],
        frames: Sequence[bytes] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """request() for a caller that has the lock and holds Ctrl-C back.

        `meanwhile` is called while the daemon works, again if the request is repeated.
        """
        if self.closed or self.pid != os.getpid():
            self.check_process()
        if self.ends.died:
            self.ends.settle()
        failures = 0
        no_room: errors.OutOfMemoryError | None = None
        if self._settles:
            self.catch_up()
            self.memory.settle()
        while True:
            try:
                if self._connection is None or self._retired or self._chores or self._unneeded:
                    self._prepare()
                return self._exchange(verb, fields, frames, meanwhile)
            except ConnectionLost as lost:
                failures += 1
                self._lost(lost, verb, failures)
            except errors.OutOfMemoryError as error:
                if no_room is not None or not self.memory.make_room():
                    raise self.memory.described(error) from None
                no_room = error  # now there may be room
            except errors.StaleError:
                if no_room is None:
                    raise
                raise self.memory.described(no_room) from None  # what failed cannot be repeated
            except BaseException:
                self._give_up_if_broken(verb)
                raise

    def ask_later(self, pending: Pending, meanwhile: Callable[[], None] | None = None) -> None:
        """The same without a wait for the reply, for a client with a timeline.

        Raises: What an earlier one has failed with; then this one is not sent.
        """
        if self.closed or self.pid != os.getpid():
            self.check_process()
        if self.ends.died:
            self.ends.settle()
        timeline: Timeline = self.timeline  # type: ignore[assignment]
        self.catch_up(MOST - 1)
        failures = 0
        while True:
            try:
                self._prepare()
                if self._connection is None or not self._connection.alive():
                    raise ConnectionLost("the control socket hung up")
                if not pending.turn:
                    timeline.begin(pending)
                self._send(pending)
                break
            except ConnectionLost as lost:
                failures += 1
                self._lost(lost, pending.verb, failures)
        timeline.follow(pending)
        if meanwhile is not None:
            meanwhile()

    def _send(self, pending: Pending) -> None:
        envelope = self.timeline.envelope(pending)  # type: ignore[union-attr]
        self._complete(envelope, pending.verb)
        pending.q = self._connection.send_later(envelope)  # type: ignore[union-attr]

    def _complete(self, envelope: dict[str, Any], verb: str) -> None:
        if verb in _RUNS and (ms := wait_ms()) is not None:
            envelope["wait"] = ms
        if self._releases and not self._resending:
            one = len(self._releases) == 1
            envelope["rel"] = [self._releases.popleft()] if one else self._take_releases()
        self.requests += 1

    def catch_up(self, most: int = 0) -> None:
        """Takes the replies that have come, and waits until at most so many requests have none.

        Raises: What one of them has failed with.
        """
        timeline = self.timeline
        if timeline is not None and (timeline.pending or timeline.has_failed):
            with interrupts.deferred:
                self._collect(timeline, 0 if timeline.has_failed else most)
            timeline.raise_failure()

    def look_after_pending(self) -> None:
        """Repeats requests over which a daemon has died, though no other request comes.

        The user's thread may be waiting for the stream that waits for them.
        """
        timeline = self.timeline
        if timeline is None or not timeline.pending or not self.lock.acquire(timeout=1):
            return
        try:
            if not self.closed and self.pid == os.getpid():
                self._collect(timeline, MOST)
        finally:
            self.lock.release()

    def _collect(self, timeline: Timeline, most: int) -> None:
        failures = 0
        while timeline.pending:
            first = timeline.pending[0]
            try:
                if self._connection is None:
                    self._connect()
                    continue  # perhaps nothing is pending any more
                reply = self._connection.collect(first.q, wait=len(timeline.pending) > most)
                if reply is None:
                    return
                if reply.get("session") == "lost":
                    raise SessionLost(f"the daemon does not know this session: {reply}")
                if reply.get("ok"):
                    self.said.hear(first.verb, 0, reply)
                timeline.answer(reply, protocol.error_of(reply))
                most = 0 if timeline.has_failed else most
            except ConnectionLost as lost:
                failures += 1
                try:
                    self._lost(lost, first.verb, failures)
                except errors.SessionError as error:
                    timeline.give_up(error)
            except errors.GraddError as error:  # of what has to be repeated first
                timeline.give_up(error)
            except BaseException:
                self._give_up_if_broken(first.verb)
                raise

    def settle_copies(self) -> None:
        """Waits for what torch has to write, unless its stream may wait for a request itself."""
        if self.memory is not HOST and not (self.timeline and self.timeline.pending):
            self.memory.settle()

    def next_id(self) -> int:
        """A number for a plan, binding or run: unique in the session, never used again."""
        return next(self.ids)

    def _prepare(self) -> None:
        """Connects if need be, and sends what is queued."""
        if self._connection is None:
            self._connect()
        if self._retired:
            self._drain_retired()
        if self._chores or self._unneeded:
            self.catch_up()  # a request on its way may need what they end
            while self._unneeded:
                self.drop_segment(self._unneeded.pop())
            self._do_chores()

    def _exchange(
        self,
        verb: str,
        fields: dict[str, Any],
        frames: Sequence[bytes],
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        envelope = {"v": verb, **fields}
        self._complete(envelope, verb)
        sent = now()
        reply = self._connection.call(envelope, frames, None, meanwhile)  # type: ignore[union-attr]
        if reply.get("ok"):
            self.said.hear(verb, sent, reply)
            return reply
        if reply.get("session") == "lost":
            raise SessionLost(f"the daemon does not know this session: {reply.get('what')}")
        return protocol.checked(reply)

    def _take_releases(self) -> list[int]:
        taken = []
        while self._releases and len(taken) < protocol.RELEASES_PER_REQUEST:
            taken.append(self._releases.popleft())
        return taken

    # ---- verbs that leave something behind: the ledger remembers them ----

    def put_graph(
        self,
        onnx: bytes,
        sources: Sequence[Sequence[str]] = (),
    ) -> protocol.GraphInfo:
        """Gives the daemon a graph; the same bytes give the same id.

        A restarted daemon gets the graph again as long as the result is referenced.
        """
        with self.lock, interrupts.deferred:
            fields: dict[str, Any] = {}
            frames = [onnx]
            block = None
            if len(onnx) > protocol.FRAME_BYTES:
                block = self.ring.allocate(len(onnx))
                block.write(onnx)
                fields["onnx"] = protocol.tensor(block.wire(torch.uint8, (len(onnx),)))
                frames = []
            elif sources:
                frames += protocol.source_frames(sources)
            try:
                reply = self.request("graph.put", fields, frames)
            except BaseException:
                if block is not None:
                    block.drop()
                raise
            info = protocol.graph_info(reply, (fields, tuple(frames)))
            if block is not None:  # the request refers to it
                weakref.finalize(info, block.drop).atexit = False
            return self.ledger.graphs.setdefault(info.id, info)

    def plan(self, fields: dict[str, Any]) -> protocol.PlanInfo:
        """Compiles a graph for concrete types; `fields` from protocol.plan_fields()."""
        with self.lock, interrupts.deferred:
            fields = {"plan": self.next_id(), **fields}
            reply = self.ledger.send_plan(self.request, fields)
            self.ledger.plans[fields["plan"]] = fields
            return protocol.plan_info(fields["plan"], reply)

    def bind(self, bind: int, tensors: Sequence[protocol.Tensor]) -> None:
        """Names a list of tensors, which must stay where they are until `unbind`."""
        fields = {"bind": bind, "tensors": protocol.tensors(tensors)}
        with self.lock, interrupts.deferred:
            self.request("bind", fields)
            self.ledger.binds[bind] = fields

    def forward(
        self,
        fields: dict[str, Any],
        read: Snapshot | None,
        more: dict[str, Any],
        meanwhile: Callable[[], None],
        results: Sequence[Block],
    ) -> bool:
        """Runs a forward for a caller that has the lock and holds Ctrl-C back.

        Until its release the ledger can run it again.

        Args:
            fields: Of the request.
            read: The parameters that it reads; once they have changed it is not run again.
            more: Fields of this request alone, about `read`.
            meanwhile: See ask().
            results: Where the outputs go.

        Returns:
            False if nothing was run because the parameters have changed since `read` was taken.
        """
        request, timeline = {**fields, **more}, self.timeline
        hear = read.hear if read is not None and "look" in more else _ignore
        kind = (fields["plan"], "forward")
        if timeline is not None and "gen" not in more and timeline.knows(kind, fields["flags"]):
            self.ask_later(Pending("forward", request, hear, results=results), meanwhile)
        else:
            if timeline is not None:
                self.catch_up()  # what an earlier one has failed with is not about this one
            try:
                reply = self.ask("forward", request, (), meanwhile)
            except errors.StaleError:  # its plan has been given up there
                reply = self.ledger.send_forward(self.ask, request)
            if reply.get("changed"):
                return False
            hear(reply)
            if timeline is not None:
                timeline.known[kind] = {}
        self.ledger.runs[fields["run"]] = (fields, read)
        return True

    def backward(
        self,
        fields: dict[str, Any],
        meanwhile: Callable[[], None],
        plan: int,
        results: Sequence[Block],
    ) -> dict[str, Any]:
        """Runs the backward of a run, for a caller that has the lock and holds Ctrl-C back.

        Args:
            fields: Of the request.
            meanwhile: See ask().
            plan: Of the run.
            results: Where the gradients go.

        Raises:
            StaleError: The run was released, or lost with a daemon.
        """
        timeline, kind = self.timeline, (plan, *fields["go"]["at"], bool(fields["keep"]))
        forward = self.ledger.runs.get(fields["run"])
        if timeline is not None and timeline.knows(kind, forward[0]["flags"] if forward else 0):
            pending = Pending("backward", fields, _ignore, results=results, forward=forward)
            self.ask_later(pending, meanwhile)
            return timeline.known[kind]
        try:
            reply = self.ask("backward", fields, (), meanwhile)
            if timeline is not None:
                timeline.known[kind] = reply
            return reply
        except errors.StaleError:
            if fields["run"] not in self.ledger.lost:
                raise
            raise self.ledger.lost_run(fields["run"]) from None

    def with_turns(self) -> Timeline | None:
        """The timeline; on the host it is made here, and each later daemon gets it."""
        if self.timeline is None and self.memory is HOST:
            self.timeline, self._settles = Timeline(HOST, self.ledger.plans), True
            if self._connection is not None:
                with contextlib.suppress(ConnectionLost):
                    self._connection.timeline(self.timeline.words.segment)
        return self.timeline

    # ---- connecting and recovering ----

    def check_process(self) -> None:
        """Raises SessionError in a process that did not connect, and after the end."""
        if self.pid != os.getpid():
            raise errors.SessionError(
                f"session {self.session} was attached in process {self.pid}, this is process "
                f"{os.getpid()}, a fork of it: wrap the module in this process"
            )
        if self.closed:
            raise errors.SessionError("this client is closed: wrap the module again")

    def _connect(self) -> None:
        moved, self._moved = self._moved, None
        connection = moved or control.Connection(self.path, self.memory)
        try:
            self._check_device(connection)
            if self.timeline is not None and not connection.has_words:
                connection.timeline(self.timeline.words.segment)
            for segment in list(self._segments.values()):
                if segment.id not in connection.held:
                    connection.segment(segment)
            self.session = connection.attach()
            if moved is None:
                self.names.resend(connection)
            if connection.daemon_pid != self.daemon_pid:
                other_daemon.warn_of_old_build(connection)
                if self.memory is HOST:
                    other_daemon.warn_of_other_device(connection)
            self.daemon_pid, self.worker_pid = connection.daemon_pid, connection.worker_pid
            self.device = connection.device
            self._connection = connection
            self.flusher.start()
            again = self.recoveries > 0
            runs, lost = self._resend()
            for held in connection.held - self._segments.keys():
                self._chores.append(("unsegment", {"id": held}))
        except BaseException:
            self._connection = None
            connection.close()
            raise
        if again:
            logger.warning(
                "session restored at daemon %d: %d segments, %d graphs, %d runs replayed%s",
                self.daemon_pid,
                len(self._segments),
                len(self.ledger.graphs),
                runs,
                f"; {lost} lost, {self.ledger.why_lost()}" if lost else "",
            )

    def _resend(self) -> tuple[int, int]:
        """Gives a new session all that the client needs; how many runs, and how many are lost."""
        timeline = self.timeline
        if timeline is not None:
            timeline.settle_done(self.worker_pid)
        if timeline is None or not timeline.pending:
            # A new session knows none of the runs and objects that these would end.
            self._releases.clear()
            for verb, fields in self._chores:
                self._forget(verb, fields)
            self._chores.clear()
            return self.ledger.resend(self._exchange)
        self._resending = True
        try:
            started = {p.fields["run"] for p in timeline.pending if p.verb == "forward"}
            counts = self.ledger.resend(self._exchange, started)
            for pending in list(timeline.pending):
                self.ledger.check(pending.forward[0] if pending.forward else pending.fields)
                if pending.forward is not None and pending.fields["run"] not in started:
                    if self.ledger.repeat_released(self._exchange, *pending.forward):
                        self._releases.append(pending.fields["run"])
                if pending.groups:  # all that the old daemon has done is done by now
                    pending.given = timeline.groups_done(pending)
                self._send(pending)
            self._releases.extend(run for run in started if run not in self.ledger.runs)
            return counts
        finally:
            self._resending = False

    def _check_device(self, connection: control.Connection) -> None:
        if self.memory is HOST or connection.uuid == self.memory.uuid:
            return
        raise devices.DeviceError(
            f"the parameters are on {self.memory.device}, {self.memory.uuid}; daemon "
            f"{connection.daemon_pid} computes on {connection.uuid or 'the CPU'}"
        )

    def _lost(self, lost: ConnectionLost, verb: str, failures: int) -> None:
        """Takes note of a lost connection; raises when it happens again and again."""
        self._moved = moving.lose(self, lost, verb, failures)

    def release_connection(self) -> control.Connection | None:
        """The connection, which becomes the caller's."""
        connection, self._connection, self._moved = self._connection or self._moved, None, None
        return connection

    def _give_up_if_broken(self, verb: str) -> None:
        """After a Ctrl-C that did not wait for a reply: the next request connects anew.

        Until it notices the hang-up, the daemon goes on with what it was doing and may still write
        into the ring; so new inputs go elsewhere. (Gradient slots it may still write are written
        again before any read.)
        """
        if self._connection is None or not self._connection.broken:
            return
        self._connection.close()
        self._connection = None
        self.recoveries += 1
        self.ring.retire()
        self._retired.append(self.ring)
        self.ring = Pool(self, "ring", _RING_BYTES, keep=True)
        logger.warning("a request (%s) was interrupted; connecting to the daemon again", verb)

    def connect(self) -> None:
        """Connects now (the first request would do it as well)."""
        with self.lock:
            self.connected("connect", lambda connection: None)

    def connected(self, what: str, call: Callable[[control.Connection], Any]) -> Any:
        """Calls with a connection, again with the next daemon's if that one is lost."""
        self.check_process()
        for failures in itertools.count(1):
            try:
                if self._connection is None:
                    self._connect()
                return call(self._connection)  # type: ignore[arg-type]
            except ConnectionLost as lost:
                self._lost(lost, what, failures)

    # ---- segments ----

    def settle(self) -> None:
        """Ends what is queued: memory that is given back may come again under another id."""
        with self.lock:
            self.connected("end what is queued", lambda _: self._prepare())

    def new_segment(self, size: int, purpose: str, in_pieces: bool = False) -> AnySegment:
        """One of this purpose (shm.PURPOSES) that the daemon does not know yet."""
        what = (self.next_id(), size, Header(purpose, self.owner), in_pieces)
        try:
            return sharing.segment(self, *what)
        except errors.OutOfMemoryError:
            with self.lock:
                self.catch_up()
                self.memory.make_room()
            return sharing.segment(self, *what)

    def create_segment(self, size: int, purpose: str) -> AnySegment:
        """A new segment that the daemon has acknowledged. Called by pools under the lock."""
        with interrupts.deferred:
            segment = self.new_segment(size, purpose)
            self.pass_segment(segment)
            return segment

    def pass_segment(self, segment: AnySegment) -> None:
        """Gives a segment to the daemon; one that it does not take is closed."""
        with interrupts.deferred:
            try:
                if segment.reserved < segment.size:
                    segment.reserve(segment.size)
                self.connected("take a segment", lambda connection: connection.segment(segment))
            except BaseException:
                segment.close()
                self._give_up_if_broken("take a segment")
                raise
            self._segments[segment.id] = segment

    def drop_segment(self, segment: AnySegment) -> None:
        """The segment is no longer needed; the daemon unmaps it before the next request."""
        if self.timeline is not None and self.timeline.pending:
            self._unneeded.append(segment)  # if the daemon dies, the next one still needs it
            return
        self._segments.pop(segment.id, None)
        self.later("unsegment", {"id": segment.id})
        segment.close()

    def locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(segment id, offset) of a contiguous tensor in this client's segments, or None."""
        pointer = data_ptr(tensor)
        size = tensor.numel() * tensor.element_size()
        for segment in self._segments.values():
            offset = pointer - segment.address
            if offset >= 0 and offset + size <= segment.size:
                return segment.id, offset
        return None

    def tensor_at(self, segment: int, offset: int, code: int, shape: Sequence[int]) -> torch.Tensor:
        """What lies at a place, as long as its block is not used otherwise."""
        dtype, found = DTYPES[code], self._segments[segment]
        size = nbytes(dtype, shape)
        if not size:
            return torch.empty(tuple(shape), dtype=dtype, device=found.device)
        memory = found.view[offset : offset + size]
        return found.make(memory, dtype=dtype, count=size // dtype.itemsize).view(tuple(shape))

    def segment_ids(self) -> list[int]:
        """Of the shared segments that this client has; the daemon accepts 512."""
        return list(self._segments)

    def segment_bytes(self) -> int:
        return sum(s.size for s in self._segments.values())

    # ---- what finalizers may do ----

    def release(self, run: int) -> None:
        """Queues the release of a run. Any thread, any time."""
        self.ledger.runs.pop(run, None)
        self.ledger.lost.pop(run, None)
        self._releases.append(run)

    def later(self, verb: str, fields: dict[str, Any]) -> None:
        """Queues a request that has no result. Any thread, any time."""
        if self.timeline is None or not self.timeline.pending:
            self._forget(verb, fields)
        self._chores.append((verb, fields))

    def _forget(self, verb: str, fields: dict[str, Any]) -> None:
        """What a chore ends need not be given to another daemon."""
        if verb == "unbind":
            self.ledger.binds.pop(fields["bind"], None)
        elif verb == "plan.drop":
            self.ledger.plans.pop(fields["plan"], None)
            if self.timeline is not None:
                self.timeline.forget(fields["plan"])

    def _pools(self) -> list[Pool]:
        return [self.parameters, self.gradients, self.state, self.ring, *self._retired]

    def flush(self) -> None:
        """Sends the messages that finalizers have queued."""
        with self.lock:
            for pool in self._pools():
                pool.drain()
            if self._connection is not None and (self._releases or self._chores):
                self.request("release", {"runs": []})

    def flush_leftovers(self) -> None:
        """The same in a thread of its own; a daemon that has died is the next request's matter."""
        queued = (self._releases, self._chores, self.ends.died)
        if not any(queued) and not any(pool.returned for pool in self._pools()):
            return
        with self.lock:
            if self._connection is None or self.closed or self.pid != os.getpid():
                return
            if self.timeline is not None and self.timeline.pending:
                return
            for pool in self._pools():
                pool.drain()
            with contextlib.suppress(ConnectionLost):
                self._do_chores()

    def unreleased_runs(self) -> list[int]:
        """Runs whose forward would be replayed after a restart."""
        with self.lock:
            self.ends.settle()
        return list(self.ledger.runs)

    def _drain_retired(self) -> None:
        for pool in self._retired:
            pool.drain()
        self._retired = [pool for pool in self._retired if pool.bytes()]

    def _do_chores(self) -> None:
        if self._releases:
            self._exchange("release", {"runs": self._take_releases()}, ())
        again = []
        while self._chores:
            verb, fields = self._chores.popleft()
            self._forget(verb, fields)
            try:
                if verb == "unsegment":
                    self._connection.unsegment(fields["id"])  # type: ignore[union-attr]
                else:
                    self._exchange(verb, fields, ())
            except errors.StaleError:
                if verb == "unsegment":
                    again.append((verb, fields))  # a run still uses it: with the next request
            except errors.GraddError as error:
                logger.warning("%s failed: %s", verb, str(error))
        self._chores.extend(again)

    # ---- end ----

    def close(self) -> None:
        """Detaches; the daemon frees all it holds for this client. Tensors stay valid."""
        with self.lock:
            if self.closed:
                return
            if self.pid == os.getpid():
                with contextlib.suppress(errors.GraddError):
                    self.catch_up()
            self.closed = True
            self.flusher.stop()
            if self.pid != os.getpid():
                return
            if self.timeline is not None:
                self.timeline.close()
            if self._connection is not None:
                try:
                    self._connection.call({"v": "detach"}, (), timeout=5.0)
                except (ConnectionLost, errors.GraddError):
                    pass  # the session ends with the connection anyway
            if (connection := self.release_connection()) is not None:
                connection.close()
            self.ledger.forget_all()
            self.parameters.unwatch()
            self.names.close()
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._unneeded.clear()
            if _clients.get(self._key) is self:
                del _clients[self._key]

    def _after_fork(self) -> None:
        """In the child: gives up the sockets without telling the daemon."""
        for connection in filter(None, (self._connection, self._moved)):
            connection.abandon()


def get_client(path: Path | str | None = None, device: torch.device = HOST.device) -> Client:
    """The client of this process for a directory and a device, made when needed.

    Args:
        path: The user's directory; None = the one that the environment names.
        device: Of the parameters: each has a daemon of its own.

    Raises:
        UnsupportedError: No daemon computes on such a device.
        DeviceLostError: Its driver fails.
    """
    memory = devices.of(device)
    user = daemon.directory()
    if path is not None:
        user = shared_directory.entered(Path(path).absolute())
    where = user / memory.uuid
    with _registry_lock:
        client = _clients.get((where, device))
        if client is None or client.closed or client.pid != os.getpid():
            client = Client(where, memory)
            _clients[where, device] = client
        return client


def clients() -> list[Client]:
    return [c for c in _clients.values() if c.pid == os.getpid() and not c.closed]


def find(tensor: torch.Tensor) -> tuple[Client, int, int] | None:
    """(client, segment id, offset) of the client whose memory holds a tensor, or None."""
    for client in clients():
        place = client.locate(tensor)
        if place is not None:
            return client, *place
    return None


def close_all() -> None:
    for client in clients():
        client.close()


def _in_child() -> None:
    global _registry_lock
    _registry_lock = threading.Lock()
    for client in list(_clients.values()):
        client.lock = client.memory.lock()  # the parent's may be held by a thread that is not here
        client._after_fork()


atexit.register(close_all)
os.register_at_fork(after_in_child=_in_child)
