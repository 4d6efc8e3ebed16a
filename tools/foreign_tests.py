"""Runs test files of ONNX Runtime, Optimum or transformers from a checkout that you have.

    tools/foreign_tests.py ~/onnxruntime
    tools/foreign_tests.py ~/transformers -k test_trainer --record /tmp/cases.jsonl

A copy of the files, in which devices are the CPU, runs under gradd, outside of the repository.
Cases, results and reasons go to benchmarks/results/foreign_tests.md, a section for each checkout:
the repository has no code of these tests. What gradd refuses by design has a reason in REASONS;
another failure shows its own words.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "foreign_tests.md"
_WIDTH = 100
_WORDS = 240  # characters of a reason
_LARGEST = 1 << 20  # bytes of a file that is copied
_RESTARTS = 20  # of a process that a case has ended


@dataclass(frozen=True)
class Suite:
    """Test files of one project.

    Attributes:
        name: Of the project.
        folder: Where the files are; the copy has all files of it.
        files: Those that run, as far as a checkout has them; the first is in all.
        beside: Another folder that they read.
    """

    name: str
    folder: str
    files: tuple[str, ...]
    beside: str = ""


SUITES = (
    Suite(
        "ONNX Runtime",
        "orttraining/orttraining/test/python",
        ("orttraining_test_ortmodule_api.py",),
    ),
    Suite(
        "ONNX Runtime on devices",
        "orttraining/orttraining/test/python",
        ("orttraining_test_ort_apis_onnxblock.py", "orttraining_test_ort_apis_py_bindings.py"),
    ),
    Suite("Optimum", "tests/onnxruntime-training", ("test_trainer.py",)),
    Suite(
        "transformers",
        "tests/trainer",
        (
            *("test_trainer.py", "test_trainer_checkpointing.py", "test_trainer_data.py"),
            *("test_trainer_evaluation.py", "test_trainer_optimizers.py"),
            "test_trainer_seq2seq.py",
        ),
        "tests/fixtures",
    ),
)

# A pattern in the words of a failure, and the reason for the table.
REASONS = (
    (r"_torch_module|_execution_manager|_is_training", "reads private parts of ORTModule"),
    (r"PrivateError: (\S+)", r"uses a private part of ONNX Runtime: \1"),
    (r"(\S+) is not there: gradd serves", r"uses a private name of ONNX Runtime: \1"),
    (r"_ORTModuleFunctionBackward", "uses a private name of ONNX Runtime: that of its function"),
    (r"GRADD_E_UNSUPPORTED: operators? (.*?) (?:is|are) not in", r"FALLBACK_DISABLE: \1"),
    (r"GRADD_E_UNSUPPORTED: graph.plan: .*?: (.*)", r"FALLBACK_DISABLE: \1"),
    (r"CaptureError: (\w+):", r"FALLBACK_DISABLE: \1"),
    (r"OverError: (.*)", r"\1"),
    (r"ConnectionError|OfflineMode|huggingface\.co", "needs the Hub"),
    (r"ValueError: ORTTrainer: (\w+=\w+) and gradd exclude", r"refused: \1"),
    (r"The maximum atol is (\d\.\d)\d*(e-0[5-9])", r"rounding: off by \1\2 in sums of products"),
    (
        r"built-in method allclose",
        "rounding: 1e-6 of the largest element in sums of 14415 products",
    ),
    (r"'gradd_compute_ms'", "compares logs of two runs, which have the daemon's times"),
    (r"my_new_custom_method", "expects a method that was replaced to be another object"),
    (r"No module named '(\S+)'", r"needs the package \1"),
    (r"cannot import name '(\S+)' from 'transformers'", r"transformers has no \1 any more"),
    (r"Torch not compiled with CUDA", "needs a GPU"),
    (r"DID NOT RAISE", "expects an error, and the call works here, or devices are mapped"),
    (r"optimized_(?:training|inference)\.onnx", "expects five stages of save_onnx: there are two"),
    (
        r"Invalid input name: \S*accumulation|ValidateOpsetForDomain|onnxruntime::Model::Model",
        "runs nodes of ONNX Runtime's training in onnxruntime",
    ),
    (r"opset (\d+) of 'ai\.onnx' is not", r"takes the newest opset of the package onnx, \1"),
    (r"custom_op_library", "needs a library of custom operators"),
    (r"no initializer 'input-0'", "trains an input: parameters are initializers"),
    (r"assert 'cpu' == 'Cuda'", "needs a GPU"),
    (r"pow_exponent", "a block that names no parameter has them all as frozen ones"),
    (r"ONNX_OPSET_VERSION", "sets the opset, which is no option here"),
    (
        r"Please build the training|"
        r"as a constant by ORT|label_is_sparse|len\(\[\]\)|'mock' to have been called",
        "expects words, or calls, of ONNX Runtime's own",
    ),
)

_PLACE = re.compile(r" \((?:node|from) [^()]*\)")  # of an operator
_NUMBER = re.compile(r"(0x|\d\.\d\d)[0-9a-f]{3,}")  # of little use in a table
_DEVICE = re.compile(r"""(["'])cuda(?::\d+)?\1""")


def mapped(text: str) -> str:
    """The text of a test file with devices mapped to the CPU."""
    text = _DEVICE.sub(r"\1cpu\1", text).replace(".cuda()", ".cpu()")
    return text.replace(
        "from transformers import AdamW, ",
        "from foreign_plugin import AdamW\nfrom transformers import ",
    )


def _suite(checkout: Path, name: str | None) -> Suite:
    """The suite of that name, or the first that the checkout has."""
    known = [s for s in SUITES if name in (None, s.name)]
    found = [s for s in known if (checkout / s.folder / s.files[0]).is_file()]
    if not found:
        places = ", ".join(f"{s.folder}/{s.files[0]} ({s.name})" for s in known)
        sys.exit(f"{checkout} has none of {places}")
    return found[0]


def _copy(checkout: Path, suite: Suite, to: Path) -> None:
    found = [p for f in (suite.folder, suite.beside) if f for p in (checkout / f).rglob("*")]
    for source in found:
        target = to / source.relative_to(checkout)
        if not source.is_file() or source.stat().st_size > _LARGEST:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".py":
            target.write_text(mapped(source.read_text()))
        else:
            shutil.copy(source, target)


def _run(suite: Suite, folder: Path, record: Path, given: argparse.Namespace) -> None:
    """Runs the files until each case has a line in the record, though some end the process."""
    paths = [*map(str, (ROOT / "adapters/python", ROOT / "adapters/optimum", ROOT / "tools"))]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]),
        "FOREIGN_SUITE": suite.name,
        "FOREIGN_RECORD": str(record),
        "FOREIGN_EACH": str(given.each or ""),
        "FOREIGN_LIMIT": str(given.limit),
        "GRADD_BIN": os.environ.get("GRADD_BIN", str(ROOT / "build/bin/gradd")),
        "CUDA_VISIBLE_DEVICES": "",
    }
    options = "-q --tb=no -p foreign_plugin -p no:cacheprovider --continue-on-collection-errors"
    command = [sys.executable, "-m", "pytest", *options.split(), "-c", os.devnull]
    command += ["--rootdir", str(folder)]
    command += ["-k", given.k] if given.k else []
    files = [f"{suite.folder}/{f}" for f in suite.files if (folder / suite.folder / f).exists()]
    for _ in range(_RESTARTS):
        before = len(_lines(record))
        subprocess.run([*command, *files], cwd=folder, env=env, check=False)
        lines = _lines(record)
        if len(lines) == before or "outcome" in lines[-1]:
            return


