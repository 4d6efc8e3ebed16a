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
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any

from gradd import errors, options
from gradd.memory.devices import Gpu, Words
from gradd.memory.parameter_changes import Snapshot
from gradd.session import protocol
from gradd.session.ring import Block

logger = logging.getLogger("gradd")

MOST = 16  # requests that are not answered
_END = 1 << 62  # of all turns; streams compare differences


class Pending:
    """A request on its way.

    Attributes:
        verb, fields: Of the request.
        answered: Is called with the reply; without keys if a daemon died that had done the request.
        failed: Is called with the error.
        results: Memory that the request writes: addresses, and bytes.
        forward: Of a backward: the fields of its forward, and the parameters that this has read.
        turn: Its number.
        q: The number of its envelope on the present connection.
    """

    __slots__ = ("answered", "failed", "fields", "forward", "q", "results", "turn", "verb")

    def __init__(
        self,
        verb: str,
        fields: dict[str, Any],
        answered: Callable[[dict[str, Any]], None],
        *,
        failed: Callable[[errors.GraddError], None] | None = None,
        results: Sequence[Block] = (),
        forward: tuple[dict[str, Any], Snapshot | None] | None = None,
    ) -> None:
        self.verb = verb
        self.fields = fields
        self.answered = answered
        self.failed = failed
        self.results = [(b.segment.address + b.offset, b.size) for b in results]
        self.forward = forward
        self.turn = self.q = 0


class Timeline:
    """The turns of a client, under its lock.

    Attributes:
        words: What the daemon is given.
        pending: Requests that are not answered, by turn.
        known: Replies to requests that were waited for, by kind: the plan, and the rest.
    """

    def __init__(self, memory: Gpu, plans: Sized) -> None:
        """Args:
            memory: Of the client.
            plans: That the daemon has for it.

        Raises:
            NoSpaceError: There is no memory for a page.
            DeviceLostError: The driver cannot map it.
        """
        self._memory = memory
        self._plans = plans
        self.words = Words(memory)
        self.pending: deque[Pending] = deque()
        self._turn = 0
        self._chain = 1
        self._failure: errors.GraddError | None = None
        self._waiting = 0
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

    def knows(self, kind: tuple[Any, ...]) -> bool:
        """Whether a request of this kind has succeeded: then its like is not waited for.

        The daemon keeps a limited number of plans, and only a reply says that one is gone.
        """
        few = len(self._plans) <= protocol.PLANS_KEPT
        return few and not self._waiting and kind in self.known

    def forget(self, plan: int) -> None:
        """The plan is dropped."""
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
        """The request is on its way: torch's current stream goes on when it is done."""
        self.pending.append(pending)
        self.words.wait_in_turn(Words.DONE, pending.turn)

    def envelope(self, pending: Pending) -> dict[str, Any]:
        """The request as it is sent."""
        order = {"turn": pending.turn, "chain": self._chain}
        return {"v": pending.verb, **pending.fields, **order}

    def answer(self, reply: dict[str, Any], error: errors.GraddError | None) -> None:
        """Takes the reply to the first request that has none, or its error."""
        pending = self.pending.popleft()
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

    def settle_done(self) -> None:
        """A daemon has died: what it had done needs no reply, and the next one knows no chain."""
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

    def give_up(self, error: errors.GraddError) -> None:
        """No daemon will answer: all requests have failed."""
        while self.pending:
            self.answer({}, error)

    def _let_go(self, pending: Pending) -> None:
        try:
            self._memory.fill_with_nan(pending.results)
        finally:
            self.words.write(Words.DONE, max(self.words.read(Words.DONE), pending.turn))

    def close(self) -> None:
        """Nothing is pending; streams that still wait go on."""
        self.words.write(Words.DONE, _END)
        self.words.close()
