"""Measures how far two results differ, and decides how far they may.

Equal NaNs are equal, and so are equal infinities. f32 results are judged by their largest
difference, results computed in bf16 or f16 by the length of the difference, whole numbers by the
number of elements that differ. What exceeds a bound is compared with the exact value, and may be
off by some times what PyTorch's own result, and those with other roundings, are off there: a ReLU
unit whose input is within rounding of zero is excused, its neighbour is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from gradd.check.modes import STEP

OUTPUT, BUFFER, GRADIENT, INPUT = "output", "buffer", "the gradient of", "the gradient of input"
Key = tuple[str, str]  # one of the kinds above, and a name or number
Values = Mapping[Key, torch.Tensor | None]

_VALUE = 1e-5  # of an output's or a buffer's largest entry
_OWN = 1e-4  # of a gradient's own largest entry
_FLOOR = 1e-4  # of the largest of all gradients: no bound is relative to less
_VANISHES = 1e-6  # of the largest of all: smaller values are left over by terms that cancel
_WORSE = 4  # times the effect of roundings
_INEXACT = 9  # roundings of a half, if PyTorch's own result stands in for the exact one
_COUNTED = 0.02  # of whole numbers, such as positions of a maximum, that a half turns over
_CHUNK = 1 << 17  # entries: some temporaries of 8 bytes for each
_SAMPLE = 1 << 13  # entries that show how much is usual


class Distance(NamedTuple):
    """Between two tensors: the size of the difference, and that of the finite part of the second.

    Of whole numbers, how many differ, and how many there are.
    """

    off: float
    size: float


def distance(a: torch.Tensor, b: torch.Tensor, half: int = 0) -> Distance:
    """Compares two tensors of one shape, in pieces that need little memory."""
    off = _length((difference(x, y) for x, y in _pieces(a, b)), _order(half, a, b))
    if not _is_real(a, b):
        return Distance(off, b.numel())
    finite = (
        y if math.isfinite(_largest(y)) else y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        for (y,) in _pieces(b)
    )
    return Distance(off, _length(finite, _order(half, b)))


def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Absolute differences; 0 or 1 of whole numbers."""
    if not _is_real(a, b):
        return (a != b).double()
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    near = (a.to(wide) - b.to(wide)).abs_()
    if math.isfinite(_largest(near)):
        return near
    same = (a == b) | (a.isnan() & b.isnan())
    off = (a.double() - b.double()).abs().masked_fill_(same, 0.0)
    return off.nan_to_num_(nan=math.inf, posinf=math.inf)


def _is_real(*tensors: torch.Tensor) -> bool:
    return all(t.is_floating_point() for t in tensors)


def _order(half: int, *tensors: torch.Tensor) -> float:
    """Of the norm that judges such tensors."""
    return (2 if half else math.inf) if _is_real(*tensors) else 1


def _length(parts: Iterable[torch.Tensor], order: float) -> float:
    """The norm of a vector that comes in parts."""
    if order == math.inf:
        return max(map(_largest, parts), default=0.0)
    norms = [torch.linalg.vector_norm(p, order, dtype=torch.double) for p in parts]
    return float(torch.linalg.vector_norm(torch.stack(norms), order))


def _largest(part: torch.Tensor) -> float:
    """Its largest number by size; as a norm it takes three times as long."""
    return max(float(x.abs()) for x in part.aminmax()) if part.numel() else 0.0


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(t.detach().reshape(-1).split(_CHUNK) for t in tensors), strict=True)


