"""capture_key(): when may a capture be used again?

The key has two parts. The call's part is schema_key(). The module's part describes everything
in the module that shapes a graph: classes, training flags, Dropout on or off, parameter and
buffer names, shapes, types and sharing, hooks, plain attributes that forward() may read
(numbers, strings, configuration objects). Building it walks the whole module, so it is cached
per module and only rebuilt if a cheap fingerprint, taken every call, has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch

from gradd import schema
from gradd.export import refuse

_PLAIN = (bool, int, float, str, type(None))
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_cache: weakref.WeakKeyDictionary[torch.nn.Module, _ModulePart] = weakref.WeakKeyDictionary()


class _ModulePart:
    """Cached module part of the key with what it takes to see that it is out of date."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tables = [m.__dict__ for m in module.modules()]
        self.configs = _configs(module)
        self.print = self.fingerprint()
        self.key = _module_key(module, self.configs)

    def fingerprint(self) -> Hashable:
        """State of all submodules, as cheap to compare as to take."""
        return (
            [_table_state(t) for t in self.tables],
            [_plain_items(c.__dict__) for c in self.configs],
        )


def _table_state(table: dict[str, Any]) -> list:
    state: list = [len(table)]
    for name, value in table.items():
        kind = type(value)
        if kind in _PLAIN:
            state.append(value)
        elif kind is dict or name in _HOOKS:
            state.extend((len(value), *map(_slot_state, value.values())))
        elif isinstance(value, torch.Tensor):
            state.append((id(value), value._version))
        else:
            state.append(id(value))
    return state


def _slot_state(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        # The memory is not part of it: re-homing parameters leaves the graph as it is.
        return (id(value), value.dtype, value.shape)
    return id(value)


def _configs(module: torch.nn.Module) -> list[Any]:
    """Configuration objects (anything called config with attributes of its own), each once."""
    found: dict[int, Any] = {}
    for sub in module.modules():
        for name, value in sub.__dict__.items():
            if "config" in name and hasattr(value, "__dict__"):
                found.setdefault(id(value), value)
    return list(found.values())


def _plain_items(table: dict[str, Any]) -> tuple:
    return tuple((k, v) for k, v in table.items() if isinstance(v, _PLAIN))


def _module_key(module: torch.nn.Module, configs: list[Any]) -> Hashable:
    parts = []
    for name, sub in module.named_modules():
        attributes = []
        for key, value in sub.__dict__.items():
            if isinstance(value, _PLAIN):
                attributes.append((key, value))
            elif isinstance(value, torch.Tensor):
                attributes.append((key, id(value), value._version))
        hooks = tuple(len(getattr(sub, h)) for h in _HOOKS)
        forward = sub.__dict__.get("forward")
        parts.append((name, type(sub), tuple(attributes), hooks, id(forward) if forward else 0))
    return (tuple(parts), _state_key(module), tuple(_plain_items(c.__dict__) for c in configs))


def _state_key(module: torch.nn.Module) -> Hashable:
    from gradd.export.aliases import alias_groups

    named = list(module.named_parameters(remove_duplicate=False))
    named += list(module.named_buffers(remove_duplicate=False))
    states = tuple((n, t.dtype, tuple(t.shape), t.device.type) for n, t in named)
    return (states, alias_groups(module))


def module_key(module: torch.nn.Module) -> Hashable:
    """The module's part of capture_key(), from the cache where nothing has changed."""
    part = _cache.get(module)
    if part is None or part.print != part.fingerprint():
        part = _ModulePart(module)
        _cache[module] = part
    return part.key


def capture_key(module: torch.nn.Module, args: tuple, kwargs: dict) -> Hashable:
    """Key under which captures of this call may be shared.

    Sizes are not part of it (check_dynamic() decides), nor are weights or requires_grad of
    parameters. Two modules of equal structure have equal keys.

    Raises:
        CaptureError: "unsupported_input_type", as schema_key().
    """
    call = schema.schema_key(module, args, kwargs)
    return (call, module_key(module), refuse.autocast_state())
