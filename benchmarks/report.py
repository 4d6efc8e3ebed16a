"""Results as JSON, as tables in Markdown and as one SVG."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import stats

COLORS = {
    "eager": "#9aa0a8",
    "last": "#c3c8ce",
    "compile": "#5b6470",
    "gradd": "#1f5fbf",
    "plain": "#8fb3e6",
}
COLORS |= {"Trainer": "#9aa0a8", "ORTTrainer": "#1f5fbf"}
OURS = ("gradd", "ORTTrainer")
RATES = {"samples/s": "sequences", "tokens/s": "tokens"}  # and what of a step they count


def one_line(mode: str, samples: dict[str, list[float]]) -> str:
    """Medians of one mode, for the progress of the run."""
    cells = []
    for engine, values in samples.items():
        m = stats.median_interval(values)
        cells.append(f"{engine} {_ms(m.value)} ({_ms(m.low)}-{_ms(m.high)})")
    return f"{mode:12s} " + "   ".join(cells) + "  ms"


def _busy(machine: dict[str, Any]) -> str:
    """That other processes had work, if they had."""
    load = machine.get("load_before", 0)
    return f" Other processes were at work (load {load:.1f} before)." if load > 0.5 else ""


def _stolen(machine: dict[str, Any]) -> str:
    """How much of its processors the machine did not get, if it is worth a word."""
    share = machine.get("stolen", 0)
    return f" The hypervisor took {share:.0%} of the processors' time." if share >= 0.005 else ""


_OF_MODULES = (
    "plain: gradd with the recognition of patterns off; last: eager in torch.channels_last. The "
    "last rows are speed-ups: an engine's time over gradd's."
)
_OF_TRAINERS = (
    "A step is all that a trainer does for it: data, forward, backward, clipping and optimizer. "
    "ORTTrainer stands for other packages' trainers with a wrapped model, too. The last row is a "
    "speed-up: Trainer's time over ORTTrainer's."
)


def table(machine: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """A Markdown page: a table for each workload and precision, with a row for each engine."""
    whole = any("sequences" in result for result in results)
    head = (
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, measured on "
        f"{machine['date']}. Median ms per step with 95 % intervals; memory: peak PSS of all "
        "processes above their start, parameters, gradients and optimizer state, in MiB, of later "
        f"steps and of the first one{'' if whole else ' (forward and backward)'}. "
    )
    head += _OF_TRAINERS if whole else _OF_MODULES
    lines = textwrap.wrap(head + _starts(results) + _busy(machine) + _stolen(machine), 100)
    for result in results:
        lines += ["", f"## {_name(result)}", ""]
        if "sequences" in result:
            lines += [*textwrap.wrap(f"{result['what']}.", 100), ""]
        lines += [*_rows(result), *_equality(result)]
        for engine, why in result["failed"].items():
            said = f"{_name(result)}, {engine} failed: {why.splitlines()[-1]}"
            lines += ["", *textwrap.wrap(said, 100, break_long_words=False)]
    return "\n".join(lines)


def _rows(result: dict[str, Any]) -> list[str]:
    """The table of one workload."""
    engines, starts = result["engines"], result.get("starts", 1)
    modes = list(dict.fromkeys(mode for engine in engines.values() for mode in engine["ms"]))
    times = {m: {n: e["ms"][m] for n, e in engines.items() if m in e["ms"]} for m in modes}
    rates = RATES if "sequences" in result else {}
    columns = ["engine", *modes, *rates, "memory", "of the first step", "first call"]
    lines = [_line(columns), "|" + "---|" * len(columns)]
    for name in (n for n in COLORS if n in engines):
        engine = engines[name]
        cells = [_cell(times[mode].get(name)) for mode in modes]
        cells += [_rate_cell(times[modes[0]].get(name), result[each]) for each in rates.values()]
        memory = [_mib(engine.get(key)) for key in ("memory", "first_memory")]
        extra = [*memory, f"{engine['first_s']:.1f} s"]
        lines.append(_line([name, *cells, *extra]))
    for against, ratio in _AGAINST:
        cells = [ratio(times[mode], against, starts) for mode in modes]
        if any(cell != "-" for cell in cells):
            ours = next(name for name in OURS if name in engines)
            empty = [""] * (len(columns) - 1 - len(cells))
            lines.append(_line([f"{against} / {ours}", *cells, *empty]))
    return lines


def _equality(result: dict[str, Any]) -> list[str]:
    """How far the losses of two trainers are apart, and what did not run in the daemon."""
    pairs = [e["losses"] for e in result["engines"].values() if "losses" in e]
    if len(pairs) != 2:
        return []
    apart = max(abs(a - b) / max(abs(a), 1e-30) for a, b in zip(*pairs, strict=False))
    stayed = [e.get("in_torch", {}) for e in result["engines"].values()]
    reasons = ", ".join(f"{name} ({n})" for each in stayed for name, n in each.items())
    said = f"Losses of {len(pairs[0])} steps differ by at most {apart:.0e} of their size; "
    said += f"in PyTorch: {reasons}." if reasons else "no fallback."
    return ["", *textwrap.wrap(said, 100)]


def _rate(samples: list[float], each: int) -> stats.Interval:
    """How many per second: a step has so many, and `samples` are milliseconds of steps."""
    m = stats.median_interval(samples)
    return stats.Interval(*(1000 * each / ms for ms in (m.value, m.high, m.low)))


def _rate_cell(samples: list[float] | None, each: int) -> str:
    if not samples:
        return "-"
    r = _rate(samples, each)
    return f"{_count(r.value)} ({_count(r.low)}-{_count(r.high)})"


def _count(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _starts(results: list[dict[str, Any]]) -> str:
    counts = {result.get("starts", 1) for result in results}
    if counts <= {1}:
        return ""
    many = " to ".join(str(n) for n in sorted({min(counts), max(counts)}))
    return f" Ratios over {many} starts of all processes, with Student's interval."


def stem(machine: dict[str, Any], kind: str = "") -> str:
    """Name of a machine's files: new results replace those of the same machine and kind."""
    cpu = re.sub(r"[^a-z0-9]+", "-", machine["cpu"].lower()).strip("-")[:32]
    cores = machine["cores"]
    threads = f"-{machine['threads']}-threads" if machine["threads"] != cores else ""
    return f"{cpu}-{cores}-cores{threads}" + (f"-{kind}" if kind else "")


