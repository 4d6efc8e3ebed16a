"""Cuts a piece out of the batch of a call.

A batch is cut along the first axis that its tensors share, which costs little, and along the second
one (positions of a sequence) where it is long; the graph's guards decide whether it takes the
smaller sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_ROWS = 2  # that are left; one alone may mean something else
_POSITIONS = 96  # that are left of a sequence at least: more than the block of any kernel
_TOKENS = 8  # one of so many is left of a batch, if its sequences are long enough
_STARTS = 8  # places of a piece of a sequence that are looked at


@dataclass(frozen=True)
class Data:
    """The free inputs of a call.

    Attributes:
        leaves: The tensors.
        parts: For each of the first axes its size in the call, where its part starts, and how long
            that is.
        fixed: Positions of tensors that have the same size in every call, as buffers have.
    """

    leaves: list[torch.Tensor]
    parts: tuple[tuple[int, int, int], ...] = ()
    fixed: frozenset[int] = frozenset()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same part of another tensor of the call."""
        for axis, (size, start, length) in enumerate(self.parts):
            if tensor.dim() <= axis or tensor.shape[axis] not in (size, 1):
                break
            if tensor.shape[axis] == size:
                tensor = tensor.narrow(axis, start, length)
        return tensor

    def cut(self, size: int, start: int, length: int) -> Data:
        """A part along the next axis."""
        axis = len(self.parts)
        leaves = [
            x.narrow(axis, start, length).clone().detach().requires_grad_(x.requires_grad)
            if k not in self.fixed and x.dim() > axis and x.shape[axis] == size
            else x
            for k, x in enumerate(self.leaves)
        ]
        return Data(leaves, (*self.parts, (size, start, length)), self.fixed)

    def size(self, axis: int) -> int:
        """That of an axis which all tensors share that have it, 1 aside; 0 = there is none."""
        varying = [x for k, x in enumerate(self.leaves) if k not in self.fixed]
        sizes = {x.shape[axis] for x in varying if x.dim() > axis}
        sizes = sizes - {1} or sizes
        return sizes.pop() if len(sizes) == 1 else 0


def piece(fits: Callable[[Data], bool], data: Data, start: int = 0) -> Data | None:
    """Few positions of a few rows, or rows alone; None where neither is to be had."""
    n = data.size(0)
    if not n:
        return None
    few = data.cut(n, start % (n - _ROWS + 1), _ROWS) if n > _ROWS else None
    less = few if few is not None and fits(few) else None
    kept = less or data.cut(n, 0, n)
    length = kept.size(1)
    k = max(_POSITIONS, n * length // (_TOKENS * kept.size(0)))
    if k >= length:
        return less
    short = kept.cut(length, _most_told(kept.leaves, length - k, k, start), k)
    return short if fits(short) else less


def _most_told(leaves: list[torch.Tensor], last: int, k: int, start: int) -> int:
    """Where `k` positions begin that hold many different numbers: neither padding nor unlabelled.

    Of places that are as good another one with another `start`.
    """
    tensors = [x for x in leaves if x.dim() > 1]
    places = sorted({last * j // (_STARTS - 1) for j in range(_STARTS)})
    told = [sum(t[:, p : p + k].unique().numel() for t in tensors) for p in places]
    good = [p for p, n in zip(places, told, strict=True) if n >= 0.9 * max(told)]
    return good[start % len(good)]
