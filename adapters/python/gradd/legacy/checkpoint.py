"""The functions of onnxruntime.training.checkpoint, on files of torch.save()."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from gradd.legacy.trainer import ORTTrainer


def experimental_state_dict(
    ort_trainer: ORTTrainer, include_optimizer_state: bool = True
) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, and the moments as `Moment_1_<name>` and so on."""
    state = ort_trainer.state_dict()
    flat = dict(state["model"]["full_precision"])
    for name, own in state["optimizer"].items() if include_optimizer_state else ():
        flat.update({f"{key}_{name}": value for key, value in own.items()})
    return flat


def experimental_load_state_dict(
    ort_trainer: ORTTrainer, state_dict: dict[str, torch.Tensor], strict: bool = False
) -> None:
    """Loads what experimental_state_dict() gave."""
    keys = ("Moment_1_", "Moment_2_", "Update_Count_")
    model = {n: t for n, t in state_dict.items() if not n.startswith(keys)}
    optimizer: dict[str, Any] = {}
    for name, value in state_dict.items():
        for key in keys:
            if name.startswith(key):
                optimizer.setdefault(name.removeprefix(key), {})[key[:-1]] = value
    loaded = {"model": {"full_precision": model}}
    ort_trainer.load_state_dict({**loaded, "optimizer": optimizer} if optimizer else loaded, strict)


def experimental_save_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: str,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: dict[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes `<prefix>.ort.pt` into an existing folder: the state as `model`, and what is given."""
    state = experimental_state_dict(ort_trainer, include_optimizer_state)
    path = os.path.join(checkpoint_dir, f"{checkpoint_prefix}.ort.pt")
    torch.save({**(checkpoint_state_dict or {}), "model": state}, path)


def experimental_load_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: str,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> dict[str, Any]:
    """Loads such a file; returns what else was saved."""
    path = os.path.join(checkpoint_dir, f"{checkpoint_prefix}.ort.pt")
    state = torch.load(path, map_location="cpu", weights_only=True)
    experimental_load_state_dict(ort_trainer, state.pop("model"), strict)
    return state
