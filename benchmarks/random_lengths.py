"""Times steps of random lengths and densities beside the same steps over all rows.

    .venv/bin/python benchmarks/random_lengths.py [--steps 1000] [--precision bf16] [--quick]

Two wrappers of the same module step every batch (forward and backward): one leaves out padding and
rows without a label, the other does not; they alternate in going first. Steps that compile a plan,
capture or run a self-check take longer and are counted apart. Every other step that takes more than
--limit times the other wrapper's is shown and tried again: disturbances by the machine are gone
then.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import workloads

BINARY = Path(__file__).resolve().parent.parent / "build" / "bin" / "gradd"
Batch = dict[str, torch.Tensor]
AGAIN = 5  # calls of a batch whose step was long


def batch_of(draw: random.Random, rows: int, longest: int, multiple: int, vocabulary: int) -> Batch:
    """Rows of random lengths, padded to the longest and on to a multiple, labelled in part."""
    lengths = [draw.randint(1, draw.randint(1, longest)) for _ in range(rows)]
    width = max(2, -(-max(lengths) // multiple) * multiple)
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    ids = torch.randint(3, vocabulary, (rows, width), generator=generator)
    real = torch.arange(width) < torch.tensor(lengths)[:, None]
    chosen = torch.rand(rows, width, generator=generator) < draw.random()
    labels = ids.masked_fill(~(real & chosen), workloads.IGNORE)
    labels[0, 0], labels[0, 1] = ids[0, 0], ids[0, 1] if lengths[0] > 1 else workloads.IGNORE
    return {"input_ids": ids * real, "attention_mask": real.long(), "labels": labels}


class Side:
    """A wrapper of the module, and what its steps take."""

    def __init__(self, module: torch.nn.Module, live: bool, compiled: Counter[str]) -> None:
        from gradd import ORTModule

        self.model = ORTModule(module, strict=True)
        self._live = "1" if live else "0"
        self._compiled = compiled

    def step(self, batch: Batch) -> tuple[float, Counter[str]]:
        """Milliseconds of forward and backward, and what else the step did."""
        os.environ["GRADD_LIVE_ROWS"] = self._live  # read when a plan is made
        self.model.zero_grad(set_to_none=True)
        before = self._counts()
        start = time.perf_counter()
        self.model(**batch).loss.backward()
        took = 1e3 * (time.perf_counter() - start)
        return took, self._counts() - before

    def _counts(self) -> Counter[str]:
        stats = self.model.gradd_stats()
        own = {"captures": stats["captures"], "self-checks": stats["self_checks"]}
        return Counter({**own, "plans": self._compiled["plans"]})


def counted_plans() -> Counter[str]:
    """Counts the plans that are compiled from now on."""
    from gradd.session.client import Client

    counts: Counter[str] = Counter()
    own = Client.plan

    def plan(self: Client, fields: dict[str, Any]) -> Any:
        counts["plans"] += 1
        return own(self, fields)

    Client.plan = plan  # type: ignore[method-assign]
    return counts


@dataclass
class Step:
    """One batch: milliseconds of both, and what the one over live rows did besides."""

    number: int
    size: str
    live: float
    dense: float
    besides: Counter[str]

    @property
    def ratio(self) -> float:
        """Of the two times."""
        return self.live / self.dense

    def __str__(self) -> str:
        return (
            f"step {self.number} ({self.size}): {self.live:.1f} ms, over all rows {self.dense:.1f}"
        )


def measure(number: int, live: Side, dense: Side, batch: Batch) -> Step:
    """A batch by both; the time over all rows is one in which nothing else was done."""
    took, besides = live.step(batch) if number % 2 else (0.0, Counter())
    other, beside = dense.step(batch)
    while beside:
        other, beside = dense.step(batch)
    if not number % 2:
        took, besides = live.step(batch)
    rows, length = batch["input_ids"].shape
    real = int(batch["attention_mask"].sum())
    labelled = int((batch["labels"] != workloads.IGNORE).sum())
    size = f"{rows} x {length}, {real} real, {labelled} labelled"
    return Step(number, size, took, other, besides)


def share(values: Sequence[float], part: float) -> float:
    """The value that this part of all does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def report(steps: list[Step], limit: float, again: dict[int, float]) -> None:
    """Prints what the steps took."""
    plain = [s for s in steps if not s.besides]
    ratios = [s.ratio for s in plain]
    text = ", ".join(f"{int(100 * p)} %: {share(ratios, p):.2f}" for p in (0.05, 0.5, 0.95, 0.99))
    print(f"{len(plain)} steps without anything besides, over the same over all rows: {text}")
    whole = sum(s.live for s in plain) / sum(s.dense for s in plain)
    print(f"all of them together: {whole:.2f}; the longest: {max(ratios):.2f}")
    for name in ("plans", "self-checks", "captures"):
        some = [s for s in steps if s.besides[name]]
        more = [s.live - s.dense for s in some]
        if some:
            print(
                f"{len(some)} steps with {name}: {statistics.median(more):.1f} ms more in the "
                f"median than over all rows, {max(more):.1f} at most"
            )
    long = [s for s in plain if s.ratio > limit]
    short = sum(s.ratio * limit < 1 for s in plain)
    print(f"{len(long)} of these take more than {limit} times as long, {short} as short")
    for s in long:
        print(f"  {s}: {s.ratio:.2f}; the shortest of {AGAIN} more: {again[s.number]:.2f}")


def main() -> int:
    """Trains and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--multiple", type=int, default=32, help="of which lengths are")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a small model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradd-bench-") as folder:
        os.environ["GRADD_DIR"] = os.path.join(folder, "run")
        os.environ["GRADD_BIN"] = str(BINARY)
        try:
            run(options)
        finally:
            subprocess.run([str(BINARY), "stop"], check=False, capture_output=True)
    return 0


def run(options: argparse.Namespace) -> None:
    """All steps, with a daemon in a directory of its own."""
    module, _ = workloads.make("sft", options.quick).build()
    module = workloads.in_precision(module.train(), {}, options.precision)[0]
    compiled = counted_plans()
    live, dense = (Side(module, which, compiled) for which in (True, False))
    draw, steps, again = random.Random(options.seed), [], {}
    for number in range(options.steps):
        batch = batch_of(
            draw, options.rows, options.longest, options.multiple, module.config.vocab_size
        )
        step = measure(number, live, dense, batch)
        steps.append(step)
        if not step.besides and step.ratio > options.limit:
            later = [measure(k, live, dense, batch) for k in range(AGAIN)]
            again[number] = min(s.live for s in later) / min(s.dense for s in later)
    report(steps, options.limit, again)
    counts = live.model.gradd_stats()
    print({k: v for k, v in counts.items() if k in ("plans", "rows") or k.endswith("left_out")})


if __name__ == "__main__":
    sys.exit(main())
