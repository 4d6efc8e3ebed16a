"""Postpones full collections of cyclic garbage while much is made that stays.

A full collection looks at every object of the process, a million with torch and a library of
models. The first call of a module makes so many objects that Python would start several of them,
which takes a tenth of the call.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_NEVER = 1 << 30  # collections of younger objects until there is a full one
_lock = threading.Lock()
_open = 0
_before: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """In this context no full collection starts by itself, in any thread; younger ones do.

    If thresholds are set meanwhile, they stay.
    """
    global _open, _before
    with _lock:
        _open += 1
        if _open == 1:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], _NEVER)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open and gc.get_threshold() == (*_before[:2], _NEVER):
                gc.set_threshold(*_before)
