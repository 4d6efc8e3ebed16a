"""What code in C does with the values that it is handed: part of reads.py.

use() is for what looks at a value alone (a loop, an operator, a length), whole() for what goes
through all that it holds (a comparison, a text, an encoder).
"""

from __future__ import annotations

import collections
import decimal
import functools
import gc
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from gradd.export.guards import images, memory, policy
from gradd.export.guards.arguments import FORM
from gradd.export.guards.images import is_a
from gradd.export.guards.spots import ABSENT, Bytes, Contents, Shape, Spot, static
from gradd.export.guards.tensors import Tensors

_LARGE = 100_000  # elements of a container that are compared at every call
VIEWS = tuple(type(getattr({}, n)()) for n in ("keys", "values", "items"))
SIMPLE = (*images.PLAIN, float)  # answers that compare by value
STORAGE_KINDS = (torch.UntypedStorage, torch.TypedStorage)
WHOLE = "*"  # in the place of a name: all attributes
_LISTED = "of which it takes the values; use torch.stack()"
_NOTHING = frozenset({*SIMPLE, complex, type, types.FunctionType, types.ModuleType})


def own_dict(value: Any) -> dict | None:
    """The instance dictionary of an object."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if is_a(found, dict) else None


def _rules() -> tuple:
    """What the arithmetic of decimal numbers depends on."""
    context = decimal.getcontext()
    return (context.prec, context.rounding, context.Emin, context.Emax, context.clamp)


class Taken:
    """Values that are taken as they are; everything else is in Reads."""

    spots: dict[tuple, Spot]
    tensors: Tensors
    skipped: set[int]
    arrays_taken: set[int]
    whole_ones: set[int]
    where: str

    def contents(self, container: Any) -> None:
        """All elements of a container, and of the containers in it."""
        if id(container) in self._tree_dicts:
            self.of_tree.add((id(container), WHOLE))
        if ("contents", id(container), None) in self.spots or id(container) in self.skipped:
            return
        if len(container) > _LARGE:
            self.blank(f"reads all {len(container)} elements of an outside container", container)
            return
        label = f"a {type(container).__name__} ({self.where})"
        self._add(Contents(container, None, images.image(container), label, self.by(container)))
        if is_a(container, collections.defaultdict):
            self.field(container, "default_factory")
        for value in list(container.values() if is_a(container, dict) else container):
            if is_a(value, (tuple, np.ndarray, *images.CONTAINERS)):
                self.use(value)
            elif is_a(value, torch.Tensor):
                self.tensors.note(value)

    def by(self, value: Any) -> Any:
        return self._owners.get(id(value), value)

    def array(self, array: Any, taken: bool = True) -> None:
        """The contents of a numpy array or record; not `taken`: as the memory of a tensor."""
        if taken:
            self.arrays_taken.add(id(array))
        self._current(array, "numpy array")
        if ("bytes", id(array), None) in self.spots:
            return
        if array.dtype.hasobject:
            self.blank("reads a numpy array of objects", array)
            return
        self._bytes(array, f"a numpy array of shape {list(array.shape)}")
        if is_a(array, np.ma.MaskedArray):
            self.array(array.mask)
            self.answer(functools.partial(getattr, array, "fill_value"), "fill_value", by=array)

    def _bytes(self, owner: Any, label: str) -> None:
        spot = Bytes(owner, None, None, label)
        spot.value = spot.now()
        self._add(spot)

    def _current(self, owner: Any, label: str) -> None:
        """Memory is read that an operator has written: a trace would find what was there before.

        What that was is known to the tensor alone, so no spot is made of the memory's owner.
        """
        for tensor in self.tensors.overwritten.values():
            if memory.shares(tensor, owner):
                self.effect(f"writes to a tensor and reads its memory through a {label}")

    def memory(self, value: Any) -> None:
        """What a buffer of C holds."""
        self._current(value, type(value).__qualname__)
        if ("bytes", id(value), None) in self.spots:
            return
        name = type(value).__qualname__
        size = memory.size_of(value)
        if size is None or size > memory.WATCHED:
            self.blank(f"reads the memory of a {name}", value)
        else:
            self._bytes(value, f"a {name}")

    def _of_array(self, array: np.ndarray, name: str) -> None:
        found = static(type(array), name)
        if name in memory.EXPOSING or type(found) is property:
            self.array(array)
        elif name in memory.FORM and ("shape", id(array), None) not in self.spots:
            spot = Shape(array, None, None, f"the form of a numpy array ({self.where})")
            spot.value = spot.now()
            self._add(spot)

    def use(self, value: Any, depth: int = 4) -> None:
        """A value is taken as it is: by an operator, a loop, or a function in C."""
        if is_a(value, images.CONTAINERS):
            self.contents(value)
        elif is_a(value, (tuple, frozenset)) and depth:
            for element in value:
                self.use(element, depth - 1)
        elif is_a(value, torch.Tensor):
            self.tensors.note(value)
            self._of_foreign(value, FORM)
        elif is_a(value, (np.ndarray, np.void)):
            self.array(value)
        elif is_a(value, np.flatiter):
            self.array(value.base)
        elif is_a(value, (*VIEWS, types.MappingProxyType)):
            self.use(gc.get_referents(value)[0])
        elif type(value) is decimal.Decimal:
            self.answer(_rules, "the rules of decimal numbers")
        elif is_a(value, functools.partial):
            for name in ("func", "args", "keywords"):  # __setstate__() may change them
                self.field(value, name)
            self.use(value.args)
            self.contents(value.keywords)
        elif is_a(value, STORAGE_KINDS):
            self.blank("reads a storage of a tensor", value)
        elif is_a(value, torch.Generator):
            self.drawn("draws from a torch.Generator")
        elif static(type(value), "__next__") is not ABSENT:
            if not is_a(value, (enumerate, zip, map, filter)) or gc.is_tracked(value):
                self.blank(f"takes elements from an outside {type(value).__name__}", value)
        elif memory.is_memory(value):
            self.memory(value)

    def whole(self, value: Any, depth: int = 6) -> None:
        """Code in C takes a value with all that it holds: compares, prints or encodes it.

        Objects of Python's classes it reads by their methods, whose frames show what those read.
        """
        kind = type(value)
        if kind in _NOTHING or not depth:
            return
        if is_a(value, images.CONTAINERS):
            place = ("contents", id(value), None)
            if id(value) in self.whole_ones and place in self.spots:
                return  # its spot holds it, so that it is no other one
            self.whole_ones.add(id(value))
        self.use(value)
        if is_a(value, (*VIEWS, types.MappingProxyType)):
            value = gc.get_referents(value)[0]
        if is_a(value, dict):
            self._whole_of(dict.values(value), depth)
            self._whole_of(dict.keys(value), depth)
        elif is_a(value, (tuple, frozenset, *images.CONTAINERS)):
            self._whole_of(value, depth)
        elif is_a(value, policy.HOLDERS):
            self.fields(value)
            self._whole_of((own_dict(value) or {}).values(), depth)

    def _whole_of(self, values: Iterable[Any], depth: int) -> None:
        for value in list(values):
            self.whole(value, depth - 1)

    def made_of(self, values: Iterable[Any]) -> None:
        """A tensor is made of lists: of tensors in them it gets the values, out of sight."""
        for value in values:
            if is_a(value, (list, tuple)):
                for element in value:
                    if is_a(element, torch.Tensor):
                        self.tensors.taken(element)
                        if not self.tensors.is_foreign(element):  # of the call or the module
                            text = "makes a tensor of a list with tensors in it"
                            self._refuse("data_dependent_control_flow", text, _LISTED, None)
                self.made_of(value)

    def fields(self, owner: Any) -> None:
        """All attributes that an object has itself."""
        table = own_dict(owner)
        if table is not None:
            self.attribute(owner, "__dict__")
            self.contents(table)
        if is_a(owner, BaseException):
            self.field(owner, "args")
            self.use(owner.args)
        for cls in type.__dict__["__mro__"].__get__(type(owner)):
            for name, found in list(cls.__dict__.items()):
                if type(found) is types.MemberDescriptorType:
                    self.field(owner, name)
