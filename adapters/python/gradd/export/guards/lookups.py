"""Where Python looks for an attribute: part of reads.py, and the names that classes may get later.

`o.name` is answered by the class before the object: by a property of that name, by
`__getattribute__`, `__getattr__`, by `__get__` of what the class holds; a class asks its metaclass
in the same way, a module its own class. A name that was not there when it was looked up changes the
answer once somebody defines it. One place per class knows which names those are, and its test is
that nothing has been added to the class: the number of names, and the last of them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradd.export.guards import policy, tracing
from gradd.export.guards.images import is_a
from gradd.export.guards.slots import ABSENT, HEAP_TYPE, Slot, static, table_of

_IMMUTABLE_TYPE = 1 << 8
_ANSWERING = ("__getattribute__", "__getattr__")  # for whatever name
_STORING = ("__setattr__", "__delattr__")
_OF_DESCRIPTOR = ("__get__", "__set__", "__delete__")
_OF_CHECKS = ("__instancecheck__", "__subclasscheck__")
# What code in C asks an object of a Python class for, when it takes a number, an array or elements.
_CONVERSIONS = (
    *("__float__", "__index__", "__int__", "__complex__", "__bool__", "__len__", "__length_hint__"),
    *("__floor__", "__ceil__", "__trunc__", "__round__", "__abs__"),
    *("__iter__", "__next__", "__getitem__", "__contains__", "__fspath__", "__buffer__"),
    *("__array__", "__array_interface__", "__array_struct__", "__array_priority__"),
    *("__array_ufunc__", "__array_function__", "__torch_function__", "__dlpack__"),
)
_NAMES = frozenset({"__name__", "__qualname__"})  # of classes: kept in C


def is_fixed(cls: type) -> bool:
    """True for classes whose attributes nobody changes."""
    fixed = not cls.__flags__ & HEAP_TYPE or cls.__flags__ & _IMMUTABLE_TYPE
    return bool(fixed) or policy.is_standard(cls.__module__)


class Names(Slot):
    """Names that a class has not itself and was asked for.

    `owner` is the class, `key` the set of the names, `value` how many the class has and which is
    the last one: a new one is behind all others.
    """

    __slots__ = ("_before",)
    KIND = "names"

    def __init__(self, cls: type) -> None:
        super().__init__(cls, set(), None, cls.__qualname__)
        self._before = frozenset(table_of(cls))
        self.value = self.now()

    def ask(self, names: Iterable[str]) -> None:
        """Names that are looked up; the forward may have deleted them before."""
        self.key.update(names)
        self._before -= self.key - table_of(self.owner).keys()

    def now(self) -> Any:
        table = table_of(self.owner)
        return (len(table), next(reversed(table), None))

    def _new(self) -> set[str]:
        return (self.key & table_of(self.owner).keys()) - self._before

    def same(self) -> bool:
        return self.value == self.now() or not self._new()

    def put_back(self) -> None:
        for name in self._new():
            delattr(self.owner, name)

    def test(self, name: Callable[[Any], str]) -> str:
        """Nothing by itself: see test_of_all()."""
        return "True"

    def rebind(self) -> None:
        """Names that nobody asks for are there from now on."""
        if self.value != self.now():
            self.value = self.now()

    def change(self) -> str:
        return f"{self.label}.{', '.join(sorted(self._new()))} is defined"


def test_of_all(slots: Iterable[Slot], name: Callable[[Any], str]) -> str:
    """One expression for all places of this kind: loops in C cost a fifth of tests one by one."""
    found = [slot for slot in slots if is_a(slot, Names)]
    tables = name(tuple(table_of(slot.owner) for slot in found))
    counts, last = (name([slot.value[i] for slot in found]) for i in (0, 1))
    return (
        f"list(map(len, {tables})) == {counts} and "
        f"list(map(next, map(reversed, {tables}))) == {last}"
    )


class Lookups:
    """Lookups in classes, metaclasses and modules; everything else is in Reads."""

    slots: dict[tuple, Slot]

    def looked_up(self, cls: type, *names: str) -> None:
        """A class and its bases are asked for names."""
        for base in type.__dict__["__mro__"].__get__(cls):
            if not is_fixed(base) and base is not torch.Tensor:
                self._asked_of(base, names)

    def _asked_of(self, base: type, names: tuple[str, ...]) -> None:
        slot = self.slots.get(("names", id(base), None))
        if slot is None:
            slot = self.slots["names", id(base), None] = Names(base)
        slot.ask(names)

    def special(self, cls: type, *names: str) -> None:
        """The same for methods that Python itself calls: what they are counts, too."""
        if is_fixed(cls):
            return
        self.looked_up(cls, *names)
        for name in names:
            if is_a(static(cls, name), types.FunctionType):
                self.of_class(cls, name)

    def converted(self, values: Iterable[Any]) -> None:
        """Code in C gets these values and takes them for what they say they are."""
        for value in values:
            if not is_a(value, (torch.nn.Module, type)):
                self.special(type(value), *_CONVERSIONS)

    def defines(self, bases: Iterable[Any]) -> None:
        """A class with these bases is made."""
        for base in bases:
            if is_a(base, type):
                self.special(base, "__init_subclass__")
                self.special(type(base), "__prepare__", "__call__", "__new__", "__init__")
            else:
                self.special(type(base), "__mro_entries__")

    def descriptor(self, found: Any) -> None:
        """What a class holds is read through it: its own class may make it a descriptor."""
        kind = type(found)
        if not (is_fixed(kind) or is_a(found, torch.Tensor)):
            self.special(kind, *_OF_DESCRIPTOR)

    def of_object(self, kind: type, name: str) -> None:
        """An attribute of an object of this class is read, written or deleted."""
        self.looked_up(kind, name, *_ANSWERING)
        found = static(kind, name)
        if found is not ABSENT:
            self.descriptor(found)

    def stores(self, kind: type, name: str) -> None:
        """An attribute of such an object is written or deleted."""
        self.looked_up(kind, name)
        self.special(kind, *_STORING)

    def checked(self, cls: Any) -> None:
        """isinstance() and issubclass() ask the class of what they are given."""
        self.special(type(cls), *_OF_CHECKS)

    def _of_type(self, cls: type, name: str) -> None:
        if tracing.of_class(cls, name):
            self.asks_tracer(f"reads .{name} of a class of tensors")
        meta = type(cls)
        self.of_object(meta, name)
        if name == "__dict__":
            return
        if name in _NAMES and not is_fixed(cls):
            self.field(cls, name)
        found = static(cls, name)
        if found is ABSENT and meta is not type:
            self.of_class(meta, name)
            self.special(meta, *_ANSWERING)
        self.of_class(cls, name)
        if found is not ABSENT:
            self.descriptor(found)

    def _of_super(self, owner: Any, name: str) -> None:
        start, mro = owner.__thisclass__, owner.__self_class__.__mro__
        for base in mro[mro.index(start) + 1 :]:
            if name in base.__dict__:
                self.of_class(base, name)
                self.descriptor(base.__dict__[name])
                return
            if not is_fixed(base):
                self._asked_of(base, (name,))

    def _of_python_module(self, owner: types.ModuleType, name: str) -> None:
        """An attribute of a module: its dictionary, its class, or the __getattr__() in it."""
        if tracing.of_module(owner, name):
            self.asks_tracer(f"reads {owner.__name__}.{name}")
        kind, table = type(owner), owner.__dict__
        label = f"{table.get('__name__')}.{name}"
        if not policy.is_library_module(str(table.get("__name__"))):
            self.field(owner, "__class__")
        self.looked_up(kind, name, *_ANSWERING)
        if name in table:
            self.item(table, name, label, owner)
            return
        self.item(table, "__getattr__", f"{table.get('__name__')}.__getattr__", owner)
        if kind is types.ModuleType and "__getattr__" not in table:
            self.item(table, name, label, owner)
            return
        self.special(kind, *_ANSWERING)
        if hasattr(type(static(kind, name)), "__set__"):
            self.of_class(kind, name)
            self._told(owner, name)
            return
        self.of_class(kind, name)
        self.later(table, name, label, by=owner)  # it may be loaded by this read
