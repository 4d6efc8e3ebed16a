"""Replays requests to a restarted daemon.

The ledger holds the fields of every request whose effect must outlive a daemon: graphs, plans,
bindings, and the forwards of runs that are not released. The client owns segments, the inputs in
them and the seeds, and forward and backward only read parameters; so sending the ledger again, in
order, gives the new daemon the state of the old one, bit for bit.

Entries are removed by single dict operations, which finalizers of any thread may do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from gradd import about, errors
from gradd.memory.parameter_changes import Snapshot
from gradd.session.protocol import GraphInfo

Send = Callable[[str, dict[str, Any], Sequence[bytes]], Any]


class Step(Protocol):
    """A step of an optimizer of which half may be done (optim.py)."""

    def finish(self, send: Send) -> None:
        """Does the other half, if there is one."""


class Ledger:
    """Requests to repeat, by the objects that they made."""

    def __init__(self) -> None:
        # Kept alive by their users: captures, and the plans that unreleased runs still hold.
        self.graphs: WeakValueDictionary[bytes, GraphInfo] = WeakValueDictionary()
        self.plans: dict[int, dict[str, Any]] = {}
        self.binds: dict[int, dict[str, Any]] = {}
        self.runs: dict[int, tuple[dict[str, Any], Snapshot | None]] = {}
        # Runs that could not be repeated and are not released: why, "" = parameters have changed.
        self.lost: dict[int, str] = {}
        self.refused: dict[int, str] = {}  # plans that the daemon does not take, and why
        self.steps: list[Step] = []  # begun, and given up by the client: to be finished first

    def resend(self, send: Send, started: Collection[int] = ()) -> tuple[int, int]:
        """Repeats everything through `send`; returns how many runs were replayed, and how many not.

        A run whose parameters have changed is not replayed: it would compute other activations, for
        which there is no right backward, and write other values into the user's outputs.

        Args:
            send: Sends a request and waits for its reply.
            started: Runs whose forward the client itself repeats.

        A forward of the ledger succeeded once with the same inputs, so its failure now (memory is
        short) is an error of the caller's next request and stops the replay.
        """
        with contextlib.suppress(errors.UnsupportedError):  # of a daemon that does not know it
            send("about", about.fields(), ())
        for info in list(self.graphs.values()):
            send("graph.put", *info.put)
        self.refused.clear()
        for plan, fields in list(self.plans.items()):
            if self._has_graph(plan):  # else it is being dropped
                self._resend_plan(send, plan, fields)
        for fields in list(self.binds.values()):
            send("bind", fields, ())
        for step in list(self.steps):
            step.finish(send)
        runs = [(run, entry) for run, entry in self.runs.items() if run not in started]
        lost = 0
        for run, (fields, read) in runs:
            if fields["plan"] in self.refused:
                self._lose(run, self.refused[fields["plan"]])
                lost += 1
                continue
            if not self._has_graph(fields["plan"]):
                self._lose(run)
                lost += 1
                continue
            if read is None:
                self.send_forward(send, fields)
                continue
            changed = read.has_changed()
            if not changed:
                reply = self.send_forward(send, {**fields, **read.expected()})
                changed = bool(reply.get("changed"))
            if changed:
                self._lose(run)
                lost += 1
        return len(runs) - lost, lost

    def _has_graph(self, plan: int) -> bool:
        """Not if an exception of a signal handler has cut a call short: then no one holds it."""
        return self.plans.get(plan, {}).get("graph") in self.graphs

    def _resend_plan(self, send: Send, plan: int, fields: dict[str, Any]) -> None:
        """A plan that is refused is an error where it is used: other plans go on."""
        try:
            self.send_plan(send, fields)
        except errors.UnsupportedError as error:
            self.refused[plan] = error.what

    def _lose(self, run: int, why: str = "") -> None:
        self.lost[run] = why
        self.runs.pop(run, None)

    def check(self, fields: dict[str, Any]) -> None:
        """Raises: UnsupportedError (a request's plan is refused)."""
        if why := self.refused.get(fields.get("plan", 0)):
            raise errors.UnsupportedError(why)

    def why_lost(self) -> str:
        """Why the last replay has lost runs."""
        return next(iter(self.refused.values()), "their parameters have changed since")

    def lost_run(self, run: int) -> errors.GraddError:
        """The error of a backward whose forward could not be repeated."""
        if why := self.lost[run]:
            return errors.UnsupportedError(why)
        return errors.StaleError(
            "the daemon was restarted after the forward of this backward, and the parameters have "
            "changed since then: its activations are lost. Run the forward again"
        )

    def send_plan(self, send: Send, fields: dict[str, Any]) -> Any:
        """graph.plan; the daemon keeps the most recent graphs only, an older one is put again."""
        try:
            return send("graph.plan", fields, ())
        except errors.StaleError:
            send("graph.put", *self.graphs[fields["graph"]].put)
            return send("graph.plan", fields, ())

    def send_forward(self, send: Send, fields: dict[str, Any]) -> Any:
        """forward; the daemon keeps the most recent plans only, an older one is compiled again."""
        try:
            return send("forward", fields, ())
        except errors.StaleError:
            self.send_plan(send, self.plans[fields["plan"]])
            return send("forward", fields, ())

    def repeat_released(self, send: Send, fields: dict[str, Any], read: Snapshot | None) -> bool:
        """The forward of a run that may have been released; False if it need not be repeated."""
        run = fields["run"]
        if run in self.runs or run in self.lost:
            return False
        expected = read.expected() if read is not None else {}
        self.send_forward(send, {**fields, **expected})
        return True

    def forget_all(self) -> None:
        """Drops every entry (the client closes)."""
        tables = (self.graphs, self.plans, self.binds, self.runs, self.lost, self.refused)
        for table in (*tables, self.steps):
            table.clear()
