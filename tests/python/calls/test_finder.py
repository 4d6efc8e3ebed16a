"""Names of ONNX Runtime Training as scripts import them, with and without another provider.

Each case runs in an interpreter of its own, because an import hook is state of the whole process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from helpers import ROOT

pytestmark = pytest.mark.one_in(4)

OPTIMUM = ROOT / "adapters" / "optimum"
NAMES = ["ORTTrainer", "ORTTrainingArguments", "ORTSeq2SeqTrainer", "ORTSeq2SeqTrainingArguments"]


# As if onnxruntime was not installed where it is.
NOT_INSTALLED = """
from importlib.machinery import PathFinder

real = PathFinder.find_spec
hides = lambda cls, name, *more: None if name.startswith("onnxruntime") else real(name, *more)
PathFinder.find_spec = classmethod(hides)
"""


def run_python(code: str, *paths: Path) -> str:
    """Runs `code` with `paths` first in sys.path and the finder installed; returns its output."""
    places = [*map(str, paths), str(ROOT / "adapters" / "python"), str(OPTIMUM)]
    prelude = f"import sys\nsys.path[:0] = {places!r}\nimport gradd_aliases\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def regular_package(tmp_path: Path) -> Path:
    """A folder with an `optimum/onnxruntime` like that of optimum-onnx: lazy, replacing itself."""
    package = tmp_path / "optimum" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import sys, types

            class LazyModule(types.ModuleType):
                def __getattr__(self, name):
                    if name == "ORTConfig":
                        from .configuration import ORTConfig
                        return ORTConfig
                    raise AttributeError(f"their own: {name}")
                def __dir__(self):
                    return ["ORTConfig"]

            lazy = LazyModule(__name__)
            lazy.__path__, lazy.__spec__, lazy.__file__ = __path__, __spec__, __file__
            sys.modules[__name__] = lazy
            """
        )
    )
    (package / "configuration.py").write_text("class ORTConfig:\n    mine = 1\n")
    (package / "utils.py").write_text("theirs = True\n")
    return tmp_path


@pytest.mark.quick
def test_package_is_served_where_no_other_provides_it() -> None:
    out = run_python(
        f"""
        import importlib.util, optimum.onnxruntime as ort
        assert "torch" not in sys.modules and "transformers" not in sys.modules
        assert sorted(ort.__all__) == {sorted(NAMES)!r} and set(ort.__all__) <= set(dir(ort))
        try:
            ort.ORTModelForCausalLM
        except AttributeError as error:
            print(error)
        """
    )
    assert "optimum-onnx" in out and "ORTModelForCausalLM" in out


def test_names_are_the_same_objects_under_both_paths() -> None:
    out = run_python(
        """
        from optimum.onnxruntime import ORTTrainer, ORTSeq2SeqTrainer
        from optimum.onnxruntime import ORTTrainingArguments, ORTSeq2SeqTrainingArguments
        from optimum.onnxruntime.training_args import ORTOptimizerNames
        from optimum.onnxruntime.trainer import ORTTrainer as deep
        from optimum.onnxruntime.utils import is_onnxruntime_training_available
        import optimum.gradd, optimum.gradd.trainer, optimum.onnxruntime.trainer as aliased
        import transformers
        assert ORTTrainer is deep is optimum.gradd.ORTTrainer
        assert aliased is optimum.gradd.trainer and aliased.__name__ == "optimum.gradd.trainer"
        assert issubclass(ORTTrainer, transformers.Trainer)
        assert issubclass(ORTSeq2SeqTrainer, (ORTTrainer, transformers.Seq2SeqTrainer))
        assert issubclass(ORTSeq2SeqTrainingArguments, ORTTrainingArguments)
        assert ORTOptimizerNames.ADAMW_ORT_FUSED == "adamw_ort_fused"
        assert is_onnxruntime_training_available()
        print("ok")
        """
    )
    assert out == "ok"


@pytest.mark.quick
def test_regular_package_keeps_its_names_and_learns_ours(regular_package: Path) -> None:
    out = run_python(
        """
        import optimum.onnxruntime as ort
        from optimum.onnxruntime import ORTConfig
        import optimum.onnxruntime.utils as utils
        assert ORTConfig.mine == 1 and utils.theirs
        assert type(ort).__name__ == "LazyModule"
        assert {"ORTConfig", "ORTTrainer"} <= set(dir(ort))
        assert "torch" not in sys.modules
        try:
            ort.nothing
        except AttributeError as error:
            print(error)
        """,
        regular_package,
    )
    assert out == "their own: nothing"


