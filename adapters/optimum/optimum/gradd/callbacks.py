"""The callback through which a trainer hears of events in Trainer's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from .daemon_training import DaemonTraining


class GraddCallback(TrainerCallback):
    """Notes of a kept session go before a step; behind it the gradient norm is known."""

    def __init__(self, trainer: DaemonTraining) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.gradd_before_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.gradd_after_optimizer_step()
