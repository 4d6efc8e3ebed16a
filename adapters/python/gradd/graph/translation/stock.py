"""Translations of operators: gradd's own, and of torch's library those that graphs ask for.

torch makes a table of its whole library, a thousand operators of which a graph has thirty. That
takes as long as the translation of a Llama of 8 layers. Here an operator's row is made when a graph
has the operator.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from onnxscript.function_libs.torch_lib import registration

from gradd import private
from gradd.graph.nodes import Operator
from gradd.graph.translation import doubles, indices, norms, operators, pointwise, products, shapes

OPSET = 20  # of the stock translations, which later opsets take as they are
_PYTHONS = {"_operator": operator, "math": math}  # modules with functions of sizes


class Table:
    """Has the methods of torch's ONNXRegistry that its exporter calls."""

    opset_version = OPSET

    def __init__(self) -> None:
        self._rows: dict[Any, list[Any]] = {}
        self._own = own()
        self._known = {*self._own, *_library(), *_of_python(), *from_library([]).functions}

    def is_registered(self, target: Any) -> bool:
        return _key(target) in self._known

    def get_decomps(self, target: Any) -> list[Any]:
        """The translations of an operator, gradd's own first."""
        key = _key(target)
        if key not in self._known:
            return []
        if key not in self._rows:
            self._rows[key] = self._row(target, key)
        return self._rows[key]

    def _row(self, target: Any, key: Any) -> list[Any]:
        found = from_library(_of_python().get(key, [key]))
        for make in self._own.get(key, ()):
            known = found.get_decomps(target)
            found.register_op(target, make(known[0].onnx_function if known else None))
        return found.get_decomps(target)


@functools.lru_cache(maxsize=1)
def table() -> Table:
    """That of the process."""
    return Table()


def _key(target: Any) -> Any:
    """The library's name of an operator; another function stands for itself."""
    return target.name() if isinstance(target, Operator) else target


# --- torch's library -------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _library() -> registration.Registry:
    from onnxscript.function_libs.torch_lib import ops  # it fills the registry

    del ops
    return registration.default_registry


@functools.lru_cache(maxsize=1)
def _of_python() -> dict[Callable, list[str]]:
    """Python's functions, and the names under which the library has them."""
    found: dict[Callable, list[str]] = {}
    for name in _library():
        module, _, function = name.partition("::")
        target = getattr(_PYTHONS.get(module), function, None)
        if target is not None:
            found.setdefault(target, []).append(name)
    return found


def from_library(names: Iterable[Any]) -> Any:
    """torch's table without the functions of the library under other names than these."""
    with _only(names):
        return private.ONNXRegistry.from_torchlib(OPSET)


@contextlib.contextmanager
def _only(names: Iterable[Any]) -> Iterator[None]:
    """Replaces the library's registry, one capture at a time."""
    whole, part = _library(), registration.Registry()
    for name in names:
        if name in whole:
            for function in whole[name].overloads:
                part.register(function, name)
            for function in whole[name].complex:
                part.register(function, name, complex=True)
    registration.default_registry = part
    try:
        yield
    finally:
        registration.default_registry = whole


# --- gradd's own -----------------------------------------------------------------------------


def own() -> dict[str, list[Callable]]:
    """Operator -> functions that make a translation of the one that it had before, if any."""
    found: dict[str, list[Callable]] = {}

    def add(rows: dict[Any, Any], make: Callable) -> None:
        for target, row in rows.items():
            found.setdefault(_key(target), []).append(functools.partial(make, row))

    add(operators.table(), lambda function, before: function)
    add(pointwise.of_doubles() | norms.of_doubles(), _by_type)
    add(shapes.of_sizes() | indices.by_masks() | products.by_operands(), _or_else)
    return found


def _or_else(special: Callable, before: Callable) -> Callable:
    def translate(*args: Any, **kwargs: Any) -> Any:
        done = special(*args, **kwargs)
        return before(*args, **kwargs) if done is None else done

    return translate


def _by_type(of_doubles: Callable, before: Callable) -> Callable:
    def translate(x: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = of_doubles if x.dtype == doubles.DOUBLE else before
        return chosen(x, *args, **kwargs)

    return translate
