"""Source lines of the user's code, wherever it lies: the name of a folder says nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import TESTS

from gradd.spec import CaptureError
from helpers import ROOT
from helpers.graphs.captures import capture
from helpers.selection import quick_or_slow

NAMES = ("gradd", "torch", "sympy", "server")
SOURCE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, steps=None):
        hidden = self.inner(x).sin()
        return torch.linalg.svd(hidden)[1] if steps else hidden
"""
LINE = SOURCE.splitlines().index("        hidden = self.inner(x).sin()") + 1


def write(folder: Path) -> Path:
    """The user's module in a folder; returns its file."""
    folder.mkdir(parents=True)
    file = folder / "net.py"
    file.write_text(SOURCE)
    return file


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"net_{file.parent.name}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", quick_or_slow({"gradd"}, NAMES))
def test_nodes_and_errors_keep_their_lines(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name / "models")
    net = load(file).Net()
    locations = capture(net, (torch.randn(2, 4),)).cap.sources
    assert any(location.endswith(f"@ {file}:{LINE}") for _, location in locations)
    assert all(str(file) in location for _, location in locations)
    with pytest.raises(CaptureError) as error:
        capture(net, (torch.randn(2, 4), 1))
    assert f"{file}:{LINE + 1}" in str(error.value)


PROGRAM = """
import net, torch
from helpers.graphs.captures import capture
for _, location in capture(net.Net(), (torch.randn(2, 4),)).cap.sources:
    print(location)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES[:1])
def test_gradd_itself_may_lie_in_such_a_folder(tmp_path: Path, name: str) -> None:
    packages = tmp_path / name / "adapters" / "python"
    shutil.copytree(ROOT / "adapters" / "python" / "gradd", packages / "gradd")
    file = write(tmp_path / name / "models")
    paths = os.pathsep.join((str(packages), str(file.parent), str(TESTS)))
    locations = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.splitlines()
    assert locations and all(str(file) in location for location in locations)
