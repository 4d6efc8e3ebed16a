"""Tokens of functions: which one it is, told without keeping it alive.

The token of an object is never given to another one, also not to one that comes to lie where the
first one was.
"""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

_KEPT = 64  # that are looked up before those that are gone are forgotten


class Tokens:
    """Tokens of objects by identity."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._known: dict[int, tuple[Callable[[], Any], int]] = {}

    def of(self, function: Any) -> Hashable:
        """What is equal for the same function; methods are made anew by each look at them."""
        if isinstance(function, types.MethodType):
            return self._number(function.__func__), self._number(function.__self__)
        return self._number(function)

    def _number(self, one: Any) -> int:
        known = self._known.get(id(one))
        if known is not None and known[0]() is one:
            return known[1]
        if len(self._known) >= _KEPT:
            self._known = {key: v for key, v in self._known.items() if v[0]() is not None}
        number = next(self._next)
        self._known[id(one)] = (_reference(one), number)
        return number


def _reference(one: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(one)
    except TypeError:  # it is kept: functions of C, classes with slots
        return lambda: one
