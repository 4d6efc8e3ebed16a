"""The old imports of training on devices, in interpreters without torch and the daemon."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

from gradd.train import library
from helpers import ROOT
from helpers import device_models as models

pytestmark = pytest.mark.quick
# As in an environment with numpy alone, where the distribution `gradd` is not installed either.
BARE = """
import sys
from importlib.machinery import PathFinder

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {HIDDEN}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing)
"""


def run_python(code: str, *paths: Path, hidden: tuple[str, ...] = ()) -> str:
    """Runs `code` with the finder installed, as if `hidden` packages were not there."""
    places = [*map(str, paths), sysconfig.get_paths()["purelib"]]
    prelude = BARE.replace("{HIDDEN}", repr(hidden)) + f"sys.path[:0] = {places!r}\n"
    command = [sys.executable, "-S", "-c", prelude + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A folder as the wheel gradd-train leaves it: no gradd/__init__.py."""
    site = tmp_path / "site"
    (site / "gradd").mkdir(parents=True)
    source = ROOT / "adapters" / "python"
    (site / "gradd" / "train").symlink_to(source / "gradd" / "train")
    (site / "gradd_aliases").symlink_to(source / "gradd_aliases")
    return site


LOOP = """
import gradd_aliases
from onnxruntime.training.api import CheckpointState, Module, Optimizer
import numpy as np
state = CheckpointState.load_checkpoint({checkpoint!r})
model = Module({training!r}, state)
optimizer = Optimizer({optimizer!r}, model)
rng = np.random.default_rng(0)
x, y = rng.standard_normal((5, 4)).astype(np.float32), np.arange(5) % 3
losses = []
for _ in range(30):
    losses.append(float(model(x, y)))
    optimizer.step()
    model.lazy_reset_grad()
assert losses[-1] < losses[0]
loaded = {{name.split(".")[0] for name in sys.modules}}
print(sorted(loaded & {{"torch", "onnx", "onnxruntime", "zmq", "numpy", "gradd"}}))
"""


def test_the_old_loop_needs_numpy_alone(alone: Path, tmp_path: Path) -> None:
    folder = models.generate(tmp_path)
    files = {kind: str(folder / f"{kind}_model.onnx") for kind in ("training", "optimizer")}
    code = LOOP.format(checkpoint=str(folder / "checkpoint"), **files)
    hidden = ("torch", "onnx", "zmq", "msgpack")
    assert run_python(code, alone, hidden=hidden) == "['gradd', 'numpy', 'onnxruntime']"


def test_the_same_beside_the_distribution_gradd(tmp_path: Path) -> None:
    folder = models.generate(tmp_path)
    files = {kind: str(folder / f"{kind}_model.onnx") for kind in ("training", "optimizer")}
    code = LOOP.format(checkpoint=str(folder / "checkpoint"), **files)
    out = run_python(code + "import gradd; print(gradd.__version__)", ROOT / "adapters" / "python")
    assert out.splitlines()[0] == "['gradd', 'numpy', 'onnxruntime']"


@pytest.mark.parametrize("installed", [False, True])
def test_names_are_those_of_gradd_train(installed: bool, alone: Path, tmp_path: Path) -> None:
    package = tmp_path / "theirs" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class OrtValue: theirs = 1\n")
    places = [package.parent, alone] if installed else [alone]
    out = run_python(
        f"""
        import gradd_aliases
        import onnxruntime.training.api as api
        from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
        from onnxruntime.training.api.checkpoint_state import Parameter, Parameters, Properties
        from onnxruntime.training import artifacts, onnxblock
        from onnxruntime.training.onnxblock import blocks, loss, optim
        import onnxruntime.training.onnxblock.blocks as same
        import onnxruntime.training as training
        assert training.artifacts is artifacts and training.onnxblock is onnxblock
        assert training.api is api
        import gradd.train, gradd.train.state
        assert same is blocks is onnxblock.blocks is gradd.train.onnxblock.blocks
        assert artifacts is gradd.train.artifacts
        assert api.Module is Module is gradd.train.Module
        assert Parameter is gradd.train.state.Parameter
        if {installed}:
            from onnxruntime import OrtValue
            assert OrtValue.theirs
        assert "torch" not in sys.modules
        print("ok")
        """,
        *places,
    )
    assert out == "ok"


def test_without_onnx_only_artifacts_are_missing(alone: Path) -> None:
    out = run_python(
        """
        import gradd_aliases
        from onnxruntime.training.api import *
        from gradd.train import *
        assert Module and TrainError
        import gradd.train.module, gradd_aliases.seeds
        gradd_aliases.seeds.set_seed(7)
        assert gradd.train.module.default_seed == 7
        try:
            from onnxruntime.training import artifacts
        except ImportError as error:
            print(error.name)
        """,
        alone,
        hidden=("onnx", "torch"),
    )
    assert out == "onnx"


STRUCTURES = {
    "gradd_train_parameter_s": library.Parameter,
    "gradd_train_property_s": library.Property,
    "gradd_train_model_s": library.Model,
    "gradd_train_optimizer_s": library.OptimizerConstants,
    "gradd_train_options_s": library.Options,
    "gradd_train_tensor_s": library.Tensor,
    "gradd_train_memory_s": library.Memory,
}
FIELD = re.compile(r"(\w+)(?:\[\w+\])?[;,]")


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_has_the_fields_of_the_header(name: str) -> None:
    text = (ROOT / "train" / "gradd_train.h").read_text()
    body = re.sub(r"/\*.*?\*/", "", text.split(f"struct {name} {{")[1].split("}")[0], flags=re.S)
    assert FIELD.findall(body) == [field for field, *_ in STRUCTURES[name]._fields_]
