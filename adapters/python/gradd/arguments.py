"""Flattens the arguments of a call into a list.

This runs before every call, so it is a plain recursive walk without torch's pytree registry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def leaves(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Everything but lists, tuples and mappings: tensors, None, numbers, objects."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            _walk((value,), found)
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and mappings, in order."""
    return [leaf for leaf in leaves((value,), {}) if isinstance(leaf, torch.Tensor)]


def _walk(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            _walk(value.values(), found)
        elif isinstance(value, (list, tuple)):
            _walk(value, found)
        else:
            found.append(value)
