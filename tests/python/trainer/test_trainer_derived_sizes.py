"""Sizes that a model reads out of its arguments break no graph under a trainer either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, Trainer, TrainingArguments

from optimum.gradd import ORTTrainer, ORTTrainingArguments, accelerate

pytestmark = pytest.mark.usefixtures("daemon")


class Pictures(nn.Module):
    """Attends within each picture, whose rows and columns `grid` has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.patches, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.config = PretrainedConfig()

    def forward(
        self, pixels: torch.Tensor, grid: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss and the logits."""
        parts = torch.split(self.patches(pixels), (grid.prod(-1) // 2).tolist())
        rows = torch.stack([(torch.softmax(p @ p.T, -1) @ p).mean(0) for p in parts])
        logits = self.head(rows)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def batches() -> list[dict[str, torch.Tensor]]:
    """Two pictures each, of changing sizes."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(5):
        grid = torch.tensor([[2, 3 + i], [2, 2 + 2 * i]])
        rows = int(grid.prod(-1).sum()) // 2
        pixels = torch.randn(rows, 6, generator=generator)
        found.append({"pixels": pixels, "grid": grid, "labels": torch.tensor([i % 3, 1])})
    return found


def arguments(kind: type[TrainingArguments], folder: Path) -> Any:
    """One batch for each step, as it is."""
    return kind(
        str(folder), max_steps=5, per_device_train_batch_size=1, logging_steps=1, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", report_to=[], save_strategy="no",
        use_cpu=True,
    )  # fmt: skip


def given(kind: type[Trainer], folder: Path) -> Trainer:
    options = ORTTrainingArguments if issubclass(kind, ORTTrainer) else TrainingArguments
    return kind(
        Pictures(),
        arguments(options, folder),
        train_dataset=batches(),
        data_collator=lambda rows: rows[0],
    )


def one_graph(stats: dict[str, Any]) -> None:
    assert stats["in_torch"] == {}, stats
    assert stats["breaks"] == 0, stats
    assert stats["graphs"] <= 3, stats  # the first sizes, any sizes


@pytest.mark.parametrize(
    "made", [lambda f: given(ORTTrainer, f), lambda f: accelerate(given(Trainer, f))]
)
def test_a_trainer(made: Callable[[Path], Any], tmp_path: Path) -> None:
    plain, ours = given(Trainer, tmp_path / "plain"), made(tmp_path / "ours")
    for trainer in (plain, ours):
        trainer.train()
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, ours)]
    torch.testing.assert_close(
        torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        dict(ours.model.state_dict()), dict(plain.model.state_dict()), rtol=1e-4, atol=1e-5
    )
    one_graph(ours.gradd_stats())
