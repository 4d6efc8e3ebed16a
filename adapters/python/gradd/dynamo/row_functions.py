"""Which functions of torch work row by row along the first axis, for masked_rows.py.

Such a function gives the same rows if there are more of them: each row of its result is made of
that row of its operands, and of what has no rows.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from gradd.dynamo.lower import name_of, value_of

Node = torch.fx.Node

ELEMENTWISE = frozenset(
    (
        *("abs", "absolute", "add", "bfloat16", "bool", "ceil", "clamp", "clamp_max", "clamp_min"),
        *("clip", "clone", "contiguous", "cos", "detach", "div", "divide", "double", "eq", "erf"),
        *("exp", "expm1", "float", "floor", "ge", "gelu", "gt", "half", "int", "isfinite", "isinf"),
        *("isnan", "le", "leaky_relu", "lerp", "log", "log10", "log1p", "log2", "logaddexp"),
        *("logical_and", "logical_not", "logical_or", "logit", "logsigmoid", "long", "lt"),
        *("masked_fill", "maximum", "minimum", "mul", "multiply", "nan_to_num", "ne", "neg", "pow"),
        *("reciprocal", "relu", "relu6", "round", "rsqrt", "rsub", "sigmoid", "sign", "silu"),
        *("sin", "softplus", "sqrt", "square", "sub", "subtract", "tan", "tanh", "to"),
        *("true_divide", "truediv", "truncate", "type", "type_as", "where", "hardtanh"),
        *("hardswish", "elu", "selu", "mish", "dropout"),
    )
)
# Functions that write into their first operand -> those that return the same.
IN_PLACE = {
    **{f"i{name}": getattr(operator, name) for name in ("add", "sub", "mul", "truediv")},
    **{f"{name}_": getattr(torch, name) for name in ("add", "sub", "mul", "div")},
}
# Losses with a parameter `reduction`.
LOSSES = frozenset(
    (
        *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss"),
        *("poisson_nll_loss",),
    )
)
_ALONG = frozenset(  # an axis, given as `dim`, or the last
    (
        *("softmax", "log_softmax", "sum", "mean", "amax", "amin", "argmax", "argmin"),
        *("logsumexp", "norm", "var", "std", "any", "all"),
    )
)
_LAST = ("layer_norm", "rms_norm")  # over the last axes


def argument(node: Node, name: str, place: int, default: Any = None) -> Any:
    """An argument of a call, by its name or its place; of a method the tensor has place 0."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[place] if place < len(node.args) else default


def axes_of(node: Node, rank: int) -> list[int] | None:
    """The axes of a reduction, from 0 on; None = all of them. Empty: they are not known."""
    dim = argument(node, "dim", 1, node.kwargs.get("axis"))
    if len(node.args) > 2 and node.op == "call_method" and _are_axes(node.args[1:]):
        dim = list(node.args[1:])
    if dim is None:
        return None
    given = list(dim) if isinstance(dim, Sequence) else [dim]
    if not given:
        return None
    return [d % rank for d in given] if _are_axes(given) else []


def _are_axes(given: Sequence[Any]) -> bool:
    return all(type(d) is int for d in given)


def is_row_wise(node: Node, rows: Sequence[Node], rank: int) -> bool:
    """Whether a call works row by row.

    Args:
        node: The call.
        rows: Its operands that have rows.
        rank: Of the first of them.
    """
    name, first = name_of(node), node.args[0] if node.args else None
    if name in ELEMENTWISE:
        return _aligned(node, rows)
    if name in _ALONG and rank > 1 and first in rows and len(rows) == 1:
        axes = axes_of(node, rank)
        if axes is None and name in ("softmax", "log_softmax"):
            return False
        return bool(axes) and 0 not in axes
    if name in _LAST:
        shape = argument(node, "normalized_shape", 1, ())
        return rows == [first] and len(shape) < rank
    if name == "linear":
        return rows == [first] and rank > 1
    if name in ("matmul", "mm"):
        other = node.args[1]
        fits = isinstance(other, Node) and value_of(other).dim() == 2
        return rows == [first] and rank > 1 and fits
    if name == "embedding":
        return rows == [first]
    if name in ("unsqueeze", "squeeze"):
        dim = argument(node, "dim", 1)
        grown = rank + (name == "unsqueeze")
        return type(dim) is int and rows == [first] and dim % grown != 0
    if name == "gather":
        dim = argument(node, "dim", 1)
        index = argument(node, "index", 2)
        return type(dim) is int and dim % rank != 0 and set(rows) == {first, index}
    if node.target is operator.getitem:
        return rows == [first] and _keeps_rows(node.args[1], rank)
    if name in LOSSES:
        return of_loss(node).get("reduction") == "none"
    return False


def of_loss(node: Node) -> dict[str, Any]:
    """The arguments of a loss by name, with defaults; empty: they are not to be had."""
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def _aligned(node: Node, rows: Sequence[Node]) -> bool:
    """Whether broadcasting meets rows with rows, and what has none with all of them."""
    rank = value_of(node).dim() if isinstance(value_of(node), torch.Tensor) else -1
    for operand in node.all_input_nodes:
        value = value_of(operand)
        if not isinstance(value, torch.Tensor):
            continue
        if operand in rows and value.dim() != rank:
            return False
        if operand not in rows and value.dim() == rank and value.shape[0] != 1:
            return False
    return rank > 0


def _keeps_rows(index: Any, rank: int) -> bool:
    """Whether an index takes all of the first axis, and no tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, (Node, list)) for part in parts) or any(
        isinstance(x, Node)
        for part in parts
        if isinstance(part, slice)
        for x in (part.start, part.stop, part.step)
    ):
        return False
    if parts[0] == slice(None, None, None):
        return True
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    return parts[0] is Ellipsis and taken < rank
