"""Where Python looks for an attribute: part of reads.py, and the names that classes may get later.

`o.name` is answered by the class before the object: by a property of that name, by
`__getattribute__`, `__getattr__`, by `__get__` of what the class holds; a class asks its metaclass
in the same way, a module its own class. A name that was not there when it was looked up changes the
answer once somebody defines it. One spot per class knows which names those are, and its test is
that nothing has been added to the class: the number of names, and the last of them.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradd.export.guards import memory, policy, tracing
from gradd.export.guards.images import is_a
from gradd.export.guards.spots import ABSENT, HEAP_TYPE, Spot, is_data, static, table_of

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
_OF_KEYS = frozenset({"__hash__", "__eq__", "__index__"})
_INHERITED = frozenset({"__bases__", "__base__", "__mro__"})
_METHODS_IN_C = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    types.GetSetDescriptorType,
)
# What runs without a frame when it is called.
IN_C = (
    *(*_METHODS_IN_C, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial),
    *(operator.attrgetter, operator.itemgetter, operator.methodcaller, type(functools.cache(len))),
)


def is_fixed(cls: type) -> bool:
    """True for classes whose attributes nobody changes."""
    fixed = not cls.__flags__ & HEAP_TYPE or cls.__flags__ & _IMMUTABLE_TYPE
    return bool(fixed) or policy.is_standard(cls.__module__)


def holder(cls: type, name: str) -> tuple[type, Any]:
    """The class among a class and its bases that has a name, and what it has."""
    for base in type.__dict__["__mro__"].__get__(cls):
        if name in base.__dict__:
            return base, base.__dict__[name]
    return cls, ABSENT


def borrowed(cls: type, name: str) -> Any:
    """Code in C that a user's class has under the name of a special method, or ABSENT.

    `__getattr__ = dict.get` runs without a frame. What a class written in C has itself is no such.
    """
    base, found = holder(cls, name)
    if is_fixed(base) or policy.is_library_module(base.__module__):
        return ABSENT
    inner = found.__func__ if is_a(found, (staticmethod, classmethod)) else found
    if not is_a(inner, (type, *IN_C)) or getattr(inner, "__objclass__", None) in (base, object):
        return ABSENT
    return found


class Names(Spot):
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


def test_of_all(spots: Iterable[Spot], name: Callable[[Any], str]) -> str:
    """One expression for all spots of this kind: loops in C cost a fifth of tests one by one."""
    found = [spot for spot in spots if is_a(spot, Names)]
    tables = name(tuple(table_of(spot.owner) for spot in found))
    counts, last = (name([spot.value[i] for spot in found]) for i in (0, 1))
    return (
        f"list(map(len, {tables})) == {counts} and "
        f"list(map(next, map(reversed, {tables}))) == {last}"
    )


class Lookups:
    """Lookups in classes, metaclasses and modules; everything else is in Reads.

    Attributes:
        call: Takes a function and its arguments as a call that is about to be made.
    """

    spots: dict[tuple, Spot]
    call: Callable[[Any, list], None]
    _hidden: set[tuple[int, str]]

    def hidden_call(self, owner: Any, name: str, *args: Any) -> None:
        """Python calls a special method of an object, of which no frame shows anything."""
        kind, place = type(owner), (id(owner), name)
        found = borrowed(kind, name)
        if found is ABSENT or place in self._hidden:  # which asks for others itself
            return
        self.of_class(kind, name)
        self._hidden.add(place)
        if is_a(found, staticmethod):
            self.call(found.__func__, [*args])
        elif is_a(found, classmethod):
            self.call(found.__func__, [kind, *args])
        elif is_a(found, _METHODS_IN_C):
            self.call(found, [owner, *args])
        else:  # nothing binds it to the object
            self.call(found, [*args])
        self._hidden.discard(place)

    def looked_up(self, cls: type, *names: str) -> None:
        """A class and its bases are asked for names."""
        for base in type.__dict__["__mro__"].__get__(cls):
            if not is_fixed(base) and base is not torch.Tensor:
                self._asked_of(base, names)

    def _asked_of(self, base: type, names: tuple[str, ...]) -> None:
        spot = self.spots.get(("names", id(base), None))
        if spot is None:
            spot = self.spots["names", id(base), None] = Names(base)
        spot.ask(names)

    def made_by(self, cls: type, args: list) -> None:
        """A user's class is called: its metaclass, or what makes the object, may be code in C."""
        self.hidden_call(cls, "__call__", *args)
        for name, before in (("__new__", [cls]), ("__init__", [])):
            found = borrowed(cls, name)
            if found is not ABSENT:
                self.call(getattr(found, "__func__", found), [*before, *args])

    def of_strange(self, value: Any, names: Iterable[str]) -> None:
        """Methods in C of a class that nobody knows: lengths are asked at every call.

        Which of several methods Python asks for is not known here; that of a key is none.
        """
        if not policy.is_strange(type(value)) or memory.is_memory(value):
            return
        kind, keyed = type(value), "__hash__" in names
        for name in names:
            base, found = holder(kind, name)
            in_c = is_a(found, _METHODS_IN_C) and found.__objclass__ is base is not object
            if not in_c or keyed and name in _OF_KEYS or not policy.is_strange(base):
                continue
            if name not in ("__len__", "__bool__"):
                self.blank(f"asks a {kind.__module__}.{kind.__qualname__} for {name}()", value)
            else:
                label = f"{kind.__qualname__}.{name}()"
                self.answer(functools.partial(found, value), label, by=value)

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
                if not is_fixed(type(value)):
                    for name in _CONVERSIONS:
                        self.hidden_call(value, name)

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

    def set_through(self, owner: Any, name: str, value: Any) -> None:
        """An attribute is written, or deleted without a value, by code in C."""
        if value is ABSENT:
            self.hidden_call(owner, "__delattr__", name)
        else:
            self.hidden_call(owner, "__setattr__", name, value)
        found = static(type(owner), name)
        values = [] if value is ABSENT else [value]
        if is_a(found, property):
            setter = found.fset if values else found.fdel
            if setter is not None and not hasattr(setter, "__code__"):
                self.call(setter, [owner, *values])
        elif found is not ABSENT:
            self.hidden_call(found, "__set__" if values else "__delete__", owner, *values)

    def through(self, found: Any, owner: Any, name: str) -> None:
        """super() asks what a class holds for the attribute of an object."""
        if is_a(found, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            self.answer(functools.partial(found.__get__, owner), f"super().{name}", by=owner)
        elif is_a(found, property):
            self.getter(found, owner)
        else:
            self.got(found, owner, type(owner))

    def getter(self, found: property, owner: Any) -> bool:
        """The function of a property is called; False if it is one of Python."""
        if hasattr(found.fget, "__code__"):
            return False
        self.call(found.fget, [owner])
        return True

    def got(self, found: Any, owner: Any, cls: type) -> None:
        """What a class holds under a name is asked for the attribute of an object."""
        if not is_a(found, (types.FunctionType, torch.Tensor)):
            self.hidden_call(found, "__get__", owner, cls)

    def checked(self, cls: Any) -> None:
        """isinstance() and issubclass() ask the class of what they are given."""
        self.special(type(cls), *_OF_CHECKS)
        for name in _OF_CHECKS:
            self.hidden_call(cls, name)

    def _of_type(self, cls: type, name: str) -> None:
        if tracing.of_class(cls, name):
            self.asks_tracer(f"reads .{name} of a class of tensors")
        meta = type(cls)
        self.of_object(meta, name)
        if name == "__dict__":
            return
        if name in _NAMES and not is_fixed(cls):
            self.field(cls, name)
        if name in _INHERITED:
            self.bases(cls)
        found = static(cls, name)
        of_meta = static(meta, name)
        if meta is not type and (found is ABSENT or is_data(of_meta)):
            self.of_class(meta, name)
            self.special(meta, *_ANSWERING)
            if is_a(of_meta, property):
                self._computed(cls, name, of_meta)
            elif of_meta is not ABSENT:
                self.got(of_meta, cls, meta)
            elif found is ABSENT:
                self.hidden_call(cls, "__getattr__", name)
        self.of_class(cls, name)
        if found is not ABSENT:
            self.descriptor(found)
            self.got(found, None, cls)

    def _of_super(self, owner: Any, name: str) -> None:
        start, mro = owner.__thisclass__, owner.__self_class__.__mro__
        for base in mro[mro.index(start) + 1 :]:
            if name in base.__dict__:
                found = base.__dict__[name]
                self.of_class(base, name)
                self.descriptor(found)
                self.through(found, owner.__self__, name)
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
        if is_a(table.get("__getattr__"), IN_C) and static(kind, name) is ABSENT:
            self.call(table["__getattr__"], [name])
        if kind is types.ModuleType and "__getattr__" not in table:
            self.item(table, name, label, owner)
            return
        self.special(kind, *_ANSWERING)
        if is_data(static(kind, name)):
            self.of_class(kind, name)
            self._told(owner, name)
            return
        self.hidden_call(owner, "__getattr__", name)
        self.of_class(kind, name)
        self.later(table, name, label, by=owner)  # it may be loaded by this read
