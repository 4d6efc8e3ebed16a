"""Spots, the places that a forward() reads: what stood there, how to look again, to put it back.

Each kind of spot knows its present value, whether that is still the same, and one Python expression
that tests it as fast as can be (mostly one lookup and one identity). A spot holds its owner, so
identities cannot be taken over by other objects.
"""

from __future__ import annotations

import array
import gc
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gradd.export.guards import images

ABSENT = images.ABSENT
HEAP_TYPE = 1 << 9  # a class that can be changed
_LITERALS = (str, int, bytes)
_WRITEABLE = 0x0400  # among the flags of a numpy array


def table_of(cls: type) -> dict:
    """The dictionary behind a class's read-only view."""
    return gc.get_referents(cls.__dict__)[0]


def static(cls: type, name: str) -> Any:
    """What a class has under a name, its bases included; no descriptor runs."""
    for base in type.__dict__["__mro__"].__get__(cls):
        found = base.__dict__.get(name, ABSENT)
        if found is not ABSENT:
            return found
    return ABSENT


def is_data(found: Any) -> bool:
    """True for what a class holds and asks before it looks into an object: it gets and sets.

    What only sets (a check of values) leaves the reading to the object's own dictionary.
    """
    kind = type(found)
    if static(kind, "__get__") is ABSENT:
        return False
    return static(kind, "__set__") is not ABSENT or static(kind, "__delete__") is not ABSENT


class Spot:
    """A place with a value that compares by images.alike().

    Attributes:
        owner: The object that holds the value.
        key: Where in it.
        value: What stood there at the first read.
        label: What the spot is called in messages.
        by: The object whose age says whether the spot was there before the call.
    """

    __slots__ = ("by", "key", "label", "owner", "value")
    KIND = ""

    def __init__(self, owner: Any, key: Any, value: Any, label: str, by: Any = None) -> None:
        self.owner, self.key, self.value, self.label = owner, key, value, label
        self.by = owner if by is None else by

    def now(self) -> Any:
        """The present value, or ABSENT."""
        raise NotImplementedError

    def put_back(self) -> None:
        """Makes the spot what it was."""
        raise NotImplementedError

    def same(self) -> bool:
        return images.alike(self.value, self.now())

    def test(self, name: Callable[[Any], str]) -> str:
        """An expression that is false, or raises, if something else stands there."""
        return f"{name(self)}.same()"

    def rebind(self) -> None:
        """Takes an equal value that is another object as the one to look for."""
        now = self.now()
        if now is not self.value:
            self.value = now

    def change(self) -> str:
        """What has happened, in words."""
        return f"{self.label}: {images.short(self.value)} -> {images.short(self.now())}"


class Item(Spot):
    """An entry of a dictionary, a list or an object's attributes."""

    __slots__ = ()
    KIND = "item"

    def now(self) -> Any:
        if isinstance(self.owner, dict):  # never by code of the user, nor __missing__()
            return dict.get(self.owner, self.key, ABSENT)
        try:
            return self.owner[self.key]
        except IndexError:
            return ABSENT

    def put_back(self) -> None:
        if self.value is not ABSENT:
            images.put_item(self.owner, self.key, self.value)
        elif not isinstance(self.owner, dict):
            del self.owner[self.key :]  # only what has been appended since reaches that far
        elif self.key in self.owner:
            del self.owner[self.key]

    def test(self, name: Callable[[Any], str]) -> str:
        key = repr(self.key) if type(self.key) in _LITERALS else name(self.key)
        if self.value is ABSENT and type(self.owner) is dict:
            return f"{key} not in {name(self.owner)}"
        if self.value is ABSENT and type(self.owner) is list and type(self.key) is int:
            return f"not -{name(self.owner)}.__len__() <= {key} < {name(self.owner)}.__len__()"
        if type(self.owner) in (dict, list):
            return f"{name(self.owner)}[{key}] is {name(self.value)}"
        return f"{name(self)}.now() is {name(self.value)}"


