"""Questions whose answer is another one while torch traces, however a forward() asks them.

A tracer works by modes of torch and by tensors of its own classes. A forward() that asks for such
would be captured as it is traced, not as it is called. Code of torch asks all the time and means
the tracer; code of users is refused by name.
"""

from __future__ import annotations

import functools
import os
import types
import warnings
from typing import Any

import torch

from gradd.export.guards.images import is_a

# Functions that tell which modes and hooks are active, or what kind of stand-in a tensor is.
_OF_MODES = frozenset(
    {
        *("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        *("_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic"),
        *("_is_torch_function_mode_enabled", "_is_torch_function_all_disabled"),
        *("_is_torch_function_enabled", "_get_torch_function_state", "_get_overloaded_args"),
        *("_len_torch_function_stack", "_get_function_stack_at"),
        *("_len_torch_dispatch_stack", "_get_dispatch_stack_at", "_get_dispatch_mode"),
        *("_get_current_function_mode", "_get_current_function_mode_stack"),
        *("_get_current_dispatch_mode", "_get_current_dispatch_mode_stack"),
        *("is_in_torch_dispatch_mode", "_is_in_torch_dispatch_mode", "_detect_infra_mode"),
        *("is_in_any_mode_without_ignore_compile_internals", "any_torch_dispatch_mode_on_stack"),
        *(
            "_is_in_any_mode_without_ignore_compile_internals",
            "_is_in_non_infra_torch_dispatch_mode",
        ),
        *("is_fake", "detect_fake_mode", "active_fake_mode", "maybe_get_fake_mode"),
        *("get_proxy_mode", "get_functional_mode", "_is_functional_tensor", "is_functionaltensor"),
        *("is_functorch_wrapped_tensor", "peek_interpreter_stack", "maybe_current_level"),
        *("_get_mkldnn_enabled", "_top_saved_tensors_default_hooks"),
        *("_saved_tensors_hooks_is_enabled", "_dispatch_keys", "_dispatch_tls_local_include_set"),
        *("_dispatch_tls_local_exclude_set", "_dispatch_tls_is_dispatch_key_included"),
        *("_dispatch_tls_is_dispatch_key_excluded", "is_autocast_cache_enabled"),
    }
)
# Attributes that stand-ins get when they are made; the others are found in their classes.
_OF_STAND_INS = frozenset(
    {"fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor", "elem", "proxy"}
)
# What a class tells of itself.
_OF_CLASS = frozenset(
    {"__name__", "__qualname__", "__module__", "__mro__", "__base__", "__bases__", "mro"}
)
# Written for tracers: what it asks, it means.
FOR_TRACERS = os.sep + "transformers" + os.sep


def of_function(module: str, name: str) -> bool:
    """True for functions of torch that answer otherwise while torch traces."""
    return name in _OF_MODES and (not module or module.startswith(("torch", "builtins")))


def of_module(module: types.ModuleType, name: str) -> bool:
    """True for such attributes of modules: switched off, or exchanged, for a trace."""
    if module is warnings:
        return name == "filters"
    return name == "enabled" and module is torch.backends.mkldnn


def of_class(cls: type, name: str) -> bool:
    """True for attributes of a class of tensors by which stand-ins show what they are."""
    return name in _OF_CLASS and issubclass(cls, torch.Tensor)


@functools.lru_cache(maxsize=1)
def _stand_ins() -> tuple[tuple[type, ...], frozenset[str]]:
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    kinds = (FakeTensor, FunctionalTensor)
    names = {name for kind in kinds for name in (*dir(kind), *kind.__dict__.get("__slots__", ()))}
    return kinds, frozenset(names - set(dir(torch.Tensor))) | _OF_STAND_INS


def of_tensor(tensor: torch.Tensor, name: str) -> bool:
    """True for what only stand-ins have, for all attributes at once, and for whose memory it is."""
    return (
        name in ("__dict__", "is_set_to") or name in _stand_ins()[1] and name not in tensor.__dict__
    )


def is_stand_in(cls: Any) -> bool:
    """True for the classes of stand-ins."""
    return is_a(cls, type) and issubclass(cls, _stand_ins()[0])


def has_text(value: Any) -> bool:
    """True for tensors, and classes of tensors, whose text is another one while torch traces."""
    return is_a(value, torch.Tensor) or is_a(value, type) and issubclass(value, torch.Tensor)
