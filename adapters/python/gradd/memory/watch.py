"""Detects possible writes to parameters that leave no trace in torch's version counters.

`p.data`, `p.numpy()`, `p.data_ptr()`, `p.untyped_storage()` and DLPack give memory away, and no
version counter records writes through them. This module detects their use on memory of parameters,
whatever object holds it and through whatever view: it replaces the attributes of torch.Tensor by
descriptors that note the address and continue. Read from the class, they return the original
attribute, so that torch's own machinery (overrides, tracers, compilers) sees no difference.

This module compares nothing. A noted access means that the drawn fingerprint of the parameters,
which detects writes of all elements, is not enough: the sum of all bytes must be compared, see
parameter_changes.py. An alias that lives on (a list of `.data`, an array) is an access in every
step.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradd import private
from gradd.memory.tensor_classes import is_plain

NAMES = ("data", "numpy", "data_ptr", "untyped_storage", "__dlpack__")
_original: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in NAMES}
_own = {name for name in NAMES if name in torch.Tensor.__dict__}  # the rest is inherited
_PATIENCE = 6  # forwards
# For gradd's own calls, which are not noted.
data_ptr = torch.Tensor.__base__.data_ptr  # type: ignore[union-attr]
untyped_storage = torch.Tensor.__base__.untyped_storage  # type: ignore[union-attr]
_lock = threading.Lock()
_ranges: dict[int, int] = {}  # memory of parameters: begin and end
_spans: tuple[tuple[int, int], ...] = ()  # the same, for readers without the lock
_low, _high = 1, 0  # of all of them
_mine = threading.local()
on_class = torch.Tensor.__dict__.get
found = list(map(on_class, NAMES))  # there when install() was called; others are a reason to do it


class Accesses:
    """Counts accesses; one for the process.

    Attributes:
        count: Another number after every noted access.
        given: Addresses of the storages that were accessed and of which an alias may still live.
        noted: The same, until session/bases.py has looked at one.
        quiet: There were none for a while, so that none are expected.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.count = next(self._numbers)
        self.given: set[int] = set()
        self.noted: set[int] = set()
        self.quiet = False
        self._seen = 0
        self._patience = _PATIENCE

    def are_expected(self) -> bool:
        """Whether there were some lately, so that there will be more; asked once per forward."""
        if self.count != self._seen:
            self._patience = _PATIENCE
        self._seen = self.count
        self._patience = max(self._patience - 1, 0)
        self.quiet = self._patience == 0
        return not self.quiet

    def note(self, tensor: torch.Tensor) -> None:
        """Notes an access if the tensor lies in memory of parameters."""
        try:
            address = data_ptr(tensor)
        except RuntimeError:  # it has no memory: functional, batched
            return
        if not _low <= address < _high or getattr(_mine, "depth", 0):
            return
        for begin, end in _spans:
            if begin <= address < end:
                place = untyped_storage(tensor).data_ptr()
                self.given.add(place)
                self.noted.add(place)
                self.touch()
                return

    def touch(self) -> None:
        """Memory of parameters may be written from now on."""
        # Another number whatever threads do: of two additions at once one might be lost.
        self.count = next(self._numbers)
        self.quiet = False

    def expect(self) -> None:
        """A new model is trained, whose training loop is not known yet."""
        self._patience = _PATIENCE
        self.quiet = False

    def settle(self, tensors: Iterable[torch.Tensor]) -> bool:
        """A forward begins. True if an alias of one of these parameters lives that was noted."""
        if not self.given:
            return False
        aliased = [self.is_given(t) for t in tensors]
        return any(aliased)

    def is_given(self, tensor: torch.Tensor) -> bool:
        """Whether an alias of its memory lives that was noted.

        A tensor that shares its storage with another one looks like an alias, which costs time and
        nothing else.
        """
        address = data_ptr(tensor)
        if address not in self.given:
            return False
        if uses(tensor) > _ALONE or _holders(tensor) > _UNHELD:
            return True
        self.given.discard(address)
        return False


def address(tensor: torch.Tensor) -> int:
    """Where the structure of a tensor's storage lies; those that share memory share it."""
    return StorageWeakRef(untyped_storage(tensor)).cdata


def uses(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and storages hold the memory of this one."""
    return private.storage_users(address(tensor))


def _holders(tensor: torch.Tensor) -> int:
    """How many hold the storage as an object of Python, which uses() counts once."""
    return sys.getrefcount(untyped_storage(tensor))


_ALONE = uses(torch.empty(1, device="cpu"))
_UNHELD = _holders(torch.empty(1, device="cpu"))
accesses = Accesses()


class Watched:
    """In place of an attribute of torch.Tensor. See the top of this file."""

    def __init__(self, original: Any) -> None:
        self.original = original
        self.get = original.__get__

    def __get__(self, tensor: torch.Tensor | None, kind: type | None = None) -> Any:
        if tensor is None:
            return self.original
        if is_plain(type(tensor)):
            accesses.note(tensor)
        return self.get(tensor, kind)


class _WatchedData(Watched):
    """One that can be assigned: the memory that was there is not written."""

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        self.original.__set__(tensor, value)

    def __delete__(self, tensor: torch.Tensor) -> None:
        self.original.__delete__(tensor)


def add(begin: int, size: int) -> None:
    """From now on accesses to this memory are noted."""
    with _lock:
        _ranges[begin] = begin + size
        _span()
    install()


def install() -> None:
    """Watches the attributes, including those that other code has replaced and restored.

    Such code restores the value that it read from the class: the attribute without its watch.
    """
    with _lock:
        for name in NAMES if _ranges else ():
            now = torch.Tensor.__dict__.get(name, None if name in _own else _original[name])
            if now is _original[name]:
                kind = _WatchedData if name == "data" else Watched
                setattr(torch.Tensor, name, kind(_original[name]))
                accesses.touch()  # some accesses may have gone unnoticed
        found[:] = map(on_class, NAMES)


def remove(begin: int) -> None:
    """The memory is gone; with the last of it torch.Tensor is as it was."""
    with _lock:
        end = _ranges.pop(begin, None)
        known = end is not None
        if known:
            gone = {address for address in accesses.given.copy() if begin <= address < end}
            accesses.given -= gone
            accesses.noted = {address for address in accesses.noted if not begin <= address < end}
        _span()
        for name in NAMES if known and not _ranges else ():
            if not isinstance(torch.Tensor.__dict__.get(name), Watched):
                continue  # other code has replaced it since
            if name in _own:
                setattr(torch.Tensor, name, _original[name])
            else:
                delattr(torch.Tensor, name)
        found[:] = map(on_class, NAMES)


def _span() -> None:
    global _low, _high, _spans
    _spans = tuple(_ranges.items())
    _low, _high = min(_ranges, default=1), max(_ranges.values(), default=0)


class _Ours:
    """A context in which this thread's accesses are gradd's own."""

    def __enter__(self) -> None:
        _mine.depth = getattr(_mine, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _mine.depth -= 1


ours = _Ours()
