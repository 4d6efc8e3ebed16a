"""A forward that may not write parameters: the write is refused before it happens.

The observed forward (observe.py) runs on the real parameters, for copies would double the memory of
a model. One that writes to them (a clipped weight, Embedding(max_norm=...)) must not do so here, as
the call is going to run again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradd.export.nodes import is_mutable
from gradd.export.spec import CaptureError


class ParametersUntouched(TorchDispatchMode):
    """Context that raises CaptureError "input_mutation" for a write to a module's parameter."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._names = {_memory(p): name for name, p in module.named_parameters() if p.numel()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_mutable(func):
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple, kwargs: dict) -> None:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = kwargs.get(argument.name, args[i] if i < len(args) else None)
            for tensor in tree_leaves(value):
                name = self._names.get(_memory(tensor))
                if name is not None:
                    raise CaptureError(
                        "input_mutation", f"forward() writes to the parameter {name!r}"
                    )


def _memory(value: Any) -> int:
    """Address of a tensor's storage, 0 for anything else."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()
