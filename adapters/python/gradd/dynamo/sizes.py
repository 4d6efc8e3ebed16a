"""Sizes of a call: a graph's symbols, their places in its arguments, and values made of them.

Dynamo represents a size of an argument as a symbol, and numbers that a forward computes from sizes
as expressions. The values that a call needs in Python, for an output that is a number or for a node
that PyTorch computes, are evaluated from the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
import torch.fx
from torch._dynamo import maybe_mark_dynamic
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from gradd import private
from gradd.dynamo import arithmetic, planned_numbers
from gradd.dynamo.lower import SYMBOLIC, value_of
from gradd.graph.locations import location_of
from gradd.spec import CaptureError

_SHAPES = 1024  # of arguments, that are remembered


def is_number(node: torch.fx.Node) -> bool:
    """Whether a node returns sizes, or values made of them, and no tensor."""
    leaves = private.pytree.tree_leaves(value_of(node))
    if not leaves or any(isinstance(x, torch.Tensor) or x is None for x in leaves):
        return False
    return not is_read(node)


def is_read(node: torch.fx.Node) -> bool:
    """Whether a node returns a number that is known only after a tensor has been computed."""
    leaves = private.pytree.tree_leaves(value_of(node))
    return any(isinstance(x, SYMBOLIC) and free_unbacked_symbols(x) for x in leaves)


class UnknownNumberError(CaptureError):
    """A number of the trace that the sizes and numbers of a call do not give."""

    def __init__(self, name: str, node: torch.fx.Node | None = None) -> None:
        where = "forward()" if node is None else location_of(node)
        text = f"{where}: needs the number {name}, which is no size and no argument of the graph"
        super().__init__("data_dependent_control_flow", text, node)

    def __reduce__(self) -> tuple:
        return (CaptureError, (self.reason, self.message))


class Sizes:
    """The symbols of one graph."""

    def __init__(
        self, placeholders: Sequence[torch.fx.Node], nodes: Iterable[torch.fx.Node] = ()
    ) -> None:
        """Args:
        placeholders: Of the graph.
        nodes: Others, which may take a number out of an argument.
        """
        self._items: list[tuple[str, int]] = []  # symbol, position of a tensor that holds it
        self._numbers: list[tuple[str, int]] = []  # symbol, position of an argument that is one
        self._axes: list[tuple[str, int, int]] = []  # symbol, position of a tensor, axis
        self.shapes: dict[int, tuple[Any, ...]] = {}  # per tensor: numbers and expressions
        self.names = known = set[str]()  # of the symbols
        for at, node in enumerate(placeholders):
            value = value_of(node)
            if isinstance(value, torch.Tensor):
                self.shapes[at] = tuple(map(_expression, value.shape))
                for axis, size in enumerate(self.shapes[at]):
                    if isinstance(size, sympy.Symbol) and size.name not in known:
                        known.add(size.name)
                        self._axes.append((size.name, at, axis))
        for at, node in enumerate(placeholders):
            value = value_of(node)
            expression = _expression(value) if isinstance(value, torch.SymInt) else None
            if isinstance(expression, sympy.Symbol) and expression.name not in known:
                known.add(expression.name)
                self._numbers.append((expression.name, at))
        places = {node: at for at, node in enumerate(placeholders)}
        for node in nodes:
            expression = _expression(value_of(node))
            given = arithmetic.taken_from(node)
            at = None if given is None else places.get(given)
            if at is not None and isinstance(expression, sympy.Symbol):
                known.add(expression.name)
                self._items.append((expression.name, at))

    def missing(self, node: torch.fx.Node) -> set[str]:
        """The symbols that a number of the trace depends on beside these; none for a tensor."""
        leaves = private.pytree.tree_leaves(value_of(node)) if is_number(node) else ()
        free = (getattr(_expression(leaf), "free_symbols", ()) for leaf in leaves)
        return {s.name for symbols in free for s in symbols} - self.names

    def has_large(self, args: Sequence[Any]) -> bool:
        """Whether a number of the call needs more than 64 bits."""
        return any(planned_numbers.is_large(args[at]) for _, at in self._numbers)

    def values(self, args: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {name: args[at].shape[axis] for name, at, axis in self._axes}
        found.update({name: args[at] for name, at in self._numbers})
        found.update({name: args[at].item() for name, at in self._items})
        return found


def _expression(value: Any) -> Any:
    return value.node.expr if isinstance(value, SYMBOLIC) else value


def number(value: Any, values: dict[str, int]) -> Any:
    """A number (or a list of them) of the trace as it is in a call."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, SYMBOLIC):
            return leaf
        expression = leaf.node.expr
        if expression.is_number:
            return leaf.node.pytype(expression)
        return leaf.node.pytype(_evaluate(expression, values))

    return private.pytree.tree_map(one, value)


