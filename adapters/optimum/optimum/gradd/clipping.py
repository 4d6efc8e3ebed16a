"""Whether the step of `FusedAdam` clips gradients, in place of Trainer, and to which norm."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from .callbacks import GraddCallback

_BETWEEN = "on_pre_optimizer_step"  # of a callback


class ArgumentsLimit(float):
    """The `max_grad_norm` of an optimizer that has that of the trainer's arguments at the time.

    0: Trainer clips, or nothing does.
    """


def by_step(optimizer: Any, model: nn.Module, wanted: float | None, callbacks: list[Any]) -> bool:
    """Decides before each step whether that does all that Trainer would; sets its limit then.

    It does not where a callback comes between, which gets clipped gradients and may change them, or
    where Trainer's norm is that of other gradients than those of the optimizer. An optimizer with a
    limit of its own keeps it; Trainer clips in addition if the arguments have a lower one.

    Args:
        optimizer: Without accelerate's wrapper.
        model: Whose gradients Trainer clips.
        wanted: `max_grad_norm` of the arguments.
        callbacks: Those of the trainer.
    """
    limit, most = getattr(optimizer, "max_grad_norm", None), wanted or 0
    follows = isinstance(limit, ArgumentsLimit)
    if not limit and not follows:
        return False
    clips = most > 0 if follows else not 0 < most < limit
    clips = clips and not any(map(_comes_between, callbacks)) and _has_all(optimizer, model)
    if follows and clips:
        optimizer.max_grad_norm = ArgumentsLimit(most)
    return clips


def leave_out(optimizer: Any) -> None:
    """The next step does not clip, where the arguments decide that."""
    if isinstance(getattr(optimizer, "max_grad_norm", None), ArgumentsLimit):
        optimizer.max_grad_norm = ArgumentsLimit(0)


def _comes_between(callback: TrainerCallback) -> bool:
    """Whether it does something after gradients are clipped and before the optimizer's step."""
    own = getattr(callback, _BETWEEN, None)
    names = (getattr(TrainerCallback, _BETWEEN), getattr(GraddCallback, _BETWEEN))
    return getattr(own, "__func__", own) not in names


def _has_all(optimizer: Any, model: nn.Module) -> bool:
    """Whether the optimizer steps with the gradients of the model and no others."""
    stepped = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
    return stepped == {id(p) for p in model.parameters() if p.grad is not None}