def _lines(record: Path) -> list[dict]:
    return list(map(json.loads, record.read_text().splitlines())) if record.exists() else []


def _reason(what: str) -> str:
    for pattern, reason in REASONS:
        found = re.search(pattern, what)
        if found is not None:
            text = _PLACE.sub("", " ".join(found.expand(reason).split()))
            return text.partition(" @ ")[0]
    text, _, _ = what.removeprefix("Skipped: ").partition(" @ ")
    return _NUMBER.sub(r"\1...", " ".join(text.split()))


def _rows(record: Path) -> tuple[list[tuple[str, str, str]], Counter[str]]:
    """A row for each test function: name, result, reason; and how many cases ended how."""
    last: dict[str, dict] = {}
    for found in _lines(record):
        last[found["case"]] = found
    total: Counter[str] = Counter()
    groups: dict[str, list[dict]] = defaultdict(list)
    for case, found in last.items():
        found.setdefault("outcome", "ended the process")
        total[found["outcome"]] += 1
        groups[case.partition("[")[0]].append(found)
    rows = []
    for full, cases in sorted(groups.items()):
        name = full if len(full) < _WIDTH - 5 else full.partition(".")[2]  # a line's worth
        counts = Counter(c["outcome"] for c in cases)
        result = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
        if len(counts) == 1:
            result = next(iter(counts)) + (f" ({len(cases)})" if len(cases) > 1 else "")
        reasons = dict.fromkeys(_reason(c.get("what", "")) for c in cases if c.get("what"))
        rows.append((name, result, "; ".join(reasons)))
    return rows, total


