"""gradd.train: training where the data are, with numpy alone.

    from gradd.train import CheckpointState, Module, Optimizer

    state = CheckpointState.load_checkpoint("checkpoint")
    module = Module("training_model.onnx", state, "eval_model.onnx")
    optimizer = Optimizer("optimizer_model.onnx", module)
    for inputs, labels in batches:
        loss = module(inputs, labels)
        optimizer.step()
        module.lazy_reset_grad()

The names and their behaviour are those of ONNX Runtime's training on the device. The files come
from `gradd.train.artifacts`, which needs the package onnx, or from ONNX Runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradd.train.library import TrainError
    from gradd.train.module import Module
    from gradd.train.optimizer import LinearLRScheduler, Optimizer
    from gradd.train.state import CheckpointState

__all__ = [
    "CheckpointState",
    "LinearLRScheduler",
    "Module",
    "Optimizer",
    "TrainError",
]  # and the modules artifacts and onnxblock, which need the package onnx

_HOMES = {
    "CheckpointState": "gradd.train.state",
    "LinearLRScheduler": "gradd.train.optimizer",
    "Module": "gradd.train.module",
    "Optimizer": "gradd.train.optimizer",
    "TrainError": "gradd.train.library",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if name in ("artifacts", "onnxblock"):
        return importlib.import_module(f"gradd.train.{name}")
    raise AttributeError(f"module 'gradd.train' has no attribute {name!r}")
