"""Runs every kind of test and ends with one line: "N passed, N failed".

Order: the checks (layers, sizes, pages), the site, the C runner, then pytest with a real daemon,
then the tests of a device's own once more on the device of tests/fake. `--quick` leaves out that
device, the site, the checks of `make lint`, C tests with a longer time limit, and Python tests that
are not marked quick. A check script counts as one test. Everything that was skipped is listed with
its reason by the part that skipped it. At the end: the slowest tests and files of all parts, and
for each failure the command that repeats it alone. `--python` runs pytest alone, with the
interpreter that runs this file; `--quick --python` runs the tests marked slow, too.
`--nightly FILE [--only TEST...]` runs the long property tests alone, file by file, those on the
emulated GPU as `emu:FILE`, and every parity test once more under each of SWITCHES; FILE keeps what
the last run of each said, and TEST may be a pattern. Called by `make test`, `make check`, `make
nightly`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fnmatch
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import outcome
from machine import workers
from outcome import ROOT, Outcome

# What saves work or memory by itself is switched off, and what a user asks for is switched on.
SWITCHES = (
    "GRADD_LIVE_ROWS=0",
    "GRADD_CHUNKED_LOSS=0",
    "ORTMODULE_ENABLE_COMPUTE_OPTIMIZER=0",
    "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER=0",
    "ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER=0",
    "ORTMODULE_MEMORY_OPT_LEVEL=1",
    "ORTMODULE_MEMORY_OPT_LEVEL=2",
    "GRADD_GROUP_BYTES=1KiB",
)
EMULATED = "emu"  # the module of C tests that runs kernels of GPUs: all cases only in the nightly
ON_EMU = "emu:"  # before a file of tests: on the emulated GPU
_MANY = 4  # files that are counted, not named
FAKE_C = ("ops", "step.")  # modules of C tests whose device is the one that is named


def run_script(title: str, command: list[str]) -> Outcome:
    """Runs a check that either holds or not."""
    print(f"== {title}", flush=True)
    return outcome.of_script(command, subprocess.run(command, cwd=ROOT).returncode)


def run_c(build: Path, device: str = "", chosen: Sequence[str] = ()) -> Outcome:
    """Runs the C tests in equal parts beside each other and prints what each part said."""
    print("== C tests", f"({device})" if device else "", flush=True)
    n = workers()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        parts = threads.map(
            lambda i: run_c_part(build, [*chosen, "--part", f"{i + 1}/{n}"]), range(n)
        )
        return sum(parts, Outcome())


def run_c_part(build: Path, options: list[str]) -> Outcome:
    """One of several runners beside each other."""
    command = [str(build / "bin" / "tests"), *options]
    with tempfile.TemporaryDirectory(prefix="gradd-tests-") as folder:
        times = Path(folder) / "times"
        timed = [*command, "--times", str(times)]
        done = subprocess.run(timed, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(f"{' '.join(options)}:\n{done.stdout}", end="", flush=True)
        return outcome.of_c(command, done.returncode, done.stdout, times, build)


def run_fake(build: Path) -> Outcome:
    """What depends on the device once more on that of tests/fake; failures on the emulated GPU."""
    os.environ["GRADD_TEST_DEVICE"] = "fake"
    chosen = [word for name in FAKE_C for word in ("--filter", name)]
    both = run_c(build, "fake", chosen)
    both += run_python(build, "fake and not nightly", files_marked("fake"))
    del os.environ["GRADD_TEST_DEVICE"]
    marked = files_marked("fake_only", "emu")
    both += run_emulated(build, "(fake_only or emu) and not nightly", marked)
    return both + run_tensors(build, drawn_tensors(1))


def run_emulated(build: Path, marked: str, files: Sequence[str] = ()) -> Outcome:
    """What is marked so on the emulated GPU."""
    os.environ["GRADD_TEST_DEVICE"] = "emu"
    try:
        return run_python(build, marked, files)
    finally:
        del os.environ["GRADD_TEST_DEVICE"]


def run_tensors(build: Path, files: Sequence[str]) -> Outcome:
    """The adapter's tests with their tensors on the emulated GPU."""
    os.environ["GRADD_TEST_TENSORS"] = "emu"
    try:
        return run_emulated(build, "not nightly", files)
    finally:
        del os.environ["GRADD_TEST_TENSORS"]


def drawn_tensors(count: int) -> list[str]:
    """So many short files of the adapter's tests that can have their tensors there, 0 = all."""
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    from helpers import gpu_tensors, selection

    chosen = selection.drawn(gpu_tensors.SHORT, count) if count else gpu_tensors.files()
    return [f"tests/python/{name}" for name in chosen]


def run_fuzz(folder: Path) -> Outcome:
    """A short run of each fuzz target; `make fuzz` is the long one."""
    binaries = sorted(p for p in folder.glob("fuzz_*") if not p.suffix)
    if not binaries:
        return Outcome(0, 1, again=["make fuzz-bins"])
    return sum((run_script(b.name, [str(b), "-runs=20000"]) for b in binaries), Outcome())


