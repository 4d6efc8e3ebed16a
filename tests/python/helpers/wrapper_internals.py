"""The internals of a wrapper that tests look at."""

from __future__ import annotations

from typing import Any

from gradd import ORTModule


def graphs(model: ORTModule) -> list[Any]:
    """The graphs of the daemon that it has."""
    return list(model._gradd_compiled.owner.alive)


def last(model: ORTModule) -> tuple[Any, Any]:
    """Graph and plan of the last call."""
    graph, plan = model._gradd_compiled.owner.last[-1]
    return graph(), plan()


def forget_calls(model: ORTModule) -> None:
    """The next call is like no earlier one."""
    for piece in model._gradd_compiled.owner.pieces:
        piece._known.clear()
