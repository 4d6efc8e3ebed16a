"""Hooks of saved tensors, which a user may have set around a call (a checkpoint has some)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _same(saved: Any) -> Any:
    return saved


@contextlib.contextmanager
def own_hooks(
    pack: Callable[[torch.Tensor], Any] = _same, unpack: Callable[[Any], torch.Tensor] = _same
) -> Iterator[None]:
    """The user's hooks see nothing of what autograd saves in this context.

    Args:
        pack: What is saved in place of a tensor.
        unpack: The tensor.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # where hooks are disabled, there are none
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
        yield
