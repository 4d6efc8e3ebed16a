"""Trains models with gradd.train and with ONNX Runtime 1.19.2, on the same files, and compares.

    .venv/bin/python benchmarks/crosswise.py build/crosswise

ONNX Runtime makes the artifacts, in an environment of its own below the folder. Both train them;
each goes on from the other's checkpoint at half of the steps; both export. The table has the
largest relative differences of the losses, and the largest difference of the exported models'
outputs, which ONNX Runtime computes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy<2")
STEPS, HALF = 200, 100
OURS, THEIRS = "gradd", "onnxruntime"
LIMIT = 1e-5


def environment(folder: Path) -> Path:
    """The Python of an environment with ONNX Runtime's training, which is made if it is missing."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([python, "-m", "pip", "-q", "install", *PACKAGES], check=True)
        (package,) = (folder / "venv").glob("lib/python*/site-packages/onnxruntime")
        for name in ("training", "tools"):  # which import torch
            (package / name / "__init__.py").write_text("")
    return python


def api(engine: str) -> Any:
    """The module with CheckpointState, Module and Optimizer."""
    if engine == OURS:
        import gradd.train as found
    else:
        import onnxruntime.training.api as found
    return found


def make(folder: Path) -> None:
    """Artifacts by ONNX Runtime."""
    from crosswise_models import models
    from onnxruntime.training import artifacts

    for name, model in models().items():
        place = folder / name
        place.mkdir(exist_ok=True)
        artifacts.generate_artifacts(
            model.proto,
            requires_grad=model.trained(),
            frozen_params=model.frozen,
            loss=artifacts.LossType[model.loss],
            optimizer=artifacts.OptimType[model.optimizer],
            artifact_directory=place,
        )


def train(folder: Path, engine: str, goes_on: bool) -> None:
    """All steps from the artifacts' checkpoint, or the second half from the other engine's."""
    from crosswise_models import models

    found, other = api(engine), THEIRS if engine == OURS else OURS
    for name, model in models().items():
        place = folder / name
        state = found.CheckpointState.load_checkpoint(
            place / (f"half_{other}" if goes_on else "checkpoint")
        )
        # ONNX Runtime does not load its own eval model of a batch norm.
        evaluates = engine == OURS or "BatchNormalization" not in str(model.proto)
        evaluation = place / "eval_model.onnx" if evaluates else None
        module = found.Module(place / "training_model.onnx", state, evaluation)
        optimizer = found.Optimizer(place / "optimizer_model.onnx", module)
        optimizer.set_learning_rate(model.rate)
        losses = []
        for step in range(HALF if goes_on else 0, STEPS):
            losses.append(float(module(*model.batch(step))))
            optimizer.step()
            module.lazy_reset_grad()
            if step == HALF - 1:
                path = place / f"half_{engine}"
                found.CheckpointState.save_checkpoint(state, path, include_optimizer_state=True)
        np.save(place / f"losses_{engine}{'_on' * goes_on}.npy", losses)
        if evaluates and not goes_on:
            module.export_model_for_inferencing(place / f"trained_{engine}.onnx", ["y"])


def infer(folder: Path) -> None:
    """Outputs of the exported models, by ONNX Runtime."""
    import onnxruntime
    from crosswise_models import models

    for name, model in models().items():
        for path in (folder / name).glob("trained_*.onnx"):
            session = onnxruntime.InferenceSession(path)
            (output,) = session.run(None, {"x": model.batch(0)[0]})
            np.save(path.with_suffix(".npy"), output)


def compare(folder: Path) -> bool:
    """Prints the table; returns whether all differences are small."""
    from crosswise_models import models

    fine = True
    print(f"{'model':14}{'same start':>12}{'they go on':>12}{'we go on':>12}{'exported':>12}")
    for name in models():
        place = folder / name
        theirs, ours = (np.load(place / f"losses_{e}.npy") for e in (THEIRS, OURS))
        gaps = [
            _gap(theirs, ours),
            _gap(ours[HALF:], np.load(place / f"losses_{THEIRS}_on.npy")),
            _gap(theirs[HALF:], np.load(place / f"losses_{OURS}_on.npy")),
        ]
        exported = [place / f"trained_{engine}.npy" for engine in (THEIRS, OURS)]
        if all(path.exists() for path in exported):
            gaps.append(float(abs(np.subtract(*map(np.load, exported))).max()))
        print(f"{name:14}" + "".join(f"{gap:12.1e}" for gap in gaps))
        fine = fine and max(gaps) <= LIMIT
    return fine


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(abs(a - b) / abs(a)))


def main() -> None:
    """Runs the parts in the two environments; the exit status says whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = {
        "make": lambda: make(options.folder),
        "infer": lambda: infer(options.folder),
        **{f"train-{e}": lambda e=e: train(options.folder, e, False) for e in (OURS, THEIRS)},
        **{f"go-on-{e}": lambda e=e: train(options.folder, e, True) for e in (OURS, THEIRS)},
    }
    if options.part:
        parts[options.part]()
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    python = {OURS: Path(sys.executable), THEIRS: environment(options.folder)}
    for part in ("make", *(f"{p}-{e}" for p in ("train", "go-on") for e in python), "infer"):
        engine = OURS if part.endswith(OURS) else THEIRS
        command = [python[engine], __file__, options.folder, "--part", part]
        environ = os.environ | {"PYTHONPATH": str(ROOT / "adapters/python") * (engine == OURS)}
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{part} failed:\n{done.stderr}")
    sys.exit(0 if compare(options.folder) else 1)


if __name__ == "__main__":
    main()
