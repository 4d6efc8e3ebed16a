"""Source lines of the user's code, wherever it lies: the name of a folder says nothing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from conftest import ROOT

from gradd import export

NAMES = ("gradd", "torch", "sympy", "server")
SOURCE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x, steps=None):
        hidden = self.inner(x).sin()
        return hidden * float(x.sum()) if steps else hidden
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


@pytest.mark.quick
@pytest.mark.parametrize("name", NAMES)
def test_nodes_and_errors_keep_their_lines(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name / "models")
    net = load(file).Net()
    captured = export.capture(net, (torch.randn(2, 4),), {})
    assert any(place.endswith(f"@ {file}:{LINE}") for _, place in captured.sources)
    assert all(str(file) in place for _, place in captured.sources)
    with pytest.raises(export.CaptureError) as error:
        export.capture(net, (torch.randn(2, 4), 1), {})
    assert f"{file}:{LINE + 1}" in str(error.value)


class Measured(torch.nn.Module):
    def forward(self, x: torch.Tensor, check: bool | None = None) -> torch.Tensor:
        return torch.distributions.Normal(x, 1.0, validate_args=check).log_prob(x).sum()


def test_errors_inside_torch_name_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the user's: that of torch.nn, never code that torch evaluates ("<string>")."""
    # torch.compile() turns them off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(4, momentum=None))
    with pytest.raises(export.CaptureError, match=r"forward\(\) @ .*batchnorm\.py:\d+: Python"):
        export.capture(module, (torch.randn(2, 4),), {})
    with pytest.raises(export.CaptureError, match="pass validate_args=False"):
        export.capture(Measured(), (torch.randn(2, 4),), {})
    assert export.capture(Measured(), (torch.randn(2, 4), False), {}).sources


class Does(torch.nn.Module):
    def __init__(self, what: Callable) -> None:
        super().__init__()
        self.layer, self.what = torch.nn.Linear(4, 4), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.what(self.layer, x)


REFUSED = {
    "masked_select": (lambda f, x: f(x).masked_select(x > 0), "depends on data"),
    "nonzero": (lambda f, x: (f(x), f(x).nonzero())[1], "depends on data"),
    "vmap": (lambda f, x: torch.vmap(f)(x), "func_transform: .*torch.vmap"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,))[1], "func_transform: .*forward-mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reasons_name_what_a_graph_cannot_hold(name: str) -> None:
    does, reason = REFUSED[name]
    with pytest.raises(export.CaptureError, match=reason):
        export.capture(Does(does), (torch.randn(2, 4),), {})


PROGRAM = """
import net, torch
from gradd import export
for _, place in export.capture(net.Net(), (torch.randn(2, 4),), {}).sources:
    print(place)
"""


@pytest.mark.parametrize("name", NAMES[:1])
def test_gradd_itself_may_lie_in_such_a_folder(tmp_path: Path, name: str) -> None:
    packages = tmp_path / name / "adapters" / "python"
    shutil.copytree(ROOT / "adapters" / "python" / "gradd", packages / "gradd")
    file = write(tmp_path / name / "models")
    paths = os.pathsep.join((str(packages), str(file.parent)))
    places = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.splitlines()
    assert places and all(str(file) in place for place in places)
