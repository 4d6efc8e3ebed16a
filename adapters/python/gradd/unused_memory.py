"""Memory that capture and self-check have freed goes back to the system.

Both work on large tensors for a moment. glibc keeps what they free for later, several hundred MiB
for a model of 56 million parameters, which nobody needs once training runs.
"""

from __future__ import annotations

import ctypes

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it


def trim() -> None:
    """Gives free pages of the heap back; takes milliseconds. Does nothing without glibc."""
    if _malloc_trim is not None:
        _malloc_trim(0)
