"""Backwards that PyTorch itself refuses: a captured graph would have gradients all the same.

A value that a node saved for its backward may be written afterwards, and some operators have no
derivative. Both show in the graph of an eager forward. What its nodes save is not kept: the version
at that time is enough, and an alias without memory that shares the counter of versions.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gradd.export.functions import nodes_of

_looked = threading.local()


class Saved:
    """Stands for a tensor that a node saved, without its memory."""

    __slots__ = ("_counter", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        with _disable_current_modes():
            self._counter = tensor.detach()
            self._counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._version = tensor._version

    def is_overwritten(self) -> bool:
        """Whether the tensor, or one that shares its memory, was written since."""
        return self._counter._version != self._version

    def tensor(self) -> torch.Tensor:
        """For the node that asks for it."""
        found = getattr(_looked, "found", None)
        if found is None:
            raise RuntimeError("forward() runs a backward of its own, for which nothing was kept")
        found.append(self)
        return torch.empty(0)


def hooks() -> contextlib.AbstractContextManager:
    """Nodes that are made in this context save Saved objects."""
    return torch.autograd.graph.saved_tensors_hooks(Saved, Saved.tensor)


def refusal(outputs: Iterable[torch.Tensor]) -> str | None:
    """Why PyTorch would refuse the backward of these results, or None.

    Args:
        outputs: Of a forward that ran under hooks().
    """
    for node in nodes_of(outputs):
        if node.name().endswith("::NotImplemented"):
            return _missing(node)
        if any(saved.is_overwritten() for saved in _saved(node)):
            return (
                f"a value that the backward of {_operator(node)} needs is written in place after "
                "it; write to a clone()"
            )
    return None


def _saved(node: Any) -> list[Saved]:
    _looked.found = found = []
    try:
        for name in _names(type(node)):
            with contextlib.suppress(RuntimeError):
                getattr(node, name)
    finally:
        _looked.found = None
    return found


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_"))


def _operator(node: Any) -> str:
    """relu for ReluBackward0."""
    return node.name().rpartition("::")[2].partition("Backward")[0].lower()


def _missing(node: Any) -> str:
    try:
        node(torch.empty(0))
    except RuntimeError as error:  # NotImplementedError is one
        return str(error)
    return "the derivative of an operator is not implemented"
