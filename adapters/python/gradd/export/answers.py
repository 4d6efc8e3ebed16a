"""While a forward is traced, sizes and torch itself answer Python code as in a plain call.

The tracer hands out objects of its own (torch.SymInt, SymFloat) in the place of sizes, and tells
who asks that something is being compiled. Code of users must not see the difference: a size is an
int for isinstance() and type(), a comparison gives True or False, its text is the number's. Where
an answer is more than arithmetic the size becomes a number of this capture, with a rule for it;
other sizes are captured again. Code of torch gets what the tracer says.

The patches are of the process, like those of the tracer itself; other threads meet neither symbols
nor, by the frames that ask, other answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.fx import _symbolic_trace

from gradd.export.guards import policy, tracing
from gradd.export.guards.spots import table_of

_KINDS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_modified = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyType_Modified", ctypes.pythonapi))
_EXPONENT = 3  # sizes to a higher power may leave the 64 bits of a graph's integers
# Functions that say whether something traces, and code that only passes the question on.
_TRACING = (
    *(torch.compiler.is_compiling, torch.compiler.is_exporting),
    *(_symbolic_trace.is_fx_tracing, _symbolic_trace.is_fx_symbolic_tracing),
)
_PASS_ON = (
    os.path.join("torch", "_dynamo", "external_utils.py"),
    os.path.join("torch", "_utils.py"),
    os.path.join("transformers", "utils", "import_utils.py"),
)


def _user_asks(depth: int = 2) -> bool:
    """Whether the frame that asks is code of the user or a library, and not of torch or gradd."""
    frame = sys._getframe(depth)
    while frame is not None and policy.is_standard_file(frame.f_code.co_filename):
        frame = frame.f_back  # abc, functools and the like ask on behalf of their caller
    name = "" if frame is None else frame.f_code.co_filename
    return bool(name) and not policy.is_of_tracer(name)


# ---- sizes ----


def _class_of(kind: type) -> property:
    number = _KINDS[kind]
    return property(lambda self: number if _user_asks() else kind)


def _only_decides(frame: types.FrameType) -> bool:
    """Whether what the frame computes now goes into a jump (`if`, `assert`) and nowhere else.

    The tracer knows an assertion by that jump and makes a check of the graph of it.
    """
    code, at = frame.f_code.co_code, frame.f_lasti + 2
    while at < len(code) and dis.opname[code[at]] in ("CACHE", "EXTENDED_ARG"):
        at += 2
    return at < len(code) and dis.opname[code[at]].startswith("POP_JUMP")


def _compared(compare: Callable) -> Callable:
    @functools.wraps(compare)
    def compared(self: Any, other: Any) -> Any:
        result = compare(self, other)
        if type(result) is torch.SymBool and not _only_decides(sys._getframe(1)) and _user_asks():
            return bool(result)
        return result

    return compared


def _power(power: Callable) -> Callable:
    @functools.wraps(power)
    def raised(self: Any, other: Any) -> Any:
        if type(other) is int and other > _EXPONENT and _user_asks():
            return int(self) ** other
        return power(self, other)

    return raised


def _power_of(power: Callable) -> Callable:
    @functools.wraps(power)
    def raised(self: Any, base: Any) -> Any:
        if type(base) is int and _user_asks():
            return base ** int(self)
        return power(self, base)

    return raised


def _text(plain: Callable) -> Callable:
    @functools.wraps(plain)
    def text(self: Any, *args: Any) -> str:
        if _user_asks():
            return getattr(number_of(self), plain.__name__)(*args)
        return plain(self, *args)

    return text


def _attribute(self: Any, name: str) -> Any:
    """What a number has and a symbol has not."""
    number = _KINDS[type(self)]
    if not hasattr(number, name) or not _user_asks():
        raise AttributeError(f"{number.__name__!r} object has no attribute {name!r}")
    return getattr(number_of(self), name)


def _array(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    """What numpy makes of a number; of an object that it does not know, one of objects."""
    return np.array(number_of(self), dtype)


def number_of(symbol: Any) -> Any:
    """The number of this capture; a rule binds the capture to it."""
    return _KINDS[type(symbol)](symbol)


def _methods(kind: type) -> dict[str, Any]:
    """What takes the place of a symbol's methods."""
    new = {name: _text(getattr(kind, name)) for name in ("__repr__", "__str__", "__format__")}
    new["__getattr__"], new["__array__"] = _attribute, _array
    if kind is not torch.SymBool:
        new |= {name: _compared(getattr(kind, name)) for name in _COMPARISONS}
    if kind is torch.SymInt:
        new["__pow__"], new["__rpow__"] = _power(kind.__pow__), _power_of(kind.__rpow__)
    return new


class _Type(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1:
            return type(*args, **kwargs)
        kind = type(args[0])
        return _KINDS.get(kind, kind)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type)


class _type(type, metaclass=_Type):
    """Stands for `type` among the globals of code that asks it for the class of a number."""


@contextlib.contextmanager
def _type_among(names: dict) -> Iterator[None]:
    names["type"] = _type
    try:
        yield
    finally:
        del names["type"]


@contextlib.contextmanager
def _like_numbers(kind: type) -> Iterator[None]:
    """Exchanges methods of a class of symbols."""
    methods = _methods(kind)
    before = {name: kind.__dict__[name] for name in methods if name in kind.__dict__}
    table = table_of(kind)  # as `kind.__class__ = ...` would not mean the attribute
    try:
        for name, method in methods.items():
            setattr(kind, name, method)
        table["__class__"] = _class_of(kind)
        _modified(kind)
        yield
    finally:
        table.pop("__class__", None)
        _modified(kind)
        for name in methods:
            if name in before:
                setattr(kind, name, before[name])
            else:
                delattr(kind, name)


# ---- tracing ----


_plain: dict[str, Callable] = {
    f.__name__: types.FunctionType(f.__code__, f.__globals__, f.__name__) for f in _TRACING
}


def traces(name: str) -> bool:
    """The answer of one of torch's functions, by who asks."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_PASS_ON):
        frame = frame.f_back
    asker = "" if frame is None else frame.f_code.co_filename
    if policy.is_of_tracer(asker) or tracing.FOR_TRACERS in asker:
        return _plain[name]()
    return False


def _asked(name=""):
    # Runs with the globals of torch's own function, hence the import.
    from gradd.export import answers

    return answers.traces(name)


@contextlib.contextmanager
def _not_tracing() -> Iterator[None]:
    """Exchanges the code of the functions, which users may keep under any name."""
    try:
        for function in _TRACING:
            function.__code__ = _asked.__code__
            function.__defaults__ = (function.__name__,)
        yield
    finally:
        for function in _TRACING:
            function.__code__ = _plain[function.__name__].__code__
            function.__defaults__ = None


@contextlib.contextmanager
def as_untraced(asking: Iterable[dict] = ()) -> Iterator[None]:
    """Around a trace; see the top of this file.

    Args:
        asking: Globals of code that asks type() for the class of a number.
    """
    with contextlib.ExitStack() as stack:
        for names in asking:
            if "type" not in names:
                stack.enter_context(_type_among(names))
        for kind in _KINDS:
            stack.enter_context(_like_numbers(kind))
        stack.enter_context(_not_tracing())
        yield
