"""Trainer with `bf16=True` on a GPU: accelerate's autocast around forward(), outputs in f32.

accelerate takes a device from its environment. Of the Trainer only the question whether the GPU has
bf16 is answered here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, training_args

from helpers import emu_torch
from helpers.trainers.hugging_face import losses, make_trainer, norms

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]


def _evaluations(trainer: Trainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.nightly
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_ort_fused"])
def test_autocast_runs_in_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "emu")
    monkeypatch.setattr(training_args, "is_torch_bf16_gpu_available", lambda: True)
    options: dict[str, Any] = {"use_cpu": False, "bf16": True, "max_steps": 4, "optim": optim}
    options |= {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    pair = [make_trainer(kind, tmp_path, **options) for kind in ("torch", "gradd")]
    for trainer in pair:
        trainer.train()
        parameter = next(trainer.model.parameters())
        assert parameter.device.type == "emu" and parameter.dtype is torch.float32
    plain, ours = pair
    for found in (losses, norms, _evaluations):
        assert len(found(plain)) in (2, 4)
        np.testing.assert_allclose(found(ours), found(plain), rtol=1e-2)
    stats = ours.gradd_stats()
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {}
    assert stats["forwards"] >= 4 * 2 + 2
