"""Arguments of earlier releases of transformers and Optimum that ORTTrainingArguments still takes.

Scripts written for Optimum's ORTTrainer pass names that today's TrainingArguments refuses. Each
has a row here: either the argument that replaced it, or the reason why it has no effect any more.
A script keeps running and every such argument is named once in a FutureWarning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Old name -> (new name, how the value changes). The old field is emptied once it has been mapped,
# so that a copy of the arguments (dataclasses.replace) does not map it a second time.
_MAPPED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "evaluation_strategy": ("eval_strategy", lambda v: v),
    # 1 would be one step
    "warmup_ratio": ("warmup_steps", lambda v: min(float(v), math.nextafter(1.0, 0.0))),
    "no_cuda": ("use_cpu", bool),
    "use_mps_device": ("use_cpu", lambda v: not v),
    "per_gpu_train_batch_size": ("per_device_train_batch_size", int),
    "per_gpu_eval_batch_size": ("per_device_eval_batch_size", int),
    "group_by_length": (
        "train_sampling_strategy",
        lambda _: "group_by_length",
    ),
    "adafactor": ("optim", lambda _: "adafactor"),
    "push_to_hub_model_id": ("hub_model_id", str),
    "push_to_hub_token": ("hub_token", str),
    "include_tokens_per_second": ("include_num_input_tokens_seen", bool),
    "include_inputs_for_metrics": ("include_for_metrics", lambda _: ["inputs"]),
}

# Old name -> why it has no effect.
_IGNORED: dict[str, str] = {
    "overwrite_output_dir": "the output folder is never emptied",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "save_safetensors": "checkpoints are always written as safetensors",
    "jit_mode_eval": "TorchScript evaluation is gone",
    "use_ipex": "Intel's extension for PyTorch is gone",
    "fp16_opt_level": "apex is gone; use bf16=True",
    "fp16_backend": "apex is gone; use bf16=True",
    "half_precision_backend": "apex is gone; use bf16=True",
    "tpu_num_cores": "gradd does not train on TPUs",
    "tpu_metrics_debug": "gradd does not train on TPUs",
    "past_index": "transformers dropped it",
    "fsdp_min_num_params": "ORTTrainer does not train under FSDP",
    "fsdp_transformer_layer_cls_to_wrap": "ORTTrainer does not train under FSDP",
    "use_legacy_prediction_loop": "transformers dropped it",
    "push_to_hub_organization": "use hub_model_id='organisation/name'",
    "mp_parameters": "gradd does not train on SageMaker model parallelism",
    "torchdynamo": "gradd captures with TorchDynamo in any case",
    "ray_scope": "transformers dropped it",
}

_MAPPED_OPTIMIZERS = {"adamw_hf": "adamw_torch"}


def _old(help_: str) -> Any:
    return field(default=None, metadata={"help": f"Deprecated. {help_}"})


def _old_flag(help_: str) -> Any:
    # HfArgumentParser makes a flag without a value only of a field whose default is a bool.
    return field(default=False, metadata={"help": f"Deprecated. {help_}"})


@dataclass
class LegacyArguments:
    """The old names as fields, so that they also work on a command line (HfArgumentParser)."""

    evaluation_strategy: str | None = _old("Use eval_strategy.")
    warmup_ratio: float | None = _old("Use warmup_steps, which takes a ratio below 1.")
    no_cuda: bool | None = _old_flag("Use use_cpu.")
    use_mps_device: bool | None = _old_flag("The device is chosen by itself; use_cpu turns it off.")
    per_gpu_train_batch_size: int | None = _old("Use per_device_train_batch_size.")
    per_gpu_eval_batch_size: int | None = _old("Use per_device_eval_batch_size.")
    group_by_length: bool | None = _old_flag("Use train_sampling_strategy=group_by_length.")
    adafactor: bool | None = _old_flag("Use optim=adafactor.")
    push_to_hub_model_id: str | None = _old("Use hub_model_id.")
    push_to_hub_token: str | None = _old("Use hub_token.")
    include_tokens_per_second: bool | None = _old_flag("Use include_num_input_tokens_seen.")
    include_inputs_for_metrics: bool | None = _old_flag("Use include_for_metrics=inputs.")
    overwrite_output_dir: bool | None = _old_flag("No effect.")
    logging_dir: str | None = _old("No effect.")
    save_safetensors: bool | None = _old_flag("No effect.")
    jit_mode_eval: bool | None = _old_flag("No effect.")
    use_ipex: bool | None = _old_flag("No effect.")
    fp16_opt_level: str | None = _old("No effect.")
    fp16_backend: str | None = _old("No effect.")
    half_precision_backend: str | None = _old("No effect.")
    tpu_num_cores: int | None = _old("No effect.")
    tpu_metrics_debug: bool | None = _old_flag("No effect.")
    past_index: int | None = _old("No effect.")
    fsdp_min_num_params: int | None = _old("No effect.")
    fsdp_transformer_layer_cls_to_wrap: str | None = _old("No effect.")
    use_legacy_prediction_loop: bool | None = _old_flag("No effect.")
    push_to_hub_organization: str | None = _old("No effect.")
    mp_parameters: str | None = _old("No effect.")
    torchdynamo: str | None = _old("No effect.")
    ray_scope: str | None = _old("No effect.")

    def _map_legacy_arguments(self) -> None:
        """Moves old arguments to their successors; names each one that was given."""
        for old, (new, convert) in _MAPPED.items():
            value = getattr(self, old)
            if value in (None, False):
                continue
            setattr(self, old, False if isinstance(value, bool) else None)
            if old == "warmup_ratio" and self.warmup_steps:  # as it was: steps win
                _warn("`warmup_ratio` has no effect: warmup_steps is given")
                continue
            converted = convert(value)
            if old == "include_inputs_for_metrics":
                converted = [*self.include_for_metrics, *converted]
            setattr(self, new, converted)
            _warn(f"`{old}` is now `{new}`: taken as {new}={converted!r}")
        for old, reason in _IGNORED.items():
            if getattr(self, old) not in (None, False):
                _warn(f"`{old}` has no effect: {reason}")
        if self.optim in _MAPPED_OPTIMIZERS:
            new_optim = _MAPPED_OPTIMIZERS[self.optim]
            _warn(f"optim={self.optim!r} is gone: taken as {new_optim!r}, the same algorithm")
            self.optim = new_optim


def _warn(text: str) -> None:
    warnings.warn(f"ORTTrainingArguments: {text}.", FutureWarning, stacklevel=5)
