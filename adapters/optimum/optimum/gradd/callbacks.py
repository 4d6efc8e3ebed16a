"""The callback through which ORTTrainer hears of events in Trainer's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from .trainer import ORTTrainer


class GraddCallback(TrainerCallback):
    """Completes the logged gradient norm once the optimizer's step has measured it."""

    def __init__(self, trainer: ORTTrainer) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.gradd_after_optimizer_step()