def run_python(build: Path, marked: str, files: Sequence[str] = ()) -> Outcome:
    """Runs pytest on what is marked so."""
    shown = files if len(files) < _MANY else [f"{len(files)} files"]
    print(" ".join(["== Python tests", f"({marked})", *shown]), flush=True)
    report = build / f"pytest-{re.sub(r'[^a-z]+', '-', marked).strip('-')}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers())]
    command += ["--dist", "worksteal", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command += ["-m", marked, *files]
    status = subprocess.run(command, cwd=ROOT).returncode
    return outcome.of_python(command, status, report, build)


def files_marked(*names: str) -> list[str]:
    """The files with tests that are marked so: to collect all others as well takes 20 seconds."""
    mark = re.compile(rf"pytest\.mark\.({'|'.join(names)})\b")
    files = sorted((ROOT / "tests" / "python").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if mark.search(f.read_text())]


def nightly_files(folder: str = "tests/python") -> list[str]:
    """The files of tests that have long ones."""
    command = [sys.executable, "-m", "pytest", "-q", "--co", "-m", "nightly", folder]
    said = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    return sorted(
        {line.partition("::")[0] for line in said.splitlines() if line.startswith("tests/")}
    )


def parity_files() -> list[str]:
    """The files of tests that compare losses and gradients of whole models with PyTorch's."""
    values = ROOT / "tests" / "python" / "values"
    return [str(t.relative_to(ROOT)) for t in sorted(values.glob("test_parity*.py"))]


def run_switched(build: Path, switch: str) -> Outcome:
    """Every parity test with a variable that is one of SWITCHES."""
    name, value = switch.split("=")
    print(f"== {switch}", flush=True)
    os.environ[name] = value
    try:
        return run_python(build, "nightly or not nightly", parity_files())
    finally:
        del os.environ[name]


def run_part(build: Path, part: str) -> Outcome:
    """One line of what `make nightly` keeps."""
    if part == EMULATED:
        return run_c(build, "", ["--filter", EMULATED])
    if part in SWITCHES:
        return run_switched(build, part)
    if not part.startswith(ON_EMU):
        return run_python(build, "nightly", [part])
    file = part.removeprefix(ON_EMU)
    if file in files_marked("emu"):
        return run_emulated(build, "emu", [file])
    return run_tensors(build, [file])


def run_nightly(build: Path, file: Path, chosen: list[str]) -> int:
    """Runs the long property tests, one file after the other, and keeps each one's last result.

    The result is written after every file of tests, so that what an end leaves out keeps its line.
    `chosen` are parts or patterns of them.
    """
    os.environ["GRADD_NIGHTLY"] = "1"
    os.environ.setdefault("GRADD_DRAW", str(datetime.date.today().isocalendar().week))
    kept = dict(re.findall(r"^(?! )(\S+): (.*(?:\n  .*)*)", read_or_nothing(file), re.MULTILINE))
    on_emu = [ON_EMU + name for name in (*files_marked("emu"), *drawn_tensors(0))]
    known = [EMULATED, *on_emu, *nightly_files(), *SWITCHES]
    if unknown := sorted(name for name in chosen if not fnmatch.filter(known, name)):
        print(f"no file of long tests: {', '.join(unknown)}; there are:", *known, sep="\n  ")
        return 2
    total = Outcome()
    for part in known:
        if chosen and not any(fnmatch.fnmatchcase(part, name) for name in chosen):
            continue
        start = time.monotonic()
        count = run_part(build, part)
        took = time.monotonic() - start
        lines = [f"{count.passed} passed, {count.failed} failed, {took:.0f} s", *count.again]
        kept[part] = "\n  ".join(lines)
        total += count
        file.write_text(nightly_page({name: kept[name] for name in known if name in kept}))
    return finish(total)


def read_or_nothing(file: Path) -> str:
    """The text of a file that may be missing."""
    return file.read_text() if file.exists() else ""


def nightly_page(results: dict[str, str]) -> str:
    """benchmarks/results/nightly.txt."""
    head = [
        "Long property tests: what the last run of each file said (`make nightly`).",
        f"machine: {len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        f"torch {metadata.version('torch')}, Python {platform.python_version()}",
        f"draw {os.environ['GRADD_DRAW']}",
        "",
    ]
    return "\n".join([*head, *(f"{name}: {text}" for name, text in results.items()), ""])


def run_quick(build: Path) -> Outcome:
    """What belongs to the inner loop; `make check` has run the checks before."""
    return run_c(build, "", ["--quick"]) + run_python(build, "quick and not slow")


def run_full(build: Path) -> Outcome:
    """Everything but the tests of `make nightly`."""
    site = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(build / "site")]
    checks = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("check_*.py"))
    total = sum((run_script(name, [sys.executable, name]) for name in checks), Outcome())
    total += run_script("site", site) + run_c(build) + run_fuzz(build / "bin")
    return total + run_python(build, "not nightly") + run_fake(build)


def main() -> int:
    """Runs all parts, whatever fails, and prints the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--quick", action="store_true", help="what takes no long time")
    parser.add_argument("--python", action="store_true", help="nothing but Python tests")
    parser.add_argument("--nightly", type=Path, help="the long property tests; keep the result")
    parser.add_argument("--only", nargs="*", default=[], help="of these: some files of tests")
    args = parser.parse_args()
    if not args.nightly:  # of the cases of emulated kernels
        os.environ.setdefault("GRADD_TEST_EVERY", "3")
    build = (ROOT / args.build).resolve()
    if build != ROOT / "build":
        os.environ["GRADD_BUILD"] = str(build)
    if args.nightly:
        return run_nightly(build, args.nightly, args.only)
    start = time.monotonic()
    if args.python:
        return finish(run_python(build, "quick or slow" if args.quick else "not nightly"))
    made = ["tools/docs.py", str(build / "bin" / "gradd"), "--check"]
    total = run_script("made pages", [sys.executable, *made])
    total += run_quick(build) if args.quick else run_full(build)
    print(outcome.slowest(total.times))
    print(f"== {time.monotonic() - start:.0f} s")
    return finish(total)


def finish(total: Outcome) -> int:
    """Prints how failures are run again, and the counts; returns the exit status."""
    if total.again:
        print("== failed; each alone again:", *total.again, sep="\n  ")
    print(f"{total.passed} passed, {total.failed} failed")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
