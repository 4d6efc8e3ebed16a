"""An estimate as a notebook shows it: self-contained HTML with a picture.

The picture has the points of the curve: planned peak against modelled extra time. Text takes the
colour of the page and everything else has a medium brightness, so both are legible on light and on
dark pages. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from gradd.html_tables import table
from gradd.memory.budget import UNITS, amount

if TYPE_CHECKING:
    from gradd.estimating import Estimate

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 34, 48  # margins around the axes
_LINE, _LIMIT = "#3f83d6", "#d9722e"  # of the curve, of the machine's memory
_NEAR = 1.6  # the machine's memory is drawn up to so many times the largest peak


def _steps(low: float, high: float, unit: float = 1) -> list[float]:
    """Round numbers from `low` to `high` for the marks of an axis, three to seven of them.

    Args:
        low: Where the axis begins.
        high: Where it ends, above that.
        unit: What numbers are round multiples of.
    """
    raw = (high - low) / unit / 6
    power = 10 ** math.floor(math.log10(raw))
    step = unit * power * next(k for k in (1, 2, 5, 10) if k * power >= raw * 0.999)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


class _Axes:
    """From values to places in the picture."""

    def __init__(self, times: Sequence[float], peaks: Sequence[float]) -> None:
        self.right = max(times) * 1.05 or 1
        room = max((max(peaks) - min(peaks)) * 0.12, max(peaks) * 1e-3) or 1
        self.low, self.high = max(min(peaks) - room, 0), max(peaks) + room
        self.unit = 1024.0 ** min(int(math.log(self.high, 1024)), len(UNITS) - 1)

    def x(self, time: float) -> float:
        return _LEFT + time / self.right * (_WIDTH - _LEFT - _RIGHT)

    def y(self, peak: float) -> float:
        part = (peak - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, more: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {more}/>'


def _grid(axes: _Axes) -> list[str]:
    """Marks of both axes with their numbers, and the titles of the axes."""
    thin = 'stroke="currentColor" stroke-opacity="0.18"'
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for peak in _steps(axes.low, axes.high, axes.unit):
        y = axes.y(peak)
        parts.append(_rule(_LEFT, y, right, y, thin))
        parts.append(_text(_LEFT - 8, y + 4, amount(peak), 'text-anchor="end"'))
    for time in _steps(0, axes.right):
        x = axes.x(time)
        parts.append(_rule(x, bottom, x, bottom + 5, 'stroke="currentColor"'))
        parts.append(_text(x, bottom + 20, f"{time:g} %", 'text-anchor="middle"'))
    parts.append(_rule(_LEFT, bottom, right, bottom, 'stroke="currentColor"'))
    parts.append(_text(8, 16, "planned peak of a training step"))
    middle = (_LEFT + right) / 2
    what = "more time for forward and backward, by a model"
    parts.append(_text(middle, _HEIGHT - 8, what, 'text-anchor="middle"'))
    return parts


def curve_svg(estimate: Estimate, memory: int) -> str:
    """The picture of an estimate with at least two points on its curve.

    Args:
        estimate: The estimate.
        memory: Bytes that the machine has left; 0 = not known.
    """
    points = estimate.curve
    rest = estimate.total - estimate.activations
    peaks = [rest + point.activations for point in points]
    times = [point.percent for point in points]
    shown = 0 < memory <= _NEAR * max(peaks) and memory >= min(peaks) / _NEAR
    axes = _Axes(times, [*peaks, memory] if shown else peaks)
    parts = _grid(axes)
    if shown:
        y = axes.y(memory)
        stroke = f'stroke="{_LIMIT}" stroke-width="2" stroke-dasharray="7 5"'
        parts.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y, stroke))
        what = f"this machine has {amount(memory)} left"
        more = f'text-anchor="end" fill="{_LIMIT}"'
        parts.append(_text(_WIDTH - _RIGHT, y - 6, what, more))
    path = " ".join(f"{axes.x(t):.1f},{axes.y(p):.1f}" for t, p in zip(times, peaks, strict=True))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{_LINE}" stroke-width="2.5"/>')
    for point, time, peak in zip(points, times, peaks, strict=True):
        title = (
            f"planned peak {amount(peak)}; arena of a run {amount(point.activations)}, computed "
            f"again {amount(point.recomputed)}, {point.percent:.1f} % more time"
        )
        parts.append(
            f'<circle cx="{axes.x(time):.1f}" cy="{axes.y(peak):.1f}" r="4.5" fill="{_LINE}">'
            f"<title>{escape(title)}</title></circle>"
        )
    parts.append(_text(axes.x(times[0]) + 8, axes.y(peaks[0]) - 7, amount(peaks[0])))
    end = f"{amount(peaks[-1])}, {times[-1]:.1f} %"
    parts.append(_text(axes.x(times[-1]), axes.y(peaks[-1]) + 19, end, 'text-anchor="end"'))
    label = "Planned peak of a training step against the time that computing again takes"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}" style="width:100%;max-width:{_WIDTH}px;height:auto" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )


def _points(estimate: Estimate) -> str:
    rest = estimate.total - estimate.activations
    rows = [("planned peak", "arena of a run", "computed again", "more time (by a model)")]
    for point in estimate.curve:
        sizes = (rest + point.activations, point.activations, point.recomputed)
        rows.append((*map(amount, sizes), f"{point.percent:.1f} %"))  # type: ignore[arg-type]
    return table(rows)


def html(
    estimates: Sequence[Estimate],
    lines: Sequence[Sequence[tuple[str, str]]],
    feet: Sequence[str],
    memory: int,
) -> str:
    """Estimates side by side; of a single one its curve, as a picture and as a table.

    Args:
        estimates: The estimates.
        lines: Of each its parts: heading and amount.
        feet: Of each what is said below.
        memory: Bytes that the machine has left; 0 = not known.
    """
    parts = []
    alone = estimates[0] if len(estimates) == 1 else None
    if alone is not None and len(alone.curve) > 1:
        left = f"This machine has {amount(memory)} left."
        parts += [curve_svg(alone, memory), f"<p>{escape(left)}</p>", _points(alone)]
    rows = [("batch", *(str(e.batch) for e in estimates))]
    for same in zip(*lines, strict=True):
        rows.append((same[0][0], *(size for _, size in same)))
    parts.append(table(rows))
    if alone is not None and alone.live is not None:
        parts.append(f"<p>{escape(str(alone.live))}</p>")
    parts += [f"<p>{escape(foot)}</p>" for foot in dict.fromkeys(feet)]
    return f"<div>{''.join(parts)}</div>"
