"""The wheels: their libraries and licences, and a step of each public name without the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

from helpers import device_models as models

ROOT = Path(__file__).resolve().parents[3]
MANYLINUX = re.compile(r"-py3-none-manylinux_2_(\d+)_\w+\.whl$")
STEPS = ROOT / "tests" / "python" / "helpers" / "processes" / "public_names.py"
pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """All three, built from this tree's objects."""
    out = tmp_path_factory.mktemp("dist")
    build = os.environ.get("GRADD_BUILD") or ROOT / "build"
    folder = os.path.relpath(build, ROOT)  # objects depend on how it is written
    command = ["make", "-s", "-C", str(ROOT), f"B={folder}", f"DIST={out}", "wheel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(out.glob("*.whl"))
    assert [w.name.split("-")[0] for w in found] == ["gradd", "gradd_train", "optimum_gradd"]
    return found


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheels; torch and what else they require are those of this one."""
    folder = tmp_path_factory.mktemp("venv")
    _environment(folder)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "requirements.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    _pip(folder, "--no-deps", "--no-index", *map(str, wheels))
    return folder


def _environment(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)


def _pip(folder: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    command = [*pip, "--python", str(folder / "bin" / "python"), "install", *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(command, check=True, timeout=1200, env=environ)  # it has gradd already


def _bare(installed: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a user that knows neither a checkout nor a compiler."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    return {
        "PATH": str(installed / "bin"),
        "HOME": str(tmp_path),
        "GRADD_DIR": str(run),
        "GRADD_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _run(command: list[str], environ: dict[str, str], tmp_path: Path) -> str:
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _bundled(binary: Path) -> set[str]:
    """Names of libraries that lie in the wheel."""
    text = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    assert "not found" not in text
    inside = str(binary.parents[1].resolve())
    return {name for name, path in re.findall(r"(\S+) => (\S+)", text) if path.startswith(inside)}


def test_a_wheel_has_its_libraries_and_their_licences(wheels: list[Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(tmp_path)
    native = tmp_path / "gradd" / "_native"
    gradd = native / "bin" / "gradd"
    gradd.chmod(0o755)
    loaded = _bundled(gradd) | _bundled(native / "lib" / "libgradd.so")
    own = {"libgradd.so", "libgradd_cuda.so"}
    assert loaded == {file.name for file in (native / "lib").iterdir()} - own
    text = subprocess.run(["ldd", gradd], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"lib(pgm|norm|gssapi|krb5|bsd)", text)
    licences = next(tmp_path.glob("gradd-*.dist-info")) / "licenses"
    named = {file.name.split("-")[0] for file in (licences / "licences").iterdir()}
    static = {"libprotobuf", "libmsgpackc"}
    assert named == {re.split(r"[-.]", name)[0] for name in loaded} | static
    assert all(len(file.read_text(errors="replace")) > 300 for file in licences.rglob("*.txt"))


def test_the_tag_is_that_of_the_newest_symbol(wheels: list[Path]) -> None:
    found = MANYLINUX.search(wheels[0].name)
    assert found, wheels[0].name
    version = os.confstr("CS_GNU_LIBC_VERSION")
    assert version and int(found[1]) <= int(version.rsplit(".")[1])
    assert MANYLINUX.search(wheels[1].name)
    assert wheels[2].name.endswith("-py3-none-any.whl")


def test_every_public_name_makes_a_step(installed: Path, tmp_path: Path) -> None:
    environ = _bare(installed, tmp_path)
    command = str(installed / "bin" / "gradd")
    try:
        assert _run([command, "--version"], environ, tmp_path).startswith("gradd ")
        script = shutil.copy(STEPS, tmp_path)
        out = _run([str(installed / "bin" / "python"), str(script)], environ, tmp_path)
        names = out.split()
        assert {"ORTModule", "FusedAdam", "torch.compile", "torch_ort", "ORTTrainer"} <= set(names)
        assert "1 session" in _run([command, "ps"], environ, tmp_path) or names
    finally:
        subprocess.run([command, "stop"], env=environ, capture_output=True)


def test_gradd_train_trains_alone(wheels: list[Path], tmp_path: Path) -> None:
    """With numpy, from a folder that has neither gradd nor torch."""
    models.generate(tmp_path)
    with zipfile.ZipFile(wheels[1]) as archive:
        archive.extractall(tmp_path / "site")
    inside = sorted(p.name for p in (tmp_path / "site").iterdir())
    assert inside[:3] == ["gradd", "gradd_aliases", "gradd_aliases.pth"] and len(inside) == 4
    assert [p.name for p in (tmp_path / "site" / "gradd").iterdir()] == ["train"]
    numpy = Path(np.__file__).parent
    for part in (numpy, numpy.with_name("numpy.libs")):
        if part.exists():
            (tmp_path / "site" / part.name).symlink_to(part)
    program = [
        "import sys; sys.path.insert(0, 'site'); import gradd_aliases",
        "from onnxruntime.training.api import CheckpointState, Module, Optimizer",
        "import numpy as np",
        "state = CheckpointState.load_checkpoint('checkpoint')",
        "module = Module('training_model.onnx', state)",
        "module(np.ones((2, 4), np.float32), np.array([0, 1]))",
        "Optimizer('optimizer_model.onnx', module).step()",
        "assert state.parameters['fc1.weight'].grad.any() and 'torch' not in sys.modules",
        "from gradd.train import library; print(library.library()._name)",
    ]
    command = [sys.executable, "-S", "-c", "\n".join(program)]
    said = _run(command, {"PATH": ""}, tmp_path)
    assert said.strip() == str(tmp_path / "site/gradd/train/_native/libgradd_train.so")


def test_a_directory_of_packages_without_the_daemon_is_named(tmp_path: Path) -> None:
    adapters = ROOT / "adapters" / "python"
    program = "import gradd_command; gradd_command.main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "ps"],
        env={**os.environ, "PYTHONPATH": str(adapters)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "_native/bin/gradd is missing" in done.stderr


@pytest.mark.skipif(not shutil.which("qemu-x86_64"), reason="no emulator of other processors here")
def test_a_processor_without_avx2_is_named() -> None:
    command = ["qemu-x86_64", "-cpu", "Nehalem", os.environ["GRADD_BIN"], "--version"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "this processor lacks AVX2" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_an_installation_with_its_requirements_runs_the_demo(
    wheels: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "venv"
    _environment(folder)
    _pip(folder, f"torch=={_pinned('torch')}")  # a release's own build may be a large one
    _pip(folder, *map(str, wheels))
    environ = _bare(folder, tmp_path)
    command = [str(folder / "bin" / "gradd"), "demo", "--out", str(tmp_path / "out")]
    try:
        few = ["--steps", "3", "--compare", "2", "--minutes", "4", "--characters", "300000"]
        said = _run(command + few, environ, tmp_path)
        assert "largest difference" in said and "matplotlib is not installed" in said
    finally:
        subprocess.run([command[0], "stop"], env=environ, capture_output=True)


def _pinned(name: str) -> str:
    text = (ROOT / "constraints.txt").read_text()
    return re.findall(rf"^{name}==(\S+)", text, re.MULTILINE)[0]
