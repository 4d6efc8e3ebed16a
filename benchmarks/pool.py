"""The ratio of two engines over all starts of several runs.

    python benchmarks/pool.py [--engines plain,gradd] results/*-recognition-*.json

One line per workload, precision and mode: the first engine's time over the second's, as the
geometric mean of all starts with Student's 95 % interval. All starts count, whichever file they are
in; a run of one start is one of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import stats


def pool(paths: list[Path], slow: str, fast: str) -> dict[tuple[str, str, str], list[float]]:
    """(workload, precision, mode) -> ratios of all starts in the files."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for path in paths:
        for result in json.loads(path.read_text())["results"]:
            engines = result["engines"]
            if slow not in engines or fast not in engines:
                continue
            for mode, samples in engines[slow]["ms"].items():
                key = (result["workload"], result["precision"], mode)
                ratios.setdefault(key, []).extend(
                    stats.start_ratios(samples, engines[fast]["ms"][mode], result.get("starts", 1))
                )
    return ratios


def main(argv: list[str] | None = None) -> int:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="plain,gradd", help="which over which")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(argv)
    slow, fast = options.engines.split(",")
    print(f"| workload | mode | starts | {slow} over {fast} |\n|---|---|---|---|")
    for (workload, precision, mode), ratios in pool(options.files, slow, fast).items():
        text = "one start has no interval"
        if len(ratios) > 1:
            r = stats.interval_over_starts(ratios)
            text = f"{r.value:.3f} ({r.low:.3f}-{r.high:.3f})"
        print(f"| {workload} {precision} | {mode} | {len(ratios)} | {text} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
