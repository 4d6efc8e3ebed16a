"""Locks of outside that forward() acquires and does not release again.

Whoever holds a plain lock is written nowhere, so that only what forward() has acquired itself can
be given back; it is counted.
"""

from __future__ import annotations

import _thread
from typing import Any

from gradd.export.guards.images import is_a

KINDS = (type(_thread.allocate_lock()), _thread.RLock)


class Locks:
    """What one forward holds."""

    def __init__(self) -> None:
        # id -> the lock, how often it was acquired, and how often its thread held it before
        self._held: dict[int, tuple[Any, int, int]] = {}

    def acquired(self, lock: Any) -> None:
        """A lock is about to be acquired, however long that takes."""
        _, count, before = self._held.get(id(lock), (lock, 0, _holds(lock)))
        self._held[id(lock)] = (lock, count + 1, before)

    def held(self, lock: Any) -> bool:
        """True for a lock that forward() has acquired and not released."""
        return self._held.get(id(lock), (lock, 0, 0))[1] > 0

    def entered(self, value: Any) -> None:
        """A `with` statement begins; its end is a call of __exit__(), as any other."""
        if is_a(value, KINDS):
            self.acquired(value)

    def released(self, lock: Any) -> bool:
        """A lock is about to be released; False if forward() has not acquired it."""
        _, count, before = self._held.get(id(lock), (lock, 0, 0))
        if count:
            self._held[id(lock)] = (lock, count - 1, before)
        return count > 0

    def put_back(self) -> bool:
        """Releases what is held, in the thread that ran forward(); True if there was any."""
        left = [entry for entry in self._held.values() if entry[1]]
        self._held.clear()
        return sum(_release(*entry) for entry in left) > 0  # each of them


def _holds(lock: Any) -> int:
    """How often this thread holds a lock that counts; nobody knows that of others."""
    counted = getattr(lock, "_recursion_count", None)
    return counted() if counted is not None else 0


def _release(lock: Any, count: int, before: int) -> bool:
    # The forward may have been ended in the middle, and what it does last was not seen.
    if hasattr(lock, "_recursion_count"):
        count = _holds(lock) - before
    elif hasattr(lock, "locked") and not lock.locked():
        count = 0
    for _ in range(count):
        try:
            lock.release()
        except RuntimeError:  # it is no longer held
            return False
    return count > 0
