"""FP16_Optimizer: checks for gradients that are not finite, all tensors at once.

It replaces methods of DeepSpeed's, Megatron's and Apex's optimizers for float16, which look at one
gradient after the other or keep gradients that could be dropped. Results are the same.
"""

from __future__ import annotations

import logging
import math
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

logger = logging.getLogger("gradd")


def all_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether no element is infinite or NaN; None counts as no element."""
    found = [t.detach() for t in tensors if t is not None and t.numel()]
    return not found or bool(torch.nn.utils.get_total_norm(found, math.inf).isfinite())


def FP16_Optimizer(optimizer: Any, **kwargs: Any) -> Any:
    """Speeds up an optimizer of another library that scales losses for float16.

    It is told by its methods, not by its class: DeepSpeed's ZeRO stages 1 and 2, also in the
    wrapper of accelerate, the FP16_Optimizer of Megatron-LM, and what Apex's amp.initialize()
    returned for O2.

    Args:
        optimizer: Any optimizer; one of another kind (those of torch, FusedAdam) stays as it is.
        kwargs: Functions of Megatron's ranks. Only its overflow check is replaced, which needs
            none.

    Returns:
        The same object.
    """
    target = optimizer
    if not _has(target, *_DEEPSPEED) and _has(getattr(target, "optimizer", None), *_DEEPSPEED):
        target = target.optimizer
    if hasattr(target, "_amp_stash"):
        replaced: dict[str, Callable[..., Any]] = {"zero_grad": _zero_grad_of_apex}
    elif _has(target, *_DEEPSPEED):
        replaced = dict(zip(_DEEPSPEED, (_overflow_of_params, _overflow_of_partition), strict=True))
    elif _has(target, "_check_overflow", "clip_master_grads"):
        replaced = {"_check_overflow": _overflow_of_groups}
    else:
        return optimizer
    for name, function in replaced.items():
        setattr(target, name, types.MethodType(function, target))
    logger.info("FP16_Optimizer: replaced %s of %s", ", ".join(replaced), type(target).__name__)
    return optimizer


_DEEPSPEED = ("has_overflow_serial", "has_overflow_partitioned_grads_serial")


def _has(optimizer: Any, *methods: str) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in methods)


def _overflow_of_params(self: Any, params: Any, is_grad_list: bool = False) -> torch.Tensor:
    return _flag(not all_finite(params if is_grad_list else (p.grad for p in params)))


def _overflow_of_partition(self: Any) -> torch.Tensor:
    kept = self.averaged_gradients  # of each group: a list, or nothing yet
    lists = kept.values() if isinstance(kept, dict) else kept
    return _flag(not all_finite(g for grads in lists if grads is not None for g in grads))


def _flag(value: bool) -> torch.Tensor:
    """What DeepSpeed asks for its `byte()`; in earlier versions, what it converts itself."""
    return torch.tensor([value], device="cpu")


def _overflow_of_groups(self: Any) -> bool:
    groups = (*self.fp16_groups, *self.fp32_from_fp32_groups)
    self.overflow = not all_finite(p.grad for group in groups for p in group)
    return self.overflow


def _zero_grad_of_apex(self: Any, set_to_none: bool = True) -> None:
    stash = self._amp_stash
    self._amp_lazy_init()
    for p in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params):
        if set_to_none or p.grad is None:
            p.grad = None
        else:
            p.grad.detach_().zero_()
    for p in stash.all_fp32_from_fp16_params:
        p.grad = None
