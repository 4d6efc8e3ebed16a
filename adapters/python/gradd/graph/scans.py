"""torch's associative_scan() of linear recurrences, h = a h + b, as one operator of a graph.

Dynamo traces associative_scan() on the CPU as the code that it is: log2(n) levels of slices, under
vmap, for one length alone. State-space models of transformers scan pairs (a, b) with a function
that makes of two steps one. If that is the function, as numbers show, the graph has
gradd::linear_scan in its place, at any length; other scans stay as they are.
"""

from __future__ import annotations

import contextlib
import fractions
import random
import types
from collections.abc import Callable
from typing import Any

import torch

_TRIES = 8
_LARGEST = 1 << 20


@torch.library.custom_op("gradd::linear_scan", mutates_args=())
def linear_scan(a: torch.Tensor, b: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    """h_t = a_t h_(t-1) + b_t along an axis, the first b; where the daemon does not run it."""
    steps = list(zip(a.unbind(dim), b.unbind(dim), strict=True))
    results = []
    for one, other in reversed(steps) if reverse else steps:
        results.append(other.clone() if not results else one * results[-1] + other)
    return torch.stack(results[::-1] if reverse else results, dim)


@linear_scan.register_fake
def _(a: torch.Tensor, b: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    a, _, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(a, output)


def _shifted(x: torch.Tensor, dim: int, back: bool) -> torch.Tensor:
    """At each step the value of the one before, or behind it; zeros where there is none."""
    zero = torch.zeros_like(x.narrow(dim, 0, 1))
    rest = x.narrow(dim, int(back), x.shape[dim] - 1)
    return torch.cat((rest, zero) if back else (zero, rest), dim)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple:
    a, h = ctx.saved_tensors
    dim, reverse = ctx.dim, ctx.reverse
    db = torch.ops.gradd.linear_scan(_shifted(a, dim, not reverse), grad, dim, not reverse)
    return db * _shifted(h, dim, reverse), db, None, None


linear_scan.register_autograd(_gradient, setup_context=_keep)


OPERATOR = torch.ops.gradd.linear_scan.default


@torch.compiler.assume_constant_result
def _is_recurrence(combine: Callable) -> bool:
    """Whether it makes (a c, c b + d) of (a, b) and (c, d), exactly, for drawn numbers."""
    draw = random.Random(7)
    for _ in range(_TRIES):
        a, b, c, d = (fractions.Fraction(draw.randint(-_LARGEST, _LARGEST)) for _ in range(4))
        try:
            found = combine((a, b), (c, d))
            first, second = found
        except Exception:  # it wants tensors, or one
            return False
        if not isinstance(found, tuple) or first != a * c or second != c * b + d:
            return False
    return True


def _fits(xs: Any) -> bool:
    if not isinstance(xs, tuple) or len(xs) != 2:
        return False
    a, b = xs
    return a.shape == b.shape and a.dtype == b.dtype and a.dtype.is_floating_point


def _products(a: torch.Tensor, dim: int, reverse: bool) -> torch.Tensor:
    """The running products, by a recurrence that begins with the first factor."""
    n = a.shape[dim]
    rest = torch.zeros_like(a.narrow(dim, 0, n - 1))
    first = a.narrow(dim, n - 1 if reverse else 0, 1)
    return torch.ops.gradd.linear_scan(
        a, torch.cat((rest, first) if reverse else (first, rest), dim), dim, reverse
    )


def substitute(wanted: Callable[[], bool]) -> None:
    """Has Dynamo trace scans of recurrences as that operator, where that is wanted at the time."""
    try:
        from torch._higher_order_ops import associative_scan as original
    except ImportError:
        return
    plain = types.FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__
    )
    is_wanted = torch.compiler.assume_constant_result(wanted)

    def scan(
        combine_fn: Callable,
        xs: Any,
        dim: int,
        reverse: bool = False,
        combine_mode: str = "pointwise",
    ) -> Any:
        if is_wanted() and _fits(xs) and _is_recurrence(combine_fn):
            a, b = xs
            dim = dim % a.dim()
            h = torch.ops.gradd.linear_scan(a, b, dim, reverse)
            return _products(a, dim, reverse), h
        return plain(combine_fn, xs, dim, reverse, combine_mode)

    with contextlib.suppress(ValueError, TypeError):  # it has a substitute, or other parameters
        torch.compiler.substitute_in_graph(original)(scan)
