"""When are two values the same to a forward()?

Plain values compare with their type: 1, 1.0 and True differ, so do 0.0 and -0.0, and NaN equals
itself. Everything that has an identity of its own (functions, classes, modules, objects, lists) is
the same only if it is the same object.
"""

from __future__ import annotations

import collections
import functools
import math
import operator
import types
from typing import Any

import numpy as np
import torch

ABSENT = type("Absent", (), {"__repr__": lambda self: "absent"})()
PLAIN = (
    *(bool, int, str, bytes, type(None), range, torch.dtype, torch.device, torch.layout),
    *(torch.memory_format, types.EllipsisType, types.NotImplementedType),
)
NUMBERS = (bool, int, float, complex)
CONTAINERS = (list, dict, set, collections.deque)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """isinstance() for objects of the user: what they say of their class is code of theirs."""
    return issubclass(type(value), kinds)


def _same_float(a: float, b: float) -> bool:
    if a == b:
        return math.copysign(1.0, a) == math.copysign(1.0, b)
    return a != a and b != b


def alike(a: Any, b: Any) -> bool:
    """True if one can stand for the other. Never calls code of the user."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind is float:
        return _same_float(a, b)
    if kind in PLAIN:
        return a == b
    if kind is complex:
        return _same_float(a.real, b.real) and _same_float(a.imag, b.imag)
    if kind is tuple or kind is torch.Size:
        return len(a) == len(b) and all(map(alike, a, b))
    if kind is frozenset:
        return tagged(a) == tagged(b)
    if kind is slice:
        return alike((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if kind is types.MethodType:
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    if kind is functools.partial:
        return a.func is b.func and alike(a.args, b.args) and _alike_items(a.keywords, b.keywords)
    if issubclass(kind, np.generic):
        return a.tobytes() == b.tobytes()
    return False


def _alike_items(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(map(alike, a.values(), b.values()))


def tagged(values: Any) -> set:
    """The elements of a set with their types: {1} and {True} are equal, these are not."""
    return {(type(v), v) for v in values}


def plain(value: Any, depth: int = 4) -> Any:
    """A copy of a plain value, or of containers of such, that alike() compares; else ABSENT."""
    kind = type(value)
    if kind in PLAIN or kind in NUMBERS:
        return value
    if kind not in (tuple, list, dict, set, frozenset) or not depth:
        return ABSENT
    found = (*value, *value.values()) if kind is dict else (*value,)
    parts = tuple(plain(part, depth - 1) for part in found)
    if ABSENT in parts:
        return ABSENT
    return (kind, frozenset(parts) if kind in (set, frozenset) else parts)


def _kind(container: Any) -> Any:
    """The class whose methods read and fill a container without code of the user."""
    return next(k for k in (collections.OrderedDict, *CONTAINERS) if isinstance(container, k))


def put_item(container: Any, key: Any, value: Any) -> None:
    """Sets an entry of a dictionary or list by the method of its kind."""
    _kind(container).__setitem__(container, key, value)


def image(container: Any) -> tuple:
    """A shallow copy of a container, by which contents_alike() knows it again."""
    if isinstance(container, dict):
        kind = _kind(container)
        return (list(kind.keys(container)), list(kind.values(container)))
    if isinstance(container, set):
        return (tagged(container),)
    return (list(container),)


def contents_alike(container: Any, copy: tuple) -> bool:
    """True if the elements are still the same, in the same order."""
    if isinstance(container, set):
        return len(container) == len(copy[0]) and tagged(container) == copy[0]
    if len(container) != len(copy[-1]):
        return False
    if isinstance(container, dict):
        kind = _kind(container)
        pairs = ((kind.keys(container), copy[0]), (kind.values(container), copy[1]))
        return all(_same_all(now, then) for now, then in pairs)
    return _same_all(container, copy[0])


def _same_all(now: Any, then: list) -> bool:
    return all(map(operator.is_, now, then)) or all(map(alike, now, then))


def refill(container: Any, copy: tuple) -> None:
    """Puts the elements of image() back."""
    kind = _kind(container)
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in zip(*copy, strict=True):
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        kind.update(container, (value for _, value in copy[0]))
    else:
        kind.extend(container, copy[0])


def short(value: Any) -> str:
    """A value in a message; objects by their class only."""
    if is_a(value, (*PLAIN, float, complex, tuple, list, dict, set)):
        try:
            text = repr(value)
        except Exception:  # of somebody's element
            text = f"a {type(value).__name__}"
        return text if len(text) <= 60 else f"{text[:57]}..."
    if is_a(value, (type, types.FunctionType)):
        return getattr(value, "__qualname__", repr(value))
    return repr(value) if type(value).__name__ == "Absent" else f"a {type(value).__name__}"
