"""Measures how far two results differ, and decides how far they may.

Values are compared one by one as they arrive, so that a whole set of gradients need not exist
twice. Equal NaNs are equal, and so are equal infinities. f32 results are judged by their largest
difference, results computed in bf16 or f16 by the length of the difference, whole numbers by the
number of elements that differ.

What exceeds a bound is compared with the exact value, and may be off as far as roundings go: an
element by some times what PyTorch's own result is off there, and the results of draws that are a
rounding off. A ReLU unit whose input is within rounding of zero is excused by these, its neighbour
is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from gradd.check.precise import STEP

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
    """What lies between two tensors a and b: size of the difference, and of the finite part of b.

    Attributes:
        off: Largest difference, or its length; of whole numbers how many differ.
        size: Largest entry of b, or its length; of whole numbers how many there are.
    """

    off: float
    size: float


def distance(a: torch.Tensor, b: torch.Tensor, half: int = 0) -> Distance:
    """Compares two tensors of one shape, in pieces that need little memory."""
    off = size = 0.0
    real = is_real(a, b)
    for x, y in _pieces(a, b):
        off = _join(off, difference(x, y), half, real)
        y = y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).double().abs()
        size = _join(size, y if real else torch.ones_like(y), half, real)
    return Distance(off, size)


def _join(length: float, more: torch.Tensor, half: int, real: bool) -> float:
    """The length of a vector with more entries, none of them negative."""
    if not real:
        return length + float(more.sum())
    return math.hypot(length, float(more.norm())) if half else max(length, float(more.max()))


def is_real(*tensors: torch.Tensor) -> bool:
    return all(t.is_floating_point() for t in tensors)


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    flat = [t.detach().reshape(-1) for t in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield tuple(t[start : start + _CHUNK] for t in flat)


def difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Absolute differences; 0 or 1 of whole numbers."""
    if not is_real(a, b):
        return (a != b).double()
    d = (a.double() - b.double()).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return d.masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)


class Tally:
    """How far the values of runs in PyTorch are from ours.

    Attributes:
        ours: The daemon's values.
        half: Code of the 16-bit float whose rounding they carry; 0 = none.
        distances: To PyTorch's, by value.
        kept: PyTorch's values where they differ.
        missing: Where one side has no such value, or another shape, in words.
        differing: What differs by more than its bound, in words, when all values are known.
    """

    def __init__(self, ours: Values, half: int, slack: float = 1.0) -> None:
        """Args:
        ours: The daemon's values.
        half: Code of the 16-bit float.
        slack: Times all bounds.
        """
        self.ours, self.half = ours, half
        self.distances: dict[Key, Distance] = {}
        self.kept: dict[Key, torch.Tensor | None] = {}
        self.missing: dict[Key, str] = {}
        self.differing: dict[Key, str] = {}
        self._slack = slack
        self._exact: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}  # and how it moves

    def add(self, key: Key, theirs: torch.Tensor | None) -> None:
        """One value of PyTorch's; None for a gradient that there is not."""
        ours = self.ours.get(key)
        if ours is None or theirs is None:
            if not any(x is not None and x.numel() for x in (ours, theirs)):
                return
            side = "the daemon" if ours is None else "PyTorch"
            self.missing[key] = f"{side} has no gradient for {key[1]}"
        elif ours.shape != theirs.shape:
            shapes = f"{list(ours.shape)}, in PyTorch {list(theirs.shape)}"
            self.missing[key] = f"{key[0]} {key[1]} has shape {shapes}"
        else:
            found = self.distances[key] = distance(ours, theirs, self.half)
            if found.off <= self._slack * self._bound(key, found, 0.0, _INEXACT):
                return
        self.kept[key] = None if theirs is None else theirs.detach()

    def settle(self) -> dict[Key, str]:
        """All values are known, and thereby the largest gradient; returns what differs."""
        self.differing = dict(self.missing)
        for key in self.kept.keys() - self.missing.keys():
            one, largest = self.distances[key], self._largest(key)
            if one.off > self._slack * self._bound(key, one, largest, _INEXACT):
                self.differing[key] = _sentence(key, one, largest)
            else:
                del self.kept[key]
        return self.differing

    def exact(self, key: Key, value: torch.Tensor | None) -> None:
        """The exact value of what differs; PyTorch's own shows how roundings move it."""
        theirs = self.kept.get(key)
        if theirs is not None and value is not None and theirs.shape == value.shape:
            self._exact[key] = value.detach(), torch.zeros(value.shape, device=value.device)
            self.draw(key, theirs)

    def draw(self, key: Key, value: torch.Tensor | None) -> None:
        """The same with other roundings: what differs no more than these move it is right."""
        exact, noise = self._exact.get(key, (None, None))
        if exact is None or value is None:
            return
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
        one, largest, off = distance(ours, exact, self.half), self._largest(key), 0.0
        usual = noise.reshape(-1)[:: max(1, noise.numel() // _SAMPLE)].median()
        for o, e, n in _pieces(ours, exact, noise):
            more = (difference(o, e) - _WORSE * (n + usual)).clamp_(min=0.0)
            off = _join(off, more, self.half, is_real(ours))
        self.differing[key] = _sentence(key, one, largest, float(noise.max()))
        return off <= self._bound(key, one, largest)

    def zeros(self) -> set[Key]:
        """Parameters whose gradient PyTorch has and finds to be zero."""
        return {k for k, a in self.distances.items() if k[0] == GRADIENT and not a.size}

    def says_something(self) -> bool:
        """Whether a number was compared, and a gradient if there are any, that is not zero."""
        gradients = [a for k, a in self.distances.items() if k[0] in (GRADIENT, INPUT)]
        return any(a.size > 0 for a in gradients or self.distances.values())

    def _largest(self, key: Key) -> float:
        """Size of the largest gradient of its kind."""
        if key[0] not in (GRADIENT, INPUT):
            return 0.0
        return max(a.size for k, a in self.distances.items() if k[0] == key[0])

    def _bound(self, key: Key, found: Distance, largest: float, roundings: int = 1) -> float:
        """The most that a value of this size may be off; a half carries so many roundings."""
        if not is_real(self.ours[key]):  # type: ignore[arg-type]
            return _COUNTED * found.size if self.half else 0.0
        scale = max(found.size, _FLOOR * largest)
        if self.half:
            return roundings * STEP[self.half] * scale
        if key[0] in (GRADIENT, INPUT):
            vanishes = _VANISHES * largest
            return max(_OWN * scale, vanishes if found.size <= vanishes else 0.0)
        return max(_VALUE * scale, 1e-12)


def _sentence(key: Key, one: Distance, largest: float, noise: float | None = None) -> str:
    of_all = f", of all gradients {largest:.3g}" if largest else ""
    moved = f", roundings move it by {noise:.3g}" if noise is not None else ""
    return f"{key[0]} {key[1]} by {one.off:.3g} (of {one.size:.3g}{of_all}{moved})"
