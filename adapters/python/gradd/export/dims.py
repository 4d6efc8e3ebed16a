"""What a trace assumed about sizes, and whether another call satisfies it.

torch.export gives one symbol per dynamic size, ranges for the symbols, and guards as Python
expressions. A symbol stands for 2 or more: the tracer takes that for granted, so a branch like
`if x.shape[0] > 1`, a squeeze() or a broadcast leaves no guard behind. Sizes 0 and 1 are numbers
in the rules and need a capture of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch.utils._sympy.printers import PythonPrinter

from gradd import schema
from gradd.spec import Capture, CaptureError, DimRules

_SYMBOL = re.compile(r"^[A-Za-z_]\w*$")


def rules_of(program: Any, leaf_numbers: list[int]) -> DimRules:
    """Reads the assumptions of an exported program.

    Args:
        program: The ExportedProgram as traced (before decompositions).
        leaf_numbers: Leaf number of each traced argument.
    """
    user = [s.arg.name for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    shapes = []
    for leaf, name in zip(leaf_numbers, user, strict=True):
        sizes = nodes[name].meta["val"].shape
        shapes.append((leaf, tuple(n if isinstance(n, int) else str(n) for n in sizes)))
    ranges = []
    for symbol, bounds in program.range_constraints.items():
        # An unbounded size has a symbolic infinity as its upper end.
        upper = int(bounds.upper) if getattr(bounds.upper, "is_Integer", False) else None
        lower = int(bounds.lower) if getattr(bounds.lower, "is_Integer", False) else 0
        ranges.append((str(symbol), lower, upper))
    return DimRules(tuple(shapes), tuple(ranges), tuple(getattr(program, "_guards_code", ())))


def decisions(program: Any) -> tuple[Any, ...]:
    """What was decided about the sizes of an exported program, as expressions.

    Taking operators apart decides more, of which the program's own guards say nothing: an adaptive
    pool by whether its windows divide the size.
    """
    for node in program.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt):
                return tuple(guard.expr for guard in size.node.shape_env.guards)
    return ()


def with_decisions(rules: DimRules, more: Iterable[Any], sizes: list[tuple[int, ...]]) -> DimRules:
    """The rules of a trace and what was decided since.

    Args:
        rules: Of the trace.
        more: Decisions.
        sizes: Of the tensors of the traced call.

    Raises:
        CaptureError: A decision is about something else than sizes of arguments.
    """
    texts = map(PythonPrinter().doprint, more)
    new = dataclasses.replace(rules, guards=(*rules.guards, *texts))
    broken = violated(new, sizes)
    if broken is not None:
        raise CaptureError(
            "unsupported_operator", f"torch takes operators apart by sizes of no argument: {broken}"
        )
    return new


class _Sized:
    """Stands for a tensor inside a guard expression; only size() is ever asked for."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def size(self) -> tuple[int, ...]:
        return self._sizes


@functools.lru_cache(maxsize=4096)
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<guard>", "eval")


def violated(rules: DimRules, sizes: list[tuple[int, ...]]) -> str | None:
    """The first assumption that these tensor sizes break, in words, or None."""
    values: dict[str, int] = {}
    later: list[tuple[str, int, int, int]] = []
    for k, ((leaf, want), have) in enumerate(zip(rules.shapes, sizes, strict=True)):
        if len(want) != len(have):
            return f"leaf {leaf} has rank {len(have)}, captured with {len(want)}"
        for axis, (w, h) in enumerate(zip(want, have, strict=True)):
            if isinstance(w, int):
                if w != h:
                    return f"leaf {leaf} axis {axis} has size {h}, captured with the fixed size {w}"
            elif h < 2:
                return f"leaf {leaf} axis {axis} has size {h}, captured with 2 or more"
            elif _SYMBOL.match(w):
                if values.setdefault(w, h) != h:
                    return f"leaf {leaf} axis {axis} has size {h}, another axis needs {values[w]}"
            else:
                later.append((w, k, axis, h))
    for text, k, axis, have in later:
        if not _holds(f"({text}) == {have}", values, sizes):
            return f"leaf {rules.shapes[k][0]} axis {axis} has size {have}, captured as {text}"
    for name, low, high in rules.ranges:
        value = values.get(name)
        if value is None:
            continue
        if value < low or (high is not None and value > high):
            return f"size {name}={value} is outside [{low}, {high}]"
    for guard in rules.guards:
        if not _holds(guard, values, sizes):
            return f"guard {guard} does not hold"
    return None


def symbols(rules: DimRules, leaves: list) -> dict[str, int]:
    """The symbols that are a size of a tensor among the leaves of a call, and their values."""
    values: dict[str, int] = {}
    for leaf, want in rules.shapes:
        if isinstance(leaves[leaf], torch.Tensor):
            pairs = zip(want, leaves[leaf].shape, strict=True)
            values.update({w: n for w, n in pairs if isinstance(w, str) and _SYMBOL.match(w)})
    return values


def form(texts: tuple, values: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes, strides and offset of SharedSpec.form in numbers.

    Raises:
        NameError: They depend on something else than these symbols.
    """
    sizes, strides, offset = texts
    scope = _scope(values)
    number = functools.partial(_number, scope)
    return tuple(map(number, sizes)), tuple(map(number, strides)), number(offset)


def evaluate(text: str, values: dict[str, int]) -> Any:
    """A number that an expression over sizes is in a call.

    Raises:
        NameError: It depends on something else than these symbols.
    """
    return eval(_compiled(text), {"__builtins__": {}}, _scope(values))


def _number(scope: dict[str, Any], text: int | str) -> int:
    if isinstance(text, int):
        return text
    return int(eval(_compiled(text), {"__builtins__": {}}, scope))


def _scope(values: dict[str, int]) -> dict[str, Any]:
    return {
        "math": math,
        "Max": max,
        "Min": min,
        "max": max,
        "min": min,
        "Mod": lambda a, b: a % b,
        "FloorDiv": lambda a, b: a // b,
        "Eq": lambda a, b: a == b,
        "Ne": lambda a, b: a != b,
        **values,
    }


def _holds(expression: str, values: dict[str, int], sizes: list[tuple[int, ...]]) -> bool:
    scope = {"L": {"leaves": [_Sized(s) for s in sizes]}, **_scope(values)}
    try:
        return bool(eval(_compiled(expression), {"__builtins__": {}}, scope))
    except (AttributeError, IndexError, NameError, SyntaxError, TypeError, ZeroDivisionError):
        return False  # an assumption that cannot be read counts as broken: capture again


def check_dynamic(capture: Capture, args: tuple, kwargs: dict) -> str | None:
    """Says whether a capture made with other sizes may serve this call.

    Args:
        capture: A capture with the same capture_key as the call.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        None if it may; otherwise one sentence on the size that was specialised. The caller then
        captures again and keeps both (several captures per key).
    """
    leaves, _, paths = schema.flatten_inputs(args, kwargs)
    sizes = [
        tuple(x.shape) if isinstance(x, torch.Tensor) else ()
        for x, p in zip(leaves, paths, strict=True)
        if schema.is_tensor_leaf(x, p)
    ]
    return violated(capture.dims, sizes)
