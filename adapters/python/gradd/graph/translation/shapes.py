"""Translations of operators on sizes and places whose stock ones lose sizes of the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from onnxscript.function_libs.torch_lib.ops.core import aten_flatten

from gradd.graph.translation.build import ints, one, op, scalar, typed

_aten = torch.ops.aten


def repeat_interleave(x: Any, repeats: Any, dim: int | None = None, **unused: Any) -> Any:
    """repeat_interleave() of a number of times that is a size of the call; None = a number."""
    if isinstance(repeats, int):
        return None
    if dim is None:
        x, axis, rank = op.Reshape(x, ints(-1)), 0, 1
    else:
        rank = max(len(x.shape), 1)
        axis = dim % rank
    times = one(repeats)
    before, after = op.Shape(x, start=0, end=axis), op.Shape(x, start=axis + 1)
    number = op.Shape(x, start=axis, end=axis + 1)
    copies = op.Expand(
        op.Unsqueeze(x, ints(axis + 1)), op.Concat(before, number, times, after, axis=0)
    )
    return op.Reshape(copies, op.Concat(before, op.Mul(number, times), after, axis=0))


def reshape(x: Any, sizes: list) -> Any:
    """reshape(), where a size of zero means zero: the stock one lets it copy an axis."""
    return op.Reshape(x, op.Concat(*map(one, sizes), axis=0) if sizes else ints(), allowzero=1)


def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    """flatten(); of a tensor without elements the stock one loses sizes."""
    known = list(x.shape)
    if 0 not in known:
        return aten_flatten(x, start_dim, end_dim)
    start, end = start_dim % len(known), end_dim % len(known) + 1
    middle = op.ReduceProd(op.Shape(x, start=start, end=end), ints(0), keepdims=1)
    before, after = op.Shape(x, start=0, end=start), op.Shape(x, start=end)
    return op.Reshape(x, op.Concat(before, middle, after, axis=0), allowzero=1)


def name_ones(graph: torch.fx.Graph) -> None:
    """squeeze() names the axes alone that it takes away: their computed sizes may be known as 1 by
    a guard of the trace, which the translation does not see.
    """
    for target in (_aten.squeeze.dim, _aten.squeeze.dims):
        for node in graph.find_nodes(op="call_function", target=target):
            source, named = node.args
            before, after = ([*map(str, n.meta["val"].shape)] for n in (source, node))
            named = [named] if isinstance(named, int) else named
            axes = sorted({axis % len(before) for axis in named} if before else ())
            gone = len(before) - len(after)
            ones = (c for c in itertools.combinations(axes, gone) if _without(before, c) == after)
            plain = tuple(axis for axis in axes if before[axis] == "1")
            best = max(ones, key=lambda c: len({*c} & {*plain}), default=plain)
            node.target, node.args = _aten.squeeze.dims, (source, list(best))


def _without(sizes: list[str], axes: tuple[int, ...]) -> list[str]:
    return [size for axis, size in enumerate(sizes) if axis not in axes]


def squeeze(x: Any, dim: list[int]) -> Any:
    """squeeze() of axes that are of size 1: see name_ones()."""
    return op.Squeeze(x, ints(*dim)) if dim else op.Identity(x)


_PADS = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad(x: Any, pad: list, mode: str = "constant", value: float | None = None) -> Any:
    """pad(); torch's circular one cuts first, so that what it cuts off does not come back."""
    sizes = list(map(one, pad))
    axes = ints(*[-1 - i for i in range(len(pad) // 2)])
    widths = op.Concat(*sizes[0::2], *sizes[1::2], axis=0)
    if mode == "circular":
        none = ints(0)
        x = typed(op.Pad(x, op.Min(widths, none), None, axes), x.dtype)
        widths = op.Max(widths, none)
    filler = None if value is None else scalar(value, x.dtype)
    return op.Pad(x, widths, filler, axes, mode=_PADS[mode])


def roll(x: Any, shifts: list, dims: list | tuple = ()) -> Any:
    """roll() by sizes of the call; None = by numbers alone."""
    if isinstance(shifts, int) or all(isinstance(shift, int) for shift in shifts):
        return None
    if not dims:
        flat = typed(op.Reshape(x, ints(-1)), x.dtype, [None])
        return op.Reshape(_rolled(flat, shifts[0], 0), op.Shape(x))
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, shift, dim % len(x.shape))
    return x


def _rolled(x: Any, shift: Any, axis: int) -> Any:
    number = op.Shape(x, start=axis, end=axis + 1)
    at = op.Sub(number, op.Mod(one(shift), op.Max(number, ints(1))))
    parts = op.Slice(x, at, number, ints(axis)), op.Slice(x, ints(0), at, ints(axis))
    return typed(op.Concat(*parts, axis=axis), x.dtype, list(x.shape))


def of_sizes() -> dict[Any, Callable]:
    """aten overload -> a translation that is None where no argument is computed from sizes."""
    return {_aten.repeat_interleave.self_int: repeat_interleave, _aten.roll.default: roll}
