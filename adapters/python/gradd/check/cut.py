"""Cuts a piece out of the batch of a call.

A batch is cut along the first axis that its tensors share, which costs little, and along the second
one (positions of a sequence) where it is long; the graph's guards decide whether it takes the
smaller sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

_ROWS = (2, 16)  # that are left; one alone may mean something else, convolutions ask for 16
_POSITIONS = 96  # that are left of a sequence at least: more than the block of any kernel
_TOKENS = 8  # one of so many is left of a batch, if its sequences are long enough
_STARTS = 8  # places of a piece of a sequence that are looked at


@dataclass(frozen=True)
class Data:
    """The free inputs of a call, or a part of them."""

    leaves: list[torch.Tensor]
    parts: tuple[tuple[int, int, int], ...] = ()  # size, start and length, by axis
    fixed: frozenset[int] = frozenset()  # tensors of one size in every call, as buffers have

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same part of another tensor of the call."""
        for axis, (size, start, length) in enumerate(self.parts):
            if tensor.dim() <= axis or tensor.shape[axis] not in (size, 1):
                break
            if tensor.shape[axis] == size:
                tensor = tensor.narrow(axis, start, length)
        return tensor

    def cut(self, start: int, length: int) -> Data:
        """A part along the next axis."""
        axis, size = len(self.parts), self.size
        leaves = list(self.leaves)
        for k, x in enumerate(leaves):
            if k not in self.fixed and x.dim() > axis and x.shape[axis] == size:
                part = x.detach().narrow(axis, start, length).clone()
                leaves[k] = part.requires_grad_(x.requires_grad)
        return Data(leaves, (*self.parts, (size, start, length)), self.fixed)

    @property
    def size(self) -> int:
        """That of the next axis, which all tensors share that have it, 1 aside; 0 = they do not."""
        axis = len(self.parts)
        varying = [x for k, x in enumerate(self.leaves) if k not in self.fixed]
        sizes = {x.shape[axis] for x in varying if x.dim() > axis}
        sizes = sizes - {1} or sizes
        return sizes.pop() if len(sizes) == 1 else 0


def piece(fits: Callable[[Data], bool], data: Data, start: int = 0) -> Data | None:
    """Few positions of a few rows, or rows alone; None where neither is to be had."""
    if not (n := data.size):
        return None
    cuts = (data.cut(start % (n - rows + 1), rows) for rows in _ROWS if n > rows)
    less = next(filter(fits, cuts), None)
    kept = less or data.cut(0, n)
    rows = kept.parts[0][2]
    length = kept.size
    k = max(_POSITIONS, n * length // (_TOKENS * rows))
    if k >= length:
        return less
    # Where there are many different numbers: neither padding nor positions without labels.
    places = sorted({(length - k) * j // (_STARTS - 1) for j in range(_STARTS)})
    told = [
        sum(x[:, p : p + k].unique().numel() for x in kept.leaves if x.dim() > 1) for p in places
    ]
    good = [p for p, n in zip(places, told, strict=True) if n >= 0.9 * max(told)]
    short = kept.cut(good[start % len(good)], k)
    return short if fits(short) else less
