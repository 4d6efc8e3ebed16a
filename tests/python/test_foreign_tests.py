"""tools/foreign_tests.py: cases of a checkout run under gradd and become a table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

TOOL = ROOT / "tools" / "foreign_tests.py"
FOLDER = "orttraining/orttraining/test/python"
CASES = """
import pytest, torch
from onnxruntime.training.ortmodule import ORTModule, _utils
from onnxruntime.training.ortmodule._custom_gradient_registry import register_gradient

@register_gradient("org.example", "Op")
def gradient():
    pass

@pytest.mark.parametrize("rows", [2, 3, 4])
def test_trains(rows):
    model = ORTModule(torch.nn.Linear(4, 4).to("cuda")).cuda()
    model(torch.ones(rows, 4, device="cuda:0")).sum().backward()
    assert model.weight.grad.device.type == "cuda"

def test_manager():
    ORTModule(torch.nn.Linear(4, 4))._torch_module._execution_manager(True)

def test_helper():
    _utils.get_device_str("cuda")

def test_words():
    assert 1 == 2, "one | two"

def test_left_out():
    pytest.skip("not today")

def test_ends():
    import os
    os._exit(3)

def test_last():
    pass
"""


@pytest.mark.nightly
def test_the_table_of_a_checkout(daemon: object, tmp_path: Path) -> None:
    file = tmp_path / FOLDER / "orttraining_test_ortmodule_api.py"
    file.parent.mkdir(parents=True)
    file.write_text(CASES)
    command = [sys.executable, str(TOOL), str(tmp_path), "--no-page", "--each", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    listed = done.stdout.partition("### Not passed\n\n")[2]
    assert listed.rstrip().splitlines() == [
        "* `test_ends`: ended the process",
        "* `test_helper`: failed: uses a private part of ONNX Runtime: _utils.get_device_str",
        "* `test_left_out`: skipped: not today",
        "* `test_manager`: failed: reads private parts of ORTModule",
        "* `test_words`: failed: AssertionError: one | two assert 1 == 2",
        "",
        "### Passed",
        "",
        "test_last, test_trains (2)",
    ]
    counts = "at most 2 cases of a function: 1 ended the process, 3 failed, 3 passed, 1 skipped."
    assert counts in " ".join(done.stdout.split())


@pytest.mark.quick
def test_a_folder_without_such_files(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and FOLDER in done.stderr


@pytest.mark.quick
def test_the_page_has_each_case_on_devices_that_does_not_pass() -> None:
    results = (ROOT / "benchmarks" / "results" / "foreign_tests.md").read_text()
    section = results.split("## ONNX Runtime on devices\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\* `(\w+)`", section, re.MULTILINE))
    page = (ROOT / "docs" / "on-device-python.md").read_text().split("ONNX Runtime's own tests")[1]
    assert set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE)) == listed != set()
    failed, passed = map(int, re.search(r"(\d+) failed, (\d+)\s+passed", section).groups())
    assert f"{failed + passed} cases" in page and f": {passed} pass." in page
    assert failed == len(listed)
