"""`ORTTrainingArguments`: TrainingArguments, Optimum's additions for ORTTrainer, our switches.

Nothing of `TrainingArguments.__post_init__` is copied: the one value it would refuse (our
optimizer's name) is set aside while it runs. Arguments that gradd cannot honour are refused or
named, never silently dropped.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field

from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.utils.generic import ExplicitEnum

from .legacy import LegacyArguments

_LOG_LEVELS = ("VERBOSE", "INFO", "WARNING", "ERROR", "FATAL")


class ORTOptimizerNames(ExplicitEnum):
    """Optimizers that only ORTTrainer knows."""

    ADAMW_ORT_FUSED = "adamw_ort_fused"


@dataclass
class ORTTrainingArguments(LegacyArguments, TrainingArguments):
    """Arguments of `ORTTrainer`: all of `transformers.TrainingArguments` and the following.

    Args:
        optim: any name that TrainingArguments takes, or `adamw_ort_fused`: AdamW whose step (and
            gradient clipping) runs in the daemon on the shared parameters. With
            optim_args="master_weights=true" it keeps float32 copies of bfloat16 parameters; with
            "sparse_rows=true" it is lazy Adam for tables (see gradd.optim.FusedAdam).
        use_module_with_loss: compute label smoothing inside the captured graph, so that logits
            never leave the daemon.
        save_onnx: write every captured graph as an ONNX file, named after `onnx_prefix`.
        onnx_prefix: start of those file names; required with `save_onnx`.
        onnx_log_level: VERBOSE, INFO, WARNING, ERROR or FATAL.
        strict: raise instead of running in PyTorch what the daemon cannot run.
        memory_budget: limit of the activations and workspace of one batch's forward and backward,
            as "2GiB" or in bytes. The backward recomputes values that the forward does not keep.
            Without a budget `gradient_checkpointing` recomputes layers; with one it has no effect.

    Raises:
        ValueError: save_onnx without onnx_prefix, an unknown onnx_log_level, or a budget that is
            not a positive size.
    """

    # Redeclared: on a command line the parent's type would admit its own names only.
    optim: str = field(
        default=TrainingArguments.optim,
        metadata={"help": "An optimizer of TrainingArguments, or adamw_ort_fused."},
    )
    use_module_with_loss: bool | None = field(
        default=False, metadata={"help": "Compute label smoothing inside the captured graph."}
    )
    save_onnx: bool | None = field(
        default=False, metadata={"help": "Write the captured graphs as ONNX files."}
    )
    onnx_prefix: str | None = field(
        default=None, metadata={"help": "Prefix of the ONNX files, required with save_onnx."}
    )
    onnx_log_level: str | None = field(
        default="WARNING", metadata={"help": "VERBOSE, INFO, WARNING, ERROR or FATAL."}
    )
    strict: bool | None = field(
        default=False,
        metadata={"help": "Raise instead of falling back to PyTorch where gradd cannot run."},
    )
    memory_budget: str | None = field(
        default=None,
        metadata={"help": "The most that a batch may take for activations, as in 2GiB."},
    )

    keep_session: str | None = field(
        default=None,
        metadata={"help": "A name: the training outlives its process in the daemon."},
    )
    keep_alive: str | None = field(
        default="10m",
        metadata={"help": "How long it stays without a process: 90s, 10m, 2h, or -1."},
    )

    def __post_init__(self) -> None:
        self._map_legacy_arguments()
        self._check_onnx_arguments()
        self._check_memory_budget()
        if self.torch_compile_backend == "gradd":  # accelerate takes its own back ends only
            self.torch_compile = False  # this one is what ORTTrainer trains with
            self.torch_compile_backend = self.torch_compile_mode = None
        chosen = self.optim
        if chosen == ORTOptimizerNames.ADAMW_ORT_FUSED:
            self.optim = "adamw_torch"  # TrainingArguments accepts its own names only
        super().__post_init__()
        if chosen == ORTOptimizerNames.ADAMW_ORT_FUSED:
            self.optim = ORTOptimizerNames.ADAMW_ORT_FUSED
        self._drop_what_gradd_replaces()

    def _check_onnx_arguments(self) -> None:
        self.onnx_log_level = str(self.onnx_log_level).upper()
        if self.onnx_log_level not in _LOG_LEVELS:
            raise ValueError(
                f"onnx_log_level={self.onnx_log_level!r}: expected one of {', '.join(_LOG_LEVELS)}"
            )
        if self.save_onnx and not self.onnx_prefix:
            raise ValueError("save_onnx=True needs onnx_prefix, the start of the files' names")

    def _check_memory_budget(self) -> None:
        from gradd.memory.budget import parse_bytes

        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "memory_budget")

    def _drop_what_gradd_replaces(self) -> None:
        if self.use_liger_kernel and not gradd_is_disabled():
            warnings.warn(
                "ORTTrainingArguments: use_liger_kernel is ignored: graph capture cannot look into "
                "its kernels. The daemon fuses operators itself.",
                UserWarning,
                stacklevel=4,
            )
            self.use_liger_kernel = False


@dataclass
class ORTSeq2SeqTrainingArguments(ORTTrainingArguments, Seq2SeqTrainingArguments):
    """Arguments of `ORTSeq2SeqTrainer`: those of both parents."""


def gradd_is_disabled() -> bool:
    """True under GRADD_DISABLE=1: the trainers then behave as transformers' own, for bisecting."""
    return os.environ.get("GRADD_DISABLE", "").strip().lower() in ("1", "true", "yes", "on")
