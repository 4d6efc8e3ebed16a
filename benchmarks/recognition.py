"""Measures the gain of recognition for the engine alone, over many starts of its process.

    make build/bin/bench_engine
    .venv/bin/python benchmarks/recognition.py [--only bert] [--precision fp32,bf16] [--starts 40]

Two starts of one program differ by more than recognition costs where it brings nothing, and a start
of `make bench` takes half a minute. This captures a workload once and gives the graph to
bench_engine, with recognition and without, in turns, each in a process of its own. The time of a
start is the sum over all operators of their shortest times, so a slow moment of the machine leaves
no trace. Integer inputs count up to the largest that the workload has; a mask hides where they are
0.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import onnx
import stats
import torch
import workloads

BENCH = Path(__file__).resolve().parent.parent / "build" / "bin" / "bench_engine"


def shape_arguments(model: onnx.ModelProto, batch: dict[str, torch.Tensor]) -> list[str]:
    """name=8x128 for the inputs of the call."""
    names = (i.name for i in model.graph.input if i.name in batch)
    return [f"{n}=" + "x".join(str(d) for d in batch[n].shape) for n in names]


def time_of(command: list[str]) -> float:
    """Milliseconds of a forward and backward.

    Raises:
        RuntimeError: What bench_engine said instead.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"launches alone ([0-9.]+) ms", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(done.stderr or done.stdout)
    return float(found[1])


def measure(name: str, precision: str, options: argparse.Namespace, folder: Path) -> list[float]:
    """Time of the plain plan over that of the recognised one, for each start."""
    from gradd.dynamo.frontend import Compiled

    module, batch = workloads.make(name, options.quick).build()
    module, batch = workloads.in_precision(module.train(), batch, precision)
    found: list[bytes] = []
    debug = SimpleNamespace(save=lambda cap, _: found.append(cap.onnx), save_plan=lambda *_: None)
    call = Compiled(module, strict=True, debug=debug)
    call(**batch)
    call.close()
    data = found[0]
    path = folder / f"{name}-{precision}.onnx"
    path.write_bytes(data)
    ids = 1 + max(int(t.max()) for t in batch.values() if not t.is_floating_point())
    command = [str(options.bench), str(path), "--repeat", str(options.repeat), "--ids", str(ids)]
    command += ["--threads", str(options.threads)]
    command += shape_arguments(onnx.load_from_string(data), batch)
    ratios = []
    for start in range(options.starts):
        order = (0, 1) if start % 2 else (1, 0)
        ms = {plain: time_of([*command, "--plain", str(plain)]) for plain in order}
        ratios.append(ms[1] / ms[0])
    return ratios


def main() -> int:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="llama,sft,bert", help="workloads, by comma")
    parser.add_argument("--precision", default="fp32,bf16", help="precisions, by comma")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=5, help="rounds of a start")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--bench", type=Path, default=BENCH, help="bench_engine of another build")
    options = parser.parse_args()
    print("| workload | starts | plain over recognised |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(","):
            for precision in options.precision.split(","):
                ratios = measure(name, precision, options, Path(folder))
                r = stats.interval_over_starts(ratios)
                text = f"{r.value:.3f} ({r.low:.3f}-{r.high:.3f})"
                print(f"| {name} {precision} | {len(ratios)} | {text} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
