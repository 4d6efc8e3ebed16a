"""`make bench`: gradd against torch eager and torch.compile, interleaved in one run.

Every engine runs in a process of its own with the same threads; they take turns, round by round, so
that a slow moment of the machine hits all of them. Medians come with 95 % bootstrap intervals, and
no speed-up is printed whose interval spans 1.0. `plain` is gradd with the recognition of patterns
switched off. Results: JSON, an SVG and a Markdown table.

`--trainers` compares whole trainers in the same way, in samples and tokens per second: plain
Trainer with ORTTrainer on the samples at small size, and trainers of other packages without and
with gradd. `--devices` compares training on devices with ONNX Runtime's (devices.py).

    python benchmarks/run.py [--quick] [--trainers] [--only llama,mlp] [--starts 6]
                             [--engines eager,compile,gradd,plain]
                             [--precision fp32,bf16,autocast]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import networks  # noqa: E402
import report  # noqa: E402
import workloads  # noqa: E402
from worker import MODES  # noqa: E402

ENGINES = ("eager", "compile", "gradd", "plain")
OF_NETWORKS = ("eager", "last", "compile", "gradd")
PRECISIONS = ("fp32", "bf16")
TRAINERS = ("Trainer", "ORTTrainer")
STEP = "whole step"  # of a trainer


class Engine:
    """A worker process, spoken to in lines of JSON."""

    def __init__(self, name: str, what: list[str], env: dict[str, str]) -> None:
        self.name = name
        program = "trainers.py" if name in TRAINERS else "worker.py"
        python = interpreter() if what[0] in workloads.OTHERS else sys.executable
        command = [python, str(HERE / program), name, *what]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by end()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=env,
        )
        self._read()

    def do(self, what: str, steps: int = 1) -> dict[str, Any]:
        """Sends one command and waits for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "steps": steps}) + "\n")
        return self._read()

    def end(self) -> None:
        """Ends the process."""
        if self._process.poll() is None:
            self._process.communicate('{"do": "end"}\n', timeout=60)
        self._log.close()  # closing twice is harmless

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self._process.wait()
        self._log.seek(0)
        tail = self._log.read().strip().splitlines()[-12:]
        raise RuntimeError(f"{self.name}: the worker ended\n" + "\n".join(tail))


def measure(
    name: str, precision: str, options: argparse.Namespace, env: dict[str, str]
) -> dict[str, Any]:
    """All engines on one workload, from `options.starts` starts of their processes, or from those
    that were done when this process was interrupted (`starts` says how many)."""
    result = _measure_once(name, precision, options, env, 0)
    result["starts"] = 1
    try:
        for start in range(1, options.starts):
            stop_daemons(env)
            _add_start(result, _measure_once(name, precision, options, env, start))
            result["starts"] += 1
    except SystemExit:
        print(f"\nended after {result['starts']} of {options.starts} starts")
    return result


def _add_start(result: dict[str, Any], more: dict[str, Any]) -> None:
    """Appends the samples of another start; an engine that failed in one start is left out."""
    result["failed"] |= more["failed"]
    for name in result["failed"]:
        result["engines"].pop(name, None)
    for name, engine in result["engines"].items():
        for mode, samples in more["engines"][name]["ms"].items():
            engine["ms"][mode] += samples
        engine |= {k: v for k, v in more["engines"][name].items() if k == "memory"}


def _measure_once(
    name: str, precision: str, options: argparse.Namespace, env: dict[str, str], start: int
) -> dict[str, Any]:
    """One start of all engines; one that fails is reported and left out. Memory: the last time."""
    load = workloads.make(name, options.quick)
    result: dict[str, Any] = {"workload": name, "precision": load.precision or precision}
    result |= {"engines": {}, "failed": {}}
    result |= {"what": load.what, "tokens": load.tokens}
    if options.trainers:
        result["sequences"] = load.sequences
    engines: list[Engine] = []
    try:
        for engine_name in turned(options.engines, start):
            _start(engine_name, options, env, engines, result)
        for mode in options.modes:
            if mode == MODES[1]:
                for engine in list(engines):
                    _ask(engine, "optimizer", 1, engines, result)
            _take_turns(engines, options, load.samples, mode, result)
        for engine in list(engines) if start == options.starts - 1 else ():
            print(f"  {engine.name:8s} memory", flush=True)
            answer = _ask(engine, "memory", options.memory_steps, engines, result)
            if answer is not None:
                result["engines"][engine.name]["memory"] = answer
        for engine in list(engines) if options.trainers else ():
            result["engines"][engine.name] |= _ask(engine, "facts", 0, engines, result) or {}
    finally:
        for engine in engines:
            engine.end()
    return result


