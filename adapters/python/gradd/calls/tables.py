"""Finds the parameters that are tables of embeddings.

An optimizer gets parameters, not modules, so this module keeps weak references to wrapped modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

_wrapped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_KINDS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


def note(module: torch.nn.Module) -> None:
    """A module that is wrapped from now on."""
    _wrapped.add(module)


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


def among(params: Iterable[torch.Tensor]) -> set[int]:
    """Identities of those that are the weight of an embedding in a wrapped module."""
    modules = (m for wrapped in list(_wrapped) for m in wrapped.modules() if isinstance(m, _KINDS))
    weights = {id(p) for m in modules for n, p in _own(m) if n == "weight"}
    return {id(p) for p in params} & weights
