"""Settings of optimizers for ORTTrainer, and the optimizers that they ask for.

A group's parameters are named as in `model.named_parameters()`. The learning rate is the same for
all groups.
"""

from __future__ import annotations

import enum
import logging
import math
import numbers
from typing import Any

import torch

from gradd.legacy.lamb import Lamb
from gradd.optim import AdamWMode, FusedAdam

logger = logging.getLogger("gradd")
Groups = list[dict[str, Any]] | tuple[()]


class OptimizerConfig:
    """Base of the settings.

    Args:
        name: `AdamOptimizer`, `LambOptimizer` or `SGDOptimizer`.
        params: Groups: dicts with `params`, a list of names, and settings that differ from
            `defaults`.
        defaults: Settings of all parameters that no group names; `lr` among them.

    Raises:
        ValueError: A setting is out of range, or a group has one that this optimizer lacks.
        TypeError: An argument has another type.
    """

    def __init__(self, name: str, params: Groups, defaults: dict[str, Any]) -> None:
        if name not in ("AdamOptimizer", "LambOptimizer", "SGDOptimizer"):
            raise ValueError(f"{name!r} is none of AdamOptimizer, LambOptimizer, SGDOptimizer")
        if not isinstance(params, (list, tuple)):
            raise TypeError(f"params must be a list of dicts, got {type(params).__name__}")
        if "lr" not in defaults:
            raise ValueError("defaults must contain 'lr'")
        self.name = name
        self.defaults = defaults
        self.lr = defaults["lr"]
        self.params = [self._complete(group) for group in params]
        for settings in (defaults, *self.params):
            _check(settings)

    def _complete(self, group: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise TypeError("a group of params must be a dict with a list of names, 'params'")
        if "lr" in group:
            raise ValueError("'lr' of a group is not supported: all groups have the same")
        if unknown := sorted(set(group) - set(self.defaults) - {"params"}):
            raise ValueError(f"a group has {unknown}, but {self.name} has {sorted(self.defaults)}")
        return {**self.defaults, **group}


class SGDConfig(OptimizerConfig):
    """torch.optim.SGD without momentum.

    Args:
        params: Must be empty.
        lr: Learning rate.
    """

    def __init__(self, params: Groups = (), lr: float = 0.001) -> None:
        if params:
            raise ValueError("'params' must be empty for SGDConfig")
        super().__init__("SGDOptimizer", params, {"lr": lr})


class AdamConfig(OptimizerConfig):
    """FusedAdam, behind clipping of the gradients' norm.

    Args:
        params: Groups by the names of parameters.
        lr: Learning rate.
        alpha: Decay of the first moment.
        beta: Decay of the second moment.
        lambda_coef: Weight decay.
        epsilon: Term in the denominator.
        max_norm_clip: Largest norm of all gradients together, unless `utils.grad_norm_clip` is off.
        do_bias_correction: Divide the moments by 1 - beta^t.
        weight_decay_mode: BEFORE_WEIGHT_UPDATE is torch's AdamW, AFTER_WEIGHT_UPDATE decays the
            updated weights; the same for all groups.
    """

    class DecayMode(enum.IntEnum):
        """When weight decay happens."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: Groups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        settings = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
            "weight_decay_mode": AdamConfig.DecayMode(weight_decay_mode),
        }
        super().__init__("AdamOptimizer", params, settings)
        vars(self).update({k: v for k, v in settings.items() if k != "lr"})
        if len({g["weight_decay_mode"] for g in (settings, *self.params)}) > 1:
            raise ValueError("weight_decay_mode must be the same for all groups")


class LambConfig(OptimizerConfig):
    """LAMB (lamb.py), behind clipping of the gradients' norm.

    Args:
        params: Groups by the names of parameters.
        lr: Learning rate.
        alpha: Decay of the first moment.
        beta: Decay of the second moment.
        lambda_coef: Weight decay.
        ratio_min: Lower limit of the trust ratio.
        ratio_max: Upper limit of the trust ratio.
        epsilon: Term in the denominator.
        max_norm_clip: Largest norm of all gradients together, unless `utils.grad_norm_clip` is off.
        do_bias_correction: Divide the moments by 1 - beta^t.
    """

    def __init__(
        self,
        params: Groups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        settings = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, settings)
        vars(self).update({k: v for k, v in settings.items() if k != "lr"})


def _check(settings: dict[str, Any]) -> None:
    for name in ("lr", "alpha", "beta", "lambda_coef", "epsilon", "max_norm_clip"):
        if not isinstance(settings.get(name, 0.0), numbers.Real):
            raise TypeError(f"{name!r} must be a number, got {settings[name]!r}")
        if name in settings and not settings[name] >= 0:
            raise ValueError(f"{name!r} must not be negative, got {settings[name]}")
    if not settings.get("max_norm_clip", 1.0) > 0:
        raise ValueError(f"'max_norm_clip' must be positive, got {settings['max_norm_clip']}")
    if not isinstance(settings.get("do_bias_correction", True), bool):
        raise TypeError("'do_bias_correction' must be True or False")


def make_optimizer(
    config: OptimizerConfig, named: dict[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of the parameters; each group has a `max_norm_clip` (SGD: None)."""
    chosen = {}
    for group in config.params:
        if unknown := [n for n in group["params"] if n not in named]:
            logger.warning("%s: no trainable parameter of the names %s", config.name, unknown)
        chosen.update({n: group for n in group["params"] if n in named})
    groups: list[dict[str, Any]] = []
    for settings in (config.defaults, *config.params):
        names = [n for n in named if chosen.get(n, config.defaults) is settings]
        if names:
            groups.append({"params": [named[n] for n in names], **_translated(settings)})
    if isinstance(config, AdamConfig):
        after = config.weight_decay_mode == AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        mode = AdamWMode.ADAMW_TRANSFORMERS if after else AdamWMode.ADAMW_TORCH
        return FusedAdam(groups, adam_w_mode=mode)
    return Lamb(groups) if isinstance(config, LambConfig) else torch.optim.SGD(groups)


def _translated(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings under the names that torch's optimizers use."""
    if "alpha" not in settings:
        return {"lr": settings["lr"], "max_norm_clip": None}
    kept = ("lr", "max_norm_clip", "ratio_min", "ratio_max")
    return {
        **{k: settings[k] for k in kept if k in settings},
        "betas": (settings["alpha"], settings["beta"]),
        "eps": settings["epsilon"],
        "weight_decay": settings["lambda_coef"],
        "bias_correction": settings["do_bias_correction"],
    }
