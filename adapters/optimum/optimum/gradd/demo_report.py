"""Output of the demo: a progress line while it runs, tables and one picture at the end."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from transformers import TrainerCallback


@dataclass
class Curve:
    """Measurements of one training run, step by step."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peaks_mib: dict[str, float] = field(default_factory=dict)

    def median_ms(self) -> float:
        """Median time of a step in ms, the first two left out (they include set-up)."""
        return 1000 * statistics.median(self.seconds[2:] or self.seconds)

    def tokens_per_second(self, tokens: int) -> float:
        """Throughput at the median step."""
        return 1000 * tokens / self.median_ms()


class Progress(TrainerCallback):
    """Records loss and time of each step and keeps one line of progress alive.

    Args:
        curve: filled step by step.
        total: steps that this run will take.
        tokens: tokens per step, for the throughput.
        deadline: `time.monotonic()` after which training stops early.
    """

    def __init__(self, curve: Curve, total: int, tokens: int, deadline: float) -> None:
        self._curve, self._total, self._tokens = curve, total, tokens
        self._deadline = deadline
        self._tty = sys.stdout.isatty()
        self._last_line = 0.0
        self._began = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.monotonic()
        if state.global_step == 0:
            print(f"  {self._curve.name}: first step ...", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        now = time.monotonic()
        self._curve.seconds.append(now - self._began)
        if state.global_step >= self._total or now > self._deadline:
            control.should_training_stop = True
        return control

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if not logs or "loss" not in logs:
            return
        self._curve.losses.append(logs["loss"])
        now, step = time.monotonic(), state.global_step
        last = step >= self._total or control.should_training_stop
        # A terminal gets a line that rewrites itself, a log file a line every few seconds.
        if not (last or step == 1 or now - self._last_line > (0.2 if self._tty else 5.0)):
            return
        self._last_line = now
        line = self._line(step, logs["loss"])
        end = "\n" if last or not self._tty else ""
        print(f"\r{line}" if self._tty else line, end=end, flush=True)

    def _line(self, step: int, loss: float) -> str:
        width = 24
        bar = "#" * (width * step // self._total)
        line = f"  step {step:4d}/{self._total}  [{bar:<{width}}]  loss {loss:6.3f}  "
        if step == 1:  # it also prepares the others, so it says nothing about their time
            return line + f"  first step: {self._curve.seconds[0]:.1f} s         "
        recent = statistics.median(self._curve.seconds[1:][-5:])
        left = int(recent * (self._total - step))
        return line + f"{self._tokens / recent:7,.0f} tokens/s  {left // 60}:{left % 60:02d} left "


def print_losses(plain: Curve, ours: Curve) -> float:
    """Both loss curves side by side; returns and prints their largest difference."""
    count = min(len(plain.losses), len(ours.losses))
    pairs = list(zip(plain.losses[:count], ours.losses[:count], strict=True))
    print("\n  step   plain Trainer   ORTTrainer   difference")
    shown = sorted({0, 1, 2, *range(4, count, 5), count - 1})
    for i in (i for i in shown if 0 <= i < count):
        a, b = pairs[i]
        print(f"  {i + 1:4d}   {a:13.6f}   {b:10.6f}   {b - a:+10.1e}")
    worst = max(abs(a - b) for a, b in pairs)
    print(f"  largest difference in the first {count} steps: {worst:.1e}")
    return worst


def print_costs(plain: Curve, ours: Curve, tokens: int) -> None:
    """Step times, throughput and memory of both runs."""
    both = (plain, ours)
    rows = [
        ("first step (ours: capture, plan, check)", *(f"{c.seconds[0]:.1f} s" for c in both)),
        ("step, median", *(f"{c.median_ms():.0f} ms" for c in both)),
        ("tokens per second", *(f"{c.tokens_per_second(tokens):,.0f}" for c in both)),
    ]
    for process in ("trainer", "daemon"):
        cells = [c.peaks_mib.get(process) for c in both]
        rows.append((f"peak memory, {process}", *(f"{v:,.0f} MiB" if v else "-" for v in cells)))
    sums = (f"{c.peaks_mib.get('sum', 0):,.0f} MiB" for c in both)
    rows.append(("peak memory, both together", *sums))
    print(f"\n  {'':40s} {'plain Trainer':>15s} {'ORTTrainer':>15s}")
    for label, a, b in rows:
        print(f"  {label:40s} {a:>15s} {b:>15s}")
    print("  (memory is PSS: pages that both processes map count once. The two runs follow each")
    print("  other; `make bench` interleaves them and gives intervals.)")


def draw(plain: Curve, ours: Curve, tokens: int, path: Path) -> None:
    """Writes loss and throughput of both runs as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    grey, blue = "#8a8f98", "#1f5fbf"
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6.4), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    for axis in (top, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axis.set_axisbelow(True)
    steps = range(1, len(ours.losses) + 1)
    top.plot(steps, ours.losses, color=blue, linewidth=1.6, label="ORTTrainer (gradd)")
    top.plot(
        range(1, len(plain.losses) + 1),
        plain.losses,
        color=grey,
        linestyle="none",
        marker="o",
        markersize=4.5,
        markerfacecolor="none",
        label=f"plain Trainer, first {len(plain.losses)} steps",
    )
    top.set_ylabel("training loss")
    top.legend(frameon=False, loc="upper right")
    top.set_title("A small Llama learns Python's standard library", loc="left", fontsize=12)
    for curve, color in ((plain, grey), (ours, blue)):
        rate = [tokens / s for s in curve.seconds[2:]]
        bottom.plot(range(3, len(rate) + 3), rate, color=color, linewidth=1.2)
        bottom.axhline(
            curve.tokens_per_second(tokens), color=color, linewidth=0.8, linestyle=(0, (4, 3))
        )
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("tokens per second")
    figure.align_ylabels()
    bottom.set_xlabel("step (dashed: the median)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
