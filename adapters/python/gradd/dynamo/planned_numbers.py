"""Whole numbers of Python that a plan knows: `logits_to_keep`, the n of `x[:, :n]`.

The daemon makes a plan for the sizes of a call, so it must know a bound of a slice, or the end of a
range, before it runs. A number that decides about the size of a tensor would need a plan for each
of its values in any case. Such a number goes in as the size of a tensor without elements, and a
graph computes it from that size. The daemon then treats it like any other size.

Only operators of sizes read it so. Arithmetic with tensors reads the number as a scalar, which may
differ between runs of one plan. Of `x[:, step % 4 :] * step` there are four plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy
import torch

from gradd import private
from gradd.spec import CaptureError


def symbols(values: Iterable[Any]) -> set[sympy.Symbol]:
    """The symbols in the sizes of tensors.

    Args:
        values: Of nodes: fake tensors, numbers, or lists of them.
    """
    found: set[sympy.Symbol] = set()
    for value in values:
        for leaf in private.pytree.tree_leaves(value):
            sizes = leaf.shape if isinstance(leaf, torch.Tensor) else ()
            found.update(*(n.node.expr.free_symbols for n in sizes if isinstance(n, torch.SymInt)))
    return found


def is_large(number: Any) -> bool:
    """Whether a number is an int of more than 64 bits.

    Tensors have none, and most operators of PyTorch refuse it; as the end of a slice it is good.
    """
    return isinstance(number, int) and not -(1 << 63) <= number < 1 << 63


def refusal() -> CaptureError:
    """For a call with such a number."""
    return CaptureError("unsupported_input_type", "forward() takes an int of more than 64 bits")


def as_tensor(number: int | torch.SymInt) -> torch.Tensor:
    """A tensor whose first size, less its second one, is a number; int64, without elements."""
    sizes = torch.sym_max(number, 0), torch.sym_max(-number, 0), 0
    return torch.empty(sizes, dtype=torch.int64, device="cpu")


def given(number: float, planned: bool) -> torch.Tensor:
    """The tensor that a graph takes for a number.

    Args:
        number: A float (f64 without axes), or an int.
        planned: The int comes as a size; otherwise as an int64 without axes.

    Raises:
        OverflowError: The int needs more than 64 bits.
    """
    if is_large(number):
        raise OverflowError(f"int too big to convert: {number} needs more than 64 bits")
    if planned:
        return as_tensor(number)  # type: ignore[arg-type]
    dtype = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=dtype, device="cpu")


def value(tensor: torch.Tensor) -> Any:
    return tensor.shape[0] - tensor.shape[1] if tensor.dim() else tensor.item()
