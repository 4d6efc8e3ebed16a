"""`%load_ext gradd` in a notebook: what runs on the machine, and a model after a kernel restart.

    %gradd ps                                 the daemons and their sessions
    %gradd show [NAME]                        one session in full; this kernel's
    %gradd reattach NAME MODEL [OPTIMIZER]    takes a kept session over, by names of variables

All of it is asked of the daemon by its own command line, which answers in the middle of a step. The
results are shown as tables, and hold the daemon's numbers.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from gradd import errors
from gradd.html_tables import table
from gradd.memory.budget import amount
from gradd.session import daemon

_SECONDS = 30.0
_NONE_RUNS = 3  # the exit code
_USAGE = "usage: %gradd ps | show [NAME] | reattach NAME MODEL [OPTIMIZER]"


def _ask(*words: str) -> list[dict[str, Any]]:
    """What `gradd` prints as JSON, for each daemon.

    Raises:
        SessionError: What it says is wrong.
    """
    command = [daemon.find_binary(), *words, "--json", "--dir", str(daemon.directory())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == _NONE_RUNS:
        return []
    if done.returncode:
        raise errors.SessionError(done.stderr.strip().removeprefix("gradd: "))
    return [json.loads(line) for line in done.stdout.splitlines()]


def _per_cent(part: float) -> str:
    return f"{100 * part:.0f} %"


class Session(dict[str, Any]):
    """One session: a dict as `gradd show --json` has it, which a notebook shows as a table."""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The table's headings and texts."""
        kinds = [(k, n) for k, n in self["segment_kinds"].items() if n]
        held = ", ".join(f"{amount(n)} {k}" for k, n in kinds)
        rows = [
            ("session", f"{self['session']}, {self['client']}, pid {self['pid']}, {self['state']}"),
            ("model", f"{self['model'] or '-'}, {self['parameters']} parameters"),
            (
                "pace",
                f"{_per_cent(self['busy'])} of the engine, {self['steps_per_second']:.1f} steps/s, "
                f"{self['steps']} steps",
            ),
            ("memory", f"{amount(self['segment_bytes'])} shared: {held or 'nothing'}"),
            (
                "activations",
                f"{amount(self['arena_bytes'])} now, {amount(self['peak_arena_bytes'])} at most",
            ),
        ]
        rows += [
            (
                f"plan {plan['plan']}",
                f"{amount(plan['arena_bytes'])}, {plan['forwards']} forwards, {plan['backwards']} "
                f"backwards in {plan['ran_ms']:.0f} ms" + ", a self-check's" * plan["self_check"],
            )
            for plan in self.get("plan_list", ())
        ]
        return rows + [
            (f"failed {error['ago_ms'] / 1000:.0f} s ago", f"{error['verb']}: {error['what']}")
            for error in self.get("errors", ())
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{heading:<12} {text}" for heading, text in self.rows)

    def _repr_html_(self) -> str:
        return table(self.rows, heads=False)


class Sessions(tuple[Session, ...]):
    """Sessions of all daemons of the user, and the names that are kept.

    Attributes:
        kept: Kept sessions, as `gradd ps --json` has them.
    """

    kept: list[dict[str, Any]]

    @classmethod
    def now(cls) -> Sessions:
        """Those that there are."""
        replies = _ask("ps")
        found = cls(Session(row) for reply in replies for row in reply["sessions"])
        found.kept = [row for reply in replies for row in reply.get("kept", ())]
        return found

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table, with its headings."""
        heads = ("session", "pid", "model", "state", "memory", "activations", "engine", "steps/s")
        rows = [
            (
                f"{s['session']} {s['client']}" + " (this one)" * (s["pid"] == os.getpid()),
                str(s["pid"]),
                s["model"],
                s["state"],
                amount(s["segment_bytes"]),
                amount(s["arena_bytes"]),
                _per_cent(s["busy"]),
                f"{s['steps_per_second']:.1f}",
            )
            for s in self
        ]
        kept = [
            (
                f"kept: {k['name']}",
                str(k["pid"]),
                "",
                "in use" if k["in_use"] else "left",
                amount(k["bytes"]),
                "",
                "",
                "" if k["left_ms"] < 0 else f"{k['left_ms'] / 1000:.0f} s left",
            )
            for k in self.kept
        ]
        return [heads, *rows, *kept]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = (zip(row, widths, strict=True) for row in self.rows)
        return "\n".join("  ".join(f"{t:<{n}}" for t, n in line).rstrip() for line in lines)

    def _repr_html_(self) -> str:
        return table(self.rows)


def _show(words: list[str]) -> Session | None:
    name = words[0] if words else str(os.getpid())
    found = [Session(row) for reply in _ask("show", name) for row in reply["sessions"]]
    return found[0] if found else None


def _reattach(words: list[str], names: dict[str, Any]) -> Any:
    from gradd import keeping

    if not 2 <= len(words) <= 3:
        raise ValueError(_USAGE)
    for word in words[1:]:
        if word not in names:
            raise NameError(f"%gradd reattach: there is no variable '{word}'")
    return keeping.reattach(words[0], *(names[word] for word in words[1:]))


def run(line: str, names: dict[str, Any]) -> Any:
    """One line of the magic.

    Args:
        line: Without `%gradd`.
        names: Variables of the notebook.

    Returns:
        What the cell shows.

    Raises:
        ValueError: The line is no such command.
        SessionError: What the daemon says is wrong.
    """
    verb, *words = line.split() or [""]
    if verb == "ps" and not words:
        return Sessions.now()
    if verb == "show" and len(words) < 2:
        return _show(words)
    if verb == "reattach":
        return _reattach(words, names)
    raise ValueError(_USAGE)


def load(shell: Any) -> None:
    """Registers `%gradd` with IPython's shell."""
    shell.register_magic_function(lambda line: run(line, shell.user_ns), "line", "gradd")
