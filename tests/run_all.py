"""Runs every kind of test and ends with one line: "N passed, N failed".

Order: the checks (layers, sizes, operators page), the C runner, then pytest with a real daemon
(`--quick`: only what is marked quick). A check script counts as one test. Everything that was
skipped is listed with its reason by the part that skipped it, and the slowest Python tests are.
`--nightly FILE` runs the long property tests alone and writes what came out to FILE. Called by
`make test`, `make check`, `make nightly`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Count = tuple[int, int]  # passed, failed


def run_script(title: str, command: list[str]) -> Count:
    """Runs a check that either holds or not."""
    print(f"== {title}", flush=True)
    return (1, 0) if subprocess.run(command, cwd=ROOT).returncode == 0 else (0, 1)


def run_c(binary: Path) -> Count:
    """Runs the C tests, passing their output through; the last line carries the counts."""
    print("== C tests", flush=True)
    command = [str(binary)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stdout or []:
            print(line, end="", flush=True)
            last = line
    match = re.fullmatch(r"(\d+) passed, (\d+) failed\n", last)
    if not match:
        print(f"C tests: {binary} ended with status {process.returncode} and no result")
        return 0, 1
    passed, failed = int(match[1]), int(match[2])
    return passed, failed if process.returncode == 0 else max(failed, 1)


def run_fuzz(folder: Path) -> Count:
    """A short run of each fuzz target; `make fuzz` is the long one."""
    binaries = sorted(p for p in folder.glob("fuzz_*") if not p.suffix)
    results = [run_script(b.name, [str(b), "-runs=20000"]) for b in binaries]
    return sum(r[0] for r in results), sum(r[1] for r in results) if binaries else 1


def run_python(build: Path, marked: str) -> Count:
    """Runs pytest on what is marked so; the counts come from its report file, not its text."""
    print(f"== Python tests ({marked})", flush=True)
    report = build / "pytest.xml"
    report.unlink(missing_ok=True)
    workers = str(min(2, len(os.sched_getaffinity(0))))  # captures are one thread of Python each
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal"]
    command += [f"--junitxml={report}", "-m", marked, "--durations=20"]
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


def run_nightly(build: Path, file: Path) -> int:
    """Runs the long property tests and keeps their result."""
    start = time.monotonic()
    os.environ["GRADD_NIGHTLY"] = "1"
    passed, failed = run_python(build, "nightly")
    cases = ElementTree.parse(build / "pytest.xml").getroot().iter("testcase")
    counts: Counter[tuple[str, str]] = Counter()
    bad = []
    for case in cases:
        name = str(case.get("name"))
        wrong = case.find("failure") is not None or case.find("error") is not None
        counts[f"{case.get('classname')}::{name.partition('[')[0]}", "failed" * wrong] += 1
        if wrong:
            bad.append(f"  {case.get('classname')}::{name}")
    lines = ["Long property tests, the last run of `make nightly`.", ""]
    lines += [f"machine: {len(os.sched_getaffinity(0))} cores, {platform.machine()}"]
    lines += [f"torch {metadata.version('torch')}, Python {platform.python_version()}", ""]
    lines += [f"{n:6d} {how or 'passed'}  {test}" for (test, how), n in sorted(counts.items())]
    lines += ["", *bad, f"{time.monotonic() - start:.0f} s"]
    lines += [f"{passed} passed, {failed} failed", ""]
    file.write_text("\n".join(lines))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    """Runs all parts, whatever fails, and prints the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    parser.add_argument("--quick", action="store_true", help="only Python tests marked quick")
    parser.add_argument("--nightly", type=Path, help="the long property tests; keep the result")
    args = parser.parse_args()
    if args.nightly:
        return run_nightly(ROOT / args.build, args.nightly)
    start = time.monotonic()
    gradd = (ROOT / args.build / "bin" / "gradd").resolve()
    operators_page = ["tools/operators_doc.py", str(gradd), "docs/operators.md"]
    counts = [
        run_script("layers", ["sh", "tests/check_layers.sh"]),
        run_script("sizes", [sys.executable, "tests/check_sizes.py"]),
        run_script("operators page", [sys.executable, *operators_page, "--check"]),
        run_c((ROOT / args.build / "bin" / "tests").resolve()),
        (0, 0) if args.quick else run_fuzz((ROOT / args.build / "bin").resolve()),
        run_python(ROOT / args.build, "quick" if args.quick else "not nightly"),
    ]
    passed, failed = (sum(column) for column in zip(*counts, strict=True))
    print(f"== {time.monotonic() - start:.0f} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
