"""Makes other data of the same form for a call: a part, or the same sizes with other contents.

A batch is cut along the first axis that its tensors share, which costs little, and also along the
second one (positions of a sequence) where memory counts; the graph's guards decide whether it takes
the smaller sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_SETS = 8
_SHIFT = 2.0**-8  # relative
_POSITIONS = 128  # that are left of a sequence at least: more than the block of any kernel
_TOKENS = 8  # one of so many is left of a batch, if its sequences are long enough
_STARTS = 8  # places of a piece of a sequence that are looked at


@dataclass(frozen=True)
class Data:
    """The free inputs of a call.

    Attributes:
        leaves: The tensors.
        parts: For each of the first axes its size in the call, where its part starts, and how long
            that is; None = other numbers than those of the call.
        fixed: Positions of tensors that have the same size in every call, as buffers have.
    """

    leaves: list[torch.Tensor]
    parts: tuple[tuple[int, int, int], ...] | None = ()
    fixed: frozenset[int] = frozenset()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same part of another tensor of the call."""
        for axis, (size, start, length) in enumerate(self.parts or ()):
            if tensor.dim() <= axis or tensor.shape[axis] not in (size, 1):
                break
            if tensor.shape[axis] == size:
                tensor = tensor.narrow(axis, start, length)
        return tensor

    def cut(self, size: int, start: int, length: int) -> Data:
        """A part along the next axis."""
        before = self.parts or ()
        axis = len(before)
        leaves = [
            _like(x, x.narrow(axis, start, length).clone()) if self.has(k, axis, size) else x
            for k, x in enumerate(self.leaves)
        ]
        return Data(leaves, (*before, (size, start, length)), self.fixed)

    def has(self, k: int, axis: int, size: int) -> bool:
        """Whether a tensor has the size that the batch has along an axis."""
        tensor = self.leaves[k]
        return k not in self.fixed and tensor.dim() > axis and tensor.shape[axis] == size


def _like(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    return now.detach().requires_grad_(before.requires_grad)


def _size(data: Data, axis: int) -> int:
    """Size of an axis that all tensors with axes share, or have 1 instead; 0 if there is none."""
    varying = [x for k, x in enumerate(data.leaves) if k not in data.fixed]
    sizes = {x.shape[axis] for x in varying if x.dim() > axis}
    sizes = sizes - {1} or sizes
    return sizes.pop() if len(sizes) == 1 else 0


def rows(fits: Callable[[Data], bool], data: Data, start: int = 0, most: int = 4) -> Data | None:
    """A few rows of a batch, or None where there are no rows or so few do not fit."""
    n = _size(data, 0)
    k = most if n >= 8 else 2
    if n <= k:
        return None
    less = data.cut(n, start % (n - k + 1), k)
    return less if fits(less) else None


def piece(fits: Callable[[Data], bool], data: Data, start: int = 0) -> Data | None:
    """Few positions of a few rows, or rows alone; None where neither is to be had."""
    n = _size(data, 0)
    less = rows(fits, data, start, 2)
    kept = less or data.cut(n, 0, n)
    length = _size(kept, 1)
    k = max(_POSITIONS, n * length // (_TOKENS * max(_size(kept, 0), 1)))
    if k >= length or not n:
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


def others(data: Data) -> Iterator[Data]:
    """Data of the same sizes: some rows of a batch again and again, all numbers moved a little."""
    n = _size(data, 0)
    for j in range(_SETS):
        k = max(1, n // (16 if j % 4 == 3 else 4))
        index = (torch.arange(n, device="cpu") % k + j * max(n // _SETS, 1)) % max(n, 1)
        new = [
            _like(x, _moved(x.detach()[index] if n and data.has(i, 0, n) else x.detach(), j, n > 1))
            for i, x in enumerate(data.leaves)
        ]
        if any(not torch.equal(a, b) for a, b in zip(new, data.leaves, strict=True)):
            yield Data(new, None, data.fixed)


def _moved(tensor: torch.Tensor, j: int, has_rows: bool) -> torch.Tensor:
    """Whole numbers move along their axis where there is one row alone."""
    if tensor.is_floating_point() and tensor.numel():
        at = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device)
        pattern = torch.cos(at * (1.3 + j)).reshape(tensor.shape)
        moved = (tensor.double() * (1 + _SHIFT * pattern)).to(tensor.dtype)
        # Probabilities stay what they are.
        return torch.minimum(torch.maximum(moved, tensor.amin()), tensor.amax())
    return tensor if has_rows or not tensor.dim() else tensor.roll(j + 1, -1)
