"""How far two results are apart, and how far they may be.

Values are compared as they come, one by one, so that a whole set of gradients need not exist twice.
Equal NaNs are equal, and so are equal infinities. f32 results are judged by their largest
difference, what computes in bf16 or f16 by the length of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

OUTPUT, BUFFER, GRADIENT, INPUT = "output", "buffer", "the gradient of", "the gradient of input"
Key = tuple[str, str]  # one of the kinds above, and a name or number
Values = Mapping[Key, torch.Tensor | None]
Worst = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # see Finding

_OWN = 1e-4  # of a gradient's own largest entry
_FLOOR = 1e-4  # of the largest entry of all gradients, times _OWN
_VANISHES = 1e-6  # of the largest entry of all: what is less is what terms that cancel leave
_INSIDE = 100  # times what roundings of whole operators do: they round inside as well
_NOTHING = 1e-3  # of what roundings do to a value: an exact one that small is zero
_VALUE = 1e-5  # of an output's or a buffer's largest entry
BF16, F16 = 16, 10  # codes of element types
_ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11}  # one step between bf16 and f16 numbers, relative
_WORSE = 4  # times PyTorch's own error in the same half
_WORSE_F32 = 10  # in f32; attention that keeps no weights loses a digit where they saturate
_COUNTED = 0.02  # of whole numbers, such as positions of a maximum, that a half turns over
_INDEPENDENT = 3  # other data in which an error shows, if there are so many
_WORST = 64  # entries of a value that differs which are remembered
_INFORMATIVE = 0.01  # of its size: a value that nearly vanishes says nothing
_CHUNK = 1 << 20
_SAMPLED = 1 << 16  # entries from which a sample tells how long a difference is
_STRIDE = 17  # of it: a prime, so that no column is left out


@dataclass(frozen=True)
class Apart:
    """What lies between two tensors a and b.

    Attributes:
        top: Largest difference.
        off: Length of the difference.
        large: Largest finite entry of b.
        long: Length of the finite entries of b.
        n: Number of entries.
        finite: Whether some entry of b is finite.
    """

    top: float
    off: float
    large: float
    long: float
    n: int
    finite: bool


def apart(a: torch.Tensor, b: torch.Tensor) -> Apart:
    """Compares two tensors of one shape, in pieces that need little memory."""
    top = off = large = long = 0.0
    finite = False
    for x, y in _pieces(a, b):
        d, y = _difference(x, y)
        here = float(d.max())
        finite = finite or bool(y.isfinite().any())
        if not math.isfinite(here) or not math.isfinite(float(y.sum())):
            y = torch.nan_to_num(y, nan=0.0, posinf=0.0, neginf=0.0)
        top = max(top, here)
        off = math.hypot(off, float(d.norm()))
        large, long = max(large, float(y.abs().max())), math.hypot(long, float(y.norm()))
    return Apart(top, off, large, long, b.numel(), finite)


def _pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    a, b = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, b.numel(), _CHUNK):
        yield a[start : start + _CHUNK], b[start : start + _CHUNK]


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Every so many entries of a large tensor of finite numbers, to tell how long it is."""
    whole = tensor.numel() < _SAMPLED or not tensor.is_floating_point()
    if whole or not math.isfinite(float(tensor.sum(dtype=torch.float64))):
        return tensor
    return tensor.reshape(-1)[::_STRIDE].clone()


