"""Requests about memory of a GPU whose replies the client does not wait for.

Two numbers that client, daemon and GPU share order the work, as a timeline semaphore does. Each
such request has a turn. torch's stream raises `ready` to it when the memory that the request reads
is written, and the daemon begins no earlier; the daemon raises `done` to it when the request has
succeeded, and torch's stream waits for that before it goes on. So the host waits for neither, and a
daemon that is killed leaves torch's stream waiting: what reads the results runs only after the
next daemon has repeated the requests that were not done.

A request that fails does not raise `done`, and the daemon runs none of the later ones of the same
chain. The client fills the results with NaN, lets the stream go on, raises the error at its next
request, and begins another chain.

A third number says how many groups of gradients of a backward are done (in_groups.py). Such a
request is the only kind for which a client on the host has a timeline; the host itself waits then.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from gradd import errors, options
from gradd.memory.devices import HOST, Gpu, Host, HostWords, Words
from gradd.memory.parameter_changes import Snapshot
from gradd.session import protocol
from gradd.session.daemon import wait_for_end
from gradd.session.ring import Block

logger = logging.getLogger("gradd")

MOST = 16  # requests that are not answered
_CHECKS = protocol.FINITE_CHECK | protocol.GRADIENT_CHECK
_END = 1 << 62  # of all turns; streams compare differences
_END_SECONDS = 30  # in which the process of a daemon ends that has hung up
_GROUP_BITS = 16  # of the word of groups: their number, below the turn


class Pending:
    """A request on its way.

    Attributes:
        verb, fields: Of the request.
        answered: Is called with the reply; without keys if a daemon died that had done the request.
        failed: Is called with the error.
        results: Memory that the request writes, by group: addresses, and bytes.
        forward: Of a backward: the fields of its forward, and the parameters that this has read.
        turn: Its number.
        q: The number of its envelope on the present connection.
        groups: Of a backward whose gradients come in groups, their number; 0 = all at once.
        given: Groups that were done when a daemon died.
        is_over: Its reply or its error has come.
        error: That.
    """

    __slots__ = (
        *("answered", "error", "failed", "fields", "forward", "given", "groups", "is_over", "q"),
        *("results", "turn", "verb"),
    )

    def __init__(
        self,
        verb: str,
        fields: dict[str, Any],
        answered: Callable[[dict[str, Any]], None],
        *,
        failed: Callable[[errors.GraddError], None] | None = None,
        results: Sequence[Block] = (),
        forward: tuple[dict[str, Any], Snapshot | None] | None = None,
        groups: int = 0,
    ) -> None:
        self.verb = verb
        self.fields = fields
        self.answered = answered
        self.failed = failed
        self.results = [[(b.segment.address + b.offset, b.size) for b in results]]
        self.forward = forward
        self.groups = groups
        self.turn = self.q = self.given = 0
        self.is_over = False
        self.error: errors.GraddError | None = None


class Timeline:
    """The turns of a client, under its lock.

    Attributes:
        words: What the daemon is given.
        pending: Requests that are not answered, by turn.
        known: Replies to requests that were waited for, by kind: the plan, and the rest.
    """

    def __init__(self, memory: Host | Gpu, plans: Sized) -> None:
        """Args:
            memory: Of the client.
            plans: That the daemon has for it.

        Raises:
            NoSpaceError: There is no memory for a page.
            DeviceLostError: The driver cannot map it.
        """
        self._memory = memory
        self._plans = plans
        self.words: HostWords = memory.words()
        self.pending: deque[Pending] = deque()
        self._turn = 0
        self._chain = 1
        self._failure: errors.GraddError | None = None
        self._waiting = 0
        self._daemon = 0  # the process that has it
        self.known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @staticmethod
    def made(memory: Gpu, plans: Sized) -> Timeline | None:
        """One for a GPU whose driver has such waits, unless GRADD_WAIT=1."""
        if options.get("GRADD_WAIT"):
            return None
        timeline = None
        try:
            timeline = Timeline(memory, plans)
            timeline.words.write_in_turn(Words.READY, 0)
        except errors.DeviceLostError as error:
            text = str(error)  # a kept record would keep the frames of the error
            logger.warning("clients of %s wait for each reply: %s", memory.device, text)
            if timeline is not None:
                timeline.close()
            return None
        return timeline

    @property
    def waits_itself(self) -> bool:
        """Whether the host waits for the results of requests; else streams do."""
        return self._memory is HOST

    def knows(self, kind: tuple[Any, ...], flags: int = 0, in_groups: bool = False) -> bool:
        """Whether a request of this kind has succeeded: then its like is not waited for.

        The daemon keeps a limited number of plans, and only a reply says that one is gone. That of
        a run which is checked is waited for, so that an error is raised where it belongs.

        Args:
            kind: The plan, and the rest.
            flags: Of the run.
            in_groups: It is a backward that gives its gradients in groups.
        """
        if self.waits_itself and not in_groups or flags & _CHECKS:
            return False
        few = len(self._plans) <= protocol.PLANS_KEPT
        return few and not self._waiting and kind in self.known

    def forget(self, plan: int) -> None:
        for kind in [kind for kind in self.known if kind[0] == plan]:
            del self.known[kind]

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context every reply is waited for; nothing is pending before.

        What reads values of a GPU under the client's lock waits for torch's stream, and nothing
        could repeat meanwhile what a daemon has died over.
        """
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def begin(self, pending: Pending) -> None:
        """Gives a request its turn, which comes after all work of torch's current stream."""
        self._turn += 1
        pending.turn = self._turn
        self.words.write_in_turn(Words.READY, pending.turn)

    def follow(self, pending: Pending) -> None:
        """The request is on its way: torch's current stream goes on when it is done.

        Of one in groups it goes on in any case, and waits for each group where that is used.
        """
        self.pending.append(pending)
        if not pending.groups:
            self.words.wait_in_turn(Words.DONE, pending.turn)

    def wait_for_group(self, pending: Pending, group: int) -> None:
        """torch's current stream goes on when the group is done; behind the last, when all is."""
        if group + 1 == pending.groups:
            self.words.wait_in_turn(Words.DONE, pending.turn)
        else:
            value = (pending.turn << _GROUP_BITS) + group + 1
            self.words.wait_in_turn(Words.GROUPS, value)

    def groups_done(self, pending: Pending) -> int:
        """How many groups of a request are done, at least in a daemon that has died."""
        turn, done = divmod(self.words.read(Words.GROUPS), 1 << _GROUP_BITS)
        return max(pending.given, done) if turn == pending.turn else pending.given

    def envelope(self, pending: Pending) -> dict[str, Any]:
        order = {"turn": pending.turn, "chain": self._chain}
        if pending.given and "reduce" not in pending.fields:  # that fails: its ranks are gone
            order["skip"] = pending.given
        return {"v": pending.verb, **pending.fields, **order}

    def answer(self, reply: dict[str, Any], error: errors.GraddError | None) -> None:
        """Takes the reply to the first request that has none, or its error."""
        pending = self.pending.popleft()
        pending.is_over, pending.error = True, error
        if error is None:
            pending.answered(reply)
            return
        if self._failure is None:
            self._failure = error
        self._let_go(pending)  # first: the stream may be waited for
        if pending.failed is not None:
            pending.failed(error)
        if not self.pending:
            self._chain += 1

    def _wait_for_end(self, daemon: int) -> None:
        """Waits until a daemon is gone, with the work of its GPU, which may still write groups.

        A daemon has hung up when its descriptors are closed, those of the GPU perhaps later.
        """
        if not daemon or not any(pending.groups for pending in self.pending):
            return
        if not wait_for_end(daemon, _END_SECONDS):
            raise errors.SessionError(
                f"daemon {daemon} has hung up, but its process has not ended within "
                f"{_END_SECONDS} s"
            )

    def settle_done(self, daemon: int) -> None:
        """A daemon has died: what it had done needs no reply, and the next one knows no chain.

        Args:
            daemon: The process of the next one.

        Raises:
            SessionError: The process of the one that has died does not end.
        """
        if daemon != self._daemon:
            self._wait_for_end(self._daemon)
            self._daemon = daemon
        if self._failure is not None:
            self.give_up(self._failure)
        done = self.words.read(Words.DONE)
        while self.pending and self.pending[0].turn <= done:
            self.answer({}, None)

    @property
    def has_failed(self) -> bool:
        """Whether there is a failure to raise."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raises what a request has failed with, once, when all of its chain are answered."""
        if self._failure is not None and not self.pending:
            failure, self._failure = self._failure, None
            raise failure

    def is_told(self, error: errors.GraddError) -> None:
        """The caller raises this failure itself."""
        if self._failure is error:
            self._failure = None

    def give_up(self, error: errors.GraddError) -> None:
        """No daemon will answer: all requests have failed."""
        while self.pending:
            self.answer({}, error)

    def _let_go(self, pending: Pending) -> None:
        rest = pending.results[self.groups_done(pending) :]
        try:
            self._memory.fill_with_nan([place for part in rest for place in part])
        finally:
            self._raise(Words.GROUPS, pending.turn + 1 << _GROUP_BITS)
            self._raise(Words.DONE, pending.turn)

    def _raise(self, word: int, value: int) -> None:
        self.words.write(word, max(self.words.read(word), value))

    def close(self) -> None:
        """Nothing is pending; streams that still wait go on."""
        self.words.write(Words.GROUPS, _END)
        self.words.write(Words.DONE, _END)
        self.words.close()
