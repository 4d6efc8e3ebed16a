"""Training crosswise with ONNX Runtime 1.19.2, which has wheels for CPython 3.11 alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from helpers import BUILD, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]
BENCHMARKS = ROOT / "benchmarks"


def run(*words: str | object) -> str:
    """What a program of benchmarks/ prints; skips where ONNX Runtime cannot be installed."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if "onnxruntime-training-cpu" in done.stderr and "pip" in done.stderr:
        pytest.skip("onnxruntime-training-cpu 1.19.2 cannot be installed here")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(autouse=True)
def needs_its_python() -> None:
    if sys.version_info[:2] != (3, 11):
        pytest.skip("ONNX Runtime 1.19.2's training has wheels for CPython 3.11")


def test_seven_models_train_alike_from_each_others_checkpoints() -> None:
    """200 steps; losses and outputs of exported models within 1e-5, or the program fails."""
    table = run(BENCHMARKS / "crosswise.py", BUILD / "devices")
    assert len(re.findall(r"^.{14}(?: +\d\.\de[-+]\d\d){3,4}$", table, re.M)) == 7, table


def test_the_table_of_networks_beside_onnx_runtime(tmp_path) -> None:
    """Two of them, one of which has operators under ONNX Runtime's names; the same losses."""
    words = ["--devices", "--only", "digits,keyboard", "--threads", "1", "--rounds", "1"]
    said = run(BENCHMARKS / "run.py", *words, "--folder", BUILD / "devices", "--out", tmp_path)
    assert re.search(r"^\| keyboard \| 1 \| \d", said, re.M), said
    (path,) = tmp_path.glob("*-devices.json")
    results = json.loads(path.read_text())["results"]
    assert [result["network"] for result in results] == ["digits", "keyboard"]
    for result in results:
        ours, theirs = (result[engine]["losses"][0] for engine in ("gradd", "onnxruntime"))
        assert ours == pytest.approx(theirs, rel=1e-5)
