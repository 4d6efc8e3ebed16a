"""A short request beside long ones, and how soon the work of a killed client is gone.

    .venv/bin/python benchmarks/neighbours.py [--only products,cumsum] [--samples 300] [--kills 40]

A daemon of its own serves a session with a forward of about a millisecond, and a second process
that asks for something long, again and again: 60 products of 4096 x 4096 x 4096, also in bf16, a
graph of 100,000 nodes that is loaded and planned, a running sum of 2^28 numbers, a layer of an
LSTM. One line each: the median, the 99th percentile and the longest of the short request, which is
asked at random moments and must have the bits that it has alone. Then that process is killed in the
middle of its request, many times: how long until the daemon has nothing of it any more.
Milliseconds; behind them the processor time that the daemon's threads have taken meanwhile, all
together, which says how much of the wait is that of a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
for folder in ("tests/python", "adapters/python"):
    sys.path.insert(0, str(HERE.parent / folder))

import numpy as np  # noqa: E402
from onnx import helper  # noqa: E402

from gradd.memory.shm import Segment  # noqa: E402
from helpers.hostile.raw_client import BF16, DROP, F32, Raw, many, put, tensor, types  # noqa: E402

SIDE = 4096
COUNT = 1 << 28
NODES = 100_000
SHORT = (192, 6)  # side of the matrices and number of products of the short request
PAUSE_S = 0.02  # between two short requests, on average
WAIT_MS = 600_000


@dataclass
class Asked:
    """A model of one output, and its sizes."""

    onnx: bytes
    inputs: list[list[int]]
    output: list[int]
    dtype: int = F32


def model(nodes: list, inputs: list[list[int]], output: list[int], dtype: int = F32) -> bytes:
    """ONNX bytes of inputs x, w, ... and one output y, all of the same type."""
    names = ["x", "w", "r"][: len(inputs)]
    graph = helper.make_graph(
        nodes,
        "long",
        [
            helper.make_tensor_value_info(name, dtype, dims)
            for name, dims in zip(names, inputs, strict=True)
        ],
        [helper.make_tensor_value_info("y", dtype, output)],
    )
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()


def products(side: int, n: int, dtype: int = F32) -> Asked:
    """y = x w w ... w."""
    at = ["x", *(f"p{i}" for i in range(n - 1)), "y"]
    nodes = [helper.make_node("MatMul", [at[i], "w"], [at[i + 1]]) for i in range(n)]
    square = [side, side]
    onnx = model(nodes, [square, square], square, dtype)
    return Asked(onnx, [square, square], square, dtype)


def cumsum() -> Asked:
    """Running sums of one row."""
    axis = helper.make_node("Constant", [], ["axis"], value_ints=[0])
    nodes = [axis, helper.make_node("CumSum", ["x", "axis"], ["y"])]
    return Asked(model(nodes, [[COUNT]], [COUNT]), [[COUNT]], [COUNT])


def lstm() -> Asked:
    """A layer of 1024 cells over 1024 steps of 32 rows."""
    steps, rows, cells = 1024, 32, 1024
    inputs = [[steps, rows, cells], [1, 4 * cells, cells], [1, 4 * cells, cells]]
    output = [steps, 1, rows, cells]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=cells)
    return Asked(model([node], inputs, output), inputs, output)


def sums(n: int) -> bytes:
    """y = x + x + ... + x."""
    at = ["x", *(f"s{i}" for i in range(n - 1)), "y"]
    nodes = [helper.make_node("Add", [at[i], "x"], [at[i + 1]]) for i in range(n)]
    return model(nodes, [[4]], [4])


class Session(Raw):
    """A session with one plan, whose forward it asks for."""

    def prepare(self, what: Asked) -> Session:
        """Segment, values, graph and plan."""
        inputs, self.output = what.inputs, what.output
        size = 4 if what.dtype == F32 else 2
        self.attach()
        places, at = [], 0
        for dims in [*inputs, self.output]:
            places.append(tensor(at, dims, what.dtype))
            at += -(-size * int(np.prod(dims)) // 4096) * 4096
        self.places = places
        self.segment = Segment(1, at)
        reply = self.control({"v": "segment", "id": 1, "bytes": at}, [self.segment.fd])
        assert reply["ok"], reply
        some = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
        for place, dims in zip(places, inputs, strict=False):
            scaled = some / np.float32(dims[-1] ** 0.5)
            if size == 2:  # bf16: the upper half
                scaled = (scaled.view(np.uint32) >> 16).astype(np.uint16)
            values = self.at(place[1], (int(np.prod(dims)),), scaled.dtype)
            for first in range(0, len(values), len(some)):
                part = values[first : first + len(some)]
                part[:] = scaled[: len(part)]
        planned = self.call({
            "v": "graph.plan", "graph": put(self, what.onnx)["graph"], "plan": 1, "out": [0],
            "in": types(*([what.dtype, dims] for dims in inputs)),
            "grad": [], "bound": [], "gmask": [],
        })  # fmt: skip
        assert planned["ok"], planned
        return self

    def receive(self) -> dict[str, Any]:
        """The next reply, for which a busy machine may need minutes."""
        assert self.dealer.poll(WAIT_MS), "no reply"
        return super().receive()

    def forward(self) -> bytes:
        """Asks for it, and for the end of the run; the bytes of the result, if it is small."""
        reply = self.call({
            "v": "forward", "plan": 1, "run": 1, "seed": 0, "flags": 0,
            "in": many(*self.places[:-1]), "out": many(self.places[-1]), "rel": [1],
        })  # fmt: skip
        assert reply["ok"], reply
        if math.prod(self.output) > 1 << 20:
            return b""
        return self.at(self.places[-1][1], tuple(self.output)).tobytes()


def compile_graphs(path: Path) -> None:
    """Graphs that the daemon has not seen, one after the other."""
    with Session(path) as s:
        s.attach()
        tell("ready")
        fresh = (int(time.time()) + os.getpid()) % 5000
        for n in range(NODES + fresh, NODES + fresh + 1000):
            graph = sums(n)
            planned = s.call({
                "v": "graph.plan", "graph": put(s, graph)["graph"], "plan": 1, "out": [0],
                "in": types([F32, [4]]), "grad": [0], "bound": [], "gmask": [0],
            })  # fmt: skip
            assert planned["ok"], planned
            s.call({"v": "plan.drop", "plan": 1})
            tell("done")


def run_forwards(what: Callable[[], Asked]) -> Callable:
    """One forward after the other."""

    def run(path: Path) -> None:
        with Session(path) as s:
            s.prepare(what())
            tell("ready")
            while True:
                s.forward()
                tell("done")

    return run


LONG: dict[str, Callable[[Path], None]] = {
    "products": run_forwards(lambda: products(SIDE, 60)),
    "products-bf16": run_forwards(lambda: products(SIDE, 60, BF16)),
    "graph": compile_graphs,
    "cumsum": run_forwards(cumsum),
    "lstm": run_forwards(lstm),
}


def tell(word: str) -> None:
    """Says to the parent how far this process is."""
    print(word, flush=True)


def fork_on(folder: Path) -> None:
    """A process of its own for each line, a name: what takes seconds is imported once."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.setsid()  # its own group: nothing reaches both
            LONG[line.strip()](folder)
        print(child, flush=True)
        os.waitpid(child, 0)


