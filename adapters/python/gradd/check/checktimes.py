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
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field

OFF, FIRST, DECADES = "0", "first", "decades"
SHARE = 0.005  # of the time
_AT_ONCE = 8  # kinds of one graph that are checked with their first call; more wait for their time
_KEPT = 256  # kinds of one graph
_SAYS_NOTHING = 8  # checks in a row on data without a finite value or any gradient
_ZEROS = 8  # more checks of gradients that are zero
_SIZES = 4  # that failed; then the whole kind has

clock: Callable[[], float] = time.perf_counter


@dataclass
class Kind:
    """The history of one kind of plan.

    Attributes:
        calls: So far.
        due: Number of the call that is to be checked next.
        done: A check has had something to compare; later ones wait for their share of the time.
        seconds: Expected duration of a later check.
        rows: Such a check may work on fewer rows.
        failed: Why it differs from PyTorch, by the sizes of the arguments.
        passed: Sizes that were checked after others had failed.
        empty: Checks in a row that had nothing to compare.
        zeros: Parameters whose gradient was zero in all checks; None = there was none.
        looks: Checks that have looked for another value of these.
    """

    calls: int = 0
    due: float = 1
    done: bool = False
    seconds: float = 0.0
    rows: bool = True
    failed: dict[Hashable, str] = field(default_factory=dict)
    passed: set[Hashable] = field(default_factory=set)
    empty: int = 0
    zeros: set | None = None
    looks: int = 0

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

    def succeed(self, sizes: Hashable, says_something: bool, zeros: Collection = ()) -> None:
        """A check has passed, where PyTorch has found these gradients to be zero."""
        if self.failed:
            self.passed.add(sizes)
        self.empty = 0 if says_something else self.empty + 1
        self.done = self.done or says_something or self.empty >= _SAYS_NOTHING
        self.zeros = set(zeros) if self.zeros is None else self.zeros & set(zeros)
        self.looks += 1

    def plan(self, seconds: float, mode: str) -> None:
        """A check has ended, and the next one is expected to take `seconds`."""
        self.seconds = seconds
        if not self.done or mode != FIRST and self.zeros and self.looks <= _ZEROS:
            self.due = self.calls + 1
        elif mode == FIRST:
            self.due = math.inf
        else:
            self.due = 2 if self.calls < 2 else 10 ** (math.floor(math.log10(self.calls)) + 1)


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
        self.last = clock()
        kind.plan(seconds, self.mode)
