"""ORTTrainerOptions: a tree of settings with defaults, and what each of them does here."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch

from gradd.legacy.scalers import LossScaler
from gradd.legacy.schedules import LRScheduler

logger = logging.getLogger("gradd")

# Name -> default. A class in place of a default: None, or an instance of it.
_TREE: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": 1},
    "device": {"id": "", "mem_limit": 0},
    "distributed": {
        "world_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
        "pipeline_parallel": {
            "pipeline_parallel_size": 1,
            "num_pipeline_micro_batches": 1,
            "pipeline_cut_info_string": "",
            "sliced_schema": {},
            "sliced_axes": {},
            "sliced_tensor_names": [],
        },
        "allreduce_post_accumulation": False,
        "deepspeed_zero_optimization": {"stage": 0},
        "enable_adasum": False,
    },
    "lr_scheduler": LRScheduler,
    "mixed_precision": {"enabled": False, "loss_scaler": LossScaler},
    "graph_transformer": {
        "attn_dropout_recompute": False,
        "gelu_recompute": False,
        "transformer_layer_recompute": False,
        "number_recompute_layers": 0,
        "propagate_cast_ops_config": {},
    },
    "utils": {
        "frozen_weights": [],
        "grad_norm_clip": True,
        "memory_efficient_gradient": False,
        "invertible_layer_norm_gradient": False,
        "run_symbolic_shape_infer": False,
    },
    "debug": {
        "deterministic_compute": False,
        "check_model_export": False,
        "graph_save_paths": {
            "model_after_graph_transforms_path": "",
            "model_with_gradient_graph_path": "",
            "model_with_training_graph_path": "",
            "model_with_training_graph_after_optimization_path": "",
        },
    },
    "_internal_use": {
        "enable_internal_postprocess": True,
        "extra_postprocess": object,
        "onnx_opset_version": 14,
        "enable_onnx_contrib_ops": True,
    },
    "provider_options": {},
    "session_options": object,
}
# Free-form: what is in them is not looked at.
_OPEN = {"propagate_cast_ops_config", "provider_options", "sliced_schema", "sliced_axes"}
# What the steps of a training depend on; a change of any other option is named as without effect.
_USED = (
    *("batch.gradient_accumulation_steps", "device.id", "lr_scheduler", "mixed_precision.enabled"),
    *("mixed_precision.loss_scaler", "utils.frozen_weights", "utils.grad_norm_clip"),
    *("distributed.world_rank", "distributed.world_size", "distributed.local_rank"),
    *("distributed.data_parallel_size", "debug.deterministic_compute"),
    *("debug.check_model_export", "distributed.deepspeed_zero_optimization.stage"),
    *("distributed.horizontal_parallel_size", "distributed.enable_adasum"),
    *("distributed.pipeline_parallel.pipeline_parallel_size", "_internal_use.extra_postprocess"),
)
# Options that gradd does not have: the only values that they may have, and what to use.
_ALONE = "one process trains here: for several, put DistributedDataParallel around gradd.ORTModule"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "distributed.world_size": ((1,), _ALONE),
    "distributed.data_parallel_size": ((1,), _ALONE),
    "distributed.horizontal_parallel_size": ((1,), _ALONE),
    "distributed.pipeline_parallel.pipeline_parallel_size": ((1,), _ALONE),
    "distributed.deepspeed_zero_optimization.stage": ((0,), _ALONE),
    "distributed.enable_adasum": ((False,), _ALONE),
    "_internal_use.extra_postprocess": ((None,), "change the torch module: no ONNX model is kept"),
}


class ORTTrainerOptions(SimpleNamespace):
    """Settings of ORTTrainer, as nested attributes: `options.batch.gradient_accumulation_steps`.

    The important ones; docs/old-names.md lists what the others do.

    * `batch.gradient_accumulation_steps`: calls of train_step() for one step of the optimizer.
    * `device.id`: default `cuda` if there is one, else `cpu`.
    * `lr_scheduler`, `mixed_precision.enabled` (float16 autocast), `mixed_precision.loss_scaler`.
    * `utils.frozen_weights`: names of parameters that are not trained; `utils.grad_norm_clip`.

    Args:
        options: Nested dicts; what is left out has its default.

    Raises:
        ValueError: An unknown name, a value of another type, or something that gradd lacks.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        problems: list[str] = []
        tree = _merged(_TREE, {} if options is None else options, "", problems)
        super().__init__(**{k: _wrap(v, k) for k, v in tree.items()})
        given = dict(_leaves(tree, ""))
        for name, (allowed, instead) in _REFUSED.items():
            if given[name] not in allowed:
                problems.append(f"{name}={given[name]!r} is not supported; {instead}")
        if given["batch.gradient_accumulation_steps"] < 1:
            problems.append("batch.gradient_accumulation_steps must be at least 1")
        if self.mixed_precision.loss_scaler and not self.mixed_precision.enabled:
            problems.append("mixed_precision.loss_scaler needs mixed_precision.enabled")
        if problems:
            raise ValueError("invalid options: " + "; ".join(problems))
        defaults = dict(_leaves(_merged(_TREE, {}, "", []), ""))
        idle = [n for n, v in given.items() if n not in _USED and v != defaults[n]]
        if idle:
            logger.warning("ORTTrainerOptions: without effect here: %s", ", ".join(sorted(idle)))
        if not self.device.id:
            self.device.id = "cuda" if torch.cuda.is_available() else "cpu"


def _merged(tree: dict[str, Any], given: Any, path: str, problems: list[str]) -> dict[str, Any]:
    """The tree with the given values; what does not fit is added to the problems."""
    if not isinstance(given, dict):
        problems.append(f"{path.rstrip('.') or 'options'} must be a dict, got {given!r}")
        given = {}
    problems += [f"unknown option {path}{name}" for name in given if name not in tree]
    return {
        name: _value(default, given[name], path + name, problems)
        if name in given
        else _value(default, {} if isinstance(default, dict) else None, path + name, problems)
        for name, default in tree.items()
    }


def _value(default: Any, given: Any, path: str, problems: list[str]) -> Any:
    name = path.rpartition(".")[2]
    if isinstance(default, dict) and name not in _OPEN:
        return _merged(default, given, path + ".", problems)
    if isinstance(default, type):
        if given is not None and not isinstance(given, default):
            problems.append(f"{path} must be a {default.__name__}, got {given!r}")
        return given
    if given is None:
        return default.copy() if isinstance(default, (list, dict)) else default
    if type(given) is not type(default):
        problems.append(f"{path} must be {type(default).__name__}, got {given!r}")
        return default
    return given


def _wrap(value: Any, name: str) -> Any:
    if not isinstance(value, dict) or name in _OPEN:
        return value
    return SimpleNamespace(**{k: _wrap(v, k) for k, v in value.items()})


def _leaves(tree: dict[str, Any], path: str) -> list[tuple[str, Any]]:
    """Dotted names and values."""
    found = []
    for name, value in tree.items():
        inner = isinstance(value, dict) and name not in _OPEN
        found += _leaves(value, f"{path}{name}.") if inner else [(path + name, value)]
    return found
