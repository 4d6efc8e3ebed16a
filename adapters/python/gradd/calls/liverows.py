"""Live rows: finds the rows of a batch that a call needs, and a plan that computes only those.

A row is a position of a batch. The daemon says which rows a plan over all rows could leave out
(`protocol.Live`): rows without a label behind the last attention, and padding. This module counts
and names the rows of a call, and checks the daemon's assumptions: the mask holds zeros and ones,
and no labelled row is padding. If they do not hold, the call runs over all rows.

The positions of an encoder are rows of their own, source rows, with a mask of their own; each
sequence must have a real one.

A plan has lists of fixed sizes. Sizes are rounded up, at most eight to an octave; a size that is
requested for the first time takes the next larger plan that exists.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gradd import errors, options

if TYPE_CHECKING:
    from gradd.calls.call import Call
    from gradd.calls.graph import Plan
    from gradd.session.protocol import GraphInfo, Live

logger = logging.getLogger("gradd")
Sizes = tuple[int, int, int]  # of the lists of labelled, real, source rows; 0 = there is none
Rows = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # which these are
_LEAST = 0.02  # of the forward's operations that a list has to save
_ASKED = 1024  # sizes that are remembered without a plan
_PATIENCE = 3  # calls in a row that saved nothing, before not every one is looked at
_LONGEST = 64  # calls that are not looked at, at most


def rounded(n: int) -> int:
    """The next size of a list: four significant bits, so at most eight sizes to an octave."""
    n = max(n, 8)
    shift = max(n.bit_length() - 4, 0)
    return (n + (1 << shift) - 1) >> shift << shift


def filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """A list of that size: live rows, and behind them ~r for an unused row r."""
    out = rows.new_empty(size)
    n = rows.numel()
    out[:n] = rows
    out[n:] = ~rows[-1] if n else -1
    return out


def _shown(inputs: list[torch.Tensor], position: int | None, rows: int) -> torch.Tensor | None:
    """Whether each row is real, by a mask of zeros and ones; None = it is no such mask."""
    if position is None:
        return None
    mask = inputs[position].detach().reshape(-1)
    real = mask.eq(1)
    return real if mask.numel() == rows and bool((real | mask.eq(0)).all()) else None


@dataclass(frozen=True)
class Switches:
    """Which rows may be left out, and whether that is printed."""

    labelled: bool
    real: bool
    printed: bool

    @classmethod
    def read(cls) -> Switches:
        all_of_them = ("GRADD_LIVE_ROWS", "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER")
        on = all(map(options.get, (*all_of_them, "ORTMODULE_ENABLE_SPARSE_OPTIMIZER")))
        return cls(
            bool(on and options.get("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER")),
            bool(on and options.get("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER")),
            bool(options.get("ORTMODULE_PRINT_INPUT_DENSITY")),
        )


class LiveRows:
    """The rows that calls of a plan over all rows leave out.

    Attributes:
        rows: Of a batch.
        source_rows: Of its encoder.
        waits: Calls that are not looked at.
        seen: Counts, for statistics: "calls" with any rows left out, "rows" of the calls that were
            looked at, of these "unlabelled" and "padding" that were left out, and "flops" of the
            forward that this saved.
    """

    def __init__(
        self,
        live: Live,
        positions: tuple[int, int | None, int | None],
        switches: Switches,
        seen: Counter[str],
    ) -> None:
        """Args:
        live: The daemon's description.
        positions: Of the labels, the mask and the encoder's mask among the free inputs.
        switches: The rows that may be left out.
        seen: Where it is counted.
        """
        self.live = live
        self.switches = switches
        self.rows = live.batch * live.positions
        self.source_rows = live.batch * live.source_positions
        self.seen = seen
        self._labels, self._mask, self._source = positions
        # The graph keeps those that were used last; an evicted one is compiled again.
        self._plans: weakref.WeakValueDictionary[Sizes, Plan] = weakref.WeakValueDictionary()
        self._asked: set[Sizes] = set()
        self._off = False
        self._idle = self.waits = 0

    @classmethod
    def of(
        cls, live: Live | None, free: Sequence[str], info: GraphInfo, seen: Counter[str]
    ) -> LiveRows | None:
        """What calls may leave out that bring what tells it; None = nothing.

        Args:
            live: The daemon's description of a plan over all rows.
            free: Names of the free inputs.
            info: Of the graph.
            seen: Counts the rows that calls leave out.
        """
        switches = Switches.read()
        if live is None or not (switches.labelled or switches.real or switches.printed):
            return None
        at = {name: i for i, name in enumerate(free)}
        names = [name for name, _, _ in info.inputs]
        labels = at.get(names[live.labels])
        mask = at.get(names[live.mask]) if live.mask >= 0 else None
        source = at.get(names[live.source]) if live.source >= 0 else None
        return None if labels is None else cls(live, (labels, mask, source), switches, seen)

    def choose(
        self,
        call: Call,
        inputs: list[torch.Tensor],
        compile_for: Callable[[Sizes], Plan],
        quiet: bool = False,
    ) -> tuple[Call, list[torch.Tensor]]:
        """How a call runs, and its free inputs.

        Args:
            call: Over all rows.
            inputs: Free inputs of the call.
            compile_for: Compiles the plan for such sizes.
            quiet: Print nothing.

        Raises:
            OutOfMemoryError: All rows do not meet the memory budget, nor do those that are needed.
        """
        over = call.plan.over
        if over is None and (self.waits or self._off):
            self.waits = max(self.waits - 1, 0)
            return call, inputs
        self.seen["rows"] += self.rows + self.source_rows
        rows = self.find(inputs)
        if self.switches.printed and not quiet:
            self._print(*rows)
        sizes = self.worth(*rows)
        if not any(sizes):
            if over is not None:
                raise errors.OutOfMemoryError(over)
            self._rest()
            return call, inputs
        self._idle = 0
        try:
            found = self._plan(sizes, compile_for, over is not None)
        except errors.GraddError as error:
            if over is not None:
                raise
            self._off = True
            # text only: a stored log record would keep the error's frames, and tensors, alive
            logger.warning("padding and rows without a label are computed as well: %s", str(error))
            return call, inputs
        if found is None:
            return call, inputs
        sizes, plan = found
        call.graph.keep(plan)
        made = call.graph.made
        own = made.get(plan)
        if own is None or own.binding is not call.binding or own.selection is not call.selection:
            own = made[plan] = call.with_lists(plan, [n for n in sizes if n])
        lists = [filled(r, n) for r, n in zip(rows, sizes, strict=True) if n and r is not None]
        self._count(sizes)
        return own, [*inputs, *lists]

    def find(self, inputs: list[torch.Tensor]) -> Rows:
        """Numbers of labelled, real and source rows; None = a plan may not know these."""
        live = self.live
        labels = inputs[self._labels].detach().reshape(-1)
        labelled = labels.ne(live.ignore)
        if live.shift:
            labelled = labelled.view(live.batch, live.positions)
            labelled = torch.nn.functional.pad(labelled[:, 1:], (0, 1)).reshape(-1)
        rows = labelled.nonzero().view(-1)
        real = _shown(inputs, self._mask, self.rows)
        if real is not None and not bool(real[rows].all()):
            real = None
        source = _shown(inputs, self._source, self.source_rows)
        if source is not None and not bool(source.view(live.batch, -1).any(1).all()):
            source = None
        return (
            rows,
            None if real is None else real.nonzero().view(-1),
            None if source is None else source.nonzero().view(-1),
        )

    def sizes(self, inputs: list[torch.Tensor]) -> Sizes:
        """Sizes of the lists for free inputs; none where these have no values."""
        if any(t.is_meta for t in inputs):
            return 0, 0, 0
        return self.worth(*self.find(inputs))

    def _rest(self) -> None:
        """Checks data without rows to leave out less and less often."""
        self._idle += 1
        if self._idle >= _PATIENCE:
            self.waits = min(1 << (self._idle - _PATIENCE), _LONGEST)

    def worth(
        self, labelled: torch.Tensor, real: torch.Tensor | None, source: torch.Tensor | None
    ) -> Sizes:
        """Sizes of the lists that save enough; without one of labelled rows these are real ones."""
        sizes = [0, 0, 0]
        label_share, real_share = self.live.label_share, self.live.real_share
        if self.switches.labelled:
            size = rounded(labelled.numel())
            if label_share * (1 - size / self.rows) >= _LEAST:
                sizes[0] = size
        if self.switches.real and real is not None:
            size = rounded(real.numel())
            share = real_share if sizes[0] else real_share + label_share
            if share * (1 - size / self.rows) >= _LEAST:
                sizes[1] = size
        if self.switches.real and source is not None:
            size = rounded(source.numel())
            if self.live.source_share * (1 - size / self.source_rows) >= _LEAST:
                sizes[2] = size
        return sizes[0], sizes[1], sizes[2]

    def _print(
        self, labelled: torch.Tensor, real: torch.Tensor | None, source: torch.Tensor | None
    ) -> None:
        n = self.rows
        text = f"gradd: {labelled.numel()} of {n} rows ({labelled.numel() / n:.1%}) have a label"
        if real is not None:
            text += f", {real.numel()} ({real.numel() / n:.1%}) are no padding"
        if source is not None:
            n, found = self.source_rows, source.numel()
            text += f"; {found} of {n} rows of the encoder ({found / n:.1%}) are no padding"
        print(text, flush=True)

    def _plan(
        self, sizes: Sizes, compile_for: Callable[[Sizes], Plan], at_once: bool
    ) -> tuple[Sizes, Plan] | None:
        plan = self._plans.get(sizes)
        if plan is None and self._plans and sizes not in self._asked and not at_once:
            if len(self._asked) >= _ASKED:
                self._asked.clear()
            self._asked.add(sizes)
            larger = self._larger(sizes)
            return None if larger is None else (larger, compile_for(larger))
        plan = self._plans[sizes] = compile_for(sizes)  # one that is there is found again
        return sizes, plan

    def _larger(self, sizes: Sizes) -> Sizes | None:
        """The smallest plan with the same lists that has room."""
        fitting = [
            s
            for s in list(self._plans)
            if all(bool(a) == bool(b) and a >= b for a, b in zip(s, sizes, strict=True))
        ]
        return min(fitting, key=sum, default=None)

    def saved(self, sizes: Sizes) -> float:
        """Part of the forward's operations that lists of these sizes leave out."""
        (labelled, real, source), live, n = sizes, self.live, self.rows
        unlabelled, padding = (n - labelled if labelled else 0), (n - real if real else 0)
        saved = (live.label_share * (unlabelled or padding) + live.real_share * padding) / n
        return saved + (live.source_share * (1 - source / self.source_rows) if source else 0)

    def _count(self, sizes: Sizes) -> None:
        labelled, real, source = sizes
        self.seen["calls"] += 1
        self.seen["unlabelled"] += self.rows - labelled if labelled else 0
        self.seen["padding"] += self.rows - real if real else 0
        self.seen["padding"] += self.source_rows - source if source else 0
        self.seen["flops"] += int(self.live.flops * self.saved(sizes))
