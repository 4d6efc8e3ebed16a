"""Measures how far two results differ, and decides how far they may.

Values are compared one by one as they arrive, so that a whole set of gradients need not exist
twice. Equal NaNs are equal, and so are equal infinities. f32 results are judged by their largest
difference, results computed in bf16 or f16 by the length of the difference, whole numbers by the
number of elements that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

OUTPUT, BUFFER, GRADIENT, INPUT = "output", "buffer", "the gradient of", "the gradient of input"
Key = tuple[str, str]  # one of the kinds above, and a name or number
Values = Mapping[Key, torch.Tensor | None]

_VALUE = 1e-5  # of an output's or a buffer's largest entry
_OWN = 1e-4  # of a gradient's own largest entry
_FLOOR = 1e-4  # of the largest of all gradients: no bound is relative to less
_VANISHES = 1e-6  # of the largest of all: smaller values are left over by terms that cancel
_WORSE = {0: 10, 16: 4, 10: 4}  # times PyTorch's own error, by codes of element types; 0 = f32
_ROUNDING = {16: 2.0**-8, 10: 2.0**-11}  # one step between bf16 and f16 numbers, relative
_COUNTED = 0.02  # of whole numbers, such as positions of a maximum, that a half turns over
_INSIDE = 100  # times the effect of rounding whole operators: they round inside as well
_NOTHING = 1e-3  # of the effect of roundings on a value: an exact one that small is zero
_WORST = 64  # entries of a value that differs which are remembered
_INFORMATIVE = 0.01  # of its size: a value that nearly vanishes says nothing
_CHUNK = 1 << 17  # entries: some temporaries of 8 bytes for each


@dataclass(frozen=True)
class Distance:
    """What lies between two tensors a and b: size of the difference, and of the finite part of b.

    Attributes:
        off: Largest difference, or its length; of whole numbers how many differ.
        size: Largest entry of b, or its length; of whole numbers how many there are.
        finite: Whether some entry of b is finite.
    """

    off: float
    size: float
    finite: bool


def distance(a: torch.Tensor, b: torch.Tensor, half: int = 0) -> Distance:
    """Compares two tensors of one shape, in pieces that need little memory."""
    off = size = 0.0
    finite = False
    join = math.hypot if half else max
    for x, y in _pieces(a, b):
        finite = finite or bool(y.isfinite().any())
        d, y = difference(x, y), y.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).double()
        if not is_real(a, b):
            off, size = off + float(d.sum()), size + d.numel()
            continue
        off, size = (
            join(v, float(t.norm() if half else t.abs().max())) for v, t in ((off, d), (size, y))
        )
    return Distance(off, size, finite)


def is_real(*tensors: torch.Tensor) -> bool:
    """Whether all hold floats."""
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


def _in_range(ours: torch.Tensor, other: torch.Tensor, exact: torch.Tensor) -> list[torch.Tensor]:
    """All three, with zeros wherever a result has left the range of its type, as PyTorch's has.

    What an overflow gives, an infinity of either sign or NaN, is up to the order of additions, and
    so is where it comes: in a value that leaves the range in PyTorch, ours may do so elsewhere.
    """
    lost = ~other.isfinite() & exact.isfinite()
    if not lost.any():
        return [ours, other, exact]
    lost |= ~ours.isfinite() & exact.isfinite()
    return [t.masked_fill(lost, 0) for t in (ours, other, exact)]


@dataclass
class Finding:
    """One value that differs.

    Attributes:
        key: Which.
        text: Its error, in words.
        distance: By how much; None where one side has no such value, which needs no other data.
        at: Positions of the entries that are furthest off.
        share: How far these are off, relative to the larger of both values.
        excused: PyTorch is as far off, on these data.
    """

    key: Key
    text: str
    distance: Distance | None = None
    at: torch.Tensor | None = None
    share: torch.Tensor | None = None
    excused: bool = False


class Tally:
    """Collects how far the values of one run in PyTorch are from ours.

    Attributes:
        distances: By value.
        kept: PyTorch's values where they differ, or some of those; nothing of a run in higher
            precision for 16-bit floats.
        noise: The effect of roundings to f32 on a value, where it is known.
    """

    def __init__(
        self, ours: Values, half: int, before: Tally | None = None, slack: float = 1.0
    ) -> None:
        """Args:
        ours: The daemon's values.
        half: Code of the 16-bit float whose rounding they carry; 0 = none.
        before: PyTorch's own values, where this run is one in higher precision, of some of them.
        slack: Times all bounds.
        """
        self.ours, self.half = ours, half
        self.distances: dict[Key, Distance] = {}
        self.kept: dict[Key, torch.Tensor | None] = {}
        self.noise: dict[Key, float] = {}
        self._slack = slack
        self._own: dict[Key, float] = {}  # PyTorch's own error
        self._before = before
        self._worst: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
        self._missing: list[Finding] = []

    def add(self, key: Key, theirs: torch.Tensor | None) -> None:
        """One value of PyTorch's; None for a gradient that there is not."""
        ours = self.ours.get(key)
        if ours is None or theirs is None:
            if any(x is not None and x.numel() for x in (ours, theirs)):
                side = "the daemon" if ours is None else "PyTorch"
                self._misses(key, theirs, f"{side} has no gradient for {key[1]}")
            return
        theirs = theirs.detach()
        if ours.shape != theirs.shape:
            shapes = f"{list(ours.shape)}, in PyTorch {list(theirs.shape)}"
            self._misses(key, theirs, f"{key[0]} {key[1]} has shape {shapes}")
            return
        other = self._before.kept.get(key) if self._before else None
        if other is not None and other.shape == theirs.shape:
            if is_real(ours, other, theirs):
                ours, other, theirs = _in_range(ours, other, theirs)
            self._own[key] = distance(other, theirs, self.half).off
        self.distances[key] = found = distance(ours, theirs, self.half)
        if not self._is_good(key, found, 0.0):
            if not (self._before and self.half):
                self.kept[key] = theirs
            self._worst[key] = _worst(ours, theirs)

    def _misses(self, key: Key, theirs: torch.Tensor | None, text: str) -> None:
        self.kept[key] = theirs
        self._missing.append(Finding(key, text))

    def findings(self) -> list[Finding]:
        """The values that differ by more than their bounds."""
        found = list(self._missing)
        for key in self._worst:
            one, largest = self.distances[key], self._largest(key)
            if not self._is_good(key, one, largest):
                text = f"{key[0]} {key[1]} by {one.off:.3g} (of {one.size:.3g}"
                own = f", PyTorch's own error {self._own[key]:.3g}" if key in self._own else ""
                of_all = f", of all gradients {largest:.3g}" if largest else ""
                found.append(Finding(key, f"{text}{of_all}{own})", one, *self._worst[key]))
        return found

    def zeros(self) -> set[Key]:
        """Parameters whose gradient PyTorch has and finds to be zero."""
        return {
            k for k, a in self.distances.items() if k[0] == GRADIENT and a.finite and not a.size
        }

    def says_something(self) -> bool:
        """Whether a finite value was compared, and a gradient that is not zero if there are any."""
        gradients = [a for k, a in self.distances.items() if k[0] in (GRADIENT, INPUT)]
        return any(a.size > 0 for a in gradients) or (
            not gradients and any(a.finite for a in self.distances.values())
        )

    def _largest(self, key: Key) -> float:
        """Size of the largest gradient of its kind."""
        if key[0] not in (GRADIENT, INPUT):
            return 0.0
        known = {**(self._before.distances if self._before else {}), **self.distances}
        return max(a.size for k, a in known.items() if k[0] == key[0])

    def _bound(self, key: Key, found: Distance, largest: float) -> float:
        own = self._own.get(key, 0.0)
        excused = _WORSE[self.half] * own if math.isfinite(own) else 0.0
        if not is_real(self.ours[key]):  # type: ignore[arg-type]
            return excused + (_COUNTED * found.size if self.half else 0.0)
        scale = max(found.size, _FLOOR * largest)
        if self.half:
            # Without anything exact PyTorch's own result stands in for it, a few roundings off.
            step = _ROUNDING[self.half] * scale
            return step + (excused if key in self._own else _WORSE[self.half] * 2 * step)
        noise = self.noise.get(key, 0.0)
        if found.size <= _NOTHING * noise:
            excused = max(excused, _INSIDE * noise)
        if key[0] in (GRADIENT, INPUT):
            vanishes = _VANISHES * largest
            return max(_OWN * scale, vanishes if found.size <= vanishes else 0.0, excused)
        return max(_VALUE * scale, 1e-12, excused)

    def _is_good(self, key: Key, found: Distance, largest: float) -> bool:
        return found.off <= self._slack * self._bound(key, found, largest)

    def would_show(self, finding: Finding) -> bool:
        """Whether these data would show an error like that of other data."""
        ours, now = self.ours.get(finding.key), self.distances.get(finding.key)
        if ours is None or now is None or not now.finite or finding.distance is None:
            return False
        if not is_real(ours) or finding.at is None or finding.share is None:
            return True
        expected = finding.share * ours.detach().reshape(-1)[finding.at].abs().double()
        shows = float(expected.norm() if self.half else expected.max())
        bound = self._bound(finding.key, now, self._largest(finding.key))
        return now.size >= _INFORMATIVE * finding.distance.size and shows > 2 * bound


def _worst(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of two values that are furthest apart, and their distance over the larger one."""
    found, start = [], 0
    for a, b in _pieces(ours, theirs):
        top, at = difference(a, b).topk(min(_WORST, a.numel()))
        found.append((top, at + start))
        start += a.numel()
    tops, at = (torch.cat(list(x)) for x in zip(*found, strict=True))
    top, which = tops.topk(min(_WORST, tops.numel()))
    at = at[which]
    a, b = (t.detach().reshape(-1)[at].abs().double() for t in (ours, theirs))
    return at, (top / torch.maximum(a, b)).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
