"""Ctrl-C while the daemon works: deferred until the two sides agree again.

A KeyboardInterrupt may be raised between any two instructions. In the middle of a request that
would be harmful: the daemon continues to write into memory that the client believes to be free, or
a reply and its records get lost. So requests run inside `with deferred`: the first Ctrl-C is noted
and delivered when the request is over, usually milliseconds later. A daemon that takes longer than
GRACE_SECONDS, or a second Ctrl-C, makes `deliver_if_due()` deliver it in the middle of the wait;
the waiting request then gives up the connection.

A capture also defers it, in deferred_for(): C++ code below it ends the process when Python raises
an exception, and imports must not stop halfway. It is delivered between two parts of a capture, by
deliver(), and the third Ctrl-C is delivered at once in any case.

A call through Dynamo defers it while Dynamo or gradd itself is at work: C++ clears an exception in
a guard, and takes the guard for a failed one. It is delivered at the next graph, or when the call
is over; the second one interrupts the user's code below it at once.

Python runs signal handlers in the main thread only; in other threads all of this does nothing.
"""

from __future__ import annotations

import _signal
import contextlib
import logging
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

logger = logging.getLogger("gradd")
GRACE_SECONDS = 2.0
_FORCED = 3  # Ctrl-C during a capture
_OWN = os.path.dirname(__file__) + os.sep
_DYNAMO = os.sep + os.path.join("torch", "_dynamo", "")
_COMPILER = os.path.join(_DYNAMO, "convert_frame.py")
_SIGINT = int(signal.SIGINT)

_depth = 0  # of deferred in the main thread
_handler: Callable[[int, Any], Any] | None = None  # whose call is deferred
noted = 0  # Ctrl-C that wait
_first = 0.0
_work = ""  # the work in progress; "" within a request
_work_depth = 0  # of deferred, where it has begun
_traced = ""  # work that a call of Dynamo may have to do first


def _note(signum: int, frame: Any) -> None:
    global noted, _first
    noted += 1
    if noted == 1:
        _first = time.monotonic()
    work = ""
    if _work and _depth == _work_depth:
        work = _work
    elif _traced and _depth == 1:
        if compiles(frame):
            work = _traced
        elif noted > 1 and not _is_ours(frame):
            _deliver(_handler)  # type: ignore[arg-type]
    if work:
        if noted >= _FORCED:
            _deliver(_handler)  # type: ignore[arg-type]
        logger.warning("Ctrl-C waits until %s has ended; a third Ctrl-C does not", work)


def compiles(frame: types.FrameType | None) -> bool:
    """Whether Dynamo makes a graph in a frame."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


def _is_ours(frame: types.FrameType) -> bool:
    """Whether a frame, not one that it calls, is gradd's or Dynamo's; guards are strings."""
    name = frame.f_code.co_filename
    return name == "<string>" or name.startswith(_OWN) or _DYNAMO in name


class Deferred:
    """Ctrl-C is delivered at the end of the outermost `with deferred:` of the main thread."""

    def __init__(self, work: str = "") -> None:
        """Args:
        work: What Dynamo may have to do in it, for a message.
        """
        self._work = work
        self._before: list[str] = []

    def __enter__(self) -> None:
        global _depth, _handler, _traced
        if get_ident() != _main:
            return
        if _depth == 0:
            # Not by the functions of `signal`, which make enumerations of what they handle.
            handler = _signal.getsignal(_SIGINT)
            _handler = handler if callable(handler) else None  # ignored, or not ours to replace
            if _handler is not None:
                _signal.signal(_SIGINT, _note)
        _depth += 1
        if self._work:
            self._before.append(_traced)
            _traced = self._work

    def __exit__(self, *_: object) -> None:
        global _depth, _handler, _traced
        if get_ident() != _main:
            return
        if self._work:
            _traced = self._before.pop()
        _depth -= 1
        if _depth == 0 and _handler is not None:
            handler, _handler = _handler, None  # it may hold a model
            _signal.signal(_SIGINT, handler)
            if noted:
                _deliver(handler)


deferred = Deferred()


def _is_main() -> bool:
    return get_ident() == _main


def _after_fork() -> None:
    """The thread that forks is the main thread of its child."""
    global _main
    _main = get_ident()


_main = threading.main_thread().ident
os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def deferred_for(work: str) -> Iterator[None]:
    """deferred, around work that takes seconds; `work` names it in a message."""
    global _work, _work_depth
    with deferred:
        before = _work, _work_depth
        _work, _work_depth = work, _depth
        try:
            yield
        finally:
            _work, _work_depth = before


def deliver() -> None:
    """Delivers a Ctrl-C that waits; called where work of our own may end."""
    if _is_main() and _depth == 1 and _handler is signal.default_int_handler:
        _deliver(_handler)


def deliver_if_due() -> None:
    """Delivers a Ctrl-C that has waited long enough; called while waiting for the daemon.

    Only if that raises KeyboardInterrupt: a handler of the user's could call the model again.
    """
    if noted == 0 or not _is_main():
        return
    if _handler is not signal.default_int_handler:
        return
    if noted > 1 or time.monotonic() - _first > GRACE_SECONDS:
        _deliver(_handler)


def _deliver(handler: Callable[[int, Any], Any]) -> None:
    """Calls the handler that Ctrl-C was meant for; it usually raises KeyboardInterrupt."""
    global noted
    if noted:
        noted = 0
        handler(signal.SIGINT, None)