def _evaluate(expression: sympy.Basic, values: dict[str, Any]) -> Any:
    """The value of an expression over sizes in a call.

    Raises:
        UnknownNumberError: It depends on something else than these symbols.
    """
    symbols: Any = expression.free_symbols
    for symbol in symbols:
        if symbol.name not in values:
            raise UnknownNumberError(symbol.name)
    known = {s: values[s.name] for s in symbols}
    try:
        return arithmetic.computed(expression, known)
    except KeyError:  # a function, or a fraction: sympy computes exactly
        exact = expression.xreplace({s: sympy.sympify(n) for s, n in known.items()})
    return bool(exact) if exact in (sympy.true, sympy.false) else exact.evalf(17)


def allowed(sizes: Sizes, args: Sequence[Any], env: Any, few: bool = False) -> bool:
    """Whether a graph that was made with other sizes may take these arguments.

    Args:
        sizes: Of the graph.
        args: Of the call.
        env: torch's shape environment, whose guards must hold; None = there are no symbols.
        few: Sizes may be below those that guards ask for. PyTorch's choice of a convolution's
            kernel makes a guard that there are 16 pictures; the graph is right for fewer.
    """
    values = sizes.values(args)
    for at, shape in sizes.shapes.items():
        for want, have in zip(shape, args[at].shape, strict=True):
            if isinstance(want, int):
                if want != have:
                    return False
                continue
            known = {symbol.name for symbol in want.free_symbols} <= values.keys()
            if have < 2 or not known or _evaluate(want, values) != have:
                return False
    for guard in env.guards if env is not None else ():
        expression = env.replace(guard.expr)
        if few and _is_lower_bound(expression):
            continue
        known = {s: values[s.name] for s in expression.free_symbols if s.name in values}
        if expression.xreplace({s: sympy.Integer(n) for s, n in known.items()}) != sympy.true:
            return False
    return True


def _is_lower_bound(expression: sympy.Basic) -> bool:
    sides = sympy.GreaterThan, sympy.StrictGreaterThan, sympy.LessThan, sympy.StrictLessThan
    return isinstance(expression, sides) and expression.lts.is_number


def mark(leaves: Sequence[Any]) -> None:
    """Sizes above 1 may differ in the next call: one graph for all of them."""
    for tensor in leaves:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            continue
        if tensor.is_nested:
            continue
        axes, marks = _marks(tensor.shape, tensor.dtype)
        own = tensor.__dict__
        if not own:
            own.update(marks)
        elif not own.keys() >= marks.keys():
            maybe_mark_dynamic(tensor, axes)


@functools.lru_cache(_SHAPES)
def _marks(shape: torch.Size, dtype: torch.dtype) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The axes of a tensor that may vary, and the attributes that maybe_mark_dynamic sets for them.

    Calling that for each tensor takes ten times as long.
    """
    axes = _varying(shape, dtype)
    tensor = torch.empty(0, device="cpu")
    if axes:
        maybe_mark_dynamic(tensor, axes)
    return axes, tensor.__dict__


def _varying(sizes: torch.Size, dtype: torch.dtype) -> tuple[int, ...]:
    """Of colour pictures only the batch: windows cut of symbolic heights take minutes to trace."""
    if len(sizes) == 4 and sizes[1] == 3 and dtype.is_floating_point:
        sizes = sizes[:1]
    return tuple([axis for axis, size in enumerate(sizes) if size > 1])
