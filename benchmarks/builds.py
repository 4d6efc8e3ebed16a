"""This build against another: the same workloads, round by round.

    git worktree add ../before COMMIT && make -C ../before
    python benchmarks/builds.py ../before [--only llama,mlp] [--precision fp32,bf16] [--rounds 5]

Each tree's adapter and daemon run in processes of their own; the two take turns, the order turns
as well. Prints medians with intervals, the ratio `before` over `now` (above 1: this tree is
faster), the time of the first call, and peak memory. Writes no files.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report
import run
import stats
import workloads

TREE = Path(__file__).resolve().parents[1]


def environment(tree: Path, folder: str, threads: int) -> dict[str, str]:
    """For a trainer that uses the adapter and the daemon of a tree."""
    env = run.environment(folder, threads)
    paths = [str(tree / "adapters" / name) for name in ("python", "optimum")]
    return {
        **env,
        "PYTHONPATH": os.pathsep.join(paths),
        "GRADD_BIN": str(tree / "build" / "bin" / "gradd"),
    }


def measure(
    name: str, precision: str, options: argparse.Namespace, envs: dict[str, dict[str, str]]
) -> dict[str, list[float]]:
    """Milliseconds of a step by build; prints what else there is to say."""
    engines: dict[str, run.Engine] = {}
    samples: dict[str, list[float]] = {build: [] for build in envs}
    size = "quick" if options.quick else "full"
    try:
        for build, env in envs.items():
            engines[build] = run.Engine("gradd", [name, size, precision], env)
            warm = engines[build].do("warm", 3)
            print(f"  {build:7s} first call {warm['first_s']:.1f} s, loss {warm['loss']:.6f}")
            # Before another process comes and shares pages of libraries that the baseline holds.
            print(f"  {build:7s} {_memory(engines[build].do('memory', 3))}")
        each = workloads.make(name, options.quick).samples * 2
        for turn in range(options.rounds):
            for build in run.turned(list(envs), turn):
                time.sleep(0.1)  # threads of the one before stop spinning
                samples[build] += engines[build].do("time", 1 + each)["ms"][1:]
    finally:
        for engine in engines.values():
            engine.end()
    return samples


def _memory(answer: dict[str, Any]) -> str:
    return f"memory above parameters and gradients: {answer['above'] / 2**20:.0f} MiB"


def main(argv: list[str] | None = None) -> int:
    """Compares the two trees and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a built checkout to compare with")
    parser.add_argument("--only", default=",".join(workloads.NAMES))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="small sizes")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gradd-builds-") as folder:
        envs = {}
        for build, tree in (("before", options.before.resolve()), ("now", TREE)):
            place = Path(folder) / build
            place.mkdir(mode=0o700)
            envs[build] = environment(tree, str(place), options.threads)
        try:
            for name in options.only.split(","):
                for precision in options.precision.split(","):
                    print(f"\n{name} {precision}", flush=True)
                    samples = measure(name, precision, options, envs)
                    ratio = stats.ratio_interval(samples["before"], samples["now"])
                    print("  " + report.one_line("fwd+bwd", samples))
                    print(
                        f"  before / now {ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})",
                        flush=True,
                    )
        finally:
            for env in envs.values():
                run.stop_daemons(env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
