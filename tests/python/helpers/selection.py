"""Which of many cases of one kind run every time; the others are left to `make nightly`.

The draw changes with GRADD_DRAW, a number; without it the draw is committed, so that no tree
turns red without a commit. `make nightly` draws by the week. Cases of a test are drawn by
`one_in()`, tests of files that take long by the mark `one_in`, all others by `mark_undrawn()`.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Collection, Iterable
from typing import Any

import pytest

_FOLDERS = {"calls", "daemon", "device", "dynamo", "values"}  # nearly each test captures a graph
_LEAST, _PART = 1, 12
SEED = os.environ.get("GRADD_DRAW", "48")


def drawn(cases: Iterable[Any], count: int) -> list[Any]:
    """`count` of the cases, the same ones for one number."""
    ordered = sorted(cases)
    return sorted(random.Random(SEED).sample(ordered, count))


def by_mark(quick: Collection[Any], kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test: marked quick, kept without a mark, all others nightly."""

    def mark(case: Any) -> Any:
        name = "quick" if case in quick else "nightly" if case not in kept else None
        return pytest.param(case, marks=getattr(pytest.mark, name)) if name else case

    return [mark(case) for case in cases]


def quick_or_slow(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test: marked quick, all others slow."""
    marks = pytest.mark
    return [pytest.param(c, marks=marks.quick if c in quick else marks.slow) for c in cases]


def every_run(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test, of which all but the kept ones are marked nightly."""
    return [c if c in kept else pytest.param(c, marks=pytest.mark.nightly) for c in cases]


def one_in(part: int, cases: Iterable[Any], always: Collection[Any] = ()) -> list[Any]:
    """The cases as parameters of a test: one in `part` is drawn, and the others are nightly."""
    cases = list(cases)
    others = [case for case in cases if case not in always]
    return every_run({*always, *drawn(others, -(-len(others) // part))}, cases)


def mark_undrawn(items: Iterable[pytest.Item]) -> None:
    """Marks nightly what its mark `one_in(n)` does not draw: n numbers give every test its turn.

    Where each case captures a graph, a twelfth of a test's cases is drawn, but one at least; of the
    quick and the slow ones all.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None:
            (part,) = mark.args
            if (zlib.crc32(item.nodeid.encode()) + int(SEED)) % part:
                item.add_marker(pytest.mark.nightly)
        elif _FOLDERS.intersection(item.path.parts) and item.get_closest_marker("nightly") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        left_out = [i for i in found if not any(map(i.get_closest_marker, ("quick", "slow")))]
        left_out.sort(key=lambda item: zlib.crc32(f"{SEED}{item.nodeid}".encode()))
        for item in left_out[max(_LEAST, -(-len(found) // _PART)) :]:
            item.add_marker(pytest.mark.nightly)
