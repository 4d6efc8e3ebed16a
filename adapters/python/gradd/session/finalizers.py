"""What is to be done when objects have died.

A finalizer in Python runs between any two instructions of the main thread, and a Ctrl-C that comes
while it does is lost: what a finalizer raises goes nowhere. So the callbacks of these weak
references are a function of C, which only notes who has died; what follows is done by the next one
who asks the daemon for something, or by the flusher.
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
        """Does what there is to do."""
        while self.died:
            dead = self.died.popleft()
            self.living.discard(dead)
            dead.what()
