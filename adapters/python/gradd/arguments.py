"""Flattens the arguments of a call into a list.

This runs before every call, so it is a plain recursive walk without torch's pytree registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def leaves(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Everything but lists, tuples and mappings: tensors, None, numbers, objects."""
    return list(_walk((*args, *kwargs.values())))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and mappings, in order."""
    return [leaf for leaf in _walk((value,)) if isinstance(leaf, torch.Tensor)]


def _walk(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _walk(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _walk(value)
        else:
            yield value