class Tally:
    """How far the values of runs in PyTorch are from the daemon's."""

    def __init__(self, ours: Values, half: int, slack: float = 1.0) -> None:
        """Args:
        ours: The daemon's values.
        half: Code of the 16-bit float whose rounding they carry; 0 = none.
        slack: Times all bounds.
        """
        self.ours, self._half, self._slack = ours, half, slack
        self.distances: dict[Key, Distance] = {}  # where both sides have a value of one shape
        self.kept: dict[Key, torch.Tensor | None] = {}  # PyTorch's values where they differ
        self.differing: dict[Key, str] = {}  # in words; `settle` completes it
        self._largest: dict[str, float] = {}  # size of a gradient, by kind
        self._exact: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}  # and how it moves

    def add(self, key: Key, theirs: torch.Tensor | None) -> None:
        """One value of PyTorch's; None for a gradient that there is not."""
        kind, name = key
        ours = self.ours.get(key)
        if ours is None or theirs is None:
            if not any(x is not None and x.numel() for x in (ours, theirs)):
                return
            side = "the daemon" if ours is None else "PyTorch"
            self.differing[key] = f"{side} has no gradient for {name}"
        elif ours.shape != theirs.shape:
            shapes = f"{list(ours.shape)}, in PyTorch {list(theirs.shape)}"
            self.differing[key] = f"{kind} {name} has shape {shapes}"
        else:
            found = self.distances[key] = distance(ours, theirs, self._half)
            if kind in (GRADIENT, INPUT):
                self._largest[kind] = max(found.size, self._largest.get(kind, 0.0))
            if found.off <= self._slack * self._bound(key, found, _INEXACT):
                return
        self.kept[key] = None if theirs is None else theirs.detach()

    def settle(self) -> dict[Key, str]:
        """All values are known, and thereby the largest gradient; returns what differs."""
        for key in self.kept.keys() & self.distances.keys():
            found = self.distances[key]
            if found.off > self._slack * self._bound(key, found, _INEXACT):
                self.differing[key] = self._sentence(key, found)
            else:
                del self.kept[key]
        return self.differing

    def exact(self, key: Key, value: torch.Tensor | None) -> None:
        """The exact value of what differs; PyTorch's own shows how roundings move it."""
        theirs = self.kept.get(key)
        if theirs is not None and value is not None and theirs.shape == value.shape:
            self._exact[key] = value.detach(), torch.zeros(value.shape, device=value.device)
            if theirs is not value:
                self.draw(key, theirs)

    def draw(self, key: Key, value: torch.Tensor | None) -> None:
        """The same with other roundings: what differs no more than these move it is right."""
        if value is None or key not in self._exact:
            return
        exact, noise = self._exact[key]
        for n, x, y in _pieces(noise, value, exact):
            torch.maximum(n, difference(x, y).to(n.dtype), out=n)
        if self._is_rounding(key, exact, noise):
            del self.differing[key], self._exact[key], self.kept[key]

    def _is_rounding(self, key: Key, exact: torch.Tensor, noise: torch.Tensor) -> bool:
        ours: torch.Tensor = self.ours[key]  # type: ignore[assignment]
        # What an overflow gives, an infinity of either sign or NaN, and where it comes, is up to
        # the order of additions.
        if bool((lost := noise.isinf()).any()):
            lost |= ~ours.isfinite() & exact.isfinite()
            ours, exact, noise = (t.masked_fill(lost, 0) for t in (ours, exact, noise))
        found = distance(ours, exact, self._half)
        self.differing[key] = self._sentence(key, found, float(noise.max()))
        usual = noise.reshape(-1)[:: max(1, noise.numel() // _SAMPLE)].median()
        more = (
            (difference(o, e) - _WORSE * (n + usual)).clamp_(min=0.0)
            for o, e, n in _pieces(ours, exact, noise)
        )
        return _length(more, _order(self._half, ours)) <= self._bound(key, found)

    def zeros(self) -> set[Key]:
        """Parameters whose gradient PyTorch has and finds to be zero."""
        return {k for k, a in self.distances.items() if k[0] == GRADIENT and not a.size}

    def says_something(self) -> bool:
        """Whether a number was compared, and a gradient if there are any, that is not zero."""
        sizes = self._largest.values() or [a.size for a in self.distances.values()]
        return any(size > 0 for size in sizes)

    def _bound(self, key: Key, found: Distance, roundings: int = 1) -> float:
        """The most that a value of this size may be off; a half carries so many roundings."""
        if not _is_real(self.ours[key]):  # type: ignore[arg-type]
            return _COUNTED * found.size if self._half else 0.0
        largest = self._largest.get(key[0], 0.0)
        scale = max(found.size, _FLOOR * largest)
        if self._half:
            return roundings * STEP[self._half] * scale
        if key[0] in (OUTPUT, BUFFER):
            return max(_VALUE * scale, 1e-12)
        return max(_OWN * scale, _VANISHES * largest * (found.size <= _VANISHES * largest))

    def _sentence(self, key: Key, found: Distance, noise: float | None = None) -> str:
        largest = self._largest.get(key[0])
        of_all = f", of all gradients {largest:.3g}" if largest else ""
        moved = f", roundings move it by {noise:.3g}" if noise is not None else ""
        return f"{key[0]} {key[1]} by {found.off:.3g} (of {found.size:.3g}{of_all}{moved})"
