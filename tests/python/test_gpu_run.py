"""tools/gpu/run.sh with stand-ins for the GPU's programs: its failures and the kept files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from helpers import ROOT

pytestmark = pytest.mark.quick
TESTS = """
echo "only=$GRADD_TEST_OP gpu=$GRADD_TEST_GPU $*"
[ "$GRADD_TEST_OP" = MatMul ] || exit 0
mkdir -p "$XDG_CACHE_HOME/gradd/products"
printf 'head\\nproduct|algorithm\\n' > "$XDG_CACHE_HOME/gradd/products/gpu.txt"
"""
GOOD = {
    "build/gpu/bin/gradd": "echo 'device cuda: x; products by y'",
    "build/gpu/bin/probe": "echo '{\"probe\": \"'$1'\"}'",
    "build/gpu/bin/tests": TESTS,
    "build/gpu/bin/bench_engine": "echo '{\"best_ms\": 1}'",
    "stand/nvidia-smi": "echo a GPU",
    "stand/nvcc": "echo release 13.0",
    "stand/python3": '[ "$1" = -c ] || echo \'{"python": 1}\'',
    "stand/compute-sanitizer": 'while [ "$1" != 1 ]; do shift; done; shift; exec "$@"',
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a bundle in which everything holds."""
    for name in ("tools/gpu", "build/gpu/bin", "build/gpu/lib", "stand", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "tools/gpu/run.sh", tmp_path / "tools/gpu")
    for name, text in GOOD.items():
        _put(tmp_path / name, text)
    _object(tmp_path / "build/gpu/lib/libgradd_cuda.so", "int x;")
    return tmp_path


def _put(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def _object(file: Path, source: str, *more: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *more, "-o", str(file)]
    subprocess.run(command, input=source, text=True, check=True)


def _run(clone: Path, *arguments: str, **more: str) -> tuple[int, str]:
    """Exit status, and what it says, started in a folder elsewhere."""
    env = {**os.environ, "PATH": f"{clone}/stand:{os.environ['PATH']}", "OUT": "results", **more}
    command = [str(clone / "tools/gpu/run.sh"), *arguments]
    done = subprocess.run(
        command, cwd=clone / "elsewhere", env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


def _parts(clone: Path) -> dict[str, dict]:
    found = json.loads((clone / "elsewhere/results/results.json").read_text())
    return {part["part"]: part for part in found}


def _failed(clone: Path) -> list[str]:
    return [name for name, part in _parts(clone).items() if part["status"]]


def test_everything_holds(clone: Path) -> None:
    status, said = _run(clone, "first", GRADD_TEST_OP="MatMull", GRADD_TEST_EVERY="7")
    assert status == 0 and said.endswith("23 passed, 0 failed\n"), said
    assert "only= gpu=cuda --limit 55 --filter emu.every_case_runs" in said
    results = clone / "elsewhere/results"
    assert (results / "products/gpu.txt").read_text() == "head\nproduct|algorithm\n"
    assert _parts(clone)["probe-vmm"]["lines"] == [{"probe": "vmm"}]
    assert not (clone / "results").exists()


@pytest.mark.parametrize("argument,status", [("", 2), ("--help", 0), ("second", 2), ("probe", 2)])
def test_usage_leaves_a_former_run_alone(clone: Path, argument: str, status: int) -> None:
    log = clone / "elsewhere/results/log.txt"
    log.parent.mkdir()
    log.write_text("a former run")
    got, said = _run(clone, *argument.split())
    assert got == status and said.startswith("Runs on a machine with a GPU")
    assert said.endswith("tools/gpu/table.py makes a page of results.\n")
    assert log.read_text() == "a former run" and len(list(log.parent.iterdir())) == 1


def test_every_part_can_fail(clone: Path) -> None:
    _put(clone / "stand/nvidia-smi", "echo no devices were found; exit 6")
    _put(clone / "build/gpu/bin/gradd", "echo 'device cuda: no driver'")
    _put(clone / "build/gpu/bin/tests", "exit 1")
    _put(clone / "build/gpu/bin/probe", "exit 127")
    _put(clone / "build/gpu/bin/bench_engine", "exit 1")
    _put(clone / "stand/python3", "exit 1")
    missing = clone / "libmissing.so"
    _object(missing, "int missing;")
    plugin = clone / "build/gpu/lib/libgradd_cuda.so"
    _object(plugin, "extern int missing; int *x = &missing;", str(missing))
    missing.unlink()
    status, said = _run(clone, "first")
    assert status == 1 and said.endswith("\n0 passed, 23 failed\n"), said
    assert f"\nfailed: {' '.join(_names(clone)[:23])}\n" in said
    assert "libmissing.so => not found" in said and "no devices were found" in said


def _names(clone: Path) -> list[str]:
    status, said = _run(clone, "parts")
    assert status == 0
    return [line.split()[0] for line in said.splitlines()]


def test_one_part_runs_again(clone: Path) -> None:
    names = _names(clone)
    assert len(names) == len(set(names)) == 31 and {"killed", "racecheck"} <= set(names)
    results = clone / "elsewhere/results"
    assert _run(clone, "first")[0] == 0
    before = (results / "results.json").read_text()
    status, said = _run(clone, "killed")
    assert status == 0 and said.endswith("1 passed, 0 failed\n")
    (part,) = json.loads((results / "killed.json").read_text())
    assert part["part"] == "killed" and part["lines"] == [{"python": 1}]
    assert (results / "results.json").read_text() == before
    assert (results / "killed.txt").exists()


def test_unmeasured_products_fail(clone: Path) -> None:
    _put(clone / "build/gpu/bin/tests", "echo 1 passed, 0 failed")
    assert _run(clone, "first")[0] == 1
    assert _failed(clone) == ["measured-products"]


@pytest.mark.slow
def test_a_limit_keeps_what_was_said(clone: Path) -> None:
    """What there is no time left for is not started, and a half line is no JSON."""
    slow = "echo '{\"probe\": 1}'; printf '{\"probe\": 2'; exec sleep 60"
    _put(clone / "build/gpu/bin/probe", slow)
    began = time.monotonic()
    status, said = _run(clone, "first", GRADD_GPU_SECONDS="4")
    assert status == 1 and time.monotonic() - began < 30
    assert _failed(clone)[0] == "probe-ipc" and _failed(clone)[-1] == "probe-product"
    assert _parts(clone)["probe-ipc"]["lines"] == [{"probe": 1}]
    assert "not started: no time is left\n-- failed: status 124" in said


def test_what_a_probe_says_of_a_failed_call_is_json(tmp_path: Path) -> None:
    source = """
        #include "tools/gpu/json_error.h"
        int main(void) {
            told_failure("call(\\"cuMemCreate\\")(0, '\\\\0')", 12, 801, NULL);
            told_failure("dlopen", 13, -1, "no \\"library\\"");
        }
    """
    program = tmp_path / "told"
    command = ["gcc", f"-I{ROOT}", "-x", "c", "-", "-o", str(program)]
    subprocess.run(command, input=source, text=True, check=True)
    first, second = map(json.loads, subprocess.check_output([program], text=True).splitlines())
    assert first == {"failed": "call(\"cuMemCreate\")(0, '\\0')", "line": 12, "status": 801}
    assert second["reason"] == 'no "library"' and second["status"] == -1
