"""Calls of Python's loggers in code that Dynamo traces.

A line that its logger drops breaks no graph, and neither does one of an installed library, which is
left out: those of transformers would cut the graph of each call. What a logger says once is said
while the graph is made. At any other line the graph breaks, as at a print().
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gradd.dynamo.tracers import membership
from gradd.graph.locations import is_installed

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "info_once": logging.INFO,  # functions of transformers
    "warning_once": logging.WARNING,
}
_ASKS = "isEnabledFor"


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace such calls so where that is wanted at the time."""
    membership.trace_instead(wanted, _instead)


def nothing() -> None:
    """What is traced in place of a line."""


def no() -> bool:
    """What is traced in place of the question whether a logger takes a level, if it does not."""
    return False


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    owner, name = membership.method(fn)
    if name not in _LEVELS and name != _ASKS:
        return None
    try:
        logger = membership.value_of(owner)
        if not isinstance(logger, logging.Logger):
            return None
        if name == _ASKS:
            done = not logger.isEnabledFor(args[0].as_python_constant())
        else:
            done = _is_left_out(tracer, logger, name, args)
        return (type(fn).build(tracer, no if name == _ASKS else nothing), [], {}) if done else None
    except Exception:  # Dynamo knows no value, or has other names
        return None


def _is_left_out(tracer: Any, logger: Any, name: str, args: list[Any]) -> bool:
    """Whether a line needs no break; says it if it is said once."""
    if not logger.isEnabledFor(_LEVELS[name]):
        return True
    if name.endswith("_once"):
        getattr(logger, name)(*(x.as_python_constant() for x in args))
        return True
    while tracer.parent and tracer.f_globals.get("__name__") == logging.__name__:
        tracer = tracer.parent
    return is_installed(tracer.f_code.co_filename)
