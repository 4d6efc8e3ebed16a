"""The ratio of two engines over all starts of several runs.

    python benchmarks/pool.py [--engines plain,gradd] runs/*/*.json

One line per workload, precision and mode: the first engine's time over the second's, as the
geometric mean of all starts with Student's 95 % interval: of each start's medians, and of the means
of its shortest quarters, for hosts that lend the processor to others. All starts count, whichever
file they are in; a run of one start is one of them. Runs need a folder each (`--out`): in one
folder a run replaces the one before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stats

Ratios = dict[tuple[str, str, str], tuple[list[float], list[float]]]


def pool(paths: list[Path], slow: str, fast: str) -> Ratios:
    """(workload, precision, mode) -> ratios of medians and of shortest quarters, by start."""
    ratios: Ratios = {}
    for path in paths:
        for result in json.loads(path.read_text())["results"]:
            engines = result["engines"]
            if slow not in engines or fast not in engines:
                continue
            for mode, samples in engines[slow]["ms"].items():
                key = (result["workload"], result["precision"], mode)
                both = (samples, engines[fast]["ms"][mode], result.get("starts", 1))
                medians, quarters = ratios.setdefault(key, ([], []))
                medians += stats.start_ratios(*both)
                quarters += stats.start_ratios(*both, of=stats.shortest_quarter)
    return ratios


def _text(ratios: list[float]) -> str:
    if len(ratios) == 1:
        return "one start has no interval"
    r = stats.interval_over_starts(ratios)
    return f"{r.value:.3f} ({r.low:.3f}-{r.high:.3f})"


def main(argv: list[str] | None = None) -> int:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="plain,gradd", help="which over which")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(argv)
    slow, fast = options.engines.split(",")
    print(f"| workload | mode | starts | {slow} over {fast} | shortest quarters |")
    print("|---|---|---|---|---|")
    for (workload, precision, mode), both in pool(options.files, slow, fast).items():
        medians, quarters = (_text(ratios) for ratios in both)
        print(f"| {workload} {precision} | {mode} | {len(both[0])} | {medians} | {quarters} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
