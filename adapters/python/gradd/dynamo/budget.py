"""A memory budget that the graphs of one call share.

Between forward and backward the runs of all graphs of a call are alive at once, so a budget bounds
their sum, including the inputs that PyTorch has made for them. Each graph gets a share: nothing
that fits is recomputed, and beyond that the cheapest recomputation by the daemon's model comes
first, whichever graph it is in.

The graphs that follow a graph break are known only after it has happened once. The first time, all
graphs but the last take as little memory as they can.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from gradd import errors
from gradd.calls.planned import Planned
from gradd.memory.budget import amount
from gradd.session.client import Client

_SEQUENCES = 64  # of graphs, that are remembered
_SIZES = 1024  # of graphs, whose curves are


@dataclass(frozen=True)
class Curve:
    """The options of one graph of the daemon with less memory.

    Attributes:
        points: (bytes, microseconds of more time by a model); bytes fall, the first keeps all.
        model_us: Of forward and backward where all is kept.
        pinned: Bytes of inputs that are kept beside the run until its backward.
    """

    points: tuple[tuple[int, float], ...]
    model_us: float
    pinned: int

    @property
    def least(self) -> int:
        return self.points[-1][0] + self.pinned

    def price(self, at: int) -> float:
        """Time per byte that the step behind a point saves."""
        if at + 1 >= len(self.points):
            return float("inf")
        (bytes_, us), (fewer, more) = self.points[at : at + 2]
        return (more - us) / max(bytes_ - fewer, 1)


def curve_of(client: Client, planned: Planned) -> Curve:
    reply = client.request("plan.estimate", {"plan": planned.used.info.id, "curve": 1})
    points = tuple((p["bytes"], p["us"]) for p in reply["curve"])
    return Curve(points, reply["model_us"], planned.pinned)


def shares(budget: int, curves: Sequence[Curve]) -> list[int]:
    """The share of each plan.

    Raises:
        OutOfMemoryError: Not even the least of all fits; the message names the sum.
    """
    least = sum(c.least for c in curves)
    if least > budget:
        raise errors.OutOfMemoryError(_too_small(budget, least, curves))
    if not curves:
        return []
    at = [0] * len(curves)

    def left() -> int:
        pairs = zip(curves, at, strict=True)
        return budget - sum(c.points[i][0] + c.pinned for c, i in pairs)

    last = 0
    while left() < 0:
        last = min(range(len(curves)), key=lambda k: curves[k].price(at[k]))
        at[last] += 1
    found = [c.points[i][0] for c, i in zip(curves, at, strict=True)]
    found[last] += left()  # there may be a finer point
    return found


def _amount(size: int) -> str:
    """ "3145728 bytes (3.0 MiB)"."""
    return f"{size} bytes" + (f" ({amount(size)})" if size >= 1024 else "")


def _too_small(budget: int, least: int, curves: Sequence[Curve]) -> str:
    extra, model = sum(c.points[-1][1] for c in curves), sum(c.model_us for c in curves)
    whole = sum(c.points[0][0] + c.pinned for c in curves)
    graphs = f"{len(curves)} graphs of a call" if len(curves) > 1 else "graph"
    return (
        f"no plans of the {graphs} fit the memory budget of {_amount(budget)}: the smallest that "
        f"can be met is {_amount(least)}, for {100 * extra / max(model, 1e-9):.1f} % more time by "
        f"the model; plans that compute nothing again take {_amount(whole)}"
    )


class Budget(threading.local):
    """The budget of the calls of one thread."""

    def __init__(self, amount: int) -> None:
        """Args:
        amount: In bytes; 0 = there is none.
        """
        self.amount = amount
        self._curves: dict[Hashable, list[Curve]] = {}
        self._known: dict[tuple[Hashable, ...], None] = {}  # calls, as sequences of graphs
        self._shares: dict[tuple[Hashable, ...], list[int]] = {}
        self._call: tuple[Hashable, ...] = ()
        self._taken = 0

    def begin(self) -> None:
        self._call, self._taken = (), 0

    @property
    def going_on(self) -> bool:
        """Whether graphs of the present call have run."""
        return bool(self._call)

    def shares(self, key: Hashable, last: bool, make: Any) -> list[int]:
        """Shares of the graphs of the daemon that a graph of Dynamo consists of.

        Args:
            key: Which graph, for which sizes.
            last: The call ends with it.
            make: Gives their curves.

        Raises:
            OutOfMemoryError: There is not enough left.
        """
        call = self._call = (*self._call, key)
        if key not in self._curves:
            if len(self._curves) >= _SIZES:
                self._known.clear()
                self._shares.clear()
                self._curves.clear()
            self._curves[key] = make()
        own = self._curves[key]
        found = self._shares.get((*call, last))
        if found is None:
            found = self._shares[(*call, last)] = self._choose(call, own, last)
        self._taken += sum(found) + sum(c.pinned for c in own)
        if last:
            self._learn(call)
            self.begin()
        return found

    def _choose(self, call: tuple[Hashable, ...], own: list[Curve], last: bool) -> list[int]:
        left = self.amount - self._taken
        if last:
            return shares(left, own)
        known = [c for c in self._known if c[: len(call)] == call]
        rests = [[curve for k in c[len(call) :] for curve in self._curves[k]] for c in known]
        if not rests:
            shares(left, own)  # raises where that is too much
            return [c.points[-1][0] for c in own]
        rest = max(rests, key=lambda curves: sum(c.least for c in curves))
        return shares(left, [*own, *rest])[: len(own)]

    def _learn(self, call: tuple[Hashable, ...]) -> None:
        if call in self._known:
            return
        if len(self._known) >= _SEQUENCES:
            self._known.clear()
        self._known[call] = None
        self._shares.clear()
