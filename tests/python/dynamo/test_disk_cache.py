"""Captures on disk: found again by their graphs, never trusted further than their form."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo import cache, disk_cache
from helpers.nets import Net, batch

pytestmark = pytest.mark.usefixtures("daemon")

PROGRAM = """
import sys, torch
from gradd import ORTModule
torch.manual_seed(0)
model = ORTModule(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()), strict=True)
loss = model(torch.ones(2, 4)).sum()
loss.backward()
print(float(loss.detach()), "onnxscript" in sys.modules, model.gradd_stats()["self_checks"])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where captures go; none is in memory."""
    monkeypatch.setenv("GRADD_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache._captures.clear()
    yield tmp_path / "gradd" / "graphs"
    cache._captures.clear()


def _translations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each translation from now on."""
    from gradd.dynamo import program

    made: list[int] = []
    capture = program.capture
    monkeypatch.setattr(program, "capture", lambda *args: made.append(1) or capture(*args))
    return made


def _gradients() -> list[torch.Tensor]:
    net = Net(seed=3)
    model = ORTModule(net, strict=True)
    model(*batch())[0].backward()
    return [p.grad for p in net.parameters()]


def _again() -> list[torch.Tensor]:
    cache._captures.clear()
    return _gradients()


def test_a_capture_is_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = _translations(monkeypatch)
    first = _gradients()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(made) == 1
    assert all(map(torch.equal, first, _again()))
    assert len(made) == 1


def test_a_loaded_capture_is_the_stored_one(folder: Path) -> None:
    _gradients()
    (known,) = cache._captures.items()
    loaded = disk_cache.load(known[0])
    assert loaded is not None
    fields = ("onnx", "inputs", "params", "buffers", "outputs", "loss_leaf", "depends", "sources")
    assert all(getattr(loaded, name) == getattr(known[1], name) for name in fields)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other form"])
def test_a_damaged_file_is_translated_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    first = _gradients()
    (file,) = folder.iterdir()
    data = file.read_bytes()
    file.write_bytes(
        {
            "cut": data[:-1],
            "flipped": data[:99] + bytes([data[99] ^ 1]) + data[100:],
            "empty": b"",
            "other form": _signed(file, b"\x81\xa4onnx\x01"),
        }[damage]
    )
    made = _translations(monkeypatch)
    assert all(map(torch.equal, first, _again()))
    assert len(made) == 1
    assert len(file.read_bytes()) == len(data)  # replaced


def test_a_graph_under_the_name_of_another_one_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(factor: float) -> torch.Tensor:
        cache._captures.clear()
        torch.manual_seed(0)
        model = ORTModule(Scaled(factor), strict=True)
        return model(torch.ones(2, 4)).sum()

    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    expected = loss(2.0), loss(3.0)
    one, other = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    other.write_bytes(one.read_bytes())
    made = _translations(monkeypatch)
    assert (loss(2.0), loss(3.0)) == expected
    assert len(made) == 1


class Middle(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(self.layer(x)).tanh()


def test_what_has_no_translation_is_tried_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next process knows from the folder what is refused, and why: it says the same."""

    def run() -> tuple[dict[str, int], list[str]]:
        caplog.clear()
        model = ORTModule(Middle())
        model(torch.ones(2, 4)).sum().backward()
        said = [r.getMessage() for r in caplog.records if "svd" in r.getMessage()]
        return model.gradd_stats()["in_torch"], said

    made = _translations(monkeypatch)
    first = run()
    tried = len(made)
    assert first[0] == {"unsupported_operator": 1} and len(first[1]) == 1
    assert run() == first and len(made) == tried  # this process knows it
    cache._captures.clear()
    assert run() == first and len(made) == tried


def test_an_error_that_nothing_expects_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradd.dynamo import program
    from gradd.spec import CaptureError

    def fails(*args: object) -> None:
        raise CaptureError("export_failed", "MemoryError")

    with monkeypatch.context() as patch:
        patch.setattr(program, "capture", fails)
        model = ORTModule(Scaled(5.0))
        model(torch.ones(2, 4))
        assert model.gradd_stats()["in_torch"] == {"export_failed": 1}
    assert not folder.exists() or not list(folder.iterdir())
    model = ORTModule(Scaled(5.0), strict=True)
    model(torch.ones(2, 4))


class Scaled(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = torch.nn.Linear(4, 3), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


def _signed(file: Path, data: bytes) -> bytes:
    return disk_cache._digest(file, data) + data


def test_other_translators_have_captures_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gradients()
    monkeypatch.setattr(disk_cache, "_translators", lambda: b"another version")
    made = _translations(monkeypatch)
    _again()
    assert len(made) == 1
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_others_write_to_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _gradients()
    folder.chmod(0o777)
    made = _translations(monkeypatch)
    _again()
    assert len(made) == 1


@pytest.mark.parametrize("how", ["off", "full", "a file"])
def test_nothing_depends_on_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "off":
        monkeypatch.setenv("GRADD_CACHE", "0")
    elif how == "full":
        monkeypatch.setattr(disk_cache, "_MOST_FILES", 0)
    else:
        folder.parent.mkdir()
        folder.write_text("not a folder")
    assert all(map(torch.equal, _gradients(), _again()))
    assert not folder.is_dir() or not list(folder.iterdir())


def test_a_folder_that_the_user_names_is_warned_of_if_it_cannot_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", "/proc/none")
    disk_cache._unused.cache_clear()
    for _ in range(2):
        _again()
    (said,) = [r.getMessage() for r in caplog.records if "are not kept" in r.getMessage()]
    assert said.startswith("translated graphs are not kept in /proc/none: it cannot be made")


def test_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_MOST_FILES", 2)
    folder.mkdir(parents=True)
    foreign = folder / "thesis.tex"  # ORTMODULE_CACHE_DIR may name any folder
    foreign.touch()
    os.utime(foreign, (9, 9))
    for i in range(3):
        ORTModule(nn.Sequential(nn.Linear(2, 2 + i), nn.Tanh()))(torch.ones(2, 2))
        newest = max(folder.iterdir(), key=lambda f: f.stat().st_mtime_ns)
        assert newest != foreign
        os.utime(newest, (i, i))
    assert sorted(int(f.stat().st_mtime) for f in folder.iterdir()) == [1, 2, 9]


def test_the_command_counts_and_clears(folder: Path) -> None:
    def command(*more: str) -> str:
        run = [os.environ["GRADD_BIN"], "cache", *more]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout

    assert command() == f"0 graphs, 0.0 MiB, in {folder}\n"
    _gradients()
    (file,) = folder.iterdir()
    foreign = folder / "thesis.tex"
    foreign.touch()
    size = file.stat().st_size
    assert json.loads(command("--json")) == {"graphs": 1, "bytes": size, "folder": str(folder)}
    assert command("--clear") == f"removed 1 graph, {size / 2**20:.1f} MiB, from {folder}\n"
    assert list(folder.iterdir()) == [foreign]


def test_the_next_process_translates_nothing(tmp_path: Path) -> None:
    def run() -> list[str]:
        environ = os.environ | {"ORTMODULE_CACHE_DIR": str(tmp_path / "here")}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    (loss, *first), (again, *second) = run(), run()
    assert loss == again
    assert first == ["True", "1"]
    assert second == ["False", "1"]  # a loaded one is checked as well
