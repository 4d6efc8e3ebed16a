"""How long a run waits for memory that other sessions have."""

from __future__ import annotations

import math
import re
from functools import cache

from gradd import options

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d*)?)\s*([smhd]?)", re.ASCII)
_FOR_EVER_MS = 2**63 - 1
_said: float | None = None  # seconds, by wait_for_memory()


def seconds_of(duration: str | float, name: str = "keep_alive") -> float:
    """Seconds of a duration: a number, or text such as "90s", "10m", "2h", "1d"; -1: for ever.

    Args:
        duration: The number or text.
        name: Of what it was given for, for the message.

    Raises:
        ValueError: It is none.
    """
    if isinstance(duration, (int, float)) and not isinstance(duration, bool):
        if 0 <= duration < math.inf or duration == -1:
            return float(duration)
    elif isinstance(duration, str):
        if duration.strip() == "-1":
            return -1.0
        found = _DURATION.fullmatch(duration.strip())
        if found:
            return float(found[1]) * _UNITS[found[2]]
    raise ValueError(
        f"{name}={duration!r}: expected seconds, a text such as '90s', '10m' or '2h', or -1, "
        "which is for ever"
    )


def wait_for_memory(duration: str | float | None = "60s") -> None:
    """Sets how long a forward or backward of this process waits for memory of other sessions.

    One daemon serves all processes of a user, so a run may find no room although it would if others
    were idle. It then waits until they have given theirs back; a warning says behind which session,
    as does `gradd ps`. A run that would not fit alone raises at once, whatever was set.

    Args:
        duration: Seconds, or text such as "90s", "10m"; 0: not at all; -1: for ever. None: what
            GRADD_WAIT_FOR_MEMORY says, else the daemon's own (`gradd serve --wait`, 60 s).

    Raises:
        ValueError: It is no duration.
    """
    global _said
    _said = None if duration is None else seconds_of(duration, "wait_for_memory()")
    wait_ms.cache_clear()


@cache
def wait_ms() -> int | None:
    """Milliseconds, as the field `wait` of a request; None: the daemon decides.

    Looked up once: each request asks.

    Raises:
        ValueError: GRADD_WAIT_FOR_MEMORY is no duration.
    """
    seconds = _by_environment() if _said is None else _said
    if seconds is None:
        return None
    return _FOR_EVER_MS if seconds < 0 else min(int(seconds * 1000), _FOR_EVER_MS)


@cache
def _by_environment() -> float | None:
    text = options.get("GRADD_WAIT_FOR_MEMORY")
    return None if text is None else seconds_of(str(text), "GRADD_WAIT_FOR_MEMORY")
