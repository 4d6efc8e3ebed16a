"""PyTorch in higher precision without a second set of parameters, and the effect of rounding.

A leaf of autograd that stands in for a parameter has its shape, a gradient in the higher precision,
and memory for one element. Below autograd, an operation that reads it, or a view of it, gets the
parameter's values, converted for that one operation; so it does in the backward. Of a large model
only a few parameters exist in the higher precision at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradd import private

STEP = {0: 2.0**-23, 16: 2.0**-8, 10: 2.0**-11}  # between numbers, relative, by codes; 0 = f32
_PERIOD = 8191  # of drawn numbers
_REAL = "gradd_values"  # of what stands in for a parameter, or of its views
_CONVERTS = torch.ops.aten._to_copy.default


class Precise(TorchDispatchMode):
    """In this context operations are computed in one precision, and may be a rounding off.

    PyTorch's own result is one sample of what roundings do, and may be exact by luck. Here results,
    and the parameters that are read, are off by a drawn part of a rounding; conversions, which are
    exact, are not, nor is what is written in place.
    (Stochastic arithmetic; Vignes, "A stochastic arithmetic for reliable scientific computation",
    1993.)
    """

    def __init__(self, dtype: torch.dtype | None, half: int = 0, draw: int | None = None) -> None:
        """Args:
        dtype: The precision; None = that of every operand.
        half: Code of the element type whose roundings are drawn; 0 = f32.
        draw: Number of the draw; None = nothing is off. Two in a row are opposite to each other,
            and the next two four times as far off in f32, where long sums are many roundings off.
        """
        super().__init__()
        self._dtype = dtype
        self._paused = False
        pair, second = divmod(draw or 0, 2)
        self._drawn = None if draw is None else torch.Generator("cpu").manual_seed(pair)
        self._rounding = STEP[half] / (2 if second else -2) * (1 if half else 4**pair)

    def stand_in(self, parameter: torch.Tensor, wants: bool) -> torch.nn.Parameter:
        """A leaf to be read in place of a parameter of floats, with a gradient if it wants one."""
        one = torch.zeros((), dtype=self._dtype or parameter.dtype, device=parameter.device)
        leaf = torch.nn.Parameter(one.expand(parameter.shape), wants)
        setattr(leaf, _REAL, parameter.detach())
        return leaf

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations are what they are elsewhere."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def real(self, value: Any) -> Any:
        """What an operation reads of its operand."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        values = getattr(value, _REAL, None)
        if values is None:
            return value.to(self._dtype or value.dtype)
        return self._shaken(values.to(value.dtype, copy=self._drawn is not None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        schema, pytree = private.schema(func), private.pytree
        aliases = [a.alias_info for a in schema.arguments]
        operands = tuple(
            x if alias is not None else pytree.tree_map(self.real, x)
            for x, alias in zip(args, aliases, strict=False)
        )
        if func is _CONVERTS and (to := kwargs.get("dtype")) is not None and to.is_floating_point:
            kwargs["dtype"] = self._dtype or to
        parameter = getattr(args[0], _REAL, None) if args else None
        if parameter is not None and aliases[0] is not None and aliases[0].is_write:
            raise TypeError(f"{func} writes a parameter")
        results = func(*operands, **kwargs)
        if all(r.alias_info is None for r in schema.returns):
            return results if func is _CONVERTS else pytree.tree_map(self._shaken, results)
        if parameter is not None:
            views = func(parameter, *operands[1:], **kwargs)
            for view, real in zip(*map(pytree.tree_leaves, (results, views)), strict=True):
                setattr(view, _REAL, real)
        return results

    def _shaken(self, value: Any) -> Any:
        """Every number by its own rounding, and all by a common one: sums average the former."""
        if self._drawn is None or not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            own = 2 * torch.rand(_PERIOD + 1, generator=self._drawn, dtype=torch.float64) - 1
            factors = (1 + self._rounding * (own[1:] + own[0].sign())).to(value.device)
            for part in value.as_strided((value.numel(),), (1,)).split(_PERIOD):
                part.mul_(factors[: part.numel()])
        return value
