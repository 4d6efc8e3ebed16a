"""Context variables around a forward that is tried out: nothing is left in them, and who sets one.

The forward runs in a copy of the caller's context, so that whatever it sets ends with it, however
it is set (by a method, by code in C, by a library's context manager). What then stands in the copy
and not in the caller's context is a write that a graph would not do.
"""

from __future__ import annotations

import contextvars
import decimal
import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils._config_module import ConfigModule

from gradd.export.guards import images
from gradd.export.guards.images import is_a
from gradd.export.guards.spots import ABSENT
from gradd.spec import CaptureError


def _is_of_torch(variable: contextvars.ContextVar) -> bool:
    """True for settings of torch's own compiler, which torch.cond() changes for itself."""
    if variable.name.startswith("torch."):
        return True
    configs = [m for m in sys.modules.values() if is_a(m, ConfigModule)]
    entries = [entry for config in configs for entry in config._config.values()]
    return any(variable is held for entry in entries for held in vars(entry).values())


class Trial:
    """A copy of the present context in which a forward runs."""

    def __init__(self) -> None:
        self._before = contextvars.copy_context()
        self._context = contextvars.copy_context()

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls function(*args, **kwargs) inside."""
        return self._context.run(function, *args, **kwargs)

    def refusal(self) -> CaptureError | None:
        """What is to be said of the first variable that is not what it was."""
        for variable, value in self._context.items():
            before = self._before.get(variable, ABSENT)
            # Reading the rules of decimal numbers for the first time puts them there.
            fresh = before is ABSENT and type(value) is decimal.Context
            fresh = fresh or _is_of_torch(variable)
            if not (fresh or images.alike(before, value)):
                return CaptureError(
                    "outside_written",
                    f"forward() sets the context variable {variable.name!r} and leaves it so, "
                    "which a graph would not do: reset it, or set it outside of forward()",
                )
        return None


class Contexts:
    """Which context variables recorded code reads, or sets to what they are already."""

    def __init__(self, answer: Callable[..., None]) -> None:
        """Args:
        answer: Notes a spot, see Reads.answer().
        """
        self._answer = answer
        self._before = contextvars.copy_context()
        self._open: Counter[contextvars.ContextVar] = Counter()

    def called(self, variable: contextvars.ContextVar, name: str) -> None:
        """A method of a variable is called."""
        if name == "get":
            self._note(variable)
        elif name == "set":
            self._open[variable] += 1
        elif name == "reset":
            self._open[variable] -= 1

    def settle(self) -> None:
        """The forward is over. What it set without a reset it would set from another value, too."""
        for variable, count in self._open.items():
            if count > 0:
                self._note(variable)

    def _note(self, variable: contextvars.ContextVar) -> None:
        """As it was before the call: forward() may set it for itself."""
        before = self._before.get(variable, ABSENT)
        ask = functools.partial(variable.get, ABSENT)
        self._answer(ask, f"context variable {variable.name}", before, variable)
