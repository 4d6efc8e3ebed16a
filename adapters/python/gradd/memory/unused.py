"""Returns memory freed by captures and self-checks to the system.

Both briefly work on large tensors. glibc keeps the memory that they free, several hundred MiB for a
model of 56 million parameters, although training does not need it. It hardly reuses this memory
either: tensors are aligned, so glibc looks for more room than the last tensor of the same size has
left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

_libc = ctypes.CDLL(None)
_malloc_trim = getattr(_libc, "malloc_trim", None)  # glibc alone has it
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt()
_MAPPED = 256 << 10  # bytes from which memory is the system's own; smaller pieces map slowly
_LARGEST = 32 << 20  # what glibc raises that to by itself when large memory is freed
_lock = threading.Lock()
_open = 0


def trim() -> None:
    """Returns free pages of the heap to the system; takes milliseconds. A no-op without glibc."""
    if _malloc_trim is not None:
        _malloc_trim(0)


@contextlib.contextmanager
def unkept() -> Iterator[None]:
    """In this context memory freed by large tensors goes back at once, in all threads.

    Nothing changes if the user has set such limits already, or without glibc.
    """
    global _open
    if _malloc_trim is None or _is_set():
        yield
        return
    with _lock:
        _open += 1
        if _open == 1:
            _libc.mallopt(_MMAP_THRESHOLD, _MAPPED)
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                # glibc does not say what they were; in a process with large tensors it is this.
                _libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
                _libc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        trim()


def _is_set() -> bool:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(os.environ.get(name) for name in names) or "glibc.malloc" in tunables
