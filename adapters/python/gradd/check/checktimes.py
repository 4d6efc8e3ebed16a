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
        done: The check of the first call has passed, and it had something to compare.
        seconds: Expected duration of a later check.
        rows: Such a check may work on fewer rows.
        failed: Why it differs from PyTorch, by the sizes of the arguments.
        passed: Sizes that were checked after others had failed.
        empty: Checks in a row that had nothing to compare.
        zeros: Parameters whose gradient was zero in all checks, and how many checks that were.
    """

    calls: int = 0
    due: float = 1
    done: bool = False
    waits: bool = False
    seconds: float = 0.0
    rows: bool = True
    failed: dict[Hashable, str] = field(default_factory=dict)
    passed: set[Hashable] = field(default_factory=set)
    empty: int = 0
    zeros: tuple[frozenset, int] | None = None

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
        before, checks = self.zeros or (zeros, 0)
        self.zeros = frozenset(before) & frozenset(zeros), checks + 1

    @property
    def hides(self) -> bool:
        """Whether gradients that were zero so far are worth another check."""
        return self.zeros is not None and bool(self.zeros[0]) and self.zeros[1] <= _ZEROS


class Times:
    """Decides for one compiled function when something is checked."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.last = clock()  # end of the last check

    # Piece._is_checked() asks the same of a kind, without a call.
    def due(self, kinds: dict[Hashable, Kind], key: Hashable) -> tuple[Kind, bool]:
        """Counts a call; its kind, and whether to check something or to report an error."""
        kind = kinds.get(key)
        if kind is None:
            kind = self._new(kinds, key)
        kind.calls += 1
        if kind.calls < kind.due and not kind.failed:
            return kind, False
        if kind.failed or not (kind.done or kind.waits):
            return kind, True
        return kind, clock() - self.last >= kind.seconds / SHARE

    def _new(self, kinds: dict[Hashable, Kind], key: Hashable) -> Kind:
        if len(kinds) >= _KEPT:
            kinds.clear()
        kind = kinds[key] = Kind()
        if len(kinds) > _AT_ONCE:
            kind.waits = True
            kind.seconds = max(k.seconds for k in kinds.values())
        return kind

    def over(self, kind: Kind, seconds: float) -> None:
        """A check has ended, and the next one is expected to take `seconds`."""
        self.last = clock()
        kind.seconds = seconds
        if not kind.done:
            kind.due = kind.calls + 1
        elif self.mode == FIRST:
            kind.due = math.inf
        elif kind.hides:
            kind.due = kind.calls + 1
        else:
            kind.due = 2 if kind.calls < 2 else 10 ** (math.floor(math.log10(kind.calls)) + 1)
