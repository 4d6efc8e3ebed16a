"""Live rows: which rows of a batch a call needs, and the plan that computes no others.

A row is a position of a batch. The daemon says what a plan over all rows could leave out
(`protocol.Live`): rows without a label behind the last attention, and padding. Here the rows of a
call are counted and named, and what the daemon takes for granted is checked: the mask holds zeros
and ones, and no labelled row is padding. Where that does not hold, the call runs over all rows.

A plan has lists of fixed sizes. Sizes are rounded up, at most eight to an octave; a size that is
asked for the first time takes the next larger plan that is there.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from gradd import errors

if TYPE_CHECKING:
    from gradd.calls.captured import Plan
    from gradd.calls.prepared import Prepared
    from gradd.session.protocol import Live

logger = logging.getLogger("gradd")
Sizes = tuple[int, int]  # of the lists of labelled and of real rows; 0 = there is none
_LEAST = 0.02  # of the forward's operations that a list has to save
_KEPT = 48  # plans with lists of a plan over all rows
_ASKED = 1024  # sizes that are remembered without a plan
_PATIENCE = 3  # calls in a row that saved nothing, before not every one is looked at
_LONGEST = 64  # calls that are not looked at, at most


def rounded(n: int) -> int:
    """The next size of a list: four significant bits, so at most eight sizes to an octave."""
    n = max(n, 8)
    shift = max(n.bit_length() - 4, 0)
    return (n + (1 << shift) - 1) >> shift << shift


def filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """A list of that size: live rows, and behind them ~r for a row r that stands for nothing."""
    out = torch.empty(size, dtype=torch.int64)
    n = rows.numel()
    out[:n] = rows
    out[n:] = ~rows[-1] if n else -1
    return out


class LiveRows:
    """What the calls of a plan over all rows leave out.

    Attributes:
        rows: Of a batch.
        waits: Calls that are not looked at.
        seen: Counts, for statistics: "calls" with any rows left out, "rows" of the calls that were
            looked at, and of these "unlabelled" and "padding" that were left out.
    """

    def __init__(self, live: Live, labels: int, mask: int | None) -> None:
        """Args:
        live: What the daemon says.
        labels: Position of the labels among the free inputs.
        mask: The same of the mask.
        """
        self.live = live
        self.rows = live.batch * live.positions
        self.seen: Counter[str] = Counter()
        self._labels = labels
        self._mask = mask
        self._plans: OrderedDict[Sizes, Plan] = OrderedDict()
        self._asked: set[Sizes] = set()
        self._off = False
        self._idle = self.waits = 0

    def choose(
        self,
        prepared: Prepared,
        inputs: list[torch.Tensor],
        made: dict[Sizes, Prepared],
        compile_for: Callable[[Sizes], Plan],
    ) -> tuple[Prepared, list[torch.Tensor]]:
        """How a call runs, and its free inputs.

        Args:
            prepared: Over all rows.
            inputs: Free inputs of the call.
            made: What was returned before, by sizes.
            compile_for: Compiles the plan for such sizes.
        """
        if self.waits or self._off:
            self.waits = max(self.waits - 1, 0)
            return prepared, inputs
        self.seen["rows"] += self.rows
        labelled, real = self.find(inputs)
        sizes = self._worth(labelled, real)
        if not any(sizes):
            self._rest()
            return prepared, inputs
        self._idle = 0
        try:
            found = self._plan(sizes, compile_for)
        except errors.GraddError as error:
            self._off = True
            logger.warning("rows that nobody needs are computed all the same: %s", error)
            return prepared, inputs
        if found is None:
            return prepared, inputs
        sizes, plan = found
        own = made.get(sizes)
        if own is None or own.plan is not plan or own.binding is not prepared.binding:
            own = made[sizes] = prepared.with_lists(plan, [n for n in sizes if n])
        lists = [filled(r, n) for r, n in zip((labelled, real), sizes, strict=True) if n]
        self._count(sizes)
        return own, [*inputs, *lists]

    def find(self, inputs: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Numbers of the labelled and of the real rows; None = all, as far as a plan may know."""
        live = self.live
        labels = inputs[self._labels].detach().reshape(-1)
        if labels.numel() != self.rows:
            return None, None
        labelled = labels.ne(live.ignore)
        if live.shift:
            labelled = labelled.view(live.batch, live.positions)
            labelled = torch.nn.functional.pad(labelled[:, 1:], (0, 1)).reshape(-1)
        rows = labelled.nonzero().view(-1)
        if self._mask is None:
            return rows, None
        mask = inputs[self._mask].detach().reshape(-1)
        real = mask.eq(1)
        plain = mask.numel() == self.rows and bool((real | mask.eq(0)).all())
        if not plain or not bool(real[rows].all()):
            return rows, None
        return rows, real.nonzero().view(-1)

    def _rest(self) -> None:
        """Data that have nothing to leave out are looked at less and less often."""
        self._idle += 1
        if self._idle >= _PATIENCE:
            self.waits = min(1 << (self._idle - _PATIENCE), _LONGEST)

    def _worth(self, labelled: torch.Tensor | None, real: torch.Tensor | None) -> Sizes:
        """Sizes of the lists that save enough."""
        live, sizes = self.live, [0, 0]
        for i, (rows, share) in enumerate(((labelled, live.label_share), (real, live.real_share))):
            if rows is None:
                continue
            size = rounded(rows.numel())
            if share * (1 - size / self.rows) >= _LEAST:
                sizes[i] = size
        return sizes[0], sizes[1]

    def _plan(
        self, sizes: Sizes, compile_for: Callable[[Sizes], Plan]
    ) -> tuple[Sizes, Plan] | None:
        plan = self._plans.get(sizes)
        if plan is None and self._plans and sizes not in self._asked:
            if len(self._asked) >= _ASKED:
                self._asked.clear()
            self._asked.add(sizes)
            return self._larger(sizes)
        if plan is None:
            plan = self._plans[sizes] = compile_for(sizes)
            if len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        self._plans.move_to_end(sizes)
        return sizes, plan

    def _larger(self, sizes: Sizes) -> tuple[Sizes, Plan] | None:
        """The smallest plan with the same lists that has room."""
        labelled, real = sizes
        fitting = [
            s
            for s in self._plans
            if bool(s[0]) == bool(labelled) and bool(s[1]) == bool(real)
            if s[0] >= labelled and s[1] >= real
        ]
        best = min(fitting, key=sum, default=None)
        return None if best is None else (best, self._plans[best])

    def _count(self, sizes: Sizes) -> None:
        self.seen["calls"] += 1
        labelled, real = sizes
        self.seen["unlabelled"] += self.rows - labelled if labelled else 0
        self.seen["padding"] += self.rows - real if real else 0
