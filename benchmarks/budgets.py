"""Measures the cost of recomputation under a memory budget, beside the planner's model of it.

    .venv/bin/python benchmarks/budgets.py [--only llama,bert] [--precisions bf16,fp32] [--quick]

Each workload is wrapped once without a budget and once for each part of the activations that it
then needs, over all rows; all take turns. Printed are planned activations, the shortest
forward and backward of all rounds, and the more time of the model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import workloads

BINARY = Path(__file__).resolve().parent.parent / "build" / "bin" / "gradd"
MIB = 1 << 20


def step(model: Any, batch: dict[str, Any]) -> float:
    """Milliseconds of a forward and a backward."""
    began = time.perf_counter()
    model(**batch).loss.backward()
    took = 1e3 * (time.perf_counter() - began)
    model.zero_grad(set_to_none=True)
    return took


def measure(name: str, precision: str, options: argparse.Namespace) -> None:
    """Prints the rows of one workload."""
    from gradd import ORTModule, estimate

    module, batch = workloads.make(name, options.quick).build()
    module, batch = workloads.in_precision(module.train(), batch, precision)
    curve = estimate(ORTModule(module, strict=True), batch, optimizer="sgd").curve
    whole = curve[0].activations
    parts = [float(part) for part in options.parts.split(",")]
    points = [curve[0]]
    for part in parts:  # the cheapest one that takes at most this part
        fits = [point for point in curve if point.activations <= part * whole]
        points += [p for p in fits[:1] if p not in points]
    models = [ORTModule(module, strict=True, memory_budget=p.activations) for p in points]
    for model in models:
        step(model, batch)
    took: list[list[float]] = [[] for _ in models]
    for turn in range(options.rounds):
        for at in range(len(models)):
            at = (at + turn) % len(models)
            took[at].append(min(step(models[at], batch) for _ in range(options.steps)))
    base = min(took[0])
    for point, times in zip(points, took, strict=True):
        less = 100 * (1 - point.activations / whole)
        print(
            f"| {name} {precision} | {point.activations / MIB:.1f} MiB | {less:.0f} % | "
            f"{min(times):.0f} ms | {100 * (min(times) / base - 1):+.1f} % | "
            f"{point.percent:+.1f} % |",
            flush=True,
        )


def main() -> int:
    """Measures in a daemon of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="llama,bert")
    parser.add_argument("--precisions", default="bf16,fp32")
    parser.add_argument("--parts", default="0.8,0.6,0.4", help="of the activations")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="in one turn")
    parser.add_argument("--quick", action="store_true", help="small sizes: checks the machinery")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradd-bench-") as folder:
        os.environ["GRADD_DIR"] = os.path.join(folder, "run")
        os.environ["GRADD_BIN"] = str(BINARY)
        os.environ["GRADD_SELF_CHECK"] = os.environ["GRADD_LIVE_ROWS"] = "0"
        try:
            for name in options.only.split(","):
                for precision in options.precisions.split(","):
                    measure(name, precision, options)
        finally:
            subprocess.run([str(BINARY), "stop"], check=False, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