def test_regular_package_serves_our_trainer(regular_package: Path) -> None:
    out = run_python(
        """
        from optimum.onnxruntime import ORTConfig, ORTTrainer
        from optimum.onnxruntime.training_args import ORTTrainingArguments
        import optimum.gradd
        assert ORTTrainer is optimum.gradd.ORTTrainer
        print(ORTTrainingArguments.__module__, ORTConfig.mine)
        """,
        regular_package,
    )
    assert out == "optimum.gradd.training_args 1"


def test_eager_trainer_of_an_old_release_gives_way(tmp_path: Path) -> None:
    package = tmp_path / "optimum" / "onnxruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("class ORTTrainer: old = 1\nclass ORTQuantizer: pass\n")
    out = run_python(
        """
        import optimum.onnxruntime as ort
        import inspect
        assert "class ORTQuantizer" in inspect.getsource(ort)  # the loader still gives its source
        print(hasattr(ort.ORTTrainer, "old"), ort.ORTQuantizer.__name__)
        """,
        tmp_path,
    )
    assert out == "False ORTQuantizer"


@pytest.mark.quick
def test_finder_costs_no_imports_and_installs_once() -> None:
    out = run_python(
        """
        import gradd_aliases
        gradd_aliases.install()
        print(sys.meta_path.count(gradd_aliases.Finder))
        import subprocess
        code = ("import sys; sys.path.insert(0, %r); before = set(sys.modules);"
                "import gradd_aliases; print(sorted(set(sys.modules) - before))")
        code = code % sys.path[0]
        print(subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True,
                             text=True).stdout)
        """
    )
    count, added = out.splitlines()[:2]
    assert count == "1"
    # Whatever it adds belongs to the import system itself.
    heavy = {"torch", "transformers", "typing", "re", "inspect", "dataclasses"}
    assert "gradd_aliases" in added and not heavy & set(eval(added))


ONE_LINERS = [
    "from torch_ort import ORTModule",
    "from torch_ort import ORTModule, DebugOptions, LogLevel, set_seed",
    "from torch_ort.optim import FusedAdam, AdamWMode",
    "import torch_ort; ORTModule = torch_ort.ORTModule",
    "from onnxruntime.training.ortmodule import ORTModule",
    "from onnxruntime.training.ortmodule import ORTModule, DebugOptions, LogLevel",
    "from onnxruntime.training.optim import FusedAdam",
    "from onnxruntime.training.optim import FusedAdam, AdamWMode",
    "from onnxruntime.training.optim.fused_adam import FusedAdam, AdamWMode",
    "import onnxruntime.training.ortmodule as m; ORTModule = m.ORTModule",
    "from onnxruntime.training import ORTTrainer, ORTTrainerOptions, TrainStepInfo",
    "from onnxruntime.training import amp, checkpoint, optim, orttrainer, ortmodule",
    "from onnxruntime.training.orttrainer import ORTTrainer, ORTTrainerOptions, TrainStepInfo",
    "from onnxruntime.training.orttrainer_options import ORTTrainerOptions",
    "from onnxruntime.training.optim import AdamConfig, LambConfig, SGDConfig, FP16_Optimizer",
    "from onnxruntime.training.optim import _OptimizerConfig, lr_scheduler",
    "from onnxruntime.training.optim.config import AdamConfig, LambConfig, SGDConfig",
    "from onnxruntime.training.optim.lr_scheduler import _LRScheduler, LinearWarmupLRScheduler",
    "from onnxruntime.training.optim.lr_scheduler import CosineWarmupLRScheduler",
    "from onnxruntime.training.optim.lr_scheduler import ConstantWarmupLRScheduler",
    "from onnxruntime.training.optim.lr_scheduler import PolyWarmupLRScheduler",
    "from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer",
    "from onnxruntime.training.amp import DynamicLossScaler, LossScaler",
    "from onnxruntime.training.amp.loss_scaler import DynamicLossScaler, LossScaler",
    "from onnxruntime.training.checkpoint import experimental_save_checkpoint",
    "from onnxruntime.training.checkpoint import experimental_load_checkpoint",
    "from onnxruntime.training.utils.data import LoadBalancingDistributedSampler",
    "from onnxruntime.training.utils.data import LoadBalancingDistributedBatchSampler",
    "from onnxruntime.training.utils.hooks import GlobalSubscriberManager, inspect_activation",
    "from onnxruntime.training.utils.hooks import StatisticsSubscriber",
    "from onnxruntime.training.ortmodule.experimental import hierarchical_ortmodule",
    "from onnxruntime.training.ortmodule.experimental.json_config import load_from_json",
    "from onnxruntime.training.experimental import export_gradient_graph, gradient_graph",
    "from onnxruntime.training.ortmodule import register_gradient",
    "from onnxruntime.training.ortmodule._custom_gradient_registry import register_gradient",
    "from onnxruntime.training.ortmodule._custom_gradient_registry import CustomGradientRegistry",
    "import onnxruntime.training.ortmodule.torch_cpp_extensions",
    "from onnxruntime import training; from onnxruntime.training import optim, ortmodule",
]