def _ask(
    engine: Engine, what: str, steps: int, engines: list[Engine], result: dict[str, Any]
) -> dict[str, Any] | None:
    """One command; an engine that fails at it is named, left out from here on, and gives None."""
    try:
        return engine.do(what, steps)
    except RuntimeError as error:
        print(f"  {engine.name} failed at {what}\n    " + str(error).replace("\n", "\n    "))
        result["failed"][engine.name] = str(error)
        engines.remove(engine)
        engine.end()
        return None


def _start(
    engine_name: str,
    options: argparse.Namespace,
    env: dict[str, str],
    engines: list[Engine],
    result: dict[str, Any],
) -> None:
    print(f"  {engine_name:8s} first call ...", end="", flush=True)
    try:
        size = "quick" if options.quick else "full"
        what = [result["workload"], size, result["precision"]]
        engine = Engine(engine_name, what, _env_of(engine_name, env))
        engines.append(engine)
        warm = engine.do("warm", options.warm)
    except RuntimeError as error:
        print(" failed", flush=True)
        print("    " + str(error).replace("\n", "\n    "), flush=True)
        result["failed"][engine_name] = str(error)
        engines[:] = [e for e in engines if e.name != engine_name]
        return
    print(f" {warm['first_s']:.1f} s, loss {warm['loss']:.6f}", flush=True)
    kept = {"first_s": warm["first_s"], "loss": warm["loss"], "first_memory": warm["memory"]}
    result["engines"][engine_name] = kept | {"ms": {}}


def _env_of(engine_name: str, env: dict[str, str]) -> dict[str, str]:
    """`plain` has a daemon of its own, so that its memory is its own."""
    if engine_name != "plain":
        return env
    folder = Path(env["GRADD_DIR"]) / "plain"
    folder.mkdir(mode=0o700, exist_ok=True)
    return {**env, "GRADD_DIR": str(folder), "GRADD_FUSE": "0"}


def turned(items: list, by: int) -> list:
    shift = by % max(1, len(items))
    return items[shift:] + items[:shift]


