"""Training on the device: gradd.train beside ONNX Runtime 1.19.2, interleaved, on the same files.

    make bench ARGS=--devices
    .venv/bin/python benchmarks/devices.py [--only mnist,mobilenet] [--threads 1,2] [--rounds 5]

ONNX Runtime makes the artifacts, in an environment of its own (crosswise.py). For each network and
number of threads both run in a process of their own, which take turns. gradd.train has the library
for devices (`make train`), not that of the daemon. Times are of whole steps: inputs, forward,
backward, optimizer, reset; memory is the most that a process had beyond what it had before it
opened the files, so weights, gradients and moments are in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT / "tests" / "python")]
import crosswise  # noqa: E402
from crosswise import OURS, THEIRS  # noqa: E402

BUILD = Path(os.environ.get("GRADD_BUILD", ROOT / "build"))
TURN_SECONDS = 0.4  # a turn takes about that long, and at least two steps
FILES = ("training_model.onnx", "optimizer_model.onnx")


# ---- the networks, in the environment with torch ------------------------------------------------


def networks() -> dict[str, tuple[Callable[[], Any], int, str]]:
    """Network, rows of a batch and what it is, by name."""
    from torch import nn

    from helpers import device_networks as made

    def perceptron() -> made.Network:
        layers = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        return made.Network(layers, _numbers(784), classes=10)

    def digits() -> made.Network:
        layers = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()]
        layers += [nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)]
        return made.Network(nn.Sequential(*layers), _numbers(1, 28, 28), classes=10)

    def head() -> made.Network:
        network = made.mobile_net_v2(32, 128)
        network.module.eval()
        last = max(int(name.split(".")[0]) for name, _ in network.module.named_parameters())
        network.trained = lambda name: name.startswith(f"{last}.")
        return network

    class Rows(nn.Module):
        """Scores of all pixels in one axis: ONNX Runtime's labels have but one more."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            return self.module(x).permute(0, 2, 3, 1).reshape(-1, made.CLASSES)

    def pixels(size: int) -> made.Network:
        network = made.u_net(16, size)
        return made.Network(Rows(network.module), network.inputs, (size * size,))

    return {
        "mnist": (perceptron, 64, "a perceptron of 784-128-10"),
        "digits": (digits, 32, "two convolutions and two layers, digits of 28 x 28"),
        "head": (head, 8, "the last layer of a MobileNetV2, pictures of 128 x 128"),
        "mobilenet": (lambda: made.mobile_net_v2(32, 128), 4, "all of it"),
        "unet": (lambda: pixels(64), 4, "a U-Net with Resize, pictures of 64 x 64"),
        "mobilevit": (lambda: made.mobile_vit(64), 4, "a small MobileViT, pictures of 64 x 64"),
        "distilbert": (
            lambda: made.distil_bert(128, 2000, 256),
            4,
            "a DistilBERT of 6 layers of 256, masked words, texts of 128",
        ),
        "keyboard": (lambda: made.gru_keyboard(64, 2000, 64), 16, "a GRU, the next of 2000 words"),
    }


def _numbers(*shape: int) -> Callable[[np.random.Generator, int], tuple]:
    return lambda rng, rows: (rng.standard_normal((rows, *shape)).astype(np.float32),)


