"""Large results that an observed forward does not compute.

What forward() takes from outside does not depend on the numbers in its activations, unless it takes
one out of a tensor. So a large result is memory that nobody has written, which the system gives no
pages, and logits and what a loss makes of them cost the capture neither memory nor time. Where
forward() takes a number or writes one behind, the observation is repeated with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

_LARGE = 32 << 20  # bytes; glibc never puts more than that on its heap, where pages are in use
_OPERANDS = 2 << 20  # bytes of operands from which a large result is expected
_SIZED_BY_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Uncomputed:
    """What was left out in one forward.

    Attributes:
        allowed: Whether anything may be left out.
        relied: Something that was left out may have decided what forward() did, or what it wrote.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.relied = False
        self._any = False

    def missed(self) -> None:
        """A value is taken or written, or forward() has raised."""
        self.relied = self.relied or self._any

    def stand_in(
        self, func: Any, operands: Sequence[torch.Tensor], args: tuple, kwargs: dict
    ) -> torch.Tensor | None:
        """The result of an operator without its values, or None where it is to be computed."""
        if self._any and not _SIZED_BY_VALUES.isdisjoint(func.tags):
            self.relied = True
        if not self.allowed or not _is_pure(func) or kwargs.get("device") is not None:
            return None
        if sum(map(_bytes, operands)) < _OPERANDS:
            return None
        try:
            with _disable_current_modes():
                form = func(*tree_map_only(torch.Tensor, _form, args), **kwargs)
        except Exception:  # not every operator knows the form of its result
            return None
        if not form.is_meta or not form.is_floating_point() or _bytes(form) <= _LARGE:
            return None
        self._any = True
        return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)


def _is_pure(func: Any) -> bool:
    """Whether all that an operator does is to return one new tensor."""
    schema = func._schema
    return (
        not schema.is_mutable
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is None
        and isinstance(schema.returns[0].type, torch.TensorType)
        and torch.Tag.nondeterministic_seeded not in func.tags
    )


def _bytes(tensor: torch.Tensor) -> int:
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return tensor.numel() * tensor.itemsize if plain else 0


def _form(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        raise TypeError(f"{type(tensor).__name__} is more than its form")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