@contextlib.contextmanager
def forking(folder: Path) -> Any:
    """What starts the other processes."""
    command = [sys.executable, __file__, "--long", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@contextlib.contextmanager
def beside(name: str, forks: Any) -> Any:
    """The pid and a pidfd of a process that asks for something long, and has begun."""
    forks.stdin.write(f"{name}\n".encode())
    os.set_blocking(forks.stdout.fileno(), True)
    pid = 0
    while (line := forks.stdout.readline()) != b"ready\n":
        if not line:
            raise RuntimeError(f"{name}: the other process ended")
        pid = int(line) if line.strip().isdigit() else pid  # not what the one before has said
    while not pid:
        pid = int(forks.stdout.readline())
    pidfd = os.pidfd_open(pid)
    os.set_blocking(forks.stdout.fileno(), False)
    try:
        yield pidfd
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
        os.close(pidfd)


def sessions(watch: Raw) -> list[dict[str, Any]]:
    """What `gradd ps` says."""
    return watch.call({"v": "ps", "t": DROP})["sessions"]


class Watch:
    """What takes how long: on the clock, and of the worker's processors."""

    def __init__(self, worker: int) -> None:
        self.tasks = Path(f"/proc/{worker}/task")
        self.ms: list[float] = []
        self.cpu_ms: list[float] = []

    def _cpu_ms(self) -> float:
        ns = 0
        for task in self.tasks.iterdir():
            with contextlib.suppress(OSError):  # a thread that gives memory back has ended
                ns += int((task / "schedstat").read_text().split()[0])
        return ns / 1e6

    def time(self, what: Callable[[], None]) -> None:
        """Does it once."""
        start, cpu = time.perf_counter(), self._cpu_ms()
        what()
        took = time.perf_counter() - start
        self.cpu_ms.append(self._cpu_ms() - cpu)
        self.ms.append(1000 * took)

    def report(self, what: str, more: str = "") -> None:
        """One line."""
        both = [sorted(self.ms), sorted(self.cpu_ms)]
        (p50, p99, most), cpu = ([quantile(ms, p) for p in (0.5, 0.99, 1)] for ms in both)
        print(
            f"{what:33} n {len(self.ms):4}  p50 {p50:7.1f}  p99 {p99:7.1f}  max {most:7.1f} ms"
            f"  processors {cpu[0]:6.1f} {cpu[1]:6.1f} {cpu[2]:6.1f}"
            f"  load {os.getloadavg()[0]:.1f} {more}",
            flush=True,
        )


def quantile(ordered: list[float], part: float) -> float:
    """The smallest value with at least that part of all at or below it."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def ask(short: Session, expected: bytes, count: int, watch: Watch) -> None:
    """So many short requests at random moments."""
    for _ in range(count):
        time.sleep(random.expovariate(1 / PAUSE_S))
        watch.time(lambda: check(short.forward(), expected))


def check(got: bytes, expected: bytes) -> None:
    """The bits must be those of the request alone."""
    if got != expected:
        raise RuntimeError("other bits than alone")


def kill_one(name: str, forks: Any, asks: Raw, watch: Watch) -> None:
    """From the end of a process to that of its session."""
    before = len(sessions(asks))
    with beside(name, forks) as pidfd:
        time.sleep(random.uniform(0.1, 0.6))
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
        watch.time(lambda: wait_for(asks, before))


def wait_for(asks: Raw, count: int) -> None:
    """Until there are so many sessions."""
    while len(sessions(asks)) > count:
        time.sleep(0.0005)


def main() -> None:
    """Measures."""
    if sys.argv[1:2] == ["--long"]:
        fork_on(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(LONG))
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--kills", type=int, default=40, help="of each")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gradd-neighbours-"))
    os.environ["GRADD_DIR"] = str(folder)
    from gradd.session import daemon

    daemon.connect(folder).close()
    try:
        with forking(folder) as forks:
            measure(args, folder, forks)
    finally:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((folder / "lock").read_text()), signal.SIGTERM)
        shutil.rmtree(folder, ignore_errors=True)


def measure(args: argparse.Namespace, folder: Path, forks: Any) -> None:
    """All lines."""
    with Session(folder).prepare(products(*SHORT)) as short, Raw(folder).attach() as asks:
        expected = short.forward()
        worker = asks.call({"v": "ps", "t": DROP})["worker"]
        wait_for(asks, 2)  # the one that started the daemon is gone
        if args.samples:
            alone = Watch(worker)
            ask(short, expected, args.samples, alone)
            alone.report("short request, alone")
        for name in args.only.split(","):
            if args.samples:
                took = Watch(worker)
                with beside(name, forks):
                    ask(short, expected, args.samples, took)
                    done = (forks.stdout.read() or b"").count(b"done")
                took.report(f"short request beside {name}", f"({done} long ones done)")
                wait_for(asks, 2)
            if args.kills:
                gone = Watch(worker)
                for _ in range(args.kills):
                    kill_one(name, forks, asks, gone)
                gone.report(f"killed client's work, {name}")


if __name__ == "__main__":
    main()
