"""Lines for people: a call that compiles says so, and a run says at its end what was in PyTorch.

A line about compiling, or a bar of tqdm for work in parts, is shown on a terminal or in a notebook
only, by the first process of a launcher. The lines at the end are warnings of the logger "gradd".
GRADD_QUIET=1 turns all of it off.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradd import options

logger = logging.getLogger("gradd")

_SOON = 0.4  # seconds: what is done by then needs no line
_LINES = 3  # at the end of a run
_active = threading.Lock()  # of the one that is shown


def _shown() -> bool:
    """Whether a person looks at stderr."""
    if options.get("GRADD_QUIET") or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    return "ipykernel" in sys.modules or bool(sys.stderr and sys.stderr.isatty())


def _print(text: str) -> None:
    """Prints a line above the progress bars of tqdm."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.write(text, file=sys.stderr)
    else:
        stream: TextIO = sys.stderr
        print(text, file=stream, flush=True)


class Compiling:
    """Around what may compile: a line if it takes long, and another one when it is done."""

    def __init__(self, title: str, why: str) -> None:
        """Args:
        title: Of what is compiled.
        why: It is.
        """
        self._title, self._why = title, why
        self._timer: threading.Timer | None = None
        self._said = False

    def __enter__(self) -> None:
        if _shown() and _active.acquire(blocking=False):  # not within another one
            self._start = time.perf_counter()
            self._timer = threading.Timer(_SOON, self._say)
            self._timer.daemon = True
            self._timer.start()

    def _say(self) -> None:
        self._said = True
        _print(f"gradd: compiling {self._title}, {self._why} ...")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is None:
            return
        self._timer.cancel()
        _active.release()
        if self._said:
            took = time.perf_counter() - self._start
            done = "done" if kind is None else f"ended by {kind.__name__}"
            _print(f"gradd: {self._title}: {done} after {took:.1f} s")


@contextlib.contextmanager
def bar(title: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Around work in parts: a bar, if tqdm is installed.

    Args:
        title: Of the work.
        total: How many parts it has; None = that is not known.

    Yields:
        Is called before each part, with its name.
    """
    if not _shown() or importlib.util.find_spec("tqdm") is None:
        yield lambda part: None
        return
    from tqdm import tqdm

    with tqdm(desc=f"gradd: {title}", total=total, leave=False) as shown:
        begun = False

        def begin(part: str) -> None:
            nonlocal begun
            shown.set_postfix_str(part, refresh=not begun)
            shown.update(int(begun))
            begun = True

        yield begin


@dataclass
class Tally:
    """What became of the calls of one wrapped module."""

    title: str  # name of its class
    calls: int = 0  # of the module
    counts: Counter[str] = field(default_factory=Counter)  # of what the daemon did: `forwards`
    in_torch: tuple[Counter[str], ...] = ()  # calls and parts of calls in PyTorch, by reason
    steps: int = 0  # of optimizers that have trained it without a call since the one before
    seen: weakref.WeakKeyDictionary[Any, int] = field(default_factory=weakref.WeakKeyDictionary)

    def note_step(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After a step of an optimizer, which may train the module."""
        before, self.seen[optimizer] = self.seen.get(optimizer, 0), self.calls
        if before != self.calls:
            return
        own = set(map(id, module.parameters()))
        given = (p for group in optimizer.param_groups for p in group["params"])
        self.steps += any(id(p) in own and p.grad is not None for p in given)


_tallies: list[Tally] = []
_living: weakref.WeakKeyDictionary[torch.nn.Module, Tally] = weakref.WeakKeyDictionary()


def tally(module: torch.nn.Module, counts: Counter[str], *in_torch: Counter[str]) -> Tally:
    """A tally that is looked at when the process ends. Counters stay those of the caller."""
    made = Tally(type(module).__name__, counts=counts, in_torch=in_torch)
    if not _tallies:
        register_optimizer_step_post_hook(_after_step)
    _tallies.append(made)
    _living[module] = made
    return made


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for module, known in list(_living.items()):
        known.note_step(module, optimizer)


def summary() -> list[str]:
    """A line for each class of modules of which something ran in PyTorch, or that had no call."""
    lines = []
    for title in dict.fromkeys(t.title for t in _tallies):
        found = [t for t in _tallies if t.title == title]
        calls = sum(t.calls for t in found)
        in_torch: Counter[str] = Counter()
        for each in found:
            in_torch.update(_largest(each.in_torch))
        forwards = sum(t.counts["forwards"] for t in found)
        steps = sum(t.steps for t in found)
        said = []
        if in_torch:
            reasons = ", ".join(f"{reason} {n}" for reason, n in in_torch.most_common())
            said.append(f"in PyTorch: {reasons} (docs/messages.md)")
        if steps:
            said.append(
                f"{_number(steps, 'step')} of an optimizer without a call of it before: if they "
                "trained it, that ran in PyTorch"
            )
        if not calls:
            lines.append(
                f"{title} was wrapped, but never called: what the script called of it ran in "
                "PyTorch"
            )
        elif said:
            lines.append(
                f"{title}: {_number(calls, 'call')}, {_number(forwards, 'graph')} run in the "
                f"daemon; {'; '.join(said)}"
            )
    return lines


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _largest(counters: tuple[Counter[str], ...]) -> Counter[str]:
    """A graph that runs in PyTorch as a whole is counted by both."""
    result: Counter[str] = Counter()
    for counter in counters:
        result |= counter
    return result


def _at_exit() -> None:
    if not _tallies or options.get("GRADD_QUIET"):
        return
    lines = summary()
    for line in lines[:_LINES]:
        logger.warning("%s", line)
    if len(lines) > _LINES:
        more = _number(len(lines) - _LINES, "other module")
        logger.warning("%s had calls in PyTorch, or no call at all", more)


atexit.register(_at_exit)
