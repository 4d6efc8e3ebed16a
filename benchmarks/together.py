"""Recognition on against off, with both plans in one trainer and one daemon.

    python benchmarks/together.py [--only mlp] [--precision fp32,bf16] [--starts 10] [--rounds 10]

Two processes of the same program differ by percents for as long as they live, which is more than
recognition costs where it brings nothing. Here a start is one trainer with a daemon of its own, and
both hold the workload twice: captured with recognition (`gradd`) and with GRADD_FUSE=0 (`plain`).
The two take turns with every sample, as a machine's speed drifts within a second; they alternate in
going first with every sample, and in being built first with every start. Forward and backward only,
no memory. Results have the format of run.py's, and pool.py reads them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import report
import run
import workloads

ENGINES = {"gradd": "1", "plain": "0"}  # with the value of GRADD_FUSE
MODE = "fwd+bwd"


def trainer(name: str, precision: str, size: str, rounds: int, start: int) -> dict[str, Any]:
    """One start: samples in milliseconds and the loss of the first step, by engine."""
    from worker import Worker

    workers: dict[str, Worker] = {}
    answer: dict[str, Any] = {"ms": {engine: [] for engine in ENGINES}, "loss": {}, "first_s": {}}
    for engine in run.turned(list(ENGINES), start):
        os.environ["GRADD_FUSE"] = ENGINES[engine]
        workers[engine] = Worker(engine, name, size == "quick", precision)
        warm = workers[engine].warm(3)
        answer["loss"][engine], answer["first_s"][engine] = warm["loss"], warm["first_s"]
    load = workers["gradd"].load
    for turn in range(rounds * load.samples):
        for engine in run.turned(list(ENGINES), turn):
            if load.repeat > 1:  # short steps, to which the other plan's leftovers in caches matter
                workers[engine].step()
            answer["ms"][engine] += workers[engine].time(1)["ms"]
    return answer


def measure(name: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """All starts of one workload in the form of run.measure()."""
    load = workloads.make(name, options.quick)
    result: dict[str, Any] = {"workload": name, "precision": precision, "what": load.what}
    result |= {"tokens": load.tokens, "engines": {}, "failed": {}, "starts": 0}
    size = "quick" if options.quick else "full"
    for start in range(options.starts):
        with tempfile.TemporaryDirectory(prefix="gradd-bench-") as folder:
            env = run.environment(folder, options.threads)
            command = [sys.executable, __file__, "--trainer", name, precision, size]
            command += [str(options.rounds), str(start)]
            try:
                done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
            except SystemExit:
                print(f"\nended after {start} of {options.starts} starts")
                return result
            finally:
                run.stop_daemons(env)
        if done.returncode:
            raise RuntimeError(f"{name} {precision}: the trainer ended with {done.returncode}")
        _add(result, json.loads(done.stdout.splitlines()[-1]))
    return result


def _add(result: dict[str, Any], answer: dict[str, Any]) -> None:
    for engine in ENGINES:
        all_ = result["engines"].setdefault(
            engine,
            {
                "loss": answer["loss"][engine],
                "first_s": answer["first_s"][engine],
                "ms": {MODE: []},
            },
        )
        all_["ms"][MODE] += answer["ms"][engine]
    result["starts"] += 1
    print("  " + report.one_line(MODE, answer["ms"]), flush=True)


def main() -> int:
    """Runs the chosen workloads and writes the results."""
    if sys.argv[1:2] == ["--trainer"]:
        name, precision, size, rounds, start = sys.argv[2:7]
        print(json.dumps(trainer(name, precision, size, int(rounds), int(start))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(workloads.NAMES), help="workloads, by comma")
    parser.add_argument("--precision", default="fp32,bf16", help="precisions, by comma")
    parser.add_argument("--starts", type=int, default=10, help="trainers, each with a daemon")
    parser.add_argument(
        "--rounds",
        type=int,
        default=10,
        help="samples of each plan in a start; ten times as many of a short step",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per engine")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", default=str(run.HERE / "results"), help="folder of the results")
    options = parser.parse_args()
    # Ended from outside: the starts that were done are kept.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = run.describe_machine(options.threads)
    before = run.processor_ticks()
    results = []
    for name in options.only.split(","):
        for precision in options.precision.split(","):
            print(f"\n{name} {precision}: {workloads.make(name, options.quick).what}", flush=True)
            results.append(measure(name, precision, options))
            if results[-1]["starts"] < options.starts:
                return finish(options, machine, before, [r for r in results if r["starts"]], 143)
    return finish(options, machine, before, results, 0)


def finish(
    options: argparse.Namespace,
    machine: dict[str, Any],
    before: tuple[int, int],
    results: list[dict[str, Any]],
    code: int,
) -> int:
    """Writes what was measured; returns the exit status."""
    all_, stolen = (b - a for a, b in zip(before, run.processor_ticks(), strict=True))
    machine["stolen"] = stolen / max(1, all_)
    machine["together"] = True
    paths = report.write(Path(options.out), machine, results, options.quick, "together")
    print("\n" + report.table(machine, results))
    print("\nwritten: " + ", ".join(str(p) for p in paths))
    return code


if __name__ == "__main__":
    sys.exit(main())