def export(folder: Path, name: str) -> None:
    """The network as ONNX, a batch, and which initializers are trained."""
    import onnx
    import torch

    torch.manual_seed(0)
    make, rows, _ = networks()[name]
    network = make()
    proto = network.proto(rows, dynamo=False)
    floats = [t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    parameters = {n for n, _ in network.module.named_parameters() if network.trained(n)}
    trained = [t.name for t in floats if t.name in parameters]
    frozen = [t.name for t in floats if t.name not in parameters and np.prod(t.dims) > 1]
    for i, node in enumerate(proto.graph.node):  # ONNX Runtime needs names, and all outputs
        node.name = node.name or f"node_{i}"
        n_outputs = {"Dropout": 2, "LayerNormalization": 3}.get(node.op_type, 0)
        for k in range(len(node.output), n_outputs):
            node.output.append(f"{node.output[0]}_{k}")
    onnx.save(proto, folder / "model.onnx")
    np.savez(folder / "batch.npz", *network.batch(1, rows))
    (folder / "names.json").write_text(json.dumps({"trained": trained, "frozen": frozen}))


# ---- in the environment of ONNX Runtime ---------------------------------------------------------


def make(folder: Path) -> None:
    """Artifacts by ONNX Runtime."""
    import onnx
    from onnxruntime.training import artifacts

    names = json.loads((folder / "names.json").read_text())
    artifacts.generate_artifacts(
        onnx.load(folder / "model.onnx"),
        requires_grad=names["trained"],
        frozen_params=names["frozen"],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
    )


# ---- a process that trains ----------------------------------------------------------------------


def work(folder: Path, engine: str, threads: int) -> None:
    """Trains as the lines of stdin say: a number of steps; prints how many ms each took."""
    api = crosswise.api(engine)
    session_options: Any = argparse.Namespace(intra_op_num_threads=threads)
    if engine == OURS:
        from gradd.train import library

        library.candidates = lambda: [BUILD / "train/native" / library.FILE]
    else:
        import onnxruntime

        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = threads
    held = np.load(folder / "batch.npz")
    batch = [held[name] for name in held.files]
    Path("/proc/self/clear_refs").write_text("5")  # the most so far begins here
    before, start = _memory("VmRSS"), time.perf_counter()
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    models = [folder / name for name in FILES]
    module = api.Module(models[0], state, session_options=session_options)
    optimizer = api.Optimizer(models[1], module)
    optimizer.set_learning_rate(1e-3)

    def step() -> float:
        loss = float(module(*batch))
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    loss = step()
    first = 1000 * (time.perf_counter() - start)
    print(json.dumps({"loss": loss, "first": first}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step()
            times.append(1000 * (time.perf_counter() - start))
        memory = _memory("VmHWM") - before
        print(json.dumps({"ms": times, "memory": memory, "loss": loss}), flush=True)


def _memory(what: str) -> float:
    """A line of this process's status, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise KeyError(what)


class Worker:
    """A process that trains."""

    def __init__(self, python: Path, folder: Path, engine: str, threads: int) -> None:
        command = [python, __file__, "--folder", folder, "--work", engine, "--threads", threads]
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT / "adapters/python") * (engine == OURS)},
        )
        self.first = self._read()
        self.ms: list[float] = []
        self.last: dict[str, Any] = {}
        self._steps = max(2, int(TURN_SECONDS * 1000 / self.run(2)))

    def run(self, steps: int = 0) -> float:
        """Some steps, by default those of a turn; returns the median of their ms."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps or self._steps + 1}\n")
        self._process.stdin.flush()
        self.last = self._read()
        # Caches are cold after the other's turn: the first step does not count.
        median = float(np.median(self.last["ms"][0 if steps else 1 :]))
        self.ms += [] if steps else [median]
        return median

    def end(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._process.communicate()[1].strip().splitlines()[-1])
        return json.loads(line)


def compare(folder: Path, threads: int, rounds: int, pythons: dict[str, Path]) -> dict[str, Any]:
    """Both on the files of a folder.

    Returns:
        For each engine: ms (a median for each round), first (ms from opening the files to the end
        of the first step), memory (MiB), losses (of the first and the last step); and what failed.
    """
    workers, failed = {}, {}
    for name, python in pythons.items():
        try:
            workers[name] = Worker(python, folder, name, threads)
        except RuntimeError as error:
            failed[name] = str(error)
    for round_ in range(rounds):
        for name in list(workers)[:: 1 if round_ % 2 else -1]:
            workers[name].run()
    for worker in workers.values():
        worker.end()
    return {"failed": failed} | {
        name: {
            "ms": worker.ms,
            "first": worker.first["first"],
            "memory": worker.last["memory"],
            "losses": [worker.first["loss"], worker.last["loss"]],
        }
        for name, worker in workers.items()
    }


# ---- the table ----------------------------------------------------------------------------------


def row(name: str, threads: int, found: dict[str, Any]) -> str:
    """A line of the table."""
    import stats

    both = [found.get(engine) for engine in (OURS, THEIRS)]
    cells = [name, str(threads)]
    cells += [f"{np.median(each['ms']):.2f}" if each else "fails" for each in both]
    ours, theirs = both
    speed = ours and theirs and stats.ratio_interval(theirs["ms"], ours["ms"])
    cells += [stats.speedup_text(speed) if speed else "-"]
    cells += [f"{e[what]:.0f}" if e else "-" for what in ("first", "memory") for e in both]
    return "| " + " | ".join(cells) + " |"


HEAD = """| network | threads | gradd, ms | ONNX Runtime | speed-up | first, ms | | memory, MiB | |
|---|---|---|---|---|---|---|---|---|"""


def page(machine: dict[str, Any], results: Sequence[dict[str, Any]], whats: dict[str, str]) -> str:
    """The results as Markdown."""
    head = (
        f"{machine['cpu']}, measured on {machine['date']}: `gradd.train` with the library for "
        "devices, and ONNX Runtime 1.19.2, AdamW, ms per step, median of the rounds; a speed-up is "
        "ONNX Runtime's time over gradd's. First: ms from opening the files to the end of the "
        "first step. Memory: the most beyond what the process had before it. Of two columns the "
        "first is gradd's."
    )
    lines = [
        *textwrap.wrap(head, 100),
        "",
        *(f"* **{name}**: {what}" for name, what in whats.items()),
        "",
        HEAD,
        *(row(result["network"], result["threads"], result) for result in results),
    ]
    said = {result["network"]: result.get("failed", {}) for result in results}
    for name, failed in said.items():
        for engine, why in failed.items():
            lines += ["", *textwrap.wrap(f"{name}, {engine} fails: {why[-160:]}", 100)]
    return "\n".join(lines) + "\n"


def write(out: Path, results: list[dict[str, Any]], whats: dict[str, str]) -> Path:
    """Adds results to those of the machine's file, and writes its page."""
    import report
    from run import describe_machine

    machine = describe_machine(os.cpu_count() or 1)
    stem = report.stem(machine, "devices")
    data = out / f"{stem}.json"
    kept = json.loads(data.read_text())["results"] if data.exists() else []
    by_key = {(r["network"], r["threads"]): r for r in [*kept, *results]}
    order = [key for key in itertools.product(whats, (1, 2, 4, 8)) if key in by_key]
    results = [by_key[key] for key in order]
    out.mkdir(parents=True, exist_ok=True)
    data.write_text(json.dumps({"machine": machine, "results": results}) + "\n")
    written = out / f"{stem}.md"
    written.write_text(page(machine, results, whats))
    return written


def main(argv: list[str] | None = None) -> int:
    """Makes the files that are missing, measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="networks, by comma")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, by comma")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=BUILD / "devices", help="of the files")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--prepare", action="store_true", help="make the files only")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        work(options.folder, options.work, int(options.threads))
        return 0
    if options.make:
        make(options.folder)
        return 0
    known = networks()
    only = options.only.split(",") if options.only else list(known)
    if unknown := set(only) - set(known):
        parser.error(f"{', '.join(sorted(unknown))} is none of {', '.join(known)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    pythons = {OURS: Path(sys.executable), THEIRS: crosswise.environment(options.folder)}
    for name in only:
        place = options.folder / name
        place.mkdir(exist_ok=True)
        if not (place / "checkpoint").exists():
            export(place, name)
            command = [pythons[THEIRS], __file__, "--folder", place, "--make"]
            subprocess.run([str(word) for word in command], check=True)
    results = []
    for name, threads in itertools.product(only, options.threads.split(",")):
        if options.prepare:
            break
        found = compare(options.folder / name, int(threads), options.rounds, pythons)
        results.append({"network": name, "threads": int(threads), **found})
        print(row(name, int(threads), found), flush=True)
    if results:
        whats = {name: what for name, (_, _, what) in known.items()}
        print(f"written: {write(options.out, results, whats)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
