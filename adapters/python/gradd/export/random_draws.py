"""Random numbers that no graph can draw: those of Python, of numpy, and of a module's own.

torch's default generator is another matter: what forward() draws from it becomes operators of the
graph. Here it is only kept as it was.

The generators of the process are everybody's: a thread that augments images draws from them while a
forward is tried out. A state that goes on changing while the forward is over says nothing about it,
whose own draws are watched (guards/calls.py), and it stays: put back, it would give the thread its
numbers again.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Generator = tuple[str, Callable[[], Any], Callable[[Any], None]]  # name, read, write its state
_PAUSES = 30  # of a millisecond, for a thread to draw again
_IDLE = ("gradd-", "tqdm_")  # beginnings of names of threads that draw nothing


class Chance:
    """The states of all generators that forward() may draw from, as they are at construction."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._torch = torch.get_rng_state()
        self._others = [(*g, g[1]()) for g in (*_of_process(), *_of_module(module))]

    def drawn(self) -> str | None:
        """Name of a generator other than torch's whose state is not what it was, or None."""
        for name, read, _, state in self._others:
            if not _equal(read(), state) and not _others_draw(read):
                return name
        return None

    def restore(self) -> None:
        """Puts all states back."""
        torch.set_rng_state(self._torch)
        for _, read, write, state in self._others:
            if not _equal(read(), state) and not _others_draw(read):
                write(state)


def others_may_draw() -> bool:
    """True if there are threads which may draw from the generators of the process."""
    me = threading.current_thread()
    return any(t is not me and not t.name.startswith(_IDLE) for t in threading.enumerate())


def _others_draw(read: Callable[[], Any]) -> bool:
    """True if a state changes while this thread does nothing."""
    before = read()
    for _ in range(_PAUSES if others_may_draw() else 0):
        time.sleep(0.001)
        if not _equal(read(), before):
            return True
    return False


def _of_process() -> Iterator[_Generator]:
    yield "Python's random", random.getstate, random.setstate
    with contextlib.suppress(ImportError):
        import numpy

        yield "numpy.random", numpy.random.get_state, numpy.random.set_state


def _of_module(module: torch.nn.Module) -> Iterator[_Generator]:
    kinds: dict[type, Callable[[str, Any], _Generator]] = {random.Random: _of_python}
    with contextlib.suppress(ImportError):
        import numpy

        kinds[numpy.random.RandomState] = _of_numpy_state
        kinds[numpy.random.Generator] = _of_numpy
    for path, sub in module.named_modules():
        for name, value in sub.__dict__.items():
            for kind, make in kinds.items():
                if isinstance(value, kind):
                    yield make(f"the generator {path + '.' if path else ''}{name}", value)


def _of_python(name: str, generator: Any) -> _Generator:
    return name, generator.getstate, generator.setstate


def _of_numpy_state(name: str, generator: Any) -> _Generator:
    return name, generator.get_state, generator.set_state


def _of_numpy(name: str, generator: Any) -> _Generator:
    bits = generator.bit_generator
    return name, lambda: bits.state, lambda state: setattr(bits, "state", state)


def _equal(a: Any, b: Any) -> bool:
    """States are nested tuples and dictionaries with numpy arrays in them."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if hasattr(a, "tobytes"):
        return a.tobytes() == b.tobytes()
    return bool(a == b)
