"""Finalizers that a Ctrl-C cannot get lost in.

A Python finalizer may run between any two instructions of the main thread, and a Ctrl-C during it
is lost, because exceptions in finalizers are discarded. So the callbacks of these weak references
are a C function that only records which object has died; the next request to the daemon does the
actual work, or the flusher.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any


class Tie(weakref.ref):
    """A weak reference that knows what it is for: `Tie(thing, died.append)`, then its `what`.

    It is appended to `died` when the thing dies, if it is kept alive itself.
    """

    __slots__ = ("what",)
    what: Any
    # By identity: a weak reference hashes as what it refers to, which may have no hash.
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Ends:
    """Actions for the ends of objects. `watch` and `settle` under the client's lock."""

    def __init__(self) -> None:
        self.died: deque[Tie] = deque()
        self.living: set[Tie] = set()

    def watch(self, thing: Any, action: Callable[[], None]) -> None:
        """`action`, which must not refer to the thing, is called after its death."""
        end = Tie(thing, self.died.append)
        end.what = action
        self.living.add(end)

    def settle(self) -> None:
        """Does the pending work."""
        while self.died:
            dead = self.died.popleft()
            self.living.discard(dead)
            dead.what()
