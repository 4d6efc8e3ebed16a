"""Which qualified names are one tensor: tied weights, found by memory and not by identity."""

from __future__ import annotations

from typing import Any

import torch


def alias_groups(module: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter and buffer names that are one tensor; canonical name first.

    The canonical name is the one that named_parameters() gives. Two tensors are one if they
    view the same memory in the same way.
    """
    groups: dict[Any, list[str]] = {}
    named = list(module.named_parameters(remove_duplicate=False))
    named += list(module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        groups.setdefault(_identity(tensor), []).append(name)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)


def _identity(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
