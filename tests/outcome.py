"""The outcome of a part of the tests: counts, times, and commands that repeat failed tests."""

from __future__ import annotations

import os
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Variables that change what runs, or how; a failure is repeated with them.
MODES = ("GRADD_TEST_DEVICE", "GRADD_TEST_TENSORS", "GRADD_NIGHTLY", "GRADD_DRAW", "GRADD_BUILD")
MODES += ("GRADD_LIVE_ROWS", "GRADD_CHUNKED_LOSS", "ORTMODULE_MEMORY_OPT_LEVEL")
MODES += ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER", "ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER")
MODES += ("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", "GRADD_GROUP_BYTES")
N_TESTS, N_FILES = 20, 10  # of the slowest
NOTHING = 5  # pytest's status if no test was chosen


@dataclass
class Outcome:
    """Of one part; parts add up.

    Attributes:
        times: Seconds of each test, by (file, test).
        again: For each failure the command that repeats it.
    """

    passed: int = 0
    failed: int = 0
    times: Counter[tuple[str, str]] = field(default_factory=Counter)
    again: list[str] = field(default_factory=list)

    def __add__(self, other: Outcome) -> Outcome:
        times = Counter(self.times)
        times.update(other.times)
        again = self.again + other.again
        return Outcome(self.passed + other.passed, self.failed + other.failed, times, again)


def shell(command: list[str], build: Path | None = None) -> str:
    """The command as one types it in the root of the repository."""
    names = {name: os.environ[name] for name in MODES if name in os.environ}
    if build is not None:
        names["GRADD_BIN"] = str(build / "bin" / "gradd")
    words = [f"{name}={_from_here(value)}" for name, value in names.items()]
    return " ".join([*words, *(shlex.quote(word.removeprefix(f"{ROOT}/")) for word in command)])


def _from_here(path: str) -> str:
    """A value that may be a path below the root; absolute, as daemons start elsewhere."""
    below = path.removeprefix(f"{ROOT}/")
    return shlex.quote(path) if below == path else f"$PWD/{shlex.quote(below)}"


def of_script(command: list[str], status: int) -> Outcome:
    """A check that either holds or not."""
    return Outcome(1) if status == 0 else Outcome(0, 1, again=[shell(command)])


def of_c(command: list[str], status: int, output: str, times: Path, build: Path) -> Outcome:
    """A run of the C runner; the last line of its output carries the counts."""
    match = re.search(r"^(\d+) passed, (\d+) failed\n\Z", output, re.MULTILINE)
    names = re.findall(r"^FAIL  (\S+?):? ", output, re.MULTILINE)
    again = [shell([command[0], "--verbose", "--filter", name], build) for name in names]
    if not match:
        print(f"C tests: {command[0]} ended with status {status} and no result")
        return Outcome(0, 1, again=[*again, shell(command, build)])
    out = Outcome(int(match[1]), int(match[2]), again=again)
    for line in times.read_text().splitlines() if times.exists() else ():
        seconds, name = line.split(" ", 1)
        out.times[_c_file(name.split(".")[0]), name] += float(seconds)
    if status != 0 and not out.failed:
        out.failed, out.again = 1, [shell(command, build)]
    return out


def _c_file(module: str) -> str:
    """The file of a module of C tests: names are unique whatever their folder."""
    found = next((ROOT / "tests" / "c").glob(f"*/test_{module}.c"), None)
    return str(found.relative_to(ROOT)) if found else module


def of_python(command: list[str], status: int, report: Path, build: Path) -> Outcome:
    """A run of pytest; the counts come from its report file, not from its text."""
    if not report.exists():
        print(f"pytest ended with status {status} and no report")
        return Outcome(0, 1, again=[shell(command, build)])
    out = Outcome()
    wrong: dict[str, None] = {}  # a failure in the test and one after it are one test
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file, name = case.get("file", ""), case.get("name", "")
        out.times[file, name] += float(case.get("time", 0))
        kinds = {element.tag for element in case}
        if kinds & {"failure", "error"}:
            wrong[_node(file, case.get("classname", ""), name)] = None
            out.failed += 1
        elif "skipped" not in kinds:
            out.passed += 1
    python = [command[0], "-m", "pytest"]
    marked = ["-m", command[command.index("-m", 3) + 1]] if "GRADD_NIGHTLY" in os.environ else []
    out.again = [shell([*python, *marked, node], build) for node in wrong]
    if marked and status == NOTHING:  # a file of long tests alone, on another device
        return out
    if status != 0 and not out.failed:
        out.failed, out.again = 1, [shell(command, build)]
    return out


def _node(file: str, classes: str, name: str) -> str:
    """pytest's name of a test, from what the report says. A file that cannot be read has none."""
    if not file:
        return classes.replace(".", "/") + ".py" if classes else name.replace(".", "/") + ".py"
    inner = classes.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join([file, *(inner.split(".") if inner else ()), name])


def slowest(times: Counter[tuple[str, str]]) -> str:
    """The slowest tests and the slowest files, as one list to read."""
    files: Counter[str] = Counter()
    for (file, _), seconds in times.items():
        files[file] += seconds
    counts = Counter(file for file, _ in times)
    lines = [f"== slowest of {len(times)} tests, {sum(times.values()):.0f} s one after the other"]
    for (file, name), seconds in times.most_common(N_TESTS):
        lines.append(f"{seconds:8.1f} s  {file}  {name}")
    lines.append(f"== slowest of {len(files)} files")
    for file, seconds in files.most_common(N_FILES):
        many = "1 test" if counts[file] == 1 else f"{counts[file]} tests"
        lines.append(f"{seconds:8.1f} s  {file}  ({many})")
    return "\n".join(lines)
