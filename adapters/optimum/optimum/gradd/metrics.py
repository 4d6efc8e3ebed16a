"""The daemon's numbers in what a trainer logs, and so in TensorBoard, W&B and the others."""

from __future__ import annotations

from typing import Any

from gradd import options
from gradd.session.said import Said


class Metrics:
    """Numbers of the interval since the last log."""

    def __init__(self, owner: Any) -> None:
        """Args:
        owner: Of the trainer's compiled function.
        """
        self._owner = owner
        self._said = Said()
        self._rows = 0
        self._heard = owner.client.said  # of the session that is listened to
        self._heard.begin(self._said.hear)

    @staticmethod
    def of(compiled: Any) -> Metrics | None:
        """Those of what a trainer has compiled; None if GRADD_METRICS=0 turns them off."""
        return Metrics(compiled.owner) if options.get("GRADD_METRICS") else None

    def take(self) -> dict[str, float]:
        """The numbers; the next interval begins.

        Returns:
            `gradd_wait_ms`: How long requests waited in the daemon for those of other processes.
            `gradd_compute_ms`: How long forwards, backwards and optimizer steps ran in it.
            `gradd_memory_mib`: The most that this process's runs took there at once.
            `gradd_rows_saved`: Rows of batches that were left out: padding, and without a label.
        """
        said, rows = self._said, self._left_out()
        found = {
            "gradd_wait_ms": said.waited_us / 1e3,
            "gradd_compute_ms": said.ran_us / 1e3,
            "gradd_memory_mib": round(said.arena_bytes / 2**20, 2),
            "gradd_rows_saved": rows - self._rows,
        }
        self._rows = rows
        self.end()
        self._said, self._heard = Said(), self._owner.client.said
        self._heard.begin(self._said.hear)
        return found

    def _left_out(self) -> int:
        rows = self._owner.live_rows
        return rows["unlabelled"] + rows["padding"]

    def end(self) -> None:
        """No more is counted."""
        self._heard.end(self._said.hear)
