"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 60.0  # a busy machine may need some of them


def until(true: Callable[[], bool], what: str) -> None:
    """Waits until `true()`; `what` is the text of the failure."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
