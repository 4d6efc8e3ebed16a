"""Dynamo's counts and words: functions that it has traced, and why it could not trace others."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import torch.fx

from gradd import private
from gradd.graph.locations import is_users

_EXPLANATION, _CONTEXT = "Explanation: ", "context: "
_RAISED = "Observed exception"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SENTENCE = re.compile(r"\.(?= [A-Z]|$)")  # its end, which that of "e.g." is not
_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_FAILURES, _BREAKS = "unimplemented", "graph_break"  # tables of causes
# All that Dynamo says of a break where it goes on behind the statement, or in either branch.
_TERSE = ("step_unsupported", "generic_jump")
_known: dict[str, Counter[str]] = {_FAILURES: Counter(), _BREAKS: Counter()}  # asked for


class Frames(NamedTuple):
    """Functions that Dynamo has met, and those that it could trace (or a part of them)."""

    total: int
    ok: int

    @classmethod
    def now(cls) -> Frames:
        """Of the process."""
        found = private.counters["frames"]
        return tuple.__new__(cls, (found["total"], found["ok"]))  # without a frame of its own

    def failed(self, before: Frames) -> bool:
        """Whether Dynamo has failed at one since then, which runs in PyTorch."""
        return self.total - self.ok > before.total - before.ok


def cause() -> str:
    """Why Dynamo could not trace something since the last query, and where; "" = unknown."""
    found = _new()
    for table, known in _known.items():
        known.clear()
        known.update(private.counters[table])
    if not found:
        return ""
    places = [f"{file}:{line}" for file, line in _LINE.findall(found[0]) if is_users(file)]
    return words(found[0]) + (f" at {places[-1]}" if places else "")


def _new() -> list[str]:
    """Causes since the last query, the last one of each table first."""
    found: list[str] = []
    for table, known in _known.items():
        found += reversed(Counter(private.counters[table]) - known)
    return found


def words(text: str) -> str:
    """Dynamo's message about a break, in one line: what there is, and a sentence about it."""
    what, *more = text.splitlines() or [""]
    if what == _RAISED:  # its explanation is that it knows no handler
        raised = (line.partition(_CONTEXT)[2].strip() for line in more)
        return _ADDRESS.sub("", next(filter(None, raised), what))
    why = (_SENTENCE.split(line.partition(_EXPLANATION)[2])[0] for line in more)
    return _ADDRESS.sub("", f"{what}: {next(filter(None, why), '')}").strip(" :.")


class End(NamedTuple):
    """A graph break: "file:line" in the user's code, and Dynamo's words about it."""

    place: str
    why: str


def end_of(module: torch.fx.GraphModule) -> End | None:
    """The break behind a graph; None = there is none."""
    end: Any = module.compile_subgraph_reason
    if not end.graph_break:
        return None
    frames = [f for f in end.user_stack if is_users(f.filename)]
    why = next(iter(_new()), end.reason) if end.reason.startswith(_TERSE) else end.reason
    return End(f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?", words(why))
