"""Arguments of earlier releases of transformers and Optimum that ORTTrainingArguments still takes.

Scripts written for Optimum's ORTTrainer pass names that today's TrainingArguments refuses. Each
has a row here: either the argument that replaced it, or the reason why it has no effect any more.
A script keeps running and every such argument is named once in a FutureWarning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any

# Old name -> its type, the new name, how the value changes. The old field is emptied once it has
# been mapped, so that a copy of the arguments (dataclasses.replace) does not map it a second time.
_MAPPED: dict[str, tuple[type, str, Callable[[Any], Any]]] = {
    "evaluation_strategy": (str, "eval_strategy", lambda v: v),
    # 1 would be one step
    "warmup_ratio": (float, "warmup_steps", lambda v: min(float(v), math.nextafter(1.0, 0.0))),
    "no_cuda": (bool, "use_cpu", bool),
    "use_mps_device": (bool, "use_cpu", lambda v: not v),
    "per_gpu_train_batch_size": (int, "per_device_train_batch_size", int),
    "per_gpu_eval_batch_size": (int, "per_device_eval_batch_size", int),
    "group_by_length": (bool, "train_sampling_strategy", lambda _: "group_by_length"),
    "adafactor": (bool, "optim", lambda _: "adafactor"),
    "push_to_hub_model_id": (str, "hub_model_id", str),
    "push_to_hub_token": (str, "hub_token", str),
    "include_tokens_per_second": (bool, "include_num_input_tokens_seen", bool),
    "include_inputs_for_metrics": (bool, "include_for_metrics", lambda _: ["inputs"]),
}

# Old name -> its type, why it has no effect.
_IGNORED: dict[str, tuple[type, str]] = {
    "overwrite_output_dir": (bool, "the output folder is never emptied"),
    "logging_dir": (str, "set the environment variable TENSORBOARD_LOGGING_DIR"),
    "save_safetensors": (bool, "checkpoints are always written as safetensors"),
    "jit_mode_eval": (bool, "TorchScript evaluation is gone"),
    "use_ipex": (bool, "Intel's extension for PyTorch is gone"),
    "fp16_opt_level": (str, "apex is gone; use bf16=True"),
    "fp16_backend": (str, "apex is gone; use bf16=True"),
    "half_precision_backend": (str, "apex is gone; use bf16=True"),
    "tpu_num_cores": (int, "gradd does not train on TPUs"),
    "tpu_metrics_debug": (bool, "gradd does not train on TPUs"),
    "past_index": (int, "transformers dropped it"),
    "fsdp_min_num_params": (int, "ORTTrainer does not train under FSDP"),
    "fsdp_transformer_layer_cls_to_wrap": (str, "ORTTrainer does not train under FSDP"),
    "use_legacy_prediction_loop": (bool, "transformers dropped it"),
    "push_to_hub_organization": (str, "use hub_model_id='organisation/name'"),
    "mp_parameters": (str, "gradd does not train on SageMaker model parallelism"),
    "torchdynamo": (str, "gradd captures with TorchDynamo in any case"),
    "ray_scope": (str, "transformers dropped it"),
}

_MAPPED_OPTIMIZERS = {"adamw_hf": "adamw_torch"}


def _old(name: str, kind: type, help_: str) -> tuple[str, Any, Any]:
    # HfArgumentParser makes a flag without a value only of a field whose default is a bool.
    default = False if kind is bool else None
    return name, kind | None, field(default=default, metadata={"help": f"Deprecated. {help_}"})


_FIELDS = [_old(name, kind, f"Use {new}.") for name, (kind, new, _) in _MAPPED.items()]
_FIELDS += [_old(name, kind, "No effect.") for name, (kind, _) in _IGNORED.items()]


class LegacyArguments(make_dataclass("_Old", _FIELDS)):  # type: ignore[misc]
    """The old names as fields, so that they also work on a command line (HfArgumentParser)."""

    def _map_legacy_arguments(self) -> None:
        """Moves old arguments to their successors; names each one that was given."""
        for old, (_, new, convert) in _MAPPED.items():
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
        for old, (_, reason) in _IGNORED.items():
            if getattr(self, old) not in (None, False):
                _warn(f"`{old}` has no effect: {reason}")
        if self.optim in _MAPPED_OPTIMIZERS:
            new_optim = _MAPPED_OPTIMIZERS[self.optim]
            _warn(f"optim={self.optim!r} is gone: taken as {new_optim!r}, the same algorithm")
            self.optim = new_optim


def _warn(text: str) -> None:
    warnings.warn(f"ORTTrainingArguments: {text}.", FutureWarning, stacklevel=5)
