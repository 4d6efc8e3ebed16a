"""`fp16=True` as Trainer has it on a GPU: autocast to f16, a scaler of the loss, skipped steps.

accelerate takes fp16=True for plain f32 where there is no GPU. So the trainers here are given what
it sets up with one (`Accelerator.__init__`): native autocast and a GradScaler, here the CPU's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer

from helpers.trainers.hugging_face import Tokens, losses, make_trainer, norms

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("daemon")]

OPTIONS = {
    "train_dataset": Tokens(120),
    "fp16": True,
    "max_steps": 20,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "learning_rate": 3e-3,
}
OPTIMIZERS = ["adamw_torch", "adamw_ort_fused"]


def _train(kind: str, folder: Path, optim: str, **scaler: Any) -> Trainer:
    trainer = make_trainer(kind, folder, optim=optim, **OPTIONS)
    trainer.accelerator.native_amp = True
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", **scaler)
    trainer.train()
    if kind == "gradd":
        stats = trainer.gradd_stats()
        assert not stats["fallbacks"] and stats["forwards"] >= 40
    return trainer


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_training_with_a_scaler(tmp_path: Path, optim: str) -> None:
    pair = [_train(k, tmp_path, optim, init_scale=2.0**10) for k in ("torch", "gradd")]
    plain, ours = pair
    np.testing.assert_allclose(losses(ours), losses(plain), atol=5e-3)
    np.testing.assert_allclose(norms(ours), norms(plain), rtol=2e-2)
    assert losses(plain)[0] - losses(plain)[-1] > 0.1
    assert [t.accelerator.scaler.get_scale() for t in pair] == [2.0**10, 2.0**10]


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_skipped_step_moves_nothing(tmp_path: Path, optim: str) -> None:
    """Neither parameters nor the scheduler; the scale falls until gradients fit in f16, and rises
    again until they do not. A weight's gradient in f32 fits here where torch's, in f16, does not.
    """
    scaler = {"init_scale": 2.0**24, "growth_interval": 6}
    for kind in ("torch", "gradd"):
        trainer = _train(kind, tmp_path, optim, **scaler)
        log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        skipped = ~np.isfinite([entry["grad_norm"] for entry in log])
        assert skipped[:2].all() and 3 <= skipped.sum() <= 8, kind
        rates = np.array([entry["learning_rate"] for entry in log])
        np.testing.assert_array_equal(np.diff(rates) == 0, skipped[:-1], kind)
        runs = "".join("x" if s else "." for s in skipped).split("x")  # of steps that were made
        rises = sum(len(run) // scaler["growth_interval"] for run in runs)
        scale = trainer.accelerator.scaler.get_scale()
        assert scale == 2.0 ** (24 - skipped.sum() + rises), kind


def test_without_a_gpu_it_is_float32(tmp_path: Path) -> None:
    """As in Trainer."""
    plain, ours = (make_trainer(k, tmp_path, fp16=True, max_steps=4) for k in ("torch", "gradd"))
    for trainer in (plain, ours):
        trainer.train()
    np.testing.assert_allclose(losses(ours), losses(plain), atol=1e-5)