def write(
    folder: Path,
    machine: dict[str, Any],
    results: list[dict[str, Any]],
    quick: bool,
    kind: str = "",
) -> list[Path]:
    """Writes JSON, Markdown and SVG over those of before; returns their paths.

    Args:
        folder: Of the results.
        machine: From describe_machine(); it says the date.
        results: One per workload and precision.
        quick: Small sizes.
        kind: What is not the whole table ("part", "together"), and so does not replace it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = stem(machine, "-".join(word for word in (kind, "quick" if quick else "") if word))
    paths = [folder / f"{name}{suffix}" for suffix in (".json", ".md", ".svg")]
    paths[0].write_text(json.dumps({"machine": machine, "quick": quick, "results": results}) + "\n")
    paths[1].write_text(f"{table(machine, results)}\n\n![These figures as bars]({name}.svg)\n")
    _draw(machine, results, paths[2])
    return paths


def _name(result: dict[str, Any]) -> str:
    return f"{result['workload']} {result['precision']}"


def _draw(machine: dict[str, Any], results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradd"  # the same figures give the same file
    from matplotlib import pyplot

    drawn = [r for r in results if r["engines"]]
    if not drawn:
        path.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>\n")
        return
    precisions = list(dict.fromkeys(r["precision"] for r in drawn))
    rows = [[r for r in drawn if r["precision"] == p] for p in precisions]
    wide = max(len(row) for row in rows)
    whole = "sequences" in drawn[0]
    width = 3.4 if whole else 2.5
    figure, axes = pyplot.subplots(
        len(rows),
        wide,
        figsize=(width * wide + 0.6, 3.2 * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for line, row in zip(axes, rows, strict=True):
        for axis, result in zip(line, row, strict=False):
            _draw_workload(axis, result)
        for axis in line[len(row) :]:
            axis.remove()
        line[0].set_ylabel("tokens per second" if whole else "ms per step, forward + backward")
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads", fontsize=9, color="#5b6470")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_workload(axis: Any, result: dict[str, Any]) -> None:
    names = [n for n in COLORS if result["engines"].get(n, {}).get("ms")]
    for x, name in enumerate(names):
        samples = next(iter(result["engines"][name]["ms"].values()))
        if "sequences" in result:
            m = _rate(samples, result["tokens"])
            text = (
                f"{_count(m.value)}\n{_count(_rate(samples, result['sequences']).value)} samples/s"
            )
        else:
            m = stats.median_interval(samples)
            text = _ms(m.value)
        axis.bar(x, m.value, width=0.7, color=COLORS[name])
        error = [[m.value - m.low], [m.high - m.value]]
        axis.errorbar(x, m.value, yerr=error, color="#222", capsize=3, linewidth=1)
        axis.annotate(
            text,
            (x, m.high),
            ha="center",
            va="bottom",
            fontsize=8,
            xytext=(0, 2),
            textcoords="offset points",
        )
    axis.set_title(_name(result), fontsize=10)
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.margins(y=0.2 if "sequences" in result else 0.12)
    axis.spines[["top", "right"]].set_visible(False)


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _cell(values: list[float] | None) -> str:
    if not values:
        return "-"
    m = stats.median_interval(values)
    return f"{_ms(m.value)} ({_ms(m.low)}-{_ms(m.high)})"


def _speedup(times: dict[str, list[float]], against: str, starts: int) -> str:
    ours = next((name for name in OURS if name in times), None)
    if ours is None or against not in times:
        return "-"
    return stats.speedup_text(stats.ratio_interval(times[against], times[ours], starts))


def _ratio(times: dict[str, list[float]], against: str, starts: int) -> str:
    """The ratio with its interval, also where it shows no difference: what must be excluded is a
    slow-down."""
    if "gradd" not in times or against not in times:
        return "-"
    ratio = stats.ratio_interval(times[against], times["gradd"], starts)
    return f"{ratio.value:.2f} ({ratio.low:.3f}-{ratio.high:.3f})"


_AGAINST = (
    *((name, _speedup) for name in ("eager", "last", "compile", "Trainer")),
    ("plain", _ratio),
)


def _mib(memory: dict[str, Any] | None) -> str:
    return f"{memory['above'] / 2**20:.0f} MiB" if memory else "-"
