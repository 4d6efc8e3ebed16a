"""Medians, bootstrap intervals and the rule for printing a speed-up.

Engines take turns in rounds, so a slow moment of the machine hits all of them: the interval of a
ratio is bootstrapped over rounds, which keeps what was measured together together.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def ratio_interval(slow: Sequence[float], fast: Sequence[float], seed: int = 0) -> Interval:
    """Median of `slow` over median of `fast` (above 1: `fast` is faster), rounds kept paired.

    Raises:
        ValueError: the two do not hold the same rounds.
    """
    a, b = np.asarray(slow, dtype=float), np.asarray(fast, dtype=float)
    if len(a) != len(b) or len(a) == 0:
        raise ValueError(f"paired rounds expected, got {len(a)} and {len(b)}")
    rows = _resample(len(a), seed)
    ratios = np.median(a[rows], axis=1) / np.median(b[rows], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Interval(float(np.median(a) / np.median(b)), float(low), float(high))


def speedup_text(ratio: Interval) -> str:
    """The ratio as text; no figure where the interval does not exclude 1.0."""
    if ratio.low <= 1.0 <= ratio.high:
        return f"no difference shown ({ratio.low:.2f}-{ratio.high:.2f})"
    return f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _resample(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))
