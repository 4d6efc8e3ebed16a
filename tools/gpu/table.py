"""Makes a page of what tools/gpu/run.sh has measured.

    python tools/gpu/table.py results.json ... > benchmarks/results/nvidia-<name>.md

A part that is in several files counts as the last one has it. What was not measured has no row, and
what has failed is listed by name.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from shapes import SHAPES, peak_of

Line = dict[str, Any]
_MOST_ROWS = 14  # of operators


@dataclass(frozen=True)
class Results:
    """Parts by name."""

    parts: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, files: Iterable[Path]) -> Results:
        return cls({part["part"]: part for file in files for part in json.loads(file.read_text())})

    def lines(self, part: str) -> list[Line]:
        """Of a part that was run, whatever became of it."""
        return self.parts.get(part, {}).get("lines", [])

    def find(self, part: str, key: str) -> Any:
        """The first value of that name; None: there is none."""
        return next((line[key] for line in self.lines(part) if key in line), None)

    def named(self, start: str) -> list[str]:
        """Names of parts that begin so, in the order of the run."""
        return [name for name in self.parts if name.startswith(start)]


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _heading(results: Results, date: str) -> list[str]:
    gpu = results.find("machine", "gpu") or "a GPU that was not named"
    name, _, driver = gpu.partition(", ")
    versions = [f"{k} {v}" for k in ("torch", "transformers") if (v := results.find("machine", k))]
    words = [name, *([f"driver {driver}"] if driver else []), *versions]
    return [f"{', '.join(words)}, measured", f"on {date} by `tools/gpu/run.sh`, one run each.", ""]


def _engine(results: Results) -> list[str]:
    peak = peak_of(results.find("machine", "gpu") or "")
    rows = []
    for part in results.named("engine-"):
        _, shape, size = part.split("-")
        ms = results.find(part, "best_ms")
        if ms is None:
            continue
        batch, length = map(int, size.split("x"))
        work = SHAPES[shape].operations(batch, length) / (1e-3 * ms)
        ours = [results.find(part, k) for k in ("forward_ms", "backward_ms", "adamw_ms")]
        rows.append(
            [
                f"{shape.upper()}, {batch} x {length}",
                _number(ms),
                *map(_number, ours),
                _number(1e3 * batch * length / ms, 0),
                f"{100 * work / peak:.0f} %" if peak else "",
                f"{results.find(part, 'forward_launches')} + "
                f"{results.find(part, 'backward_launches')}",
                _number(results.find(part, "arena_mb"), 0),
            ]
        )
    if not rows:
        return []
    head = ["", "both, ms", "forward", "backward", "AdamW", "tokens/s", "MFU", "launches"]
    return [
        "## The engine alone, bf16, without trainer and daemon",
        "",
        "The shortest of five rounds of forward and backward. MFU counts, per token, 6 operations",
        "for each parameter of a linear layer, the head included, and per pair of query and key",
        "that the causal mask leaves 12 for each element of all heads and layers, and divides by",
        f"the GPU's dense bf16 peak, {peak / 1e12:.0f} TFLOP/s." if peak else "a peak not known.",
        "",
        *table([*head, "arena, MB"], rows),
        "",
    ]


def _operators(results: Results) -> list[str]:
    parts = [p for p in results.named("engine-") if results.find(p, "row")]
    if not parts:
        return []
    by_row = {p: {x["row"]: x["ms"] for x in results.lines(p) if "row" in x} for p in parts}
    last = by_row[parts[-1]]
    names = sorted(last, key=lambda row: -last[row])[:_MOST_ROWS]
    rows = [[f"`{name}`", *(_number(by_row[p].get(name), 2) for p in parts)] for name in names]
    head = ["ms", *(p.removeprefix("engine-") for p in parts)]
    return ["By operator, each launch waited for:", "", *table(head, rows), ""]


def _attention_of(results: Results, part: str, way: str) -> float | None:
    found = [x["ms"] for x in results.lines(part) if x.get("row", "").startswith(way)]
    return sum(found) if found else None


def _attention(results: Results) -> list[str]:
    rows = []
    for part in results.named("attention-"):
        _, shape, size = part.split("-")
        theirs = next((x for x in results.lines(f"sdpa-{shape}") if x.get("size") == size), {})
        ways = ("fwd FusedAttention ", "bwd FusedAttentionGrad ")
        ours = [_attention_of(results, part, way) for way in ways]
        if ours == [None, None]:
            continue
        given = [theirs.get("forward_ms"), theirs.get("backward_ms")]
        row = [ours[0], given[0], ours[1], given[1]]
        rows.append([f"{shape.upper()}, {size}", *(_number(x, 2) for x in row)])
    head = ["ms", "gradd, forward", "PyTorch, forward", "gradd, backward", "PyTorch, backward"]
    return ["One layer's attention:", "", *table(head, rows), ""] if rows else []


def _peers(results: Results) -> list[str]:
    made = []
    for part, title in (("peers-", "all parameters trained"), ("lora-", "LoRA, r = 16")):
        for name in results.named(part):
            lines = [x for x in results.lines(name) if "engine" in x]
            rows = [
                [
                    x["engine"],
                    *(_number(x.get(k)) for k in ("step_ms", "adamw_step_ms")),
                    _number(x.get("tokens_per_s"), 0),
                    _number(x.get("memory_mib"), 0),
                    _number(x.get("first_s")),
                    "failed" if "failed" in x else f"{x['loss']:.4f}" if "loss" in x else "",
                ]
                for x in lines
            ]
            head = [
                "",
                "step, ms",
                "with AdamW",
                "tokens/s",
                "memory, MiB",
                "first call, s",
                "loss",
            ]
            if rows:
                where = f"{lines[0]['shape']}, {lines[0]['size']}, bf16, {title}"
                made += [f"### Llama {where}", "", *table(head, rows), ""]
    if not made:
        return []
    return [
        "## Trainers, engines in turns",
        "",
        "A step is forward and backward, medians over rounds. Memory is what the GPU has free",
        "when the engine's processes, trainer and daemon, are gone.",
        "",
        *made,
    ]


def _ceilings(results: Results) -> list[str]:
    rows = []
    copy = {k: results.find("probe-copy", f"{k}_gb_s") for k in ("device", "to_device", "to_host")}
    if copy["device"]:
        rows.append(["copy within the device, read and written", f"{copy['device']:,.0f} GB/s"])
        rows.append(
            ["copy to and from pinned memory", f"{copy['to_device']} and {copy['to_host']} GB/s"]
        )
    speeds = [x["tflop_s"] for x in results.lines("probe-product") if "tflop_s" in x]
    if speeds:
        span = f"{min(speeds):.0f} to {max(speeds):.0f} TFLOP/s"
        rows.append(["products of Llama's sizes, 8192 rows, bf16", span])
    for part, key, what in (
        ("probe-ipc", "event_round_us", "round of an event between two processes"),
        ("probe-words", "turn_us", "turn of words between two processes"),
        ("probe-streams", "host_us", "event of a context of 64 idle streams, on the host"),
    ):
        if (value := results.find(part, key)) is not None:
            rows.append([what, f"{value} us"])
    return ["## Ceilings", "", *table(["", ""], rows), ""] if rows else []


def _held(results: Results) -> list[str]:
    bundles = [x for x in results.lines("bundles") if "bundle" in x]
    good = [name for name, part in results.parts.items() if not part["status"]]
    bad = [name for name, part in results.parts.items() if part["status"]]
    made = ["## What held", "", *_wrapped(f"* Parts: {', '.join(good) or 'none'}.")]
    if bad:
        made += _wrapped(f"* Failed: {', '.join(bad)}.")
    if bundles:
        count = sum(x["held"] for x in bundles)
        worst = max((x.get("of_limit") or 0 for x in bundles if x["held"]), default=0)
        made += _wrapped(
            f"* Graphs with PyTorch's losses and gradients: {count} of {len(bundles)}; the worst "
            f"of these at {100 * worst:.0f} % of its limit."
        )
    return made


def _wrapped(text: str, width: int = 100) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = " "
        line = f"{line} {word}" if line else word
    return [*lines, line]


def page(results: Results, date: str) -> str:
    """The whole page."""
    parts = (_engine, _operators, _attention, _peers, _ceilings, _held)
    lines = _heading(results, date) + [line for part in parts for line in part(results)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints the page of the files that the command line names."""
    if not sys.argv[1:]:
        sys.exit(__doc__)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    print(page(Results.read(map(Path, sys.argv[1:])), today), end="")


if __name__ == "__main__":
    main()
