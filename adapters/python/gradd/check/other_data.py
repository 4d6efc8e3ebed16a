"""Other data of the same form for a call: fewer rows, or the same sizes with other contents.

A batch is cut along the first axis that its tensors share, which costs little, and where memory
counts along the second one (positions of a sequence); whether a capture may take the smaller sizes
is for its rules to say. A batch of the same sizes is made of a few of its own rows, repeated (real
data, ties and padding included, with few different numbers in it), or of numbers that are a little
larger or smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

_SETS = 10  # of rows, at most
_MOVED = 10  # sets of other numbers
_SHIFT = 2.0**-8  # relative
_POSITIONS = 128  # that are left of a sequence at least: more than the block of any kernel
_TOKENS = 8  # one of so many is left of a batch, if its sequences are long enough
_STARTS = 8  # places of a piece of a sequence that are looked at


@dataclass(frozen=True)
class Data:
    """The free inputs of a call."""

    leaves: list[torch.Tensor]

    def replaced(self, new: dict[int, torch.Tensor]) -> Data:
        """The same with other tensors at some leaves, which ask for gradients as before."""
        leaves = list(self.leaves)
        for i, tensor in new.items():
            leaves[i] = tensor.detach().requires_grad_(leaves[i].requires_grad)
        return Data(leaves)


def rows(data: Data) -> tuple[int, list[int]]:
    """Size of the first axis that all tensors with axes share, and their leaves; (0, []) if none.

    A table beside the batch that has another length, such as position numbers, is left alone.
    """
    with_axes = [i for i, x in enumerate(data.leaves) if x.dim()]
    sizes = [data.leaves[i].shape[0] for i in with_axes]
    if not sizes or len(set(sizes)) > 1:
        return 0, []
    return sizes[0], with_axes


def cut(fits: Callable[[Data], bool], data: Data, start: int = 0, most: int = 4) -> Data | None:
    """A few rows of a batch, or None where there are no rows or so few do not fit."""
    n, leaves = rows(data)
    k = most if n >= 8 else 2
    if n <= k:
        return None
    start = start % (n - k + 1)
    less = data.replaced({i: data.leaves[i][start : start + k].clone() for i in leaves})
    return less if fits(less) else None


def piece(fits: Callable[[Data], bool], data: Data, start: int = 0) -> Data | None:
    """Few positions of a few rows, or rows alone; None where neither is to be had."""
    n, _ = rows(data)
    less = cut(fits, data, start, 2)
    kept = data if less is None else less
    tensors = [i for i in rows(kept)[1] if kept.leaves[i].dim() > 1]
    sizes = {kept.leaves[i].shape[1] for i in tensors}
    if len(sizes) != 1:
        return less
    length = sizes.pop()
    k = max(_POSITIONS, n * length // (_TOKENS * rows(kept)[0]))
    if k >= length:
        return less
    at = _most_told([kept.leaves[i] for i in tensors], k, start)
    short = kept.replaced({i: kept.leaves[i][:, at : at + k].clone() for i in tensors})
    return short if fits(short) else less


def _most_told(tensors: list[torch.Tensor], k: int, start: int) -> int:
    """Where `k` positions begin that hold many different numbers: neither padding nor unlabelled.

    Of places that are as good another one with another `start`.
    """
    last = tensors[0].shape[1] - k
    places = sorted({last * j // (_STARTS - 1) for j in range(_STARTS)})
    told = [sum(t[:, p : p + k].unique().numel() for t in tensors) for p in places]
    good = [p for p, n in zip(places, told, strict=True) if n >= 0.9 * max(told)]
    return good[start % len(good)]


def others(data: Data) -> Iterator[tuple[frozenset[int], Data]]:
    """Data of the same sizes, a limited number, each with the rows that it is made of.

    First some rows again and again, a sixteenth of them or a quarter; then all with numbers that
    are a little different. These know no row, as they are new in all of them.
    """
    n, leaves = rows(data)
    seen = set()
    for j in range(_SETS if n >= 2 else 0):
        k = max(1, n // (16 if j % 2 else 4))
        start = (j * n) // _SETS if n >= _SETS else j % n
        if (start, k) not in seen:
            seen.add((start, k))
            index = (torch.arange(n) % k + start) % n
            tiled = {i: data.leaves[i].detach()[index] for i in leaves}
            yield frozenset(index.tolist()), data.replaced(tiled)
    tensors = {i: x.detach() for i, x in enumerate(data.leaves)}
    for j in range(_MOVED):
        # Whole numbers move along their axis; a model that sees a row as a set would see the same.
        new = {i: _other(x, j, n >= 2) for i, x in tensors.items()}
        if any(not torch.equal(new[i], x) for i, x in tensors.items()):
            yield frozenset(), data.replaced(new)


def _other(tensor: torch.Tensor, j: int, has_rows: bool) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.numel():
        pattern = torch.cos(torch.arange(tensor.numel(), dtype=torch.float64) * (1.3 + j))
        moved = (tensor.double() * (1 + _SHIFT * pattern.reshape(tensor.shape))).to(tensor.dtype)
        # Probabilities stay what they are.
        return torch.minimum(torch.maximum(moved, tensor.amin()), tensor.amax())
    return tensor if has_rows or not tensor.dim() else tensor.roll(j + 1, -1)
