"""Hashable images of attribute values: two images are equal if forward() would see no difference.

A capture's key is made of them, and the watch over a trace compares them. Plain values stand for
themselves. Lists, tuples, dictionaries, sets and objects that only hold settings (dataclasses,
namespaces, configurations) are described by their contents, at any depth. Tensors are described
by identity and version; functions, classes, modules and objects of any other class by identity
alone, without keeping them alive.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import numbers
import types
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch

from gradd.export.guards.images import is_a

_VALUES = (bool, int, float, str, type(None), bytes, range)
_VALUES += (torch.dtype, torch.device, torch.layout, torch.memory_format)
_MUTABLE = (list, dict, set, deque)
_CONTAINERS = (*_MUTABLE, tuple, frozenset)
_NO_SETTINGS = (torch.nn.Module, type, types.FunctionType)
# What torch keeps in every module: parameters, buffers, submodules and hooks are no attributes.
TABLES = frozenset(
    name for name, v in torch.nn.Module().__dict__.items() if isinstance(v, (dict, set))
)


class One:
    """Equal to one object and to nothing else, also after that object is gone."""

    __slots__ = ("_hash", "_ref")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        try:
            self._ref = weakref.ref(value)
        except TypeError:  # its class has no room for weak references
            self._ref = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        if mine is None:
            return self is other
        return isinstance(other, One) and mine is other._ref()


def version(tensor: torch.Tensor) -> int:
    """Grows with every write that torch knows of; inference tensors do not count theirs."""
    return -1 if tensor.is_inference() else tensor._version


def typed(value: float) -> tuple:
    """A number with its type: 1, 1.0 and True differ, 0.0 and -0.0 differ, NaN equals itself."""
    return (type(value), value.hex() if isinstance(value, float) else value)


def is_config(name: str, value: Any) -> bool:
    """True for an object called config that has attributes of its own."""
    return "config" in name and _has_attributes(value) and not is_a(value, _NO_SETTINGS)


def _has_attributes(value: Any) -> bool:
    try:
        return hasattr(value, "__dict__")
    except Exception:  # of a stand-in for what is not there yet
        return False


def _is_settings(name: str, value: Any) -> bool:
    if is_a(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    if dataclasses.is_dataclass(type(value)):
        return _has_attributes(value)
    return is_config(name, value)


def own_tensors(module: torch.nn.Module) -> set[int]:
    """Ids of parameters and buffers: optimizers write those, which no image should show."""
    return {id(t) for t in (*module.parameters(), *module.buffers())}


class Freezer:
    """Makes images of values, and notes what can change without being replaced.

    Attributes:
        watched: (container, shallow copy) of every list, dictionary, set and deque seen.
        tensors: Tensors seen that are neither parameters nor buffers.
    """

    def __init__(self, own: set[int], leave_out: frozenset[str] = frozenset()) -> None:
        """Args:
        own: own_tensors() of the module that the values belong to.
        leave_out: Keys of dictionaries and names of settings that images do not show.
        """
        self.watched: list[tuple[Any, Any]] = []
        self.tensors: list[torch.Tensor] = []
        self._own = own
        self._leave_out = leave_out
        self._done: dict[int, Any] = {}

    def __call__(self, value: Any, name: str = "") -> Hashable:
        """The image of a value that is found under this name."""
        if is_a(value, (bool, int, float)):
            return typed(value)
        if is_a(value, _VALUES):
            return value if type(value) in _VALUES else (type(value), value)
        if is_a(value, torch.Tensor):
            return self._tensor(value)
        if is_a(value, _CONTAINERS):
            return self._container(value)
        if is_a(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return (functools.partial, *(self(part) for part in parts))
        if is_a(value, types.MethodType):
            return (types.MethodType, One(value.__func__), One(value.__self__))
        if _is_settings(name, value):
            return (type(value), self._container(value.__dict__))
        if is_a(value, numbers.Number):  # numpy's, for example
            return (type(value), repr(value))
        return One(value)

    def items_of(self, table: dict) -> tuple:
        """The image of a dictionary as pairs."""
        return self._container(table)[1]

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) in self._own:
            return One(tensor)
        self.tensors.append(tensor)
        return (One(tensor), version(tensor))

    def _container(self, value: Any) -> Any:
        image = self._done.get(id(value))
        if image is None:
            self._done[id(value)] = "..."  # what a container that holds itself sees of itself
            if isinstance(value, _MUTABLE):
                self.watched.append((value, _copy(value)))
            image = self._done[id(value)] = (type(value), self._contents(value))
        return image

    def _contents(self, value: Any) -> Hashable:
        if isinstance(value, dict):
            return self._items(value)
        if isinstance(value, (set, frozenset)):
            return frozenset(self(v) for v in value)
        return tuple(self(v) for v in value)

    def _items(self, table: dict) -> tuple:
        return tuple(
            (self(k), self(v, k if isinstance(k, str) else ""))
            for k, v in table.items()
            if not (isinstance(k, str) and k in self._leave_out)
        )


def _copy(value: Any) -> Any:
    kind = next(k for k in _MUTABLE if isinstance(value, k))
    return kind(value)
