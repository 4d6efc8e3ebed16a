"""Dynamo's counts: functions that it has traced, and reasons why it could not trace others."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from gradd import private

_EXPLANATION = "Explanation: "
_known: Counter[str] = Counter()  # causes that have been asked for


class Frames(NamedTuple):
    """Functions that Dynamo has met, and those that it could trace (or a part of them)."""

    total: int
    ok: int

    @classmethod
    def now(cls) -> Frames:
        """Of the process."""
        found = private.counters["frames"]
        return cls(found["total"], found["ok"])

    def failed(self, before: Frames) -> bool:
        """Whether Dynamo has failed at one since then, which runs in PyTorch."""
        return self.total - self.ok > before.total - before.ok


def cause() -> str:
    """Why Dynamo could not trace something since the last query; "" = unknown."""
    now = private.counters["unimplemented"]
    found = Counter(now) - _known
    _known.clear()
    _known.update(now)
    if not found:
        return ""
    what, *more = next(reversed(found)).splitlines()
    why = (line.partition(_EXPLANATION)[2] for line in more)
    return f"{what}: {next(filter(None, why), '')}".strip(" :.")
