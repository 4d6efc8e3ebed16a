"""Draws whose operands get a gradient of zeros in PyTorch: torch.normal() of tensors.

torch's own decomposition, mean + deviation x normal number, would pass a gradient on to both.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten


def _zero(of: Any) -> Any:
    """0 whose gradient is 0; a product with 0 would be NaN for infinite values."""
    if not isinstance(of, torch.Tensor):
        return 0.0
    return torch.where(torch.zeros_like(of, dtype=torch.bool), of, torch.zeros_like(of))


def _normal(mean: Any, std: Any, *, generator: torch.Generator | None = None) -> torch.Tensor:
    drawn = mean + std * torch.randn_like(mean + std)
    return torch.ops.gradd.stop_gradient(drawn) + _zero(mean) + _zero(std)


RULES = {
    _aten.normal.Tensor_Tensor: _normal,
    _aten.normal.Tensor_float: lambda mean, std=1.0, **kw: _normal(mean, std, **kw),
    _aten.normal.float_Tensor: _normal,
}
