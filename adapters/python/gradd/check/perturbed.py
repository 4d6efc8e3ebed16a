"""What rounding to f32 may do to a value, measured: each operator's results are off by a rounding.

PyTorch's own f32 result is one sample of it, and may be exact by luck: where terms cancel, one side
gives zero and the other what the roundings leave. (Stochastic arithmetic; Vignes, "A stochastic
arithmetic for reliable scientific computation", 1993.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDING = 2.0**-24  # of f32, relative


class Shaken(TorchDispatchMode):
    """Inside this context the results of operators on float64 are a rounding of f32 off.

    Views and what is written in place stay as they are: what they show was shaken when it was made.
    Equal seeds draw equal numbers, from a generator of its own.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and all(r.alias_info is None for r in schema.returns):
            for value in pytree.tree_leaves(results):
                if isinstance(value, torch.Tensor) and value.dtype is torch.float64:
                    self._shake(value)
        return results

    def _shake(self, value: torch.Tensor) -> None:
        """Every number by its own rounding, and all by a common one: sums average the former."""
        own = torch.rand(value.shape, generator=self._generator, dtype=torch.float64)
        common = float(torch.rand((), generator=self._generator) < 0.5)
        value.mul_(1.0 + (2.0 * (own + common) - 2.0) * _ROUNDING)
