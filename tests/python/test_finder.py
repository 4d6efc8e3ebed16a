"""`optimum.onnxruntime` as scripts import it: with nobody providing the package, and with somebody.

Each case runs in an interpreter of its own, because an import hook is state of the whole process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIMUM = ROOT / "adapters" / "optimum"
NAMES = ["ORTTrainer", "ORTTrainingArguments", "ORTSeq2SeqTrainer", "ORTSeq2SeqTrainingArguments"]


def run_python(code: str, *paths: Path) -> str:
    """Runs `code` with `paths` first in sys.path and the finder installed; returns its output."""
    places = [*map(str, paths), str(OPTIMUM), str(ROOT / "adapters" / "python")]
    prelude = f"import sys\nsys.path[:0] = {places!r}\nimport optimum_gradd_finder\n"
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
def test_package_is_served_where_nobody_provides_it() -> None:
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
        import optimum_gradd_finder
        optimum_gradd_finder.install()
        print(sum(getattr(f, "__name__", "") == "Finder" for f in sys.meta_path))
        import subprocess
        code = ("import sys; sys.path.insert(0, %r); before = set(sys.modules);"
                "import optimum_gradd_finder; print(sorted(set(sys.modules) - before))")
        code = code % sys.path[0]
        print(subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True,
                             text=True).stdout)
        """
    )
    count, added = out.splitlines()[:2]
    assert count == "1"
    # Whatever it adds belongs to the import system itself.
    heavy = {"torch", "transformers", "typing", "re", "inspect", "dataclasses"}
    assert "optimum_gradd_finder" in added and not heavy & set(eval(added))
