"""`2 in numbers` in code that Dynamo traces, where numbers have changed and are inputs since then.

Dynamo compares a constant with constants alone: an input counts as unequal, and no guard says so.
The graph of one choice of layers (`for i, layer in enumerate(layers): if i in chosen`) then serves
each other one of that length. Here such an input is compared, and the answer becomes a guard: one
graph for each answer, not for each number. `operator.contains()` and `__contains__()` stay as
Dynamo has them (docs/dynamo.md).
"""

from __future__ import annotations

import dis
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from gradd import private

_IN = dis.opmap["CONTAINS_OP"]
_SEQUENCES = (list, tuple, deque)
_NUMBERS = (bool, int, float)


def compare(wanted: Callable[[], bool]) -> None:
    """Has inputs compared where that is wanted at the time."""
    for table in tables():
        table[_IN] = functools.partial(_contains, wanted, table[_IN])


def tables() -> Iterator[dict[int, Callable]]:
    """Those of Dynamo's tracers: a function for each instruction."""
    for cls in _family(getattr(private.tracer, "__base__", None)):
        yield cls.dispatch_table


def trace_instead(wanted: Callable[[], bool], instead: Callable[..., Any]) -> None:
    """Has Dynamo trace another call in place of one, where that is wanted at the time.

    `instead` takes the tracer, function, arguments and keyword arguments of a call, as Dynamo's
    variables; it returns the other function, arguments and keyword arguments, or None.
    """
    base = getattr(private.tracer, "__base__", None)
    if not hasattr(base, "call_function"):
        return
    usual = base.call_function

    @functools.wraps(usual)
    def call_function(tracer: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        found = instead(tracer, fn, args, kwargs) if wanted() else None
        usual(tracer, *(found or (fn, args, kwargs)))

    base.call_function = call_function


def value_of(variable: Any) -> Any:
    """What a variable of Dynamo stands for, a function or an object; None = that is not known."""
    if hasattr(type(variable), "peek_value") and not variable.is_realized():
        return variable.peek_value()
    known = vars(variable.realize())
    return known.get("value", known.get("fn"))


def attribute(tracer: Any, variable: Any, name: str) -> Any:
    """Dynamo's variable for an attribute of what a variable stands for."""
    build = type(variable).build
    return build(tracer, getattr).call_function(tracer, [variable, build(tracer, name)], {})


def method(variable: Any) -> tuple[Any, str | None]:
    """The owner of a method, as a variable of Dynamo, and its name; (None, None) = it is none."""
    known = getattr(variable, "__dict__", {})
    # torch 2.14 has a class of its own for a method that is called.
    return known.get("obj"), known.get("name", known.get("method_name"))


def _family(cls: Any) -> Iterator[Any]:
    """A class of tracers and all that are made from it."""
    if hasattr(cls, "dispatch_table"):
        yield cls
        for other in cls.__subclasses__():
            yield from _family(other)


def _contains(wanted: Callable[[], bool], usual: Callable, tracer: Any, instruction: Any) -> None:
    """Runs `item in container`; what is left to Dynamo may not have an equal input."""
    item, container = tracer.stack[-2:]
    if wanted() and item.is_python_constant() and _is_sequence(container):
        value = item.as_python_constant()
        # Constants first: their own guards are enough if one is equal.
        known = sorted(container.items, key=lambda x: not x.is_python_constant())
        if _holds_numbers(value) and any(_equals(x, value) for x in known):
            tracer.popn(2)
            tracer.push(type(item.realize()).build(tracer, not instruction.argval))  # 1: not in
            return
    usual(tracer, instruction)


def _is_sequence(variable: Any) -> bool:
    try:
        found = issubclass(variable.python_type(), _SEQUENCES)
    except NotImplementedError:  # Dynamo has no type for it
        return False
    return found and hasattr(variable, "items")


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_numbers, value))
    return isinstance(value, _NUMBERS)


def _equals(variable: Any, value: Any) -> bool:
    """Whether a variable of Dynamo equals a value; an input's answer becomes a guard."""
    if variable.is_python_constant():
        found = variable.as_python_constant()
        return found is value or bool(found == value)
    if isinstance(value, (list, tuple)):
        if not _is_sequence(variable) or variable.python_type() is not type(value):
            return False
        parts = variable.items
        return len(parts) == len(value) and all(map(_equals, parts, value))
    number = getattr(variable, "sym_num", None)
    return number is not None and isinstance(value, _NUMBERS) and bool(number == +value)
