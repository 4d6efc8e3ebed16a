"""Ctrl-C while the daemon works: held back until the two sides agree again.

A KeyboardInterrupt may be raised between any two instructions. In the middle of a request that
would be harmful: the daemon goes on writing into memory that the client believes to be free, or a
reply and what is noted about it get lost. So requests run inside `held()`: the first Ctrl-C is
noted and delivered when the request is over, usually milliseconds later. A daemon that takes longer
than GRACE_SECONDS, or a second Ctrl-C, makes `deliver_if_due()` deliver it in the middle of the
wait; whoever waits then gives the connection up.

A capture holds it back as well, in held_for(): below it lies code in C++ that ends the process when
Python raises something, and imports that must not stop halfway. It is delivered between two parts
of a capture, by deliver(), and the third Ctrl-C is delivered at once, come what may.

Signal handlers of Python run in the main thread only; in other threads all of this does nothing.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("gradd")
GRACE_SECONDS = 2.0
_FORCED = 3  # Ctrl-C during a capture

_depth = 0  # of held() in the main thread
_handler: Callable[[int, Any], Any] | None = None  # whose call is held back
_noted = 0
_first = 0.0
_work = ""  # what is in progress; "" within a request


def _note(signum: int, frame: Any) -> None:
    global _noted, _first
    _noted += 1
    if _noted == 1:
        _first = time.monotonic()
    if _work and _depth == 1:
        if _noted >= _FORCED:
            _deliver(_handler)  # type: ignore[arg-type]
        logger.warning("Ctrl-C waits for %s; the third one does not", _work)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Ctrl-C is delivered at the end of the outermost block of the main thread."""
    global _depth, _handler
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _depth == 0:
        handler = signal.getsignal(signal.SIGINT)
        _handler = handler if callable(handler) else None  # ignored, or not ours to replace
        if _handler is not None:
            signal.signal(signal.SIGINT, _note)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0 and _handler is not None:
            handler, _handler = _handler, None  # it may hold a model
            signal.signal(signal.SIGINT, handler)
            _deliver(handler)


@contextlib.contextmanager
def held_for(work: str) -> Iterator[None]:
    """held(), around work that takes seconds; `work` names it in a message."""
    global _work
    with held():
        before, _work = _work, work
        try:
            yield
        finally:
            _work = before


def deliver() -> None:
    """Delivers a Ctrl-C that waits; called where work of our own may end."""
    main = threading.current_thread() is threading.main_thread()
    if main and _depth == 1 and _handler is signal.default_int_handler:
        _deliver(_handler)


def deliver_if_due() -> None:
    """Delivers a Ctrl-C that has waited long enough; called while waiting for the daemon.

    Only if that raises KeyboardInterrupt: a handler of the user's could call the model again.
    """
    if _noted == 0 or threading.current_thread() is not threading.main_thread():
        return
    if _handler is not signal.default_int_handler:
        return
    if _noted > 1 or time.monotonic() - _first > GRACE_SECONDS:
        _deliver(_handler)


def _deliver(handler: Callable[[int, Any], Any]) -> None:
    """Calls the handler that Ctrl-C was meant for; it usually raises KeyboardInterrupt."""
    global _noted
    if _noted:
        _noted = 0
        handler(signal.SIGINT, None)
