"""The set of spots that a capture depends on, and the fast answer to "is all as it was?".

The answer comes from one generated function of identity tests. Only where one of them fails are
values compared: an equal value that is another object is looked for from then on, everything else
is a change with a name. A list, dictionary or set that was assigned anew takes the old one's place
if all that was read from the old one is the same in it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from gradd.export.guards.arguments import Asked, layouts
from gradd.export.guards.images import is_a
from gradd.export.guards.lookups import test_of_all
from gradd.export.guards.spots import ABSENT, Cell, Field, Item, Spot
from gradd.export.guards.taken import WHOLE

_PER_LINE = 64
_CONTAINERS = (list, dict, set)  # exactly these: others have code of somebody's
_HOLDERS = (Item, Cell, Field)
# Values that no equal object takes the place of: their names may be shared by tests.
_SHARED = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, type(ABSENT))


class Swap(NamedTuple):
    """A container that stands where another one of its type stood, and the spots that hold it."""

    old: Any
    new: Any
    spots: list[Spot]

    def back(self) -> Swap:
        return Swap(self.new, self.old, self.spots)


def _same(spot: Spot) -> bool:
    try:
        return spot.same()
    except Exception:  # what cannot be read any more has changed
        return False


def _assigned_anew(moved: Iterable[Spot], spots: Sequence[Spot]) -> list[Swap]:
    """Containers in whose place others stand, wherever they stood; none if one only in part.

    What is one object has to stay one, and two have to stay two: forward() may ask that.
    """
    swaps: dict[int, Swap] = {}
    for spot in moved:
        if type(spot.value) in _CONTAINERS:
            now = spot.now() if type(spot) in _HOLDERS else ABSENT
            swap = swaps.setdefault(id(spot.value), Swap(spot.value, now, []))
            swap.spots.append(spot)
            if now is not swap.new or type(now) is not type(spot.value):
                return []
    new = {id(swap.new) for swap in swaps.values()}
    if len(new) < len(swaps):
        return []
    for spot in spots:
        swap = swaps.get(id(spot.value))
        if id(spot.value) in new or swap is not None and spot not in swap.spots:
            return []
    return list(swaps.values())


def _move(spots: Iterable[Spot], swaps: Sequence[Swap]) -> None:
    """What was read from the old containers is looked for in the new ones."""
    new = {id(swap.old): swap.new for swap in swaps}
    for spot in spots:
        if id(spot.owner) in new:
            spot.owner = new[id(spot.owner)]


class Guards:
    """Everything that a forward() read from outside, as it was.

    Attributes:
        spots: Those that it read, each once.
        test: The generated function: True if all is as it was. False, or an exception, is no
            verdict, see holds(). Another one may take its place.
        layouts: Those of the call's tensors, where forward() asks for such; else None.
        asked: What else it asks them, see arguments.py.
        read: Attributes of the module that it read: path of the submodule and name; None if that
            is not known.
    """

    def __init__(
        self,
        spots: Iterable[Spot],
        layouts: tuple | None = None,
        asked: Asked | None = None,
        read: frozenset[tuple[str, str]] | None = None,
    ) -> None:
        self.spots = list(spots)
        self.layouts = layouts
        self.asked = asked
        self.read = read
        self._values: dict[str, Any] = {}  # what the generated function compares with, by name
        self._own: dict[int, str] = {}  # number of a spot -> name of its value, if it is its own
        self.test = self._compile()

    def _compile(self) -> Callable[[], bool]:
        self._values, self._own = {}, {}
        tests = list(dict.fromkeys(self._test(i, spot) for i, spot in enumerate(self.spots)))
        tests.append(test_of_all(self.spots, self._shared))
        lines = [
            f"    if not ({' and '.join(tests[i : i + _PER_LINE])}):\n        return False\n"
            for i in range(0, len(tests), _PER_LINE)
        ]
        exec("def holds():\n" + "".join(lines) + "    return True\n", self._values)
        return self._values.pop("holds")  # else it and its globals would be a cycle

    def _test(self, number: int, spot: Spot) -> str:
        def name(value: Any) -> str:
            if value is None or value is True or value is False:
                return repr(value)
            if value is spot.value and type(spot) is Item and not is_a(value, _SHARED):
                known = self._own[number] = f"w{number}"
            else:
                return self._shared(value)
            self._values[known] = value
            return known

        return spot.test(name)

    def _shared(self, value: Any) -> str:
        known = f"v{id(value)}"
        self._values[known] = value
        return known

    @property
    def asks_arguments(self) -> bool:
        """Whether fits() depends on the call."""
        return self.layouts is not None or self.asked is not None and bool(self.asked.names)

    def fits(self, leaves: Sequence[Any]) -> bool:
        """True if a call's tensors answer as those of the capture, where forward() asks them."""
        if self.layouts is not None and self.layouts != layouts(leaves):
            return False
        return self.asked is None or self.asked.differ(leaves) is None

    def ignores(self, attributes: Iterable[tuple[str, str]]) -> bool:
        """True if forward() read none of these attributes of the module (path and name)."""
        read = self.read
        return read is not None and not any(
            (path, name) in read or (path, WHOLE) in read for path, name in attributes
        )

    def holds(self) -> bool:
        """True if every spot still has its value."""
        try:
            if self.test():
                return True
        except Exception:  # an entry is gone, or somebody's comparison raises
            pass
        return not self.changed()

    def changed(self) -> list[Spot]:
        """The spots whose value is another one now.

        Where all values are the same, but some are other objects, those are looked for from then
        on.
        """
        moved = [spot for spot in self.spots if not _same(spot)]
        swaps = _assigned_anew(moved, self.spots)
        if swaps:
            _move(self.spots, swaps)
            holders = {id(spot) for swap in swaps for spot in swap.spots}
            if all(_same(spot) for spot in self.spots if id(spot) not in holders):
                moved = []
            else:
                _move(self.spots, [swap.back() for swap in swaps])
        if not moved:
            self._rebind(bool(swaps))
        return moved

    def _rebind(self, whole: bool) -> None:
        for number, spot in enumerate(self.spots):
            before = spot.value
            spot.rebind()
            if spot.value is before:
                continue
            known = self._own.get(number)
            if known is not None:
                self._values[known] = spot.value
            else:
                whole = True
        if whole:
            self.test = self._compile()


def describe(spots: Iterable[Spot]) -> str:
    """The changes of these spots for a message."""
    texts = []
    for spot in spots:
        try:
            texts.append(spot.change())
        except Exception:
            texts.append(spot.label)
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
