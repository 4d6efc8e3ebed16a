"""Helpers that scripts for ONNX Runtime Training import from `optimum.onnxruntime.utils`."""

from __future__ import annotations

from importlib.util import find_spec


def is_onnxruntime_training_available() -> bool:
    """True where `ORTTrainer` can train: gradd's client package is installed."""
    return find_spec("gradd") is not None