def _section(suite: Suite, checkout: Path, record: Path, each: int | None = None) -> str:
    rows, total = _rows(record)
    head = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%ad", "--date=format:%B %Y"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(total.items()))
    of = f", of {head}" if head else ""
    of += f", at most {each} cases of a function" if each else ""
    files = ", ".join(f"`{name}`" for name in suite.files)
    lines = [f"## {suite.name}", "", *_wrapped(f"{files}{of}: {counts}.")]
    lines += ["", "### Not passed", ""]
    for name, result, reason in rows:
        if not result.startswith("passed"):
            lines += _wrapped(f"* `{name}`: {result}" + (f": {reason[:_WORDS]}" if reason else ""))
    passed = [f"{name}{result[6:]}" for name, result, _ in rows if result.startswith("passed")]
    return "\n".join([*lines, "", "### Passed", "", *_wrapped(", ".join(passed))]) + "\n"


def _wrapped(text: str) -> list[str]:
    indent = "  " if text.startswith("* ") else ""
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _write(suite: Suite, section: str) -> None:
    """Replaces the section of one project on the page."""
    text = PAGE.read_text() if PAGE.exists() else ""
    parts = {s.splitlines()[0][3:]: s for s in re.split(r"(?m)^(?=## )", text) if s[:3] == "## "}
    parts[suite.name] = section
    head = (
        "# Tests of others\n\nCases of test files of ONNX Runtime, Optimum and transformers under "
        "gradd, devices mapped\nto the CPU. `tools/foreign_tests.py PATH` makes it from a "
        "checkout; it has none of their code.\n\n"
    )
    PAGE.write_text(head + "\n".join(parts[n].rstrip() + "\n" for n in sorted(parts)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout")
    names = [s.name for s in SUITES]
    parser.add_argument("--suite", choices=names, help="of several that the checkout has")
    parser.add_argument("-k", default="", help="only cases that pytest selects by this")
    parser.add_argument("--each", type=int, help="cases of each function at most (default: all)")
    parser.add_argument("--limit", type=int, default=300, help="seconds of a case (default: 300)")
    parser.add_argument("--record", type=Path, help="file of cases, to go on with (default: a new)")
    parser.add_argument("--no-page", action="store_true", help="print the section")
    given = parser.parse_args()
    suite = _suite(given.checkout, given.suite)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        record = given.record.resolve() if given.record else Path(name) / "record.jsonl"
        _copy(given.checkout, suite, folder)
        _run(suite, folder, record, given)
        section = _section(suite, given.checkout, record, given.each)
    if given.no_page:
        print(section)
    else:
        _write(suite, section)


if __name__ == "__main__":
    main()
