"""Runs every kind of test and ends with one line: "N passed, N failed".

Order: the checks (layers, sizes, pages), the C runner, then pytest with a real daemon
(`--quick`: only what is marked quick), then the tests of a device's own once more on the device of
tests/fake. A check script counts as one test. Everything that was
skipped is listed with its reason by the part that skipped it, and the slowest Python tests are.
`--nightly FILE [--only TEST...]` runs the long property tests alone, file by file, and keeps in
FILE what the last run of each said. Called by `make test`, `make check`, `make nightly`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import platform
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Count = tuple[int, int]  # passed, failed
FAKE_C = ("ops", "step.")  # modules of C tests whose device is the one that is named


def run_script(title: str, command: list[str]) -> Count:
    """Runs a check that either holds or not."""
    print(f"== {title}", flush=True)
    return (1, 0) if subprocess.run(command, cwd=ROOT).returncode == 0 else (0, 1)


def workers() -> int:
    """Processes of tests beside each other: two, as captures are one thread of Python each."""
    return min(2, len(os.sched_getaffinity(0)))


def run_c(binary: Path, device: str = "", filters: Sequence[str] = ()) -> Count:
    """Runs the C tests in equal parts beside each other and prints what each part said."""
    print("== C tests", f"({device})" if device else "", flush=True)
    chosen = [word for name in filters for word in ("--filter", name)]
    commands = [
        [str(binary), "--part", f"{part}/{workers()}", *chosen] for part in range(1, workers() + 1)
    ]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        counts = list(threads.map(run_c_part, commands))
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


def run_c_part(command: list[str]) -> Count:
    """The last line of the output carries the counts."""
    part = " ".join(command[1:])
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(f"{part}:\n{done.stdout}", end="", flush=True)
    match = re.search(r"^(\d+) passed, (\d+) failed\n\Z", done.stdout, re.MULTILINE)
    if not match:
        print(f"C tests: {command[0]} ended with status {done.returncode} and no result")
        return 0, 1
    passed, failed = int(match[1]), int(match[2])
    return passed, failed if done.returncode == 0 else max(failed, 1)


def run_fake(build: Path) -> Count:
    """What depends on the device once more on that of tests/fake."""
    os.environ["GRADD_TEST_DEVICE"] = "fake"
    binary = (build / "bin" / "tests").resolve()
    counts = [run_c(binary, "fake", FAKE_C), run_python(build, "fake and not nightly")]
    del os.environ["GRADD_TEST_DEVICE"]
    return sum(c[0] for c in counts), sum(c[1] for c in counts)


def run_fuzz(folder: Path) -> Count:
    """A short run of each fuzz target; `make fuzz` is the long one."""
    binaries = sorted(p for p in folder.glob("fuzz_*") if not p.suffix)
    results = [run_script(b.name, [str(b), "-runs=20000"]) for b in binaries]
    return sum(r[0] for r in results), sum(r[1] for r in results) if binaries else 1


def run_python(build: Path, marked: str, files: Sequence[str] = ()) -> Count:
    """Runs pytest on what is marked so; the counts come from its report file, not its text."""
    print(" ".join(["== Python tests", f"({marked})", *files]), flush=True)
    report = build / "pytest.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers()), "--dist", "worksteal"]
    command += [f"--junitxml={report}", "-m", marked, "--durations=20", *files]
    status = subprocess.run(command, cwd=ROOT).returncode
    if not report.exists():
        print(f"pytest ended with status {status} and no report")
        return 0, 1
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    passed = max(total - failed - skipped, 0)
    return passed, failed if status == 0 else max(failed, 1)


def nightly_files() -> list[str]:
    """The files of tests that have long ones."""
    tests = sorted((ROOT / "tests" / "python").rglob("test_*.py"))
    return [
        str(t.relative_to(ROOT)) for t in tests if re.search("nightly|every_run", t.read_text())
    ]


def run_nightly(build: Path, file: Path, chosen: list[str]) -> int:
    """Runs the long property tests, one file after the other, and keeps each one's last result.

    The result is written after every file of tests, so that what an end leaves out keeps its line.
    """
    os.environ["GRADD_NIGHTLY"] = "1"
    kept = dict(re.findall(r"^(?! )(\S+): (.*(?:\n  .*)*)", read_or_nothing(file), re.MULTILINE))
    known = nightly_files()
    if unknown := sorted(set(chosen) - set(known)):
        print(f"no file of long tests: {', '.join(unknown)}; there are:", *known, sep="\n  ")
        return 2
    passed = failed = 0
    for tests in chosen or known:
        start = time.monotonic()
        count = run_python(build, "nightly", [tests])
        took = time.monotonic() - start
        lines = [f"{count[0]} passed, {count[1]} failed, {took:.0f} s", *failures(build)]
        kept[tests] = "\n  ".join(lines)
        passed, failed = passed + count[0], failed + count[1]
        file.write_text(nightly_page({name: kept[name] for name in known if name in kept}))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def read_or_nothing(file: Path) -> str:
    """The text of a file that may be missing."""
    return file.read_text() if file.exists() else ""


def failures(build: Path) -> list[str]:
    """Names of the tests that failed in the last run of pytest."""
    report = build / "pytest.xml"
    cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ()
    wrong = (c for c in cases if c.find("failure") is not None or c.find("error") is not None)
    return [str(case.get("name")) for case in wrong]


def nightly_page(results: dict[str, str]) -> str:
    """benchmarks/results/nightly.txt."""
    head = [
        "Long property tests: what the last run of each file said (`make nightly`).",
        f"machine: {len(os.sched_getaffinity(0))} cores, {platform.machine()}",
        f"torch {metadata.version('torch')}, Python {platform.python_version()}",
        "",
    ]
    return "\n".join([*head, *(f"{name}: {text}" for name, text in results.items()), ""])


def main() -> int:
    """Runs all parts, whatever fails, and prints the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--quick", action="store_true", help="only Python tests marked quick")
    parser.add_argument("--nightly", type=Path, help="the long property tests; keep the result")
    parser.add_argument("--only", nargs="*", default=[], help="of these: some files of tests")
    args = parser.parse_args()
    if args.nightly:
        return run_nightly(ROOT / args.build, args.nightly, args.only)
    start = time.monotonic()
    gradd = (ROOT / args.build / "bin" / "gradd").resolve()
    counts = [
        run_script("layers", ["sh", "tests/check_layers.sh"]),
        run_script("sizes", [sys.executable, "tests/check_sizes.py"]),
        run_script("imports", [sys.executable, "tests/check_imports.py"]),
        run_script("pages", [sys.executable, "tests/check_pages.py"]),
        run_script("words", [sys.executable, "tests/check_words.py"]),
        run_script("made pages", [sys.executable, "tools/docs.py", str(gradd), "--check"]),
        run_c((ROOT / args.build / "bin" / "tests").resolve()),
        (0, 0) if args.quick else run_fuzz((ROOT / args.build / "bin").resolve()),
        run_python(ROOT / args.build, "quick" if args.quick else "not nightly"),
        (0, 0) if args.quick else run_fake(ROOT / args.build),
    ]
    passed, failed = (sum(column) for column in zip(*counts, strict=True))
    print(f"== {time.monotonic() - start:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
