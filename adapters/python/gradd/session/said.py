"""What the daemon says about forwards, backwards and optimizer steps, with their replies.

Each reply has when its request came, how long it waited for others and how long it ran, and the
memory of the session's runs. `Said` adds that up, and hands it on to those that ask for an interval
(a log of Trainer, a trace).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Listener = Callable[[str, int, dict[str, Any]], None]
everywhere: tuple[Listener, ...] = ()  # of the clients that are made from now on
now = time.perf_counter_ns  # the clock of the daemon's times, CLOCK_MONOTONIC


class Said:
    """Sums over replies, under the client's lock.

    Attributes:
        waited_us: Microseconds in the daemon's queue, behind other requests.
        ran_us: Microseconds that the daemon computed.
        arena_bytes: The most that runs took at once for activations and workspace.
        listeners: Get each reply to a request that was done: the verb, when it was sent (`now()`;
            0 = its reply was not waited for), and the reply.
    """

    __slots__ = ("arena_bytes", "listeners", "ran_us", "waited_us")

    def __init__(self) -> None:
        self.waited_us = self.ran_us = self.arena_bytes = 0
        self.listeners: tuple[Listener, ...] = everywhere

    def hear(self, verb: str, sent: int, reply: dict[str, Any]) -> None:
        """Takes the reply to a request that was done; a Listener."""
        us = reply.get("us")
        if us is not None:
            self.waited_us += us["queued"]
            self.ran_us += us["ran"]
            arena = reply.get("arena", 0)
            if arena > self.arena_bytes:
                self.arena_bytes = arena
        for listener in self.listeners:
            listener(verb, sent, reply)

    def begin(self, listener: Listener) -> None:
        """From now on the listener gets each reply, once."""
        if listener not in self.listeners:
            self.listeners += (listener,)

    def end(self, listener: Listener) -> None:
        self.listeners = tuple(known for known in self.listeners if known != listener)
