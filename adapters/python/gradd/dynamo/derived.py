"""Numbers and indices that follow from the arguments of a call alone.

    lengths = (grid.prod(-1) // 4).tolist()      torch.split(x, lengths)

Models of images and sounds compute sizes so, from small tensors beside the pictures, and Dynamo
breaks its graph at each. While it traces such a call, gradd computes these values from the real
arguments, and notes how (`tracers/readings.py`). From then on they are computed in front of each
call, and are arguments of the traced function: an object with an attribute for each. So Dynamo
guards them, a number that changes becomes an input that determines sizes, and a call that they do
not fit is traced again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from gradd import private
from gradd.dynamo import sizes

ARGUMENT = "gradd_derived"  # of the traced function
MOST = 256  # numbers of one tensor, and steps and values of one function
_PATH = re.compile(r"L\['(args|kwargs)'\]((?:\[(?:'[^']*'|\d+)\])+)(?:\.size\(\)\[(\d+)\])?")
_KEY = re.compile(r"\[(?:'([^']*)'|(\d+))\]")
_OWN = re.compile(rf"L\['{ARGUMENT}'\]\.(\w+)")


class UnknownError(Exception):
    """A value follows from something else than the arguments."""


class At(NamedTuple):
    """In the operands of a step: the value of an earlier one."""

    step: int


class Path(NamedTuple):
    """A step that takes an argument of the call, or a size of one."""

    given: str  # "args" or "kwargs"
    keys: tuple[Any, ...]
    axis: int | None = None


class Own(NamedTuple):
    """A step that takes one of the values themselves."""

    name: str


class Call(NamedTuple):
    """A step that calls a function, or a method by its name."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Value(NamedTuple):
    """What a graph takes: a tensor as a whole, or the numbers in it."""

    name: str
    step: int
    shape: tuple[int, ...] | None  # of the tensor whose numbers these are


class Derivation:
    """How the values of one traced function are computed.

    Attributes:
        ends: Whether an error of an operator ends its trace, see tracers/failures.py.
    """

    def __init__(self, ends: Callable[[], bool] = lambda: False) -> None:
        self.ends = ends
        self.steps: list[Path | Own | Call] = []
        self._places: dict[Hashable, int] = {}
        self.values: dict[tuple[int, tuple[int, ...] | None], _Value] = {}

    def give(self, derived: Derived) -> None:
        """Computes the values of a call."""
        with aside():
            for value in list(self.values.values()):
                with contextlib.suppress(Exception):  # the user's: the traced code has it too
                    derived.give(value)

    def add(self, step: Path | Own | Call) -> int:
        """The number of a step; the same one for the same step."""
        key = (type(step), _key(tuple(step)))
        if key not in self._places:
            if len(self.steps) >= MOST:
                raise UnknownError
            self._places[key] = len(self.steps)
            self.steps.append(step)
        return self._places[key]

    def value(self, step: int, shape: tuple[int, ...] | None) -> _Value:
        """What a graph takes of a step's result."""
        key = step, shape
        if key not in self.values:
            if len(self.values) >= MOST:
                raise UnknownError
            self.values[key] = _Value(f"v{len(self.values)}", step, shape)
        return self.values[key]


class Derived:
    """The values of one call, an attribute for each that could be computed.

    called() sets the others: every call makes one, so it has no constructor.
    """

    derivation: Derivation
    given: dict[str, Any]  # "args" and "kwargs" of the call
    known: dict[int, Any]  # results of steps

    def result(self, step: int) -> Any:
        """Computes a step, and those before it."""
        if step not in self.known:
            self.known[step] = self._computed(self.derivation.steps[step])
        return self.known[step]

    def _computed(self, step: Path | Own | Call) -> Any:
        if isinstance(step, Own):
            return getattr(self, step.name)
        if isinstance(step, Path):
            found = self.given[step.given]
            for key in step.keys:
                found = found[key]
            return found if step.axis is None else found.shape[step.axis]
        args, kwargs = self._filled(step.args), self._filled(step.kwargs)
        if isinstance(step.target, str):
            return getattr(args[0], step.target)(*args[1:], **kwargs)
        return step.target(*args, **kwargs)

    def _filled(self, operand: Any) -> Any:
        if isinstance(operand, At):
            return self.result(operand.step)
        if isinstance(operand, dict):
            return {name: self._filled(x) for name, x in operand.items()}
        if isinstance(operand, slice):
            return slice(*map(self._filled, (operand.start, operand.stop, operand.step)))
        if isinstance(operand, (tuple, list)):
            return type(operand)(map(self._filled, operand))
        return operand

    def give(self, value: _Value) -> list[str]:
        """Sets the attributes of a value; returns their names, none if it has another shape."""
        found = self.result(value.step)
        if value.shape is None:
            sizes.mark([found])
            setattr(self, value.name, found)
            return [value.name]
        if tuple(getattr(found, "shape", ())) != value.shape:
            return []
        numbers = found.reshape(-1).tolist() if isinstance(found, torch.Tensor) else [found]
        names = [f"{value.name}_{i}" for i in range(len(numbers))]
        vars(self).update(zip(names, numbers))
        return names


@contextlib.contextmanager
def aside() -> Any:
    """Around such computations: they are no work that PyTorch does for the daemon."""
    mode = private.dispatch_mode()
    with getattr(mode, "paused", contextlib.nullcontext)(), torch.no_grad():
        yield


def place(source: str) -> Path | Own | None:
    """The step for what Dynamo has found at a place; None = it is no argument of the call."""
    if own := _OWN.fullmatch(source):
        return Own(own[1])
    found = _PATH.fullmatch(source)
    if found is None:
        return None
    keys = tuple(name or int(number) for name, number in _KEY.findall(found[2]))
    return Path(found[1], keys, int(found[3]) if found[3] else None)


def called(function: Callable[..., Any], derivation: Derivation) -> Callable[..., Any]:
    """A function that passes the values of a call to a traced one, as its first argument."""

    def call(*args: Any, **kwargs: Any) -> Any:
        derived = Derived()
        derived.derivation, derived.known = derivation, {}
        derived.given = {"args": args, "kwargs": kwargs}
        if derivation.values:
            derivation.give(derived)
        try:
            return function(derived, *args, **kwargs)
        finally:
            derived.given = derived.known = {}  # lets go of the arguments

    return call


def _key(operand: Any) -> Hashable:
    """Equal for operands that are the same."""
    if isinstance(operand, dict):
        return tuple((name, _key(x)) for name, x in operand.items())
    if isinstance(operand, slice):
        return "slice", *map(_key, (operand.start, operand.stop, operand.step))
    if isinstance(operand, (tuple, list)):
        return type(operand), *map(_key, operand)
    return type(operand), operand