@pytest.fixture
def inference_package(tmp_path: Path) -> Path:
    """A folder with an `onnxruntime` like the one for inference."""
    package = tmp_path / "onnxruntime"
    (package / "capi").mkdir(parents=True)
    (package / "__init__.py").write_text("class InferenceSession: theirs = 1\n")
    (package / "capi" / "__init__.py").write_text("state = 2\n")
    return tmp_path


@pytest.mark.parametrize("installed", [False, True])
def test_imports_of_old_scripts(installed: bool, inference_package: Path) -> None:
    places = [inference_package] if installed else []
    lines = [
        *("" if installed else NOT_INSTALLED).splitlines(),
        *ONE_LINERS[: None if installed else -1],  # the last one asks for their package first
        "import gradd, gradd.optim",
        "assert ORTModule is gradd.ORTModule and FusedAdam is gradd.optim.FusedAdam",
        "assert DebugOptions is gradd.DebugOptions and LogLevel is gradd.LogLevel",
        "assert AdamWMode is gradd.optim.AdamWMode",
        "assert hierarchical_ortmodule.HierarchicalORTModule is ORTModule",
        "import gradd.legacy.trainer as legacy, gradd.legacy.configs as configs",
        "assert ORTTrainer is orttrainer.ORTTrainer is legacy.ORTTrainer",
        "assert optim.config.AdamConfig is optim.AdamConfig is AdamConfig is configs.AdamConfig",
        "assert issubclass(optim.lr_scheduler.PolyWarmupLRScheduler, _LRScheduler)",
        "assert amp.loss_scaler.LossScaler is LossScaler",
        "import torch; set_seed(3); a = torch.rand(1); torch.manual_seed(3)",
        "assert torch.equal(a, torch.rand(1))",
        "print('ok')",
    ]
    assert run_python("\n".join(lines), *places) == "ok"


@pytest.mark.quick
def test_the_package_for_inference_stays_as_it_is(inference_package: Path) -> None:
    out = run_python(
        """
        import onnxruntime, onnxruntime.capi
        before = set(vars(onnxruntime))
        import onnxruntime.training.optim
        assert set(vars(onnxruntime)) - before == {"training"}
        import gradd, onnxruntime.training.orttrainer
        assert not [name for name in sys.modules if name.startswith("gradd.legacy")]
        assert onnxruntime.capi.state == 2 and "torch" not in sys.modules
        print(onnxruntime.InferenceSession.theirs, hasattr(onnxruntime, "set_seed"))
        """,
        inference_package,
    )
    assert out == "1 False"


@pytest.mark.quick
def test_the_trainer_beside_an_installed_package(inference_package: Path) -> None:
    out = run_python(
        """
        try:
            from onnxruntime.capi.ort_trainer import ORTTrainer
        except ImportError as error:
            print(error)
        """,
        inference_package,
    )
    assert out.startswith("onnxruntime.capi.ort_trainer: use onnxruntime.training.ORTTrainer")


@pytest.mark.quick
def test_a_package_for_training_that_is_installed_comes_first(inference_package: Path) -> None:
    training = inference_package / "onnxruntime" / "training"
    training.mkdir()
    (training / "__init__.py").write_text("theirs = True\n")
    (inference_package / "torch_ort.py").write_text("ORTModule = 'theirs'\n")
    out = run_python(
        """
        import onnxruntime.training, torch_ort
        assert onnxruntime.training.theirs
        print(torch_ort.ORTModule)
        """,
        inference_package,
    )
    assert out == "theirs"