def _take_turns(
    engines: list[Engine],
    options: argparse.Namespace,
    samples_each: int,
    mode: str,
    result: dict[str, Any],
) -> None:
    samples: dict[str, list[float]] = {e.name: [] for e in engines}
    rounds = options.rounds if mode != MODES[1] else max(2, options.rounds // 2)
    for round_ in range(rounds):
        # The order rotates too, so that no engine always runs after the same neighbour.
        for engine in turned(engines, round_):
            time.sleep(options.pause)  # threads of the engine before stop spinning
            # One sample more than wanted: caches are cold after the others' turn, so the first
            # does not count.
            answer = _ask(engine, "time", 1 + options.samples * samples_each, engines, result)
            if answer is not None:
                samples[engine.name] += answer["ms"][1:]
    samples = {engine.name: samples[engine.name] for engine in engines}
    for engine in engines:
        result["engines"][engine.name]["ms"][mode] = samples[engine.name]
    print("  " + report.one_line(mode, samples), flush=True)


def processor_ticks() -> tuple[int, int]:
    """Since the system's start: all, and those in which the hypervisor ran another guest."""
    with open("/proc/stat") as file:
        ticks = [int(n) for n in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


def describe_machine(threads: int) -> dict[str, Any]:
    """What a reader needs to know to judge the figures."""
    import torch
    import transformers

    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True
    ).stdout.strip()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--trainers", action="store_true", help="whole trainers, on the samples")
    parser.add_argument("--networks", action="store_true", help="pictures, sounds, recurrence")
    parser.add_argument("--only", help="workloads, by comma")
    parser.add_argument("--engines", help="engines, by comma")
    parser.add_argument("--precision", help="precisions, by comma")
    parser.add_argument(
        "--rounds",
        type=int,
        help="rounds of turns (default 10, quick 6, trainers 4; half with AdamW)",
    )
    parser.add_argument("--samples", type=int, help="samples per turn (default 2, quick 4)")
    parser.add_argument(
        "--starts", type=int, default=1, help="starts of all processes; each runs all rounds"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per engine")
    parser.add_argument("--no-optimizer", action="store_true", help="forward and backward only")
    parser.add_argument("--out", default=str(HERE / "results"), help="folder of the results")
    options = parser.parse_args(argv)
    names, engines, precisions = _whole(options)
    options.only = options.only.split(",") if options.only else list(names)
    options.engines = options.engines.split(",") if options.engines else list(engines)
    options.precision = options.precision.split(",") if options.precision else list(precisions)
    options.modes = MODES[:1] if options.no_optimizer else MODES
    if options.trainers:
        options.modes = (STEP,)
    for given, known in (
        (options.only, names),
        (options.engines, engines),
        (options.precision, PRECISIONS if options.trainers else workloads.PRECISIONS),
    ):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(unknown)} is none of {', '.join(known)}")
    options.rounds = options.rounds or (4 if options.trainers else 6 if options.quick else 10)
    options.samples = options.samples or (4 if options.quick else 2)
    options.warm = 3
    options.memory_steps = 2 if options.trainers else 5
    options.pause = 0.1
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the chosen workloads and writes the results."""
    words = sys.argv[1:] if argv is None else argv
    if "--devices" in words:
        import devices

        return devices.main([word for word in words if word != "--devices"])
    options = _parse(argv)
    # Ended from outside: the workers and the daemon end as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    machine = describe_machine(options.threads)
    print(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}")
    if machine["load_before"] > 0.5:
        print(
            f"note: the machine is busy (load {machine['load_before']:.1f}); intervals will be wide"
        )
    results = []
    before = processor_ticks()
    # A daemon of this run alone: a daemon of yesterday's build must not be measured.
    with tempfile.TemporaryDirectory(prefix="gradd-bench-") as folder:
        env = environment(folder, options.threads)
        try:
            for name, precision in itertools.product(options.only, options.precision):
                what = workloads.make(name, options.quick).what
                print(f"\n{name} {precision}: {what}", flush=True)
                results.append(measure(name, precision, options, env))
                if results[-1]["starts"] < options.starts:
                    break
        finally:
            stop_daemons(env)
    all_, stolen = (b - a for a, b in zip(before, processor_ticks(), strict=True))
    machine["stolen"] = stolen / max(1, all_)
    paths = report.write(
        Path(options.out), machine, results, options.quick, _kind(options, results)
    )
    print("\n" + report.table(machine, results))
    print("\nwritten: " + ", ".join(str(p) for p in paths))
    return 0 if results[-1]["starts"] == options.starts else 143  # ended by SIGTERM


def _whole(
    options: argparse.Namespace,
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Workloads, engines and precisions of a table that leaves nothing out."""
    if options.trainers:
        return workloads.SAMPLES + workloads.OTHERS, TRAINERS, PRECISIONS[:1]
    if options.networks:
        return networks.NAMES, OF_NETWORKS, PRECISIONS
    return workloads.NAMES, ENGINES, PRECISIONS


def _kind(options: argparse.Namespace, results: list[dict[str, Any]]) -> str:
    """Says "part" where something of the whole table was left out, or the run ended early."""
    whole = _whole(options)
    chosen = (options.only, options.engines, options.precision)
    left_out = any(set(w) - set(c) for w, c in zip(whole, chosen, strict=True))
    early = results[-1]["starts"] < options.starts
    words = [word for word in ("trainers", "networks") if getattr(options, word)]
    return "-".join(words + ["part"] * (left_out or early or options.no_optimizer))


def environment(folder: str, threads: int) -> dict[str, str]:
    """For trainers with a daemon of their own in this folder."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "GRADD_DIR": folder}
    env |= {"GRADD_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "GRADD_CACHE": "0"}
    env |= {"TOKENIZERS_PARALLELISM": "false"}
    ours = [str(HERE.parent / "adapters" / name) for name in ("python", "optimum")]
    env["PYTHONPATH"] = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]).rstrip(":")
    return env


def interpreter() -> str:
    """That of the environment with the packages of other trainers, which is made once."""
    sys.path.insert(0, str(HERE.parent / "tests" / "python"))
    from helpers.trainers import environment

    return environment.interpreter()


def stop_daemons(env: dict[str, str]) -> None:
    for engine_name in ("gradd", "plain"):
        _stop_daemon(_env_of(engine_name, env))


def _stop_daemon(env: dict[str, str]) -> None:
    build = Path(os.environ.get("GRADD_BUILD", HERE.parent / "build"))
    binary = build / "bin" / "gradd"
    if binary.exists() and any(Path(env["GRADD_DIR"]).glob("*.sock")):
        subprocess.run([binary, "stop"], env=env, capture_output=True, timeout=30)


if __name__ == "__main__":
    sys.exit(main())