class Class(Spot):
    """An attribute of a class, found on it or on a base: its home."""

    __slots__ = ("home",)
    KIND = "class"

    def __init__(self, owner: type, key: str, value: Any, label: str, by: Any = None) -> None:
        super().__init__(owner, key, value, label, by)
        bases = type.__dict__["__mro__"].__get__(owner)
        self.home = next((base for base in bases if key in base.__dict__), None)

    def now(self) -> Any:
        return static(self.owner, self.key)

    def put_back(self) -> None:
        for base in type.__dict__["__mro__"].__get__(self.owner):
            if base is self.home:
                type.__setattr__(base, self.key, self.value)
                break
            if self.key in base.__dict__:  # it hides what was found
                type.__delattr__(base, self.key)

    def test(self, name: Callable[[Any], str]) -> str:
        """Looks where it was found; of bases before that Names know whether they have it."""
        for base in type.__dict__["__mro__"].__get__(self.owner):
            table = table_of(base)
            if self.key in table:
                if not base.__flags__ & HEAP_TYPE:
                    return "True"
                return f"{name(table)}[{self.key!r}] is {name(self.value)}"
        return super().test(name)


class Bases(Spot):
    """The bases of a class, in the order in which attributes are looked for."""

    __slots__ = ()
    KIND = "bases"

    def now(self) -> Any:
        return type.__dict__["__mro__"].__get__(self.owner)

    def put_back(self) -> None:
        self.owner.__bases__ = self.key

    def test(self, name: Callable[[Any], str]) -> str:
        return f"{name(self.owner)}.__mro__ is {name(self.value)}"

    def change(self) -> str:
        """Both by the classes' names."""
        before, now = (", ".join(c.__qualname__ for c in v) for v in (self.value, self.now()))
        return f"{self.label}: {before} -> {now}"


