"""Which families of transformers train in gradd: tries each with a tiny random model.

Usage: families.py RESULTS [--only NAMES] [--seconds N]
       families.py RESULTS --page docs/families.md

RESULTS gets one line of JSON per family and model class; what it holds already is not run again. A
model runs forward and backward in PyTorch and through ORTModule, strictly, for three shapes of the
batch, and loss and all gradients are compared. Every family has a process of its own, with limits
of time and memory; the daemon is one of this run, in a directory of its own. With --page nothing
runs: the page is written from RESULTS, which is put in order. `make families` does both.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import families_page
import families_sizes
import torch
from families_sizes import Family

SHAPES = ((2, 12), (3, 9), (1, 7))  # rows and length of the batches
MEMORY_BYTES = 8 << 30  # address space of a child
TEXT = 400  # characters that a row keeps of a message
TOLERANCE = 1e-3
FLOOR = 1e-3  # of the largest gradient's norm: smaller ones are measured by that
CONTEXT = multiprocessing.get_context("fork")  # imports take longer than most families
Step = tuple[float, dict[str, torch.Tensor]]  # loss and gradients by parameter
Row = dict[str, Any]


# ---- one family, in its own process ----


def step(model: torch.nn.Module, parameters: torch.nn.Module, batch: dict) -> Step:
    """Forward and backward; parameters without a gradient count as zeros."""
    parameters.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    loss = model(**batch).loss
    loss.backward()
    named = parameters.named_parameters()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}
    return float(loss.detach()), grads


def in_torch(family: Family) -> tuple[torch.nn.Module, list[dict], list[Step]]:
    """The first model that PyTorch can train, its batches, and what PyTorch computes.

    Raises:
        Exception: What the first one objected to.
    """

    def attempt(model: torch.nn.Module) -> tuple[torch.nn.Module, list[dict], list[Step]]:
        problem: Exception | None = None
        for make in families_sizes.batches(family, SHAPES):
            try:
                batches = make(model)
                twin = copy.deepcopy(model)
                steps = [step(twin, twin, copy.deepcopy(batch)) for batch in batches]
                check_sound(steps)
            except Exception as error:  # of any kind: the code is the family's
                problem = error
                continue
            return model, batches, steps
        raise problem or RuntimeError("there is no batch to try")

    return families_sizes.first_that(family, attempt)


def check_sound(steps: list[Step]) -> None:
    """Raises ArithmeticError where a comparison would prove nothing."""
    for loss, grads in steps:
        size = sum(float(g.double().norm()) for g in grads.values())
        if not 0.0 < size < float("inf") or loss != loss:
            raise ArithmeticError(f"in PyTorch the loss is {loss}, the norm of gradients {size}")


def difference(ours: Step, theirs: Step) -> tuple[float, float, str]:
    """Relative differences of loss and gradients, and the parameter that has the largest."""
    floor = FLOOR * max(float(g.double().norm()) for g in theirs[1].values())
    worst, where = 0.0, ""
    for name, want in theirs[1].items():
        off = float((ours[1][name].double() - want.double()).norm())
        off /= max(float(want.double().norm()), floor)
        if not off <= worst:  # also NaN
            worst, where = off if off == off else float("inf"), name
    return abs(ours[0] - theirs[0]) / max(abs(theirs[0]), 1e-12), worst, where


def in_daemon(
    model: torch.nn.Module, batches: list[dict], theirs: list[Step], strict: bool = True
) -> Row:
    """Trains in the daemon and compares; the fields of a row that tell how it went."""
    from gradd import ORTModule

    spare = copy.deepcopy(model)
    wrapped = ORTModule(model, strict=strict)
    ours = [step(wrapped, model, batch) for batch in batches]
    losses, grads, names = zip(*map(difference, ours, theirs))
    stats = wrapped.gradd_stats()
    if not strict and not stats["forwards"]:
        return {"status": "pytorch"}
    explained = wrapped.gradd_explain()
    if strict and stats["fallbacks"]:
        raise AssertionError(f"strict, and yet in PyTorch: {stats['fallbacks']}")
    same = all(off <= TOLERANCE for off in (*losses, *grads))  # NaN is not
    if not same:
        with contextlib.suppress(Exception):  # of any kind: not every model computes in f64
            same = as_exact(spare, batches, ours, theirs)
    leftovers = Counter(r.op for r in explained.leftovers if r.phase == "forward")
    return {
        "status": "daemon" if same else "differs",
        "loss": max(losses),
        "gradient": max(grads),
        "where": names[grads.index(max(grads))],
        "captures": stats["captures"],
        "leftovers": dict(leftovers),
        **({} if strict else {"share": share(wrapped, model, batches[0])}),
    }


def as_exact(model: torch.nn.Module, batches: list[dict], ours: list, theirs: list) -> bool:
    """Whether ours are as near to results in f64 as PyTorch's, over all batches.

    A value next to a step of a function (a ReLU, the maximum of a pool) may fall on either side.
    """
    model = model.double()
    wide = [{name: widened(value) for name, value in batch.items()} for batch in batches]
    exact = [step(model, model, batch) for batch in wide]
    off = [d for pair in zip(ours, exact) for d in difference(*pair)[:2]]
    others = [d for pair in zip(theirs, exact) for d in difference(*pair)[:2]]
    return all(d <= TOLERANCE + 2 * max(others) for d in off)  # NaN is not


def widened(value: Any) -> Any:
    """A tensor of numbers with a fraction in f64; anything else as it is."""
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


def share(wrapped: torch.nn.Module, model: torch.nn.Module, batch: dict) -> float:
    """Of the FLOPs of forward(), those that PyTorch does not run when the wrapped model does."""
    # A self-check computes the call once more, in PyTorch, but not in three calls in a row.
    theirs = min(flops(wrapped, batch) for _ in range(3))
    all_of_them = flops(model, batch)
    return 1.0 - theirs / all_of_them if all_of_them else 0.0


def flops(model: torch.nn.Module, batch: dict) -> int:
    """Those of the products and convolutions that PyTorch runs."""
    with torch.profiler.profile(with_flops=True) as profile:
        model(**batch)
    return sum(event.flops for event in profile.events())


def attempt(model: torch.nn.Module, batches: list[dict], theirs: list[Step]) -> Row:
    """in_daemon(), or what strict mode raised."""
    spare = copy.deepcopy(model)
    try:
        return in_daemon(model, batches, theirs)
    except Exception as error:
        row = outcome(error)
    if row["status"] != "pytorch":
        return row
    try:
        found = in_daemon(spare, batches, theirs, strict=False)
    except Exception as error:  # without strict=True nothing may raise
        return {**row, **outcome(error), "status": "error"}
    names = {"daemon": "partly", "pytorch": "pytorch"}
    return {**row, **found, "status": names.get(found["status"], "differs")}


def short(text: str) -> str:
    return families_page.without_folders(text)[:TEXT]


def outcome(error: Exception) -> Row:
    """The fields of a row for what strict mode raised."""
    from gradd.fallback import DEFAULT_POLICY, classify

    flag, reason = classify(error)
    status = "pytorch" if flag & DEFAULT_POLICY and reason != "self_check" else "error"
    return {"status": status, "reason": reason, "text": short(str(error))}


def child(family: Family, send: Connection) -> None:
    """Tries one family; sends a row when something is known, the last one is the result."""
    warnings.filterwarnings("ignore")
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1), os.dup2(nothing, 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        model, batches, steps = in_torch(family)
    except Exception as error:
        text = (
            str(error) if isinstance(error, OverflowError) else f"{type(error).__name__}: {error}"
        )
        send.send({"status": "untried", "text": short(text)})
        return
    row = {"parameters": sum(p.numel() for p in model.parameters())}
    send.send({**row, "status": "error", "reason": "process"})
    row |= attempt(model, batches, steps)
    send.send({**row, "seconds": round(time.monotonic() - start, 1)})


# ---- all families ----


def supervised(family: Family, seconds: float) -> Row:
    """The row of a family, whatever becomes of its process."""
    receive, send = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=child, args=(family, send))
    process.start()
    send.close()
    deadline = time.monotonic() + seconds
    row: Row = {"status": "untried"}
    end = "its process died"
    try:
        while True:
            if not receive.poll(max(0.0, deadline - time.monotonic())):
                end = f"no result within {seconds:.0f} s"
                break
            row = receive.recv()
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    if row["status"] in ("untried", "error"):
        row.setdefault("text", end)
    head = {"family": family.name, "model": family.model, "task": family.task}
    return {**head, "versions": versions(), **row}


def versions() -> str:
    """What a row is true for."""
    import transformers

    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


@contextlib.contextmanager
def own_daemon() -> Iterator[Callable[[], None]]:
    """A daemon for this run alone; calling the result starts another one if it has died."""
    from gradd.session import daemon

    folder = Path(tempfile.mkdtemp(prefix="gradd-families-"))  # mode 0700
    os.environ.update(GRADD_DIR=str(folder / "run"), GRADD_AUTOSTART="0")
    command = [daemon.find_binary(), "serve", "--dir", str(folder / "run")]
    running: list[subprocess.Popen] = []

    def serve() -> None:
        if running and running[-1].poll() is None:
            return
        with open(folder / "log", "ab") as log:
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
        daemon.connect(folder / "run").close()  # waits

    try:
        serve()
        yield serve
    finally:
        for process in running:
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def prepare() -> None:
    """Imports what every child needs, once."""
    import onnxscript  # noqa: F401
    import transformers

    import gradd.graph  # noqa: F401

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()


def run(results: Path, only: set[str], seconds: float) -> None:
    """Tries every family that has no row yet."""
    known = {(r["family"], r["model"]) for r in families_page.read(results)}
    todo = [f for f in families_sizes.families() if not only or f.name in only]
    new = [f for f in todo if (f.name, f.model) not in known]
    if len(new) < len(todo):
        print(f"{len(todo) - len(new)} are in {results} already: remove it to run them again")
    prepare()
    with own_daemon() as serve, open(results, "a") as file:
        for number, family in enumerate(new, 1):
            serve()
            row = supervised(family, seconds)
            print(json.dumps(row), file=file, flush=True)
            said = f"{row['gradient']:.1e}" if "gradient" in row else families_page.reason(row)
            print(f"{number}/{len(new)} {family.name} {family.model}: {row['status']} {said}")


def main() -> int:
    """Runs the families, or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="lines of JSON, appended to")
    parser.add_argument("--only", default="", help="names of families, joined by commas")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit for one family")
    parser.add_argument("--page", type=Path, help="write this page from the results; run nothing")
    args = parser.parse_args()
    if args.page:
        rows = families_page.read(args.results)
        known = {(r["family"], r["model"]) for r in rows}
        every = [(f.name, f.model) for f in families_sizes.families()]
        left = [names for names in every if names not in known]
        args.page.write_text(families_page.page(rows, left))
        families_page.write(args.results, rows)  # in order
        return 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.pop("GRADD_DISABLE", None)
    run(args.results, set(filter(None, args.only.split(","))), args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
