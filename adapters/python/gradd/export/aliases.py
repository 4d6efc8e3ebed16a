"""Which qualified names are one tensor: tied weights and tied buffers."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def alias_groups(module: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of parameter and buffer names that are one tensor; canonical name first.

    The canonical name is the one that named_parameters() gives. Names of one Parameter are one
    tensor, and so are buffers that view the same memory in the same way. Two Parameters with one
    memory (`a.data = b.data`) are two, each with a gradient of its own; a buffer is none of them,
    as it has none.
    """
    groups: dict[Hashable, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(tensor), []).append(name)
    for name, tensor in module.named_buffers(remove_duplicate=False):
        groups.setdefault(_memory(tensor), []).append(name)
    return tuple(tuple(g) for g in groups.values() if len(g) > 1)


def _memory(tensor: torch.Tensor) -> Hashable:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return id(tensor)
    return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
