"""libgradd_train: what it asks of the system, and a program of a device that uses it alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from helpers import BUILD, ROOT
from helpers import device_models as models

LIST = ROOT / "train/symbols.txt"
B = os.path.relpath(BUILD, ROOT)  # as `make` has it: another spelling is another build
# Targets whose machine has fused multiply-add: the bits of x86, by these compilers.
SAME_BITS = {
    "aarch64": ("aarch64-linux-gnu-gcc", "qemu-aarch64"),
    "armhf": ("arm-linux-gnueabihf-gcc", "qemu-arm"),
    "riscv64": ("riscv64-linux-gnu-gcc", "qemu-riscv64"),
}
# Beginnings of names that talk to another program, or become one.
TALKS = re.compile(r"socket|connect|send|recv|fork|vfork|exec|posix_spawn|popen|system|dl[os]|pipe")


def digits() -> onnx.ModelProto:
    """A training model: a perceptron of 784-256-10 with its cross-entropy."""
    info = helper.make_tensor_value_info
    sizes = {"w1": [784, 256], "b1": [256], "w2": [256, 10], "b2": [10]}
    inputs = [
        info("x", TensorProto.FLOAT, ["n", 784]),
        info("y", TensorProto.INT64, ["n"]),
        *(info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()),
    ]
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "w2", "b2"], ["z"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["z", "y"], ["loss"]),
    ]
    graph = helper.make_graph(nodes, "digits", inputs, [info("loss", TensorProto.FLOAT, [])])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def undefined(library: Path) -> set[str]:
    """Names that a shared object takes from others, without versions."""
    lines = subprocess.check_output(["nm", "-D", "--undefined-only", library], text=True)
    return {line.split()[1].split("@")[0] for line in lines.splitlines()}


def listed() -> set[str]:
    """The names in train/symbols.txt."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def line(wide: bool = False) -> onnx.ModelProto:
    """A training model: loss = mean((x w - y)^2), of two weights; the square perhaps in f64."""
    info = helper.make_tensor_value_info
    inputs = [
        info("x", TensorProto.FLOAT, ["n", 2]),
        info("y", TensorProto.FLOAT, ["n", 1]),
        info("w", TensorProto.FLOAT, [2, 1]),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Sub", ["p", "y"], ["d"]),
        *([helper.make_node("Cast", ["d"], ["f"], to=TensorProto.DOUBLE)] if wide else []),
        helper.make_node("Mul", ["f" if wide else "d"] * 2, ["s"]),
        *([helper.make_node("Cast", ["s"], ["t"], to=TensorProto.FLOAT)] if wide else []),
        helper.make_node("ReduceMean", ["t" if wide else "s"], ["loss"], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "line", inputs, [info("loss", TensorProto.FLOAT, [])])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def run_program(target: str, *variables: str) -> str:
    """Builds the program for a target where that is missing, and runs it there."""
    command = ["make", "--no-print-directory", f"TARGET={target}", f"B={B}", *variables]
    command.append("train-run")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return "".join(re.findall(r"^(?:shallow|deep|norms|kept) .*\n", done.stdout, re.M))


def test_all_that_the_library_takes_is_listed() -> None:
    """So "data stay on the device" can be checked: nothing in the list can send them."""
    names = undefined(BUILD / "train/native/libgradd_train.so")
    assert not names - listed(), "add them to train/symbols.txt, or do without"
    assert not [name for name in listed() if TALKS.match(name)]


def test_a_program_trains_and_allocates_nothing_after_its_first_steps() -> None:
    """Three models, one twice; the program itself counts allocations and fails if there are any."""
    program = BUILD / "train/native/device_program"
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^(\w+)((?: [0-9a-f]{8})+)$", done.stdout, re.M)
    assert [name for name, _ in losses] == ["shallow", "deep", "norms", "kept"]
    assert losses[3][1] == losses[2][1]  # the same model, its state in a file
    for name, bits in losses:
        first, *_, last = (int(word, 16) for word in bits.split())  # positive floats: same order
        assert last < first, name


def test_the_header_for_cpp_learns_a_line(tmp_path: Path) -> None:
    """y = 3 x0 - x1; and what fails throws, with the sentence of the library."""
    program = BUILD / "train/native/device_program_cpp"
    model = tmp_path / "line.onnx"
    onnx.save(line(), model)
    command = [program, model, tmp_path / "state"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    learnt, bits, *rest = done.stdout.splitlines()
    assert learnt == "0.000 3.000 -1.000"
    assert bits.startswith("bits ")
    assert rest == [
        "y 3 line",
        "TENSOR: expected 2 inputs, got 1: 'y' is neither given nor a parameter of the state",
        "TENSOR: no parameter of the model matches 'v*'",
        "200 200",  # steps, and the position in the data
    ]


def test_the_page_has_a_counterpart_for_each_function_of_onnx_runtime() -> None:
    """The 33 of its table, each by functions that the library exports."""
    page = (ROOT / "docs/on-device.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\w+) \| `(gradd_\w+)`", page, re.M)
    lines = subprocess.check_output(
        ["nm", "-D", "--defined-only", BUILD / "train/native/libgradd_train.so"], text=True
    )
    exported = {line.split()[2] for line in lines.splitlines()}
    assert len({theirs for theirs, _ in rows}) == len(rows) == 33
    assert {ours for _, ours in rows} <= exported


def make_train(*variables: str) -> None:
    """`make train` with these, in the tests' build."""
    command = ["make", "--no-print-directory", f"B={B}", *variables, "train"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def run_with(library: Path, model: Path) -> str:
    """What the program for C++ prints with another library."""
    return subprocess.run(
        [BUILD / "train/native/device_program_cpp", model],
        capture_output=True,
        text=True,
        env={"LD_LIBRARY_PATH": str(library.parent), "LD_PRELOAD": str(library)},
    ).stdout


@pytest.mark.nightly
def test_a_library_for_one_model_is_small_and_trains_it(tmp_path: Path) -> None:
    """It has the operators and element types of the line, and no others, unless asked for."""
    model, wide = tmp_path / "line.onnx", tmp_path / "wide.onnx"
    onnx.save(line(), model)
    onnx.save(line(wide=True), wide)
    whole, small = (BUILD / "train/native" / f"{at}libgradd_train.so" for at in ("", "ops/"))
    make_train(f"OPS={model}")
    assert small.stat().st_size < whole.stat().st_size / 3
    assert run_with(small, model).startswith("0.000 3.000 -1.000\n")
    assert "operator Cast of" in run_with(small, wide)
    make_train(f"OPS={model},{wide}")
    assert run_with(small, wide) == run_with(small, model) == run_with(whole, model)


@pytest.mark.nightly
def test_a_library_without_a_type_refuses_it_by_name(tmp_path: Path) -> None:
    """`TYPES=` of a library with all operators, in a build of its own."""
    model, wide = tmp_path / "line.onnx", tmp_path / "wide.onnx"
    onnx.save(line(), model)
    onnx.save(line(wide=True), wide)
    build = tmp_path / "build"
    make_train(f"B={build}", "TYPES=f32")
    library = build / "train/native/libgradd_train.so"
    assert library.stat().st_size < (BUILD / "train/native/libgradd_train.so").stat().st_size
    assert run_with(library, model).startswith("0.000 3.000 -1.000\n")
    text = run_with(library, wide)
    assert "(Cast)" in text and "built without element type f64" in text


@pytest.mark.nightly
def test_sizes_for_a_phone(tmp_path: Path) -> None:
    """All operators with f32 and integers, and those of a digit classifier, stripped."""
    if not shutil.which("aarch64-linux-gnu-gcc"):
        pytest.skip("no compiler for aarch64")
    model = tmp_path / "digits.onnx"
    onnx.save(digits(), model)
    at = BUILD / "train/aarch64"
    make_train("TARGET=aarch64", "TYPES=f32")
    assert (at / "libgradd_train.so").stat().st_size <= 1_100_000
    make_train("TARGET=aarch64", f"OPS={model}")
    assert (at / "ops/libgradd_train.so").stat().st_size <= 400_000


@pytest.mark.nightly
@pytest.mark.parametrize("target", SAME_BITS)
def test_another_machine_has_the_same_bits(target: str) -> None:
    """By emulation, in f32, after forward, backward and optimizer steps."""
    missing = [program for program in SAME_BITS[target] if not shutil.which(program)]
    if missing:
        pytest.skip(f"no {missing[0]}")
    assert run_program(target) == run_program("native")


def clang_tools() -> list[str]:
    """Variables of make with which the target for Android is this machine, by clang."""
    clang = next((name for name in ("clang", "clang-14") if shutil.which(name)), None)
    if not clang:
        pytest.skip("no clang")
    return [f"T_CC={clang}", "T_AR=ar", "T_STRIP=strip", "T_ARCH_android=$(ARCH)"]


@pytest.mark.nightly
def test_clang_makes_the_same_bits() -> None:
    """With the options for Android's kit, whose compiler is clang, but for this machine."""
    assert run_program("android", *clang_tools()) == run_program("native")
    assert not undefined(BUILD / "train/android/libgradd_train.so") - listed()


WINE = next(
    (at for at in ("/usr/lib/wine/wine64", shutil.which("wine")) if at and Path(at).exists()), ""
)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_windows_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By gcc and wine; and the DLL takes nothing from others but the system and its C library."""
    if not shutil.which("x86_64-w64-mingw32-gcc") or not WINE:
        pytest.skip("no compiler for Windows, or no wine")
    monkeypatch.setenv("WINEPREFIX", str(tmp_path / "wine"))
    theirs = run_program("windows", f"T_RUN_windows=env WINEDEBUG=-all {WINE}")
    assert theirs == run_program("native")
    dump = ["x86_64-w64-mingw32-objdump", "-p", BUILD / "train/windows/gradd_train.dll"]
    libraries = re.findall(r"DLL Name: (\S+)", subprocess.check_output(dump, text=True))
    assert set(libraries) == {"KERNEL32.dll", "msvcrt.dll"}


@pytest.mark.nightly
def test_webassembly_trains() -> None:
    """In node. Without fused multiply-add the last bits differ: the first loss is the same."""
    if not shutil.which("emcc"):
        pytest.skip("no emcc")
    ours, theirs = run_program("native").split(), run_program("wasm").split()
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a == b or abs(int(a, 16) - int(b, 16)) < 64  # units in the last place


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("tests", "counts"),
    [("lasting.kills", {"GRADD_KILLS": "2000"}), ("power.", {"GRADD_DRAWS": "20"})],
)
def test_a_state_in_a_file_survives_more(tests: str, counts: dict[str, str]) -> None:
    """Kills at random moments, and losses of power in every operation, in many ways."""
    done = subprocess.run(
        [BUILD / "bin/tests", "--verbose", "--filter", tests],
        capture_output=True,
        text=True,
        env={**os.environ, **counts},
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"^[1-9]\d* passed, 0 failed", done.stdout, re.M), done.stdout


AWAKE = """
import argparse, os, sys
import numpy as np
from gradd.train import CheckpointState, Module, Optimizer
folder, width = sys.argv[1], int(sys.argv[2])
state = CheckpointState.load_checkpoint(folder + "/checkpoint")
options = argparse.Namespace(intra_op_num_threads=2)
module = Module(folder + "/training_model.onnx", state, session_options=options)
optimizer = Optimizer(folder + "/optimizer_model.onnx", module)
before = len(os.listdir("/proc/self/task"))
for _ in range(2):
    module(np.ones((2, width), np.float32), np.array([0, 1]))
    optimizer.step()
    module.lazy_reset_grad()
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(("width", "woken"), [(784, 0), (16384, 1)])
def test_a_small_update_wakes_no_thread(width: int, woken: int, tmp_path: Path) -> None:
    """With two threads: AdamW on 100,000 parameters is one's work, on two millions both's."""
    values = {"w": np.full((128, width), 0.01, np.float32), "v": np.eye(10, 128, dtype=np.float32)}
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["h"], transB=1),
        helper.make_node("Gemm", ["h", "v"], ["scores"], transB=1),
    ]
    sizes = {"x": ["n", width]}, {"scores": ["n", 10]}
    models.generate(tmp_path, models.model(nodes, *sizes, values))
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "adapters/python")}
    command = [sys.executable, "-c", AWAKE, str(tmp_path), str(width)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == woken
