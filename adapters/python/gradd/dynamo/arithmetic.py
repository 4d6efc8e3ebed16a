"""Arithmetic of sizes: evaluates expressions over symbols from the values of the symbols."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch

_POWERS = ("Pow", "PowByNatural")
_REMAINDERS = ("Mod", "PythonMod", "FloorDiv")
_HIGHEST = 4  # power of a size that is still a number of 64 bits
_NUMBER_BITS = 40.0  # of a number that goes in: a step, a seed, a hash


def is_pythons(expression: sympy.Basic) -> bool:
    """Whether a graph cannot compute a number: a root, or a size to a high power."""
    for part in sympy.preorder_traversal(expression):
        name = part.func.__name__
        if name.startswith("OpaqueUnaryFn"):  # math.sqrt
            return True
        if name in _POWERS and part.is_integer:
            exponent = part.args[1]
            if not exponent.is_number or exponent > _HIGHEST:
                return True
    return False


def may_wrap(expression: sympy.Basic) -> bool:
    """Whether whole numbers may need more than 64 bits on the way: `n**4 % 97`, of a step n."""

    def bits(part: sympy.Basic) -> float:
        if part.is_number:
            return math.log2(abs(float(part)) + 1)
        inner = [bits(x) for x in part.args] or [_NUMBER_BITS]
        name = part.func.__name__
        if name in _POWERS:
            return inner[0] * abs(float(part.args[1]))
        return sum(inner) if name == "Mul" else max(inner)

    found = (x for x in sympy.preorder_traversal(expression) if isinstance(x, sympy.Expr))
    return any(bits(x) >= 63 for x in found if x.is_integer)


def is_misjudged(expression: sympy.Basic) -> bool:
    """Whether torch takes a number for whole that need not be: it simplifies `x % 1` to 0."""
    return any(
        part.is_integer and not all(x.is_integer for x in part.args)
        for part in sympy.preorder_traversal(expression)
        if part.func.__name__ in _REMAINDERS
    )


def _rounded(function: Callable[[Any], int]) -> Callable[[Any], Any]:
    """A function of Python's that a proxy has no method for."""

    def call(x: Any) -> Any:
        if isinstance(x, torch.fx.Proxy):
            return x.tracer.create_proxy("call_function", function, (x,), {})
        return function(x)

    return call


# By the names of sympy's classes, and of torch's own.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *args: reduce(operator.add, args),
    "Mul": lambda *args: reduce(operator.mul, args),
    "Max": lambda *args: reduce(torch.sym_max, args),
    "Min": lambda *args: reduce(torch.sym_min, args),
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloatPow": operator.pow,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": torch.sym_float,
    "CeilToInt": _rounded(math.ceil),
    "FloorToInt": _rounded(math.floor),
    "TruncToInt": _rounded(math.trunc),
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "And": lambda *args: reduce(operator.and_, args),
    "Or": lambda *args: reduce(operator.or_, args),
    "Not": torch.sym_not,
}


def computed(expression: sympy.Basic, known: Mapping[sympy.Symbol, Any]) -> Any:
    """The value of an expression.

    Args:
        expression: Of sizes.
        known: The values of its symbols: anything that Python can compute with.

    Raises:
        KeyError: A function that has no counterpart here.
    """
    if isinstance(expression, sympy.Symbol):
        return known[expression]
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Float):
        return float(expression)
    function = _FUNCTIONS[type(expression).__name__]
    return function(*(computed(part, known) for part in expression.args))


class Appending(torch.fx.proxy.GraphAppendingTracer):
    """Appends arithmetic of sizes to a graph; returns the result."""

    def create_node(self, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = super().create_node(*args, **kwargs)
        operands = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        node.meta["val"] = node.target(*operands[0], **operands[1])  # type: ignore[operator]
        return node


def taken_from(node: torch.fx.Node) -> torch.fx.Node | None:
    """The argument of a graph whose only element a node takes out; None = it does not.

    So Dynamo hands over floats, and whole numbers of NumPy (`wrapped_item`).
    """
    if getattr(node.target, "__name__", node.target) not in ("item", "wrapped_item"):
        return None
    given = node.args[0]
    return given if isinstance(given, torch.fx.Node) and given.op == "placeholder" else None
