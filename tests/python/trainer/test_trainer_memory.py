"""ORTTrainer under a memory budget: losses as without one, gradient checkpointing, batch sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradd import errors
from helpers.trainers.hugging_face import Tokens, losses, make_trainer, tiny_llama
from optimum.gradd import ORTTrainer

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("shared_daemon")]


def plan_of(trainer: ORTTrainer) -> Any:
    return trainer.gradd_explain()


def trained(folder: Path, **options: Any) -> ORTTrainer:
    trainer = make_trainer(
        "gradd", folder, tiny_llama(num_hidden_layers=4), max_steps=3, strict=True, **options
    )
    trainer.train()
    return trainer


def weights(trainer: ORTTrainer) -> list[torch.Tensor]:
    return [p.detach() for p in trainer.model.parameters()]


def test_a_budget_changes_no_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    whole = plan_of(plain).arena_bytes
    small = trained(tmp_path, memory_budget=str(int(0.7 * whole)))
    assert plan_of(small).arena_bytes <= 0.7 * whole
    assert plan_of(small).recomputed_bytes > 0 == plan_of(plain).recomputed_bytes
    assert losses(plain) == losses(small)
    for a, b in zip(weights(plain), weights(small), strict=True):
        assert torch.equal(a, b)


def test_gradient_checkpointing_computes_layers_again(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    again = trained(tmp_path, gradient_checkpointing=True)
    assert plan_of(again).arena_bytes < plan_of(plain).arena_bytes
    assert losses(plain) == losses(again)
    roomy = trained(tmp_path, gradient_checkpointing=True, memory_budget="1GiB")
    assert plan_of(roomy).recomputed_bytes == 0


def test_a_budget_finds_the_batch_size(tmp_path: Path) -> None:
    """Trainer halves the batch where memory is out; the budget is such a place."""
    fit = plan_of(trained(tmp_path, per_device_train_batch_size=2)).arena_bytes
    tight = {"memory_budget": str(fit // 2), "train_dataset": Tokens(64)}
    with pytest.raises(errors.OutOfMemoryError):
        trained(tmp_path, per_device_train_batch_size=16, **tight)
    found = trained(tmp_path, per_device_train_batch_size=16, auto_find_batch_size=True, **tight)
    assert plan_of(found).arena_bytes <= fit // 2
    assert found._train_batch_size < 16


def test_bad_budgets_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory_budget='2GB': expected bytes from 1"):
        make_trainer("gradd", tmp_path, memory_budget="2GB")
