"""Decides which classes of tensors the daemon may treat as plain tensors.

A class that torch's functions treat as Tensor itself (a subclass of nn.Parameter, say) differs by
name only. Other classes see every operator that reads them, or pass their class on to its result:
calls with such tensors run in PyTorch, by name.
"""

from __future__ import annotations

import torch
from torch.nn.parameter import UninitializedTensorMixin

from gradd import private

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# The functions of classes without an override of their own.
_NO_FUNCTION = torch.nn.Parameter.__torch_function__
_NO_DISPATCH = (None, torch.Tensor.__torch_dispatch__)
_FSDP = "FullyShardedDataParallel"
# Marks of engines on tensors that are parts of a flat parameter of theirs.
_ENGINES = {private.FSDP_TENSOR: _FSDP, "ds_id": "DeepSpeed's ZeRO of stage 3"}


def is_plain(cls: type) -> bool:
    """True for classes of tensors that torch's functions treat as Tensor itself."""
    if cls in _PLAIN:
        return True
    return (
        cls.__torch_function__ is _NO_FUNCTION
        and getattr(cls, "__torch_dispatch__", None) in _NO_DISPATCH
        and not issubclass(cls, UninitializedTensorMixin)
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements lie in one storage with strides: not sparse, nested or quantized."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def engine_of(module: torch.nn.Module) -> str:
    """The engine that keeps a module's parameters in a flat one of its own; "" if none does."""
    for one in module.modules():
        own = list(one.parameters(recurse=False))
        if hasattr(one, private.FSDP_MODULE):  # also by fully_shard(), whose are parameters
            if not all(isinstance(p, torch.nn.Parameter) for p in own):
                return _FSDP
        for tensor in (*own, *vars(one).values()):
            if isinstance(tensor, torch.Tensor):
                for mark, engine in _ENGINES.items():
                    if hasattr(tensor, mark):
                        return engine
    return ""


def refusal(what: str, cls: type) -> Exception:
    """The message about a tensor whose class is not plain.

    Args:
        what: Its name and role.
        cls: Its class.
    """
    from gradd.spec import CaptureError  # that package imports users of this module

    return CaptureError(
        "tensor_subclass",
        f"{what} is a {cls.__module__}.{cls.__qualname__}, a subclass of Tensor that takes part "
        "in torch's functions; use a plain tensor (x.as_subclass(torch.Tensor))",
    )
