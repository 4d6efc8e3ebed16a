"""Learning rates by the number of optimizer steps, for ORTTrainer.

All start at 0 and rise to the optimizer's rate during the first `warmup` of `total_steps`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradd.legacy.trainer import TrainStepInfo


class LRScheduler:
    """Base class; own schedules override get_lr()."""

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def step(self, train_step_info: TrainStepInfo) -> list[float]:
        """The learning rate of this step, which get_last_lr() then returns."""
        self._last_lr = self.get_lr(train_step_info)
        return self._last_lr

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """A list of one learning rate.

        Args:
            train_step_info: Has `optimization_step`, the optimizer's steps so far, and
                `optimizer_config`, whose `lr` is the rate to start from.
        """
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        return self._last_lr


class _Warmup(LRScheduler):
    """A factor of the rate: it rises with the steps of the warm-up, then it is decay()."""

    def __init__(self, total_steps: int, warmup: float = 0.002) -> None:
        super().__init__()
        if not isinstance(total_steps, int) or total_steps <= 0:
            raise ValueError(f"total_steps must be a positive number, got {total_steps!r}")
        if not 0 <= warmup < 1:
            raise ValueError(f"warmup is a share of the steps, at least 0 and below 1: {warmup}")
        self.total_steps = total_steps
        self.warmup = warmup
        self.warmup_steps = warmup * total_steps

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        step, base = train_step_info.optimization_step, train_step_info.optimizer_config.lr
        if step < self.warmup_steps:
            return [base * step / max(1.0, self.warmup_steps)]
        return [self.decay(step, base)]

    def decay(self, step: int, base: float) -> float:
        """The rate after the warm-up, which began at `base`."""
        raise NotImplementedError

    def _done(self, step: int) -> float:
        """Share of the steps behind the warm-up that are done."""
        return (step - self.warmup_steps) / max(1.0, self.total_steps - self.warmup_steps)


class ConstantWarmupLRScheduler(_Warmup):
    """A constant rate.

    Args:
        total_steps: Optimizer steps of the training.
        warmup: Share of them until the rate is reached.
    """

    def decay(self, step: int, base: float) -> float:
        return base


class CosineWarmupLRScheduler(_Warmup):
    """A cosine from the rate to 0.

    Args:
        total_steps: Optimizer steps of the training.
        cycles: Waves of the cosine; 0.5 falls to 0 once.
        warmup: Share of the steps until the rate is reached.
    """

    def __init__(self, total_steps: int, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        if not cycles > 0:
            raise ValueError(f"cycles must be positive, got {cycles}")
        self.cycles = cycles

    def decay(self, step: int, base: float) -> float:
        wave = math.cos(2 * math.pi * self.cycles * self._done(step))
        return base * max(0.0, (1 + wave) / 2)


class LinearWarmupLRScheduler(_Warmup):
    """A straight line from the rate to 0.

    Args:
        total_steps: Optimizer steps of the training.
        warmup: Share of them until the rate is reached.
    """

    def decay(self, step: int, base: float) -> float:
        left = (self.total_steps - step) / max(1.0, self.total_steps - self.warmup_steps)
        return base * max(0.0, left)


class PolyWarmupLRScheduler(_Warmup):
    """A polynomial from the rate to `lr_end`.

    Args:
        total_steps: Optimizer steps of the training.
        lr_end: Rate at the end and after it; below the optimizer's.
        power: Of the polynomial.
        warmup: Share of the steps until the rate is reached.
    """

    def __init__(
        self, total_steps: int, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        if lr_end < 0 or power < 0:
            raise ValueError(f"lr_end and power must not be negative, got {lr_end} and {power}")
        self.lr_end = lr_end
        self.power = power

    def decay(self, step: int, base: float) -> float:
        if not base > self.lr_end:
            raise ValueError(f"lr_end ({self.lr_end}) must be below the optimizer's lr ({base})")
        if step > self.total_steps:
            return self.lr_end
        return (base - self.lr_end) * (1 - self._done(step)) ** self.power + self.lr_end
