"""Medians, bootstrap intervals and the rule for printing a speed-up.

Engines take turns in rounds, so a slow moment of the machine hits all of them: the interval of a
ratio is bootstrapped over rounds, which keeps what was measured together together. Two starts of
the same program differ by a percent or two for good (where its pages came to lie), which no number
of rounds shows. A ratio from several starts is therefore the geometric mean of the starts' ratios,
with Student's interval over starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def median_interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """Median of the samples with its interval."""
    data = np.asarray(samples, dtype=float)
    rows = _resample(len(data), seed)
    low, high = np.percentile(np.median(data[rows], axis=1), [2.5, 97.5])
    return Interval(float(np.median(data)), float(low), float(high))


def ratio_interval(
    slow: Sequence[float], fast: Sequence[float], starts: int = 1, seed: int = 0
) -> Interval:
    """Median of `slow` over median of `fast` (above 1: `fast` is faster), rounds kept paired.

    Args:
        slow: Samples, those of one start of the processes side by side.
        fast: The other engine's, in the same order.
        starts: Over how many starts they spread evenly.
        seed: Of the bootstrap.

    Raises:
        ValueError: the two do not hold the same rounds, or do not spread evenly.
    """
    a, b = np.asarray(slow, dtype=float), np.asarray(fast, dtype=float)
    if len(a) != len(b) or len(a) == 0:
        raise ValueError(f"paired rounds expected, got {len(a)} and {len(b)}")
    if starts > 1:
        return interval_over_starts(start_ratios(slow, fast, starts))
    rows = _resample(len(a), seed)
    ratios = np.median(a[rows], axis=1) / np.median(b[rows], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high))


def start_ratios(
    slow: Sequence[float],
    fast: Sequence[float],
    starts: int,
    of: Callable[[np.ndarray], np.ndarray] = lambda samples: np.median(samples, axis=1),
) -> list[float]:
    """Median of `slow` over median of `fast` for each start of the processes.

    Args:
        slow: Samples, those of one start side by side.
        fast: The other engine's, in the same order.
        starts: Over how many starts they spread evenly.
        of: What to take of the samples [starts, rounds] instead of the median: [starts].

    Raises:
        ValueError: The samples do not spread evenly over that many starts.
    """
    if len(slow) % starts or len(slow) != len(fast):
        raise ValueError(f"{len(slow)} samples do not spread evenly over {starts} starts")
    a, b = (np.asarray(x, dtype=float).reshape(starts, -1) for x in (slow, fast))
    return list(of(a) / of(b))


def shortest_quarter(samples: np.ndarray) -> np.ndarray:
    """Mean of the shortest quarter of every row: what a host that lends the processor to others
    half of the time does not reach. One sample at least."""
    return np.sort(samples, axis=1)[:, : max(1, samples.shape[1] // 4)].mean(axis=1)


def interval_over_starts(ratios: Sequence[float]) -> Interval:
    """Geometric mean of the ratios of two or more starts, with Student's interval."""
    logs = np.log(ratios)
    spread = logs.std(ddof=1) / np.sqrt(len(logs)) * _student(len(logs) - 1)
    middle = logs.mean()
    return Interval(*(float(np.exp(x)) for x in (middle, middle - spread, middle + spread)))


def _student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t distribution."""
    exact = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
    if freedom <= len(exact):
        return exact[freedom - 1]
    normal = 1.959964  # with the first terms of the Cornish-Fisher expansion
    third, fifth = normal**3 + normal, 5 * normal**5 + 16 * normal**3 + 3 * normal
    return normal + third / (4 * freedom) + fifth / (96 * freedom**2)


def speedup_text(ratio: Interval) -> str:
    """The ratio as text; no figure where the interval does not exclude 1.0."""
    if ratio.low <= 1.0 <= ratio.high:
        return f"no difference shown ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _resample(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
