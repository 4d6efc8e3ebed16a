"""Operators that torch decomposes into parts with other derivatives at ties and NaN.

Where torch decomposes a whole graph these take their place first: the same values, and the
derivative of the operator.
"""

from __future__ import annotations

from typing import Any

import torch

from gradd.graph.nodes import Operator

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)


def _beyond(x: torch.Tensor, lambd: float) -> torch.Tensor:
    """x where it is outside of [-lambd, lambd], a bound in the type of x; else 0 without slope."""
    low, high = (torch.full((), bound, dtype=x.dtype, device=x.device) for bound in (-lambd, lambd))
    return torch.where((x < low) | (x > high), x, torch.zeros_like(x))


def _hardshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    beyond = _beyond(x, lambd)
    value = torch.where(x.isnan(), x, beyond)
    return torch.ops.gradd.straight_through(value, beyond)


def _softshrink(x: torch.Tensor, lambd: float = 0.5) -> torch.Tensor:
    z = x.to(torch.float32) if x.dtype in _HALVES else x
    value = torch.where(z < -lambd, z + lambd, z * 0.0)
    value = torch.where(z > lambd, z - lambd, value).to(x.dtype)
    return torch.ops.gradd.straight_through(value, _beyond(x, lambd))


def _multi_margin(
    scores: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    x = scores if scores.dim() == 2 else scores.unsqueeze(0)
    label = torch.ops.gradd.check_index(target.reshape(-1, 1), x.shape[1])
    above = margin - x.gather(1, label) + x
    counts = (label != torch.arange(x.shape[1], device=x.device)) & (above > 0)
    nothing = torch.zeros_like(above)
    above = torch.where(counts, above, nothing)
    above = above * above if p == 2 else above
    if weight is not None:
        above = torch.where(counts, above * weight[label], nothing)
    rows = above.mean(1)
    if reduction == 0:
        return rows if scores.dim() == 2 else rows.squeeze(0)
    return rows.mean() if reduction == 1 else rows.sum()


RULES: dict[Any, Any] = {
    _aten.hardshrink.default: _hardshrink,
    _aten.softshrink.default: _softshrink,
    _aten.multi_margin_loss.default: _multi_margin,
}


def is_lost(target: Operator) -> bool:
    """Whether an operator is one of them."""
    return target in RULES
