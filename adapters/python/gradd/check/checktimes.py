"""Decides when a self-check is due: at the first call of every kind of plan, and sometimes later.

A kind is a graph with a choice of trainable parameters, inputs with a gradient, wanted outputs and
output gradients, whatever the sizes. Its first call is checked in full; later checks are due at
calls 2, 10, 100, 1,000, ... and wait until they cost at most half a percent of the time since the
last check. A failure counts for the kind and the sizes that failed. If the gradient of a parameter
was zero, checks are also due at a few of the next calls: an error in it could not show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

OFF, FIRST, DECADES = "0", "first", "decades"
SHARE = 0.005  # of the time
_AT_ONCE = 8  # kinds of one graph that are checked with their first call; more wait for their time
_KEPT = 256  # kinds of one graph
_LOOKS = 8  # checks of data without a finite value, or a gradient; more checks of zero gradients
_SIZES = 4  # that failed; then the whole kind has

clock: Callable[[], float] = time.perf_counter


@dataclass
class Kind:
    """The history of one kind of plan."""

    calls: int = 0
    due: float = 1  # number of the call that is to be checked next
    done: bool = False  # there was something to compare; later checks wait for their share of time
    seconds: float = 0.0  # that a later check is expected to take
    rows: bool = True  # such a check may work on fewer rows
    failed: dict[Hashable, str] = field(default_factory=dict)  # by the sizes of arguments, why
    passed: set[Hashable] = field(default_factory=set)  # sizes that passed after others had failed
    zeros: set | None = None  # parameters whose gradient was zero in all checks
    looks: int = 0  # checks that have passed

    def is_due(self, call: int, last: float) -> bool:
        """Whether to check this call, or to report an error, if the last check ended then."""
        if self.failed or not self.done:
            return bool(self.failed) or call >= self.due
        return call >= self.due and clock() - last >= self.seconds / SHARE

    def failure(self, sizes: Hashable) -> str | None:
        """Why a call of these sizes runs in PyTorch, if it does."""
        if len(self.failed) >= _SIZES:
            return next(reversed(self.failed.values()))
        return self.failed.get(sizes)

    def succeed(self, sizes: Hashable, says_something: bool) -> None:
        """A check has passed."""
        if self.failed:
            self.passed.add(sizes)
        self.looks += 1
        self.done = self.done or says_something or self.looks >= _LOOKS


class Times:
    """Decides for one compiled function when something is checked."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.last = clock()  # end of the last check

    def due(self, kinds: dict[Hashable, Kind], key: Hashable) -> tuple[Kind, bool]:
        """Counts a call; its kind, and whether to check something or to report an error."""
        kind = kinds.get(key)
        if kind is None:
            if len(kinds) >= _KEPT:
                kinds.clear()
            kind = kinds[key] = Kind()
            if len(kinds) > _AT_ONCE:
                kind.done, kind.seconds = True, max(k.seconds for k in kinds.values())
        kind.calls += 1
        return kind, kind.is_due(kind.calls, self.last)

    def over(self, kind: Kind, seconds: float) -> None:
        """A check has ended, and the next one is expected to take `seconds`."""
        self.last, kind.seconds = clock(), seconds
        if not kind.done or self.mode != FIRST and kind.zeros and kind.looks <= _LOOKS:
            kind.due = kind.calls + 1
        elif self.mode == FIRST:
            kind.due = math.inf
        else:
            kind.due = 2 if kind.calls < 2 else 10 ** (math.floor(math.log10(kind.calls)) + 1)