def _difference(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Absolute differences (0 or 1 for whole numbers), and b as floats."""
    if not b.is_floating_point() or not a.is_floating_point():
        return (a != b).float(), b.double()
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    a, b = a.to(wide), b.to(wide)
    d = (a - b).abs()
    if not math.isfinite(float(d.sum())):
        same = (a == b) | (a.isnan() & b.isnan())
        d = torch.where(same, torch.zeros_like(d), d).nan_to_num_(nan=math.inf, posinf=math.inf)
    return d, b


def _within_range(
    ours: torch.Tensor, other: torch.Tensor, exact: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All three, with zeros wherever a result has left the range of its type, as PyTorch's has.

    What an overflow gives, an infinity of either sign or NaN, is up to the order of additions, and
    so is where it comes: in a value that leaves the range in PyTorch, ours may do so elsewhere.
    """
    if ours.shape != other.shape or not other.is_floating_point():
        return ours, other, exact
    lost = ~other.isfinite() & exact.isfinite()
    if not lost.any():
        return ours, other, exact
    lost |= ~ours.isfinite() & exact.isfinite()
    return ours.masked_fill(lost, 0), other.masked_fill(lost, 0), exact.masked_fill(lost, 0)


def is_zero(tensor: torch.Tensor) -> bool:
    """Whether there is nothing in it but zeros."""
    return not tensor.numel() or not bool(tensor.any())


def _worst(ours: torch.Tensor, theirs: torch.Tensor) -> Worst:
    """The entries of two values that are furthest apart, found in pieces."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = 0
    for a, b in _pieces(ours, theirs):
        d = _difference(a, b)[0]
        top, at = d.topk(min(_WORST, d.numel()))
        found.append((top, at + start))
        start += d.numel()
    tops = torch.cat([top for top, _ in found])
    top, which = tops.topk(min(_WORST, tops.numel()))
    at = torch.cat([at for _, at in found])[which]
    a, b = (t.detach().reshape(-1)[at].abs() for t in (ours, theirs))
    larger = torch.maximum(a.to(top.dtype), b.to(top.dtype))
    share = (top / larger).nan_to_num_(nan=1.0, posinf=1.0).clamp_(max=1.0)
    return at, top, share


@dataclass
class Finding:
    """One value that differs.

    Attributes:
        key: Which.
        text: What is wrong with it, in words.
        apart: By how much; None where one side has no such value, which needs no other data.
        worst: Positions of the entries that are furthest off, their differences, and what share of
            the larger of both values that is.
        excused: PyTorch is as far off. It may be so elsewhere, and the daemon wrong all the same;
            other data say.
    """

    key: Key
    text: str
    apart: Apart | None = None
    worst: Worst | None = None
    excused: bool = False


class Tally:
    """Collects how far the values of one run in PyTorch are from ours."""

    def __init__(self, ours: Values, half: int, others: Values | None = None) -> None:
        """Args:
        ours: The daemon's values.
        half: Code of the 16-bit float whose rounding they carry; 0 = none.
        others: PyTorch's own, where this run is one in higher precision.
        """
        self.ours = ours
        self.half = half
        self._rounding = _ROUNDING.get(half, 0.0)
        self.apart: dict[Key, Apart] = {}
        self.own: dict[Key, float] = {}  # PyTorch's own error, where it is known
        self.kept: dict[Key, torch.Tensor] = {}  # of PyTorch, where it differs; of halves all
        self.noise: dict[Key, float] = {}  # what roundings to f32 do to a value, where it is known
        self._others = others or {}
        self._more: dict[Key, bool] = {}
        self._worst: dict[Key, Worst] = {}
        self._missing: list[Finding] = []

    def add(self, key: Key, theirs: torch.Tensor | None) -> None:
        """One value of PyTorch's; None for a gradient that there is not."""
        ours = self.ours.get(key)
        if ours is None or theirs is None:
            self._add_missing(key, ours, theirs)
            return
        theirs = theirs.detach()
        if ours.shape != theirs.shape:
            text = f"{_name(key)} has shape {list(ours.shape)}, in PyTorch {list(theirs.shape)}"
            self._missing.append(Finding(key, text))
            return
        other = self._others.get(key)
        if other is not None and other.shape != theirs.shape:
            part = _sample(theirs)
            self.own[key] = apart(other, part).off * math.sqrt(theirs.numel() / part.numel())
            other = None
        if other is not None:
            ours, other, theirs = _within_range(ours, other, theirs)
        self.apart[key] = found = apart(ours, theirs)
        if other is not None:
            own = apart(other, theirs)
            self.own[key] = self.size_of(key, own)
            longer = found.off > _WORSE * own.off
            self._more[key] = longer and self._is_off_more_often(key, ours, other, theirs)
        bad = not self._is_good(key, found, 0.0)
        if bad and not self._counts(key):
            self._worst[key] = _worst(ours, theirs)
        if self.half and not self._others:
            self.kept[key] = _sample(theirs)
        elif bad:
            self.kept[key] = theirs

    def _add_missing(
        self, key: Key, ours: torch.Tensor | None, theirs: torch.Tensor | None
    ) -> None:
        value = theirs if ours is None else ours
        if value is not None and not is_zero(value):
            side = "the daemon" if ours is None else "PyTorch"
            self._missing.append(Finding(key, f"{side} has no gradient for {key[1]}"))

    def _is_off_more_often(
        self, key: Key, ours: torch.Tensor, other: torch.Tensor, exact: torch.Tensor
    ) -> bool:
        """Whether many more entries of ours are off than of PyTorch's.

        One unit that PyTorch has on the other side of zero must not excuse all that we may have.
        Only asked where ours are off by more all together: beside many of PyTorch's entries that
        are off by about the bound, a few times as far is not more.
        """
        bound = self._bound(key)
        n, own = (
            sum(int((_difference(x, y)[0] > bound).sum()) for x, y in _pieces(t, exact))
            for t in (ours, other)
        )
        return n > _WORSE * own

    def findings(self, among: Collection[Key] | None = None) -> list[Finding]:
        """What differs by more than its bound, among all values or these."""
        found = list(self._missing)
        floors = {kind: self._floor(kind) for kind in (GRADIENT, INPUT)}
        for key, one in self.apart.items():
            floor = floors.get(key[0], 0.0)
            if (among is None or key in among) and not self._is_good(key, one, floor):
                text = f"{_name(key)} by {self._text(key, one, floor)}"
                found.append(Finding(key, text, one, self._worst.get(key)))
        return found

    def says_something(self) -> bool:
        """Whether a finite value was compared, and a gradient that is not zero if there are any."""
        gradients = [a for k, a in self.apart.items() if k[0] in (GRADIENT, INPUT)]
        return any(a.large > 0 for a in gradients) or (
            not gradients and any(a.finite for a in self.apart.values())
        )

    def _bound(self, key: Key) -> float:
        """How far the largest entries of one value may be apart."""
        share = self._rounding if self.half else _OWN if key[0] in (GRADIENT, INPUT) else _VALUE
        return share * self.apart[key].large

    def _counts(self, key: Key) -> bool:
        return not self.ours[key].is_floating_point()  # type: ignore[union-attr]

    def size_of(self, key: Key, found: Apart) -> float:
        if self._counts(key):
            return found.off**2  # how many
        return found.off if self.half else found.top

    def _floor(self, kind: str) -> float:
        """What a gradient's bound is at least relative to: a share of the largest of its kind."""
        same = [a for k, a in self.apart.items() if k[0] == kind]
        return _FLOOR * max((a.long if self.half else a.large for a in same), default=0.0)

    def _is_good(self, key: Key, found: Apart, floor: float) -> bool:
        size, own = self.size_of(key, found), self.own.get(key)
        if self._counts(key):
            return size <= (_COUNTED * found.n if self.half else 0.0) + _WORSE * (own or 0.0)
        if self.half:
            scale = max(found.long, floor)
            # Without anything exact PyTorch's own result stands in for it, a few roundings off.
            error = 2 * self._rounding * scale if own is None else own
            return size <= _WORSE * error + self._rounding * scale
        excused = own is not None and math.isfinite(own) and size <= _WORSE_F32 * own
        if excused and not self._more.get(key):
            return True
        noise = self.noise.get(key, 0.0)
        if found.large <= _NOTHING * noise and size <= _INSIDE * noise:
            return True
        if key[0] in (GRADIENT, INPUT):
            least = _VANISHES * floor / _FLOOR
            return size <= max(_OWN * max(found.large, floor), least if found.large <= least else 0)
        return size <= max(_VALUE * found.large, 1e-12)

    def would_show(self, finding: Finding) -> bool:
        """Whether an error like that of other data would be seen in these, were it there."""
        key, before = finding.key, finding.apart
        ours, now = self.ours.get(key), self.apart.get(key)
        if ours is None or now is None or before is None or not now.finite:
            return False
        if finding.worst is None:
            return True
        at, top, share = finding.worst
        expected = torch.minimum(share * ours.detach().reshape(-1)[at].abs().to(share.dtype), top)
        enough = float(expected.max()) > 2 * self._bound(key)
        return enough and now.large >= _INFORMATIVE * before.large

    def _text(self, key: Key, one: Apart, floor: float) -> str:
        if self._counts(key):
            return f"{one.off**2:.0f} of {one.n} numbers"
        if self.half:
            own = self.own.get(key)
            error = "not known" if own is None else f"{own:.3g}"
            scale = max(one.long, floor)
            return f"{one.off:.3g} (length {scale:.3g}, PyTorch's own error {error})"
        if key[0] not in (GRADIENT, INPUT):
            return f"{one.top:.3g} (largest value {one.large:.3g})"
        largest = floor / _FLOOR
        return f"{one.top:.3g} (largest entry {one.large:.3g}, of all gradients {largest:.3g})"


class Trial:
    """Whether what differs is an error: it must show in other data, wherever it could.

    A unit whose input is within rounding of zero differs again in every set of rows that holds the
    row where that is so. Only sets without a common row, and data in which every row is new, are
    independent of each other.
    """

    def __init__(self, findings: list[Finding]) -> None:
        self._suspects = {f.key: f for f in findings}
        self._evidence: dict[Key, list[frozenset[int]]] = {key: [] for key in self._suspects}
        self._heard = self._agreed = 0

    def hear(self, tally: Tally, findings: list[Finding], used: frozenset[int]) -> bool:
        """Takes the comparison of other data, made of the rows `used`; True if that is enough."""
        self._heard += 1
        unlike = {f.key for f in findings}
        differing = {f.key for f in findings if not f.excused}
        self._agreed += tally.says_something() and differing.isdisjoint(self._suspects)
        for key, finding in list(self._suspects.items()):
            if key not in unlike and tally.would_show(finding):
                del self._suspects[key]
                del self._evidence[key]
            elif key in differing and all(used.isdisjoint(x) for x in self._evidence[key]):
                self._evidence[key].append(used)
        return self._is_over()

    def _is_over(self) -> bool:
        if not self._suspects:
            return True
        most = max(map(len, self._evidence.values()))
        if not most and all(f.excused for f in self._suspects.values()):
            return self._heard >= _INDEPENDENT  # PyTorch is as far off everywhere
        return most >= _INDEPENDENT

    def guilty(self) -> Finding | None:
        """What is an error. Without any other data, all that differs is."""
        for key, finding in self._suspects.items():
            if len(self._evidence[key]) >= 2 or not (self._heard or finding.excused):
                return finding
        return None

    @property
    def open(self) -> list[Finding]:
        """What no other data speak for or against, or too few."""
        enough = self._agreed >= _INDEPENDENT
        return [
            f for k, f in self._suspects.items() if self._evidence[k] or not (enough or f.excused)
        ]


def _name(key: Key) -> str:
    return f"{key[0]} {key[1]}"