class Cell(Spot):
    """A closure cell."""

    __slots__ = ()
    KIND = "cell"

    def now(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:
            return ABSENT

    def put_back(self) -> None:
        if self.value is ABSENT:
            del self.owner.cell_contents
        else:
            self.owner.cell_contents = self.value

    def test(self, name: Callable[[Any], str]) -> str:
        if self.value is ABSENT:
            return super().test(name)
        return f"{name(self.owner)}.cell_contents is {name(self.value)}"


class Field(Spot):
    """An attribute that is kept in C: of a function, of an object with __slots__, of a tensor."""

    __slots__ = ()
    KIND = "field"

    def now(self) -> Any:
        return getattr(self.owner, self.key, ABSENT)

    def put_back(self) -> None:
        if self.value is ABSENT:
            delattr(self.owner, self.key)
        else:
            setattr(self.owner, self.key, self.value)

    def test(self, name: Callable[[Any], str]) -> str:
        if self.value is ABSENT or getattr(self.owner, self.key, ABSENT) is not self.value:
            return super().test(name)
        return f"{name(self.owner)}.{self.key} is {name(self.value)}"


class Entry(Spot):
    """A property of the tensor under a name in a table: the tensor may be exchanged."""

    __slots__ = ("field",)
    KIND = "entry"

    def now(self) -> Any:
        return getattr(self.owner.get(self.key), self.field, ABSENT)

    def put_back(self) -> None:
        setattr(self.owner[self.key], self.field, self.value)

    def test(self, name: Callable[[Any], str]) -> str:
        return f"{name(self.owner)}[{self.key!r}].{self.field} is {name(self.value)}"


class Answer(Spot):
    """What a harmless call says: a flag of torch, a context variable. `owner` is called."""

    __slots__ = ()
    KIND = "answer"

    def rebind(self) -> None:
        """Answers are compared by value anyway."""

    def now(self) -> Any:
        return self.owner()

    def put_back(self) -> None:
        """Such a change ends with the call, or is the caller's own."""

    def test(self, name: Callable[[Any], str]) -> str:
        constant = self.value is None or isinstance(self.value, (bool, torch.dtype))
        if constant or self.value is ABSENT:
            return f"{name(self.owner)}() is {name(self.value)}"
        if type(self.value) in (int, str):  # images.alike(), without a call
            kind, value = name(type(self.value)), name(self.value)
            return f"(type(a := {name(self.owner)}()) is {kind} and a == {value})"
        return f"{name(images.alike)}({name(self.owner)}(), {name(self.value)})"


class Locked(Answer):
    """Whether a lock is taken; `by` is the lock."""

    __slots__ = ()

    def put_back(self) -> None:
        if self.value:
            self.by.acquire(False)
        else:
            self.by.release()


class Contents(Spot):
    """All elements of a container; `value` is images.image() of it."""

    __slots__ = ()
    KIND = "contents"

    def now(self) -> Any:
        return self.owner

    def put_back(self) -> None:
        images.refill(self.owner, self.value)

    def same(self) -> bool:
        return images.contents_alike(self.owner, self.value)

    def test(self, name: Callable[[Any], str]) -> str:
        if not self.value[0]:
            return f"not {name(self.owner)}"
        if type(self.owner) is list and len(self.value[0]) < 9:
            owner = name(self.owner)
            parts = [f"{owner}[{i}] is {name(v)}" for i, v in enumerate(self.value[0])]
            return " and ".join([f"len({owner}) == {len(parts)}", *parts])
        test = _same_set if isinstance(self.owner, set) else _same_objects
        return f"{name(test)}({name(self.owner)}, {name(self.value)})"

    def rebind(self) -> None:
        if not _same_objects(self.owner, self.value):
            self.value = images.image(self.owner)

    def change(self) -> str:
        before = self.value[0] if len(self.value) == 1 else dict(zip(*self.value, strict=True))
        return f"{self.label}: {images.short(before)} -> {images.short(self.owner)}"


def _same_objects(container: Any, copy: tuple) -> bool:
    """Identities only: what fails here is compared by value afterwards."""
    if len(container) != len(copy[0]):
        return False
    if len(copy) == 2 and not all(map(operator.is_, container.values(), copy[1])):
        return False
    return all(map(operator.is_, container, copy[0]))


_same_set = images.contents_alike


class Member(Spot):
    """Whether a set has an element."""

    __slots__ = ()
    KIND = "member"

    def now(self) -> Any:
        return self.key in self.owner

    def put_back(self) -> None:
        (self.owner.add if self.value else self.owner.discard)(self.key)

    def test(self, name: Callable[[Any], str]) -> str:
        return f"{name(self.key)} {'in' if self.value else 'not in'} {name(self.owner)}"


class Bytes(Spot):
    """The bytes of a numpy array, a small tensor or a buffer, held by identity elsewhere."""

    __slots__ = ()
    KIND = "bytes"

    def now(self) -> Any:
        return raw(self.owner)

    def same(self) -> bool:
        return self.value == raw(self.owner)

    def put_back(self) -> None:
        _, _, content = self.value
        if issubclass(type(self.owner), (np.ndarray, np.void)):
            _overwrite(self.owner, content)
        elif issubclass(type(self.owner), torch.Tensor):
            found = _as_bytes(self.owner)
            found[...] = np.frombuffer(content, np.uint8).reshape(found.shape)
        elif issubclass(type(self.owner), bytearray):
            bytearray.__setitem__(self.owner, slice(None), content)  # it may have grown
        elif issubclass(type(self.owner), array.array):
            content = array.array(self.owner.typecode, content)
            array.array.__setitem__(self.owner, slice(None), content)
        else:
            memoryview(self.owner).cast("B")[:] = content

    def test(self, name: Callable[[Any], str]) -> str:
        return f"{name(raw)}({name(self.owner)}) == {name(self.value)}"

    def rebind(self) -> None:
        """The bytes are the same."""

    def change(self) -> str:
        return f"{self.label}: its contents"


def _overwrite(array: Any, content: bytes) -> None:
    """Fills an array or record, whatever its steps, also if it may be read only by now."""
    writeable = array.flags.writeable
    if not writeable:
        array.setflags(write=True)
    view = np.asarray(array)
    view[...] = np.frombuffer(content, view.dtype).reshape(view.shape)
    if not writeable:
        array.setflags(write=False)


def _as_bytes(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().flatten().view(torch.uint8).numpy()
    return value.view(np.ndarray).reshape(-1).view(np.uint8)


def raw(value: Any) -> tuple:
    """Form and bytes of an array, a tensor or a buffer."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return (value.dtype, tuple(value.shape), _as_bytes(value).tobytes())
    if issubclass(kind, np.ndarray):
        return (value.dtype.str, value.shape, np.ndarray.tobytes(value))
    if issubclass(kind, np.generic):
        return (value.dtype.str, (), value.tobytes())
    with memoryview(value) as memory:
        return (memory.format, memory.shape, memory.tobytes())


class Shape(Spot):
    """How a numpy array lies in its memory, which can be changed in place."""

    __slots__ = ()
    KIND = "shape"

    def now(self) -> Any:
        return layout_of(self.owner)

    def put_back(self) -> None:
        shape, dtype, strides, flags = self.value
        self.owner.dtype = dtype
        self.owner.shape = shape
        if self.owner.strides != strides:
            self.owner.strides = strides
        self.owner.setflags(write=bool(flags & _WRITEABLE))

    def test(self, name: Callable[[Any], str]) -> str:
        return f"{name(layout_of)}({name(self.owner)}) == {name(self.value)}"


def layout_of(array: np.ndarray) -> tuple:
    """Sizes, element type, strides and flags."""
    return (array.shape, array.dtype.str, array.strides, array.flags.num)
