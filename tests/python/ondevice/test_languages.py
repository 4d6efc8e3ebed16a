"""libgradd_train from other languages: one program each, whose lines are those of C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from test_library import line

from gradd.train import CheckpointState, LinearLRScheduler, Optimizer
from helpers import BUILD, ROOT
from helpers import device_models as models
from helpers.pages import blocks

B = os.path.relpath(BUILD, ROOT)  # as `make` has it: another spelling is another build
NATIVE = BUILD / "train/native"
HERE = Path(__file__).parent
PAGE = ROOT / "docs/on-device-languages.md"


def make(*targets: str) -> None:
    """Targets of the makefile, in the tests' build."""
    command = ["make", "--no-print-directory", f"B={B}", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def need(*programs: str) -> None:
    """Skips by the name of a program that this machine lacks."""
    for program in programs:
        if not shutil.which(program):
            pytest.skip(f"no {program}")


def run(*command: str | Path, **more: str) -> list[str]:
    """The lines that a program prints."""
    env = {**os.environ, **more}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that each program trains."""
    path = tmp_path_factory.mktemp("line") / "line.onnx"
    onnx.save(line(), path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[str]:
    """What the program for C++ prints, bits of the losses and weights among it."""
    make(f"{B}/train/native/device_program_cpp")
    lines = run(NATIVE / "device_program_cpp", model)
    assert lines[0] == "0.000 3.000 -1.000"
    assert lines[1].startswith("bits ")
    return lines


def java(*arguments: str | Path) -> list[str]:
    """What a Java program prints, checked by JNI's own checks, which name what they do not like."""
    options = ["-Xcheck:jni", f"-Djava.library.path={NATIVE}", "-Xmx64m", "-XX:+UseSerialGC"]
    return run("java", *options, "-cp", NATIVE / "gradd-train.jar", *arguments)


@pytest.mark.nightly
def test_java_has_the_bits_of_cpp(model: Path, expected: list[str]) -> None:
    need("javac", "java", "jar")
    make("train-java")
    assert java(HERE / "Line.java", model) == expected


@pytest.mark.nightly
def test_java_trains_files_as_python_does(tmp_path: Path) -> None:
    """The other methods; losses, checkpoint and exported model are those of gradd.train."""
    need("javac", "java", "jar")
    make("train-java")
    folder = models.generate(tmp_path, nominal_checkpoint=True)
    weights = np.random.default_rng(3).standard_normal(4 * 6 + 6 + 6 * 3 + 3).astype(np.float32)
    weights.tofile(folder / "global.f32")
    losses = [float(text) for text in java(HERE / "DeviceFiles.java", folder)]
    x = ((np.arange(20) % 7 - 3) / 4).astype(np.float32).reshape(5, 4)
    labels = np.array([0, 1, 2, 1, 0])
    state, module = models.load(folder)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    schedule = LinearLRScheduler(optimizer, 2, 100, 0.125)
    expected = []
    for _ in range(10):
        expected.append(float(module(x, labels)))
        optimizer.step()
        schedule.step()
        module.lazy_reset_grad()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    saved = CheckpointState.load_checkpoint(folder / "java.checkpoint").parameters
    for name, parameter in state.parameters:
        np.testing.assert_allclose(saved[name].data, parameter.data, rtol=1e-4, atol=1e-6)
    exported = ReferenceEvaluator(onnx.load(folder / "java.onnx"))
    module.export_model_for_inferencing(folder / "python.onnx", ["scores"])
    ours = ReferenceEvaluator(onnx.load(folder / "python.onnx")).run(None, {"x": x})
    np.testing.assert_allclose(exported.run(None, {"x": x})[0], ours[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        np.fromfile(folder / "update.f32", np.float32),
        update(folder, weights, x, labels),
        atol=1e-6,
    )


def update(folder: Path, weights: np.ndarray, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """What a client of a federation sends after five steps from these weights."""
    _, module = models.load(folder, "nominal_checkpoint")
    module.copy_buffer_to_parameters(weights, False)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    for _ in range(5):
        module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
    return module.get_contiguous_parameters(False) - weights


STRUCTURES = """#include <stdio.h>
#include "train/gradd_train.h"
#define SIZE(of) (int)sizeof(gradd_##of##_t)
int main(void) {
    printf("[%d, %d, %d, %d, %d, %d, %d, %d, %d]", SIZE(type), SIZE(train_parameter),
           SIZE(train_progress), SIZE(train_property), SIZE(train_lasting), SIZE(train_model),
           SIZE(train_optimizer), SIZE(train_options), SIZE(train_tensor));
}
"""


@pytest.fixture(scope="module")
def sizes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Bytes of the structures that a binding without C declares again."""
    program = tmp_path_factory.mktemp("sizes") / "sizes"
    command = ["gcc", "-I", ROOT, "-x", "c", "-o", program, "-"]
    subprocess.run(command, input=STRUCTURES, text=True, check=True)
    return run(program)


@pytest.mark.nightly
def test_rust_has_the_bits_of_cpp(model: Path, expected: list[str], tmp_path: Path) -> None:
    """And, in a folder, asserts of the rest."""
    need("cargo")
    make("train-rust")
    program, here = NATIVE / "rust/release/examples/line", {"LD_LIBRARY_PATH": str(NATIVE)}
    assert run(program, model, tmp_path, **here) == expected


@pytest.mark.nightly
def test_rust_has_the_structures_of_c(sizes: list[str]) -> None:
    need("cargo")
    make("train-rust")
    program = NATIVE / "rust/release/examples/line"
    assert run(program, "sizes", LD_LIBRARY_PATH=str(NATIVE)) == sizes


@pytest.fixture(scope="module")
def csharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program for C#."""
    need("mcs", "mono")
    make("train-csharp")
    program = tmp_path_factory.mktemp("csharp") / "line.exe"
    library = shutil.copy(NATIVE / "Gradd.Train.dll", program.parent)
    run("mcs", "-unsafe", f"-r:{library}", f"-out:{program}", HERE / "Line.cs")
    return program


@pytest.mark.nightly
def test_csharp_has_the_bits_of_cpp(
    model: Path, expected: list[str], csharp: Path, tmp_path: Path
) -> None:
    """And, in a folder, holds the rest."""
    assert run("mono", csharp, model, tmp_path, LD_LIBRARY_PATH=str(NATIVE)) == expected


@pytest.mark.nightly
def test_csharp_has_the_structures_of_c(sizes: list[str], csharp: Path) -> None:
    assert run("mono", csharp, "sizes", LD_LIBRARY_PATH=str(NATIVE)) == sizes


@pytest.mark.nightly
def test_clang_reads_the_module_of_swift_and_objective_c(tmp_path: Path) -> None:
    """It reads alone: there is no compiler for Swift here."""
    clang = shutil.which("clang") or shutil.which("clang-14")
    if not clang:
        pytest.skip("no clang")
    (source := tmp_path / "step.m").write_text(blocks(PAGE, "objc")[0].text)
    options = ["-fmodules", f"-fmodules-cache-path={tmp_path}", "-fsyntax-only", "-Werror"]
    run(clang, *options, f"-fmodule-map-file={ROOT}/train/module.modulemap", f"-I{ROOT}", source)


@pytest.mark.nightly
def test_the_examples_of_the_page_compile(tmp_path: Path, csharp: Path) -> None:
    need("javac", "jar", "cargo")
    make("train-java", "train-rust")
    sources = {"java": "Digits.java", "rust": "digits.rs", "csharp": "Digits.cs"}
    for language, name in sources.items():
        (tmp_path / name).write_text(blocks(PAGE, language)[0].text)
    jar = NATIVE / "gradd-train.jar"
    run("javac", "-Xlint:all", "-Werror", "-cp", jar, "-d", tmp_path, tmp_path / "Digits.java")
    crate = NATIVE / "rust/release/libgradd_train.rlib"
    options = ["--edition", "2021", "--emit", "metadata", "--extern", f"gradd_train={crate}"]
    run("rustc", *options, "--out-dir", tmp_path, tmp_path / "digits.rs")
    library = csharp.parent / "Gradd.Train.dll"
    run("mcs", f"-r:{library}", f"-out:{tmp_path / 'digits.exe'}", tmp_path / "Digits.cs")
