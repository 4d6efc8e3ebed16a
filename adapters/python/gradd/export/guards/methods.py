"""Methods that Python looks up in the class of an operand, and those of tensors.

An operator names no place: `a + b` asks the classes of both for `__add__` and `__radd__`. Here is
which names an instruction or a builtin asks for. Methods of tensors are watched by name, because
nobody can say which tensor of a trace stands for which: the names that torch.Tensor has itself one
by one, and all that it has not (they are inherited from code in C) by one question to its
dictionary.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType
from typing import Any

import torch

from gradd.export.guards.images import is_a
from gradd.export.guards.instructions import readings
from gradd.export.guards.spots import ABSENT, Class, Spot, static, table_of

_WORDS = {
    **{"ADD": "add", "AND": "and", "FLOOR_DIVIDE": "floordiv", "LSHIFT": "lshift"},
    **{"MATRIX_MULTIPLY": "matmul", "MULTIPLY": "mul", "REMAINDER": "mod", "OR": "or"},
    **{"POWER": "pow", "RSHIFT": "rshift", "SUBTRACT": "sub", "TRUE_DIVIDE": "truediv"},
    "XOR": "xor",
}
COMPARED = ("__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__")
GOT = ("__getitem__",)
SET = ("__setitem__", "__delitem__", "__getitem__")
KEYED = ("__hash__", "__eq__", "__index__")
HELD = ("__contains__", "__iter__", "__getitem__", *KEYED)
ENTERED = ("__enter__", "__exit__")
_TRUTH = ("__bool__", "__len__")
_LOOP = ("__iter__", "__next__", "__getitem__", "__len__")
TEXT = ("__format__", "__str__", "__repr__")
_BY_INSTRUCTION = {
    "UNARY_NEGATIVE": ("__neg__",),
    "UNARY_POSITIVE": ("__pos__",),
    "UNARY_INVERT": ("__invert__",),
    "GET_LEN": ("__len__",),
    **dict.fromkeys(("UNARY_NOT", "TO_BOOL"), _TRUTH),
    **dict.fromkeys(("FORMAT_SIMPLE", "CONVERT_VALUE"), TEXT),
}
_OF_BUILTINS = {
    **{name: (f"__{name}__",) for name in ("len", "abs", "round", "hash", "reversed", "dir")},
    **dict.fromkeys(("min", "max", "sorted"), (*COMPARED, *_LOOP)),
    **dict.fromkeys(
        ("list", "tuple", "set", "frozenset", "enumerate", "zip", "iter", "map"), _LOOP
    ),
    **dict.fromkeys(("any", "all", "filter"), (*_LOOP, *_TRUTH)),
    **dict.fromkeys(("repr", "ascii", "format", "str"), TEXT),
    "sum": ("__add__", "__radd__", *_LOOP),
    "pow": ("__pow__", "__rpow__"),
    "divmod": ("__divmod__", "__rdivmod__", "__mod__", "__floordiv__"),
    "next": ("__next__",),
    "bool": _TRUTH,
    "int": ("__int__", "__index__", "__trunc__"),
    "float": ("__float__", "__index__"),
    "complex": ("__complex__", "__float__", "__index__"),
    **dict.fromkeys(("range", "hex", "oct", "bin", "slice"), ("__index__",)),
}
# Those of the module operator that are not called as the method they stand for.
_OF_OPERATOR = {"truth": _TRUTH, "not_": _TRUTH, "concat": ("__add__",), "iconcat": ("__iadd__",)}
# Files of torch whose functions stand between a forward() and the operators.
_BETWEEN = (("torch", "functional.py"), ("nn", "functional.py"), ("torch", "_tensor.py"))
_MANY = 100  # elements of a container that are looked at for their classes


def _reflected(word: str) -> tuple[str, ...]:
    return (f"__{word}__", f"__r{word}__")


def of_operator(number: int) -> tuple[str, ...]:
    """What an instruction for an operator with two operands asks their classes for."""
    kind = dis._nb_ops[number][0].removeprefix("NB_")
    word = _WORDS.get(kind.removeprefix("INPLACE_"), "getitem")
    own = (f"__i{word}__",) if kind.startswith("INPLACE_") else ()
    return (*own, *_reflected(word))


def of_instruction(name: str) -> tuple[str, ...]:
    """The same for an instruction with one operand."""
    return _BY_INSTRUCTION.get(name) or (_TRUTH if "JUMP" in name else _LOOP)


def of_code(code: CodeType) -> set[str]:
    """What the operators of a function may ask a tensor for."""
    found: set[str] = set()
    for kind, carried in readings(code).values():
        if kind == "operate":
            found.update(of_operator(carried))
        elif kind == "load_item":
            found.update(GOT)
    return found


def of_builtin(function: Any, args: list) -> tuple[str, ...]:
    """The same for a builtin, or a function of the module operator, in a call or among arguments.

    reduce(operator.mul, tensors) and its like call what they are given.
    """
    found: tuple[str, ...] = ()
    for one in (function, *args):
        if type(one) is not type and type(one) is not BuiltinFunctionType:
            continue
        name, module = one.__name__, one.__module__
        if module == "builtins":
            found += _OF_BUILTINS.get(name, ())
        elif module == "itertools" and name != "repeat":
            found += _LOOP
        elif module == "_operator":
            word = name.strip("_")
            plain = word[1:] if word.startswith("i") and word[1:] in _WORDS.values() else word
            found += _OF_OPERATOR.get(name, (f"__{word}__", *_reflected(plain)))
    return found


def operands(value: Any, depth: int = 2) -> Iterator[Any]:
    """One object of each class in a value, which may be a container."""
    yield value
    if depth and is_a(value, (list, tuple, set, frozenset, dict)):
        elements = dict.values(value) if is_a(value, dict) else value
        kinds = {type(e): e for _, e in zip(range(_MANY), elements, strict=False)}
        for element in kinds.values():
            yield from operands(element, depth - 1)


def elements(values: list) -> Iterator[Any]:
    """What the lists and tuples among values hold, as far as anybody looks."""
    for value in values:
        if is_a(value, (list, tuple)):
            yield from value[:_MANY]


def is_between(code: CodeType) -> bool:
    """True for functions of torch that call others, and methods of tensors, by name."""
    parts = tuple(code.co_filename.replace("\\", "/").rsplit("/", 2)[-2:])
    return parts in _BETWEEN


class Lacking(Spot):
    """Names that a class has not itself: `key`, a frozenset; `owner` is the class."""

    __slots__ = ()
    KIND = "lacking"

    def now(self) -> Any:
        """Those that it has by now; what it would inherit anyway, put there, is nothing new."""
        found, base = self.owner.__dict__, self.owner.__base__
        return frozenset(n for n in self.key if n in found and found[n] is not static(base, n))

    def put_back(self) -> None:
        for name in self.now():
            delattr(self.owner, name)

    def test(self, name: Callable[[Any], str]) -> str:
        return f"{name(table_of(self.owner).keys())}.isdisjoint({name(self.key)})"

    def change(self) -> str:
        names = ", ".join(sorted(self.now()))
        return f"{self.label}.{names} is defined"


class TensorMethods:
    """The methods of tensors that a forward() uses, with what they were at their first use."""

    _CLASSES = (torch.Tensor, torch.nn.Parameter)

    def __init__(self) -> None:
        self._found: dict[str, tuple] = {}
        for name in ("__getattr__", "__getattribute__"):  # asked for whatever name
            self.use(name)

    def use(self, name: str) -> None:
        """Notes the use of a name, by whatever tensor."""
        if name not in self._found:
            self._found[name] = tuple(c.__dict__.get(name, ABSENT) for c in self._CLASSES)

    def spots(self) -> Iterator[Spot]:
        """The spots to watch."""
        for number, cls in enumerate(self._CLASSES):
            label = f"torch.{'' if cls is torch.Tensor else 'nn.'}{cls.__name__}"
            lacking = frozenset(n for n, values in self._found.items() if values[number] is ABSENT)
            if lacking:
                yield Lacking(cls, lacking, frozenset(), label)
            for name in self._found.keys() - lacking:
                yield Class(cls, name, self._found[name][number], f"{label}.{name}")
