"""Replays requests to a restarted daemon.

The ledger holds the fields of every request whose effect must outlive a daemon: graphs, plans,
bindings, and the forwards of runs that are not released. The client owns segments, the inputs in
them and the seeds, and forward and backward only read parameters; so sending the ledger again, in
order, gives the new daemon the state of the old one, bit for bit.

Entries are removed by single dict operations, which finalizers of any thread may do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

from gradd import errors
from gradd.memory.parameter_changes import Snapshot
from gradd.session.protocol import GraphInfo

Send = Callable[[str, dict[str, Any], Sequence[bytes]], Any]


def lost_run() -> errors.StaleError:
    """The error of a backward whose forward could not be repeated."""
    return errors.StaleError(
        "the daemon was restarted after the forward of this backward, and the parameters have "
        "changed since then: its activations are lost. Run the forward again"
    )


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
        self.lost: set[int] = set()  # runs that could not be repeated and are not released
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
        for info in list(self.graphs.values()):
            send("graph.put", *info.put)
        for fields in list(self.plans.values()):
            if fields["graph"] in self.graphs:  # else it is being dropped
                self.send_plan(send, fields)
        for fields in list(self.binds.values()):
            send("bind", fields, ())
        for step in list(self.steps):
            step.finish(send)
        runs = [(run, entry) for run, entry in self.runs.items() if run not in started]
        lost = 0
        for run, (fields, read) in runs:
            if read is None:
                self.send_forward(send, fields)
                continue
            changed = read.has_changed()
            if not changed:
                reply = self.send_forward(send, {**fields, **read.expected()})
                changed = bool(reply.get("changed"))
            if changed:
                self.lost.add(run)
                self.runs.pop(run, None)
                lost += 1
        return len(runs) - lost, lost

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
        for table in (self.graphs, self.plans, self.binds, self.runs, self.lost, self.steps):
            table.clear()
