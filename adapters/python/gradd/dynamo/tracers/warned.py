"""`warnings.warn()` in code that Dynamo traces: it breaks no graph.

Python shows a warning once for each place. So does a trace: the warning is given while the graph is
made, as from the line that asks for it. Where a filter makes it an error, and where its text is not
known then, the call stays as it is, between two graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from gradd.dynamo.tracers import membership


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace such calls so where that is wanted at the time."""
    membership.trace_instead(wanted, _instead)


def nothing() -> None:
    """What is traced in place of a warning."""


def _instead(
    tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[Any, list[Any], dict[str, Any]] | None:
    if membership.value_of(fn) is not warnings.warn:
        return None
    try:
        given = [x.as_python_constant() for x in args]
        named = {name: x.as_python_constant() for name, x in kwargs.items()}
        _warn(tracer, *given, **named)
        return type(fn.realize()).build(tracer, nothing), [], {}
    except Exception:  # the warning itself, or Dynamo knows no value, or has other names
        return None


def _warn(
    tracer: Any, message: str, category: type[Warning] | None = None, stacklevel: int = 1
) -> None:
    """Gives the warning, as from the code that is traced."""
    for _ in range(stacklevel - 1):
        tracer = tracer.parent or tracer
    names = tracer.f_globals
    warnings.warn_explicit(
        message,
        category or UserWarning,
        tracer.f_code.co_filename,
        tracer.lineno,
        module=names.get("__name__"),
        registry=names.setdefault("__warningregistry__", {}),
    )
