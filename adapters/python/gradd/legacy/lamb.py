"""LAMB, after You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lamb(torch.optim.Optimizer):
    """Adam whose update of each tensor has the length of the tensor, times the learning rate.

    With direction r = m / (sqrt(v) + eps) + weight_decay * w, a step is
    w -= lr * clamp(|w| / |r|, ratio_min, ratio_max) * r; the ratio is 1 where a norm is 0.

    Args:
        params: Parameters or groups, as for torch's optimizers.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Term in the denominator.
        weight_decay: Decay rate, part of the direction.
        bias_correction: Divide the moments by 1 - beta^t.
        ratio_min: Lower limit of the trust ratio.
        ratio_max: Upper limit of the trust ratio.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = False,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        (beta1, beta2), t = group["betas"], state["step"]
        m = state["exp_avg"].lerp_(p.grad, 1 - beta1)
        v = state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
        if group["bias_correction"]:
            m, v = m / (1 - beta1**t), v / (1 - beta2**t)
        direction = (m / (v.sqrt() + group["eps"])).add_(p, alpha=group["weight_decay"])
        norms = p.norm(), direction.norm()
        ratio = (norms[0] / norms[1]).clamp(group["ratio_min"], group["ratio_max"])
        ratio = torch.where((norms[0] > 0) & (norms[1] > 0), ratio, torch.ones_like(ratio))
        p.sub_(direction * (ratio * group["lr"]))
