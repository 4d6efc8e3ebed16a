"""Backwards that forward() runs itself, found before they begin.

A backward adds to the `.grad` of whatever it reaches, runs hooks, and uses its graph up: a trial
would count twice, and a trace would leave its own kind of tensors in gradients of outside. Every
way from Python leads through one engine, which another object stands in for meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradd.spec import CaptureError

_ACCUMULATES = 6  # position of accumulate_grad among the arguments of run_backward()


class _Engine:
    """Stands in for torch's engine; other threads, and whoever keeps it, get to that one."""

    def __init__(self, engine: Any, found: Callable[[str, str], None]) -> None:
        self._engine, self._found, self._thread = engine, found, threading.get_ident()

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's own, unless forward() calls it."""
        if self._found is not None and threading.get_ident() == self._thread:
            self._found(*_named(args, kwargs))
        return self._engine.run_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def over(self) -> None:
        """forward() is done."""
        self._found = None


def _named(args: tuple, kwargs: dict) -> tuple[str, str]:
    """Reason and text for a backward that is about to run."""
    if torch._C._functorch.maybe_current_level() is not None:
        return "func_transform", "differentiates a function (torch.func.grad, vjp, jacrev, hessian)"
    given = args[_ACCUMULATES] if len(args) > _ACCUMULATES else False
    if kwargs.get("accumulate_grad", given):
        return "outside_written", "runs a backward, which adds to .grad of tensors"
    return "export_failed", "differentiates something itself (torch.autograd.grad)"


@contextlib.contextmanager
def watched(found: Callable[[str, str], None]) -> Iterator[None]:
    """Context of a forward: a backward of this thread is handed to `found` before it runs.

    Args:
        found: Gets a reason and a text that goes on after "forward()"; it raises.
    """
    variable = torch.autograd.Variable
    engine = variable._execution_engine
    standing = variable._execution_engine = _Engine(engine, found)
    try:
        yield
    finally:
        standing.over()
        variable._execution_engine = engine


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Context of a trace.

    Raises:
        CaptureError: forward() runs a backward, whatever it makes of the exception.
    """
    errors: list[CaptureError] = []

    def found(reason: str, text: str) -> None:
        errors.append(CaptureError(reason, f"forward() {text}, which a graph does not do"))
        raise errors[0]

    with watched(found):
        try:
            yield
        finally:
            first = errors[0].with_traceback(None) if errors else None
            errors.clear()  # they hold frames, and so the module
    if first is not None:
        raise first
