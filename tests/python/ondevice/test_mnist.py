"""samples/mnist: one training by four programs, on pictures in the form of MNIST's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from helpers import BUILD, ROOT

HERE = ROOT / "samples/mnist"
B = os.path.relpath(BUILD, ROOT)
NATIVE = BUILD / "train/native"
PATHS = {"PYTHONPATH": str(ROOT / "adapters/python"), "LD_LIBRARY_PATH": str(NATIVE)}
EPOCHS = "3"


def run(*command: str | Path) -> list[str]:
    """The lines that a program prints."""
    env = {**os.environ, **PATHS}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


def write(folder: Path, kind: str, pictures: np.ndarray, labels: np.ndarray) -> None:
    """Numbers of the heads have 4 bytes, the most significant first."""
    sizes = np.array([2051, len(pictures), 28, 28], ">i4").tobytes()
    (folder / f"{kind}-images-idx3-ubyte").write_bytes(sizes + pictures.tobytes())
    sizes = np.array([2049, len(labels)], ">i4").tobytes()
    (folder / f"{kind}-labels-idx1-ubyte").write_bytes(sizes + labels.tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten shapes under noise; the last batch is shorter than the others."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    shapes = draw.integers(0, 2, (10, 784)) * 120
    for kind, n in (("train", 300), ("t10k", 100)):
        labels = draw.integers(0, 10, n).astype(np.uint8)
        pictures = (shapes[labels] + draw.integers(0, 130, (n, 784))).astype(np.uint8)
        write(folder, kind, pictures, labels)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    run(sys.executable, HERE / "files.py", folder)
    return folder


@pytest.fixture(scope="module")
def expected(data: Path, files: Path) -> list[str]:
    """What Python prints: the loss falls, and the pictures are read."""
    lines = run(sys.executable, HERE / "mnist.py", data, files, EPOCHS)
    first, *_, last = (float(line.split()[3].rstrip(",")) for line in lines)
    assert len(lines) == int(EPOCHS) and last < first / 2
    assert int(lines[-1].split()[4]) > 80
    return lines


def test_the_exported_model_reads_as_many(data: Path, files: Path, expected: list[str]) -> None:
    pictures = np.fromfile(data / "t10k-images-idx3-ubyte", np.uint8)[16:].reshape(-1, 784)
    labels = np.fromfile(data / "t10k-labels-idx1-ubyte", np.uint8)[8:]
    model = ReferenceEvaluator(onnx.load(files / "mnist.onnx"))
    (scores,) = model.run(None, {"x": pictures.astype(np.float32) / 255})
    assert f"{(scores.argmax(1) == labels).sum()} of 100 right" in expected[-1]


def test_c_prints_the_same(data: Path, files: Path, expected: list[str], tmp_path: Path) -> None:
    library = BUILD / "lib/libgradd_train.so"
    program = tmp_path / "mnist"
    options = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}")
    run("gcc", *options, "-o", program, HERE / "mnist.c", library, f"-Wl,-rpath,{library.parent}")
    assert run(program, data, files, EPOCHS) == expected


@pytest.mark.nightly
def test_java_prints_the_same(data: Path, files: Path, expected: list[str]) -> None:
    if not shutil.which("javac"):
        pytest.skip("no javac")
    run("make", "--no-print-directory", f"B={B}", "train-java")
    options = [f"-Djava.library.path={NATIVE}", "-cp", NATIVE / "gradd-train.jar"]
    assert run("java", *options, HERE / "Mnist.java", data, files, EPOCHS) == expected


@pytest.mark.nightly
def test_node_prints_the_same(data: Path, files: Path, expected: list[str], tmp_path: Path) -> None:
    """Its products have other last bits."""
    for name in ("node", "emcc"):
        if not shutil.which(name):
            pytest.skip(f"no {name}")
    run("make", "--no-print-directory", f"B={B}", "web")
    (tmp_path / "samples").mkdir()
    shutil.copytree(HERE, tmp_path / "samples/mnist")
    (tmp_path / "build").symlink_to(BUILD)
    lines = run("node", tmp_path / "samples/mnist/mnist.mjs", data, files, EPOCHS)
    for ours, theirs in zip(lines, expected, strict=True):
        (loss, right), (other, others) = (
            line.split("loss ")[1].split(", ") for line in (ours, theirs)
        )
        assert float(loss) == pytest.approx(float(other), abs=2e-4) and right == others
