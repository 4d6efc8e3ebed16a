"""Hugging Face trainers whose forward and backward passes run in the gradd daemon.

    from optimum.gradd import ORTTrainer, ORTTrainingArguments

are drop-in replacements of `transformers.Trainer` and `TrainingArguments`. The same names are
served as `optimum.onnxruntime` for scripts written for ONNX Runtime Training. Imports are lazy:
nothing of torch or transformers is loaded before a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_WHERE = {
    "ORTTrainer": "trainer",
    "accelerate": "trainer",
    "ORTSeq2SeqTrainer": "trainer_seq2seq",
    "ORTTrainingArguments": "training_args",
    "ORTSeq2SeqTrainingArguments": "training_args",
    "ORTOptimizerNames": "training_args",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
