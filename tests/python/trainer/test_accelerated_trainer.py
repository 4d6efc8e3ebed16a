"""`accelerate(trainer)`: a trainer of any class made from Trainer trains in the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from gradd import ORTModule, errors
from optimum.gradd import ORTTrainer, accelerate
from optimum.gradd.daemon_training import DaemonTraining

pytestmark = pytest.mark.usefixtures("daemon")


class Classifier(nn.Module):
    """Scores alone: the loss is the trainer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Rows of six features."""
        return {"logits": self.layers(x)}


class Smoothed(Trainer):
    """A loss and an optimizer of its own, as subclasses of Trainer have them."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Cross-entropy in which classes count differently."""
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 0.5])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], weight)
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """Plain gradient descent."""
        return torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}


class ChoosesByItself(Smoothed):
    """The choice of the optimizer reads the trainer, as that of sentence-transformers does."""

    rate = 0.1

    def get_optimizer_cls_and_kwargs(  # type: ignore[override]
        self, args: Any, model: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Plain gradient descent."""
        return torch.optim.SGD, {"lr": self.rate, "momentum": 0.9}


def _trainer(folder: Path, model: nn.Module | None = None, kind: type = Smoothed) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 6, generator=generator)
    rows = [{"x": row, "labels": int(row[0] > 0) + int(row[1] > 0)} for row in x]
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return kind(model=model or Classifier(), args=args, train_dataset=rows)


def _losses(trainer: Any) -> list[float]:
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    ("kind", "wrapped"), [(Smoothed, False), (Smoothed, True), (ChoosesByItself, False)]
)
def test_a_subclass_of_trainer_keeps_its_loss_and_its_optimizer(
    tmp_path: Path, kind: type, wrapped: bool
) -> None:
    expected = _losses(_trainer(tmp_path))
    model = Classifier()
    trainer = _trainer(tmp_path, ORTModule(model) if wrapped else model, kind)
    assert accelerate(trainer) is trainer and accelerate(trainer) is trainer
    assert isinstance(trainer, kind) and type(trainer).__name__ == kind.__name__
    torch.testing.assert_close(_losses(trainer), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    stats = trainer.gradd_stats()
    assert stats["forwards"] >= 4 and stats["in_torch"] == {}
    assert trainer.model is model
    assert "forward" not in vars(model)  # given back


def test_what_cannot_be_accelerated_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="transformers.Trainer, got Linear"):
        accelerate(nn.Linear(1, 1))  # type: ignore[type-var]
    trainer = _trainer(tmp_path)
    trainer.args.torch_compile = True
    with pytest.raises(ValueError, match="torch_compile"):
        accelerate(trainer)
    assert type(trainer) is Smoothed  # as it was


def test_options_of_the_daemon(tmp_path: Path) -> None:
    trainer = accelerate(accelerate(_trainer(tmp_path), strict=True, memory_budget="1B"))
    with pytest.raises(errors.OutOfMemoryError):
        trainer.train()
    assert len(_losses(accelerate(_trainer(tmp_path), strict=True, memory_budget="1GiB"))) == 4


def test_an_orttrainer_stays_as_it_is(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, kind=ORTTrainer)
    assert type(accelerate(trainer)) is ORTTrainer
    assert sum("Gradd" in type(c).__name__ for c in trainer.callback_handler.callbacks) == 1


def test_it_may_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_DISABLE", "1")
    expected = _losses(_trainer(tmp_path))
    trainer = accelerate(_trainer(tmp_path))
    assert _losses(trainer) == expected and trainer.gradd_stats() == {}


@pytest.mark.quick
def test_names_of_the_trainer_behind_are_its_own() -> None:
    """TRL's trainers keep a `_metrics` of their own."""
    added = {name for name in vars(DaemonTraining) if not hasattr(Trainer, name)}
    added -= {name for name in added if name.startswith(("__", "gradd_", "_gradd_"))}
    assert added == {"get_ort_optimizer_cls_and_kwargs"}, "Optimum's; all others say whose they are"
