"""A forward that a script replaces, between two trainings or within one, is what trains then."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from optimum.gradd import ORTTrainer, ORTTrainingArguments

pytestmark = pytest.mark.usefixtures("daemon")
Run = tuple[list[float], dict[str, torch.Tensor], Trainer]


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without self-checks, which would hide a fault behind a fallback."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")


class Net(nn.Module):
    """Classifies rows of six features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)
        self.config = PretrainedConfig()  # Trainer asks it, to smooth labels

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The logits, after the loss if there are labels."""
        logits = self.head(torch.relu(self.body(x)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def other(self: Net, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Another forward of the same module."""
    logits = self.head(torch.tanh(self.body(x))) * 3
    return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def on_the_instance(model: nn.Module) -> None:
    """As a patch of one model does."""
    model.forward = types.MethodType(other, model)


def on_the_class(model: nn.Module) -> None:
    """As libraries do that patch a kind of models."""
    type(model).forward = other  # type: ignore[assignment]


def around_it(model: nn.Module) -> None:
    """With the former one inside."""
    former = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        found = former(*args, **kwargs)
        return {**found, "loss": found["loss"] * 2}

    model.forward = doubled


def of_a_child(model: nn.Module) -> None:
    """Of a layer, which Dynamo compares."""
    body = model.body
    model.body.forward = lambda x: nn.functional.linear(x, body.weight) * 2


class ByParts(Trainer):
    """Asks the children, not the model."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Of logits that two children make."""
        logits = model.head(torch.relu(model.body(inputs["x"])))
        return nn.functional.cross_entropy(logits, inputs["labels"])


def trainer_of(kind: type[Trainer], folder: Path, callback: Any = None, **given: Any) -> Trainer:
    """A trainer of a new model of a class of its own, for three steps of four rows."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 6, generator=generator), torch.arange(12) % 3
    arguments = ORTTrainingArguments if issubclass(kind, ORTTrainer) else TrainingArguments
    args = arguments(
        str(folder), max_steps=3, per_device_train_batch_size=4, logging_steps=1, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", report_to=[], save_strategy="no",
        use_cpu=True, **given,
    )  # fmt: skip
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    model = type("Net", (Net,), {})()
    return kind(model, args, train_dataset=rows, callbacks=[callback] if callback else None)


def result(trainer: Trainer, losses: list[float]) -> Run:
    """What is compared."""
    return losses, dict(trainer.model.state_dict()), trainer


def losses_of(trainer: Trainer) -> list[float]:
    """Those of the last training, step by step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check(plain: Run, ours: Run) -> None:
    """Equal losses and parameters, and nothing in PyTorch."""
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[1], plain[1], rtol=1e-5, atol=1e-6)
    stats = ours[2].gradd_stats()  # type: ignore[attr-defined]
    assert stats["in_torch"] == {}, stats
    assert stats["forwards"] >= len(plain[0]), stats


@pytest.mark.parametrize("replace", [on_the_instance, on_the_class, around_it, of_a_child])
def test_between_two_trainings(replace: Callable[[nn.Module], None], tmp_path: Path) -> None:
    def run(kind: type[Trainer]) -> Run:
        trainer = trainer_of(kind, tmp_path / kind.__name__)
        trainer.train()
        first = losses_of(trainer)
        replace(trainer.model)  # type: ignore[arg-type]
        trainer.train()
        return result(trainer, first + losses_of(trainer))

    check(run(Trainer), run(ORTTrainer))


@pytest.mark.parametrize("replace", [on_the_class, around_it, of_a_child])
def test_within_a_training(replace: Callable[[nn.Module], None], tmp_path: Path) -> None:
    class Replaces(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            if state.global_step == 1:
                replace(model)

    def run(kind: type[Trainer]) -> Run:
        trainer = trainer_of(kind, tmp_path / kind.__name__, Replaces())
        trainer.train()
        return result(trainer, losses_of(trainer))

    check(run(Trainer), run(ORTTrainer))


def test_of_a_part_that_the_loss_calls(tmp_path: Path) -> None:
    class OrtByParts(ORTTrainer):
        compute_loss = ByParts.compute_loss

    def run(kind: type[Trainer]) -> Run:
        trainer = trainer_of(kind, tmp_path / kind.__name__)
        trainer.train()
        first = losses_of(trainer)
        of_a_child(trainer.model)  # type: ignore[arg-type]
        trainer.train()
        return result(trainer, first + losses_of(trainer))

    plain, ours = run(ByParts), run(OrtByParts)
    assert plain[0][0] != plain[0][3]
    check(plain, ours)


@pytest.mark.parametrize("smoother", [LabelSmoother(epsilon=0.5), None])
def test_a_smoothing_in_the_graph(smoother: LabelSmoother | None, tmp_path: Path) -> None:
    def run(kind: type[Trainer], **given: Any) -> Run:
        trainer = trainer_of(kind, tmp_path / kind.__name__, label_smoothing_factor=0.1, **given)
        trainer.train()
        first = losses_of(trainer)
        trainer.label_smoother = smoother
        trainer.train()
        return result(trainer, first + losses_of(trainer))

    check(run(Trainer), run(ORTTrainer, use_module_with_loss=True))
