"""Loss scales of ORTTrainer's mixed precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradd.legacy.trainer import TrainStepInfo


class LossScaler:
    """Base class; own scalers override update() and reset().

    Args:
        loss_scale: The factor of the loss before the backward.
    """

    def __init__(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale

    @property
    def loss_scale(self) -> float:
        """The factor of the next step; positive."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, loss_scale: float) -> None:
        if not loss_scale > 0:
            raise ValueError(f"loss_scale must be positive, got {loss_scale}")
        self._loss_scale = float(loss_scale)

    def reset(self) -> None:
        """Goes back to the state at the beginning."""
        raise NotImplementedError

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Called after each step of the optimizer.

        Args:
            train_step_info: `all_finite` tells whether all gradients of the step were finite.

        Returns:
            The scale of the next step.
        """
        raise NotImplementedError


class DynamicLossScaler(LossScaler):
    """Halves the scale at a gradient that is not finite, doubles it after a series of steps.

    Args:
        automatic_update: Whether train_step() calls update(); otherwise the script does.
        loss_scale: The first scale.
        up_scale_window: Steps with finite gradients until the scale is doubled.
        min_loss_scale: Lower limit.
        max_loss_scale: Upper limit.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self._first = self.loss_scale
        self._steps = 0

    def reset(self) -> None:
        self.loss_scale = self._first
        self._steps = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        self._steps = self._steps + 1 if train_step_info.all_finite else 0
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
        elif self._steps >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._steps = 0
        return self.loss_scale