@pytest.mark.quick
def test_onnxruntime_itself_is_not_found() -> None:
    out = run_python(
        NOT_INSTALLED
        + textwrap.dedent("""
        import importlib.util
        print(importlib.util.find_spec("onnxruntime"))
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            print(error.name)
        import onnxruntime.training
        try:
            import onnxruntime; onnxruntime.InferenceSession
        except AttributeError as error:
            print(error)
        """)
    )
    first, second, third = out.splitlines()
    assert (first, second) == ("None", "onnxruntime")
    assert "inference comes with the package onnxruntime" in third


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("from onnxruntime.training.optim import FusedLamb", "gradd serves FusedAdam"),
        ("from onnxruntime.training.api import Trainer", "gradd serves CheckpointState, Module"),
        ("from onnxruntime.training.utils.hooks import ZeROOffloadSubscriber", "DeepSpeed's own"),
        ("from onnxruntime.capi.ort_trainer import ModelDescription", "takes a dict"),
        ("from onnxruntime.training.checkpoint import aggregate_checkpoints", "one file"),
        ("from onnxruntime.training.ortmodule.experimental import pipe", "wrap each stage"),
        ("from onnxruntime.training import _utils", "in it the modules ortmodule, experimental"),
        ("from onnxruntime.training.ortmodule import export_context", "is_compiling"),
        (
            "from onnxruntime.training.ortmodule._custom_gradient_registry import x",
            "gradd serves register_gradient, CustomGradientRegistry",
        ),
        (
            "from onnxruntime.training.ortmodule._custom_op_symbolic_registry import x",
            "leave it out",
        ),
        ("from onnxruntime.training.ortmodule.graph_optimizers import x", "docs/patterns.md"),
        ("from torch_ort import ORTInferenceModule", "inference"),
        ("from torch_ort import nothing_of_that_name", "gradd serves ORTModule, DebugOptions"),
        ("from optimum.onnxruntime import ORTModelForCausalLM", "optimum-onnx"),
    ],
)
def test_a_name_that_is_not_there_says_what_to_use(line: str, says: str) -> None:
    out = run_python(
        f"""
        try:
            {line}
        except ImportError as error:
            print(error)
        """
    )
    assert says in out


@pytest.mark.quick
def test_names_are_not_served_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_NO_ALIASES", "1")
    out = run_python(
        """
        for name in ("torch_ort", "onnxruntime.training", "optimum.onnxruntime"):
            try:
                __import__(name)
            except ModuleNotFoundError:
                print(name)
        """
    )
    assert out.split() == ["torch_ort", "onnxruntime.training", "optimum.onnxruntime"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("given", "spins"),
    [
        ({}, "5000"),
        ({"GRADD_NO_ALIASES": "1"}, "5000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
def test_idle_threads_of_torch_poll_shortly(
    given: dict[str, str], spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, text in {**given, "OMP_DISPLAY_ENV": "verbose"}.items():
        monkeypatch.setenv(name, text)
    out = run_python(
        """
        import os
        print(sorted(name for name in os.environ if "GOMP" in name))
        os.dup2(1, 2)  # where OpenMP tells its settings
        import torch
        """
    )
    before, *settings = out.splitlines()
    assert before == str([name for name in given if "GOMP" in name])
    assert f"  GOMP_SPINCOUNT = '{spins}'" in settings


@pytest.mark.quick
@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize(
    "module", ["torch_ort.configure", "onnxruntime.training.ortmodule.torch_cpp_extensions.install"]
)
def test_nothing_is_to_be_compiled(module: str, installed: bool, inference_package: Path) -> None:
    places = [inference_package] if installed else []
    hidden = "" if installed else NOT_INSTALLED
    run = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    called = f"import {module} as old; old.build_torch_cpp_extensions()"
    out = run_python(f"{hidden}\n{run}", *places)
    assert run_python(f"{hidden}\n{called}", *places) == out
    assert "nothing needs configuring or compiling" in out


def test_old_names_train(daemon: object) -> None:
    from onnxruntime.training.optim import FusedAdam  # type: ignore[import-not-found]
    from torch_ort import DebugOptions, LogLevel, ORTModule  # type: ignore[import-not-found]

    model = ORTModule(torch.nn.Linear(4, 2), DebugOptions(log_level=LogLevel.WARNING))
    before = model.weight.detach().clone()
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    assert model.gradd_stats()["forwards"] and not torch.equal(before, model.weight)
