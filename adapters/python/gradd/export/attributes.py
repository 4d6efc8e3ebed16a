"""The attributes of a module and of its submodules: what forward() wrote, and putting it back.

A graph computes outputs and the new values of buffers; anything else that forward() writes would
be written while it is traced and never again. written() names it, restore() undoes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gradd.export.freeze import TABLES, Freezer, own_tensors
from gradd.export.guards.images import image, refill

# Hugging Face fills these in at the first call, if they are None, and then goes on as with them.
FILLED_IN = frozenset({"problem_type"})
# Written by forward() without any effect on what it computes: marks and copies of what is there.
HARMLESS = frozenset(
    {
        "_output_capturing_hooks_installed",
        "_flat_weight_refs",  # nn.LSTM follows the tensors that a trace puts in its tables
        "_flat_weights",
        "long_inv_freq",
        "full_attention_long_inv_freq",
        "sliding_attention_long_inv_freq",
    }
)
_ALLOWED = FILLED_IN | HARMLESS
# Hugging Face sets this hook with gradient checkpointing: it only calls requires_grad_(True).
_HARMLESS_HOOKS = frozenset({"make_inputs_require_grads"})
# Hooks of this module only note intermediate results for the model's own outputs.
_NOTING = "transformers.utils.output_capturing"
STATE = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, *BACKWARD_HOOKS)
_RESTORED = (*STATE, *HOOKS)


def is_harmless(hook: object) -> bool:
    """True for hooks of a module that do nothing which a graph would lose."""
    if getattr(hook, "__module__", "") == _NOTING:
        return True
    return getattr(hook, "__name__", "") in _HARMLESS_HOOKS


class _Sub:
    """One submodule as it was."""

    def __init__(self, name: str, module: torch.nn.Module, freezer: Freezer) -> None:
        self.module, self.kind = module, type(module)
        self.where = f"{name or 'the root'} ({type(module).__name__})"
        self.attributes = dict(module.__dict__)
        self.tables = {table: dict(module.__dict__[table]) for table in _RESTORED}
        self.images = _images(module, freezer)

    def written(self, freezer: Freezer) -> str | None:
        """Name of an attribute that is new, gone or different."""
        now = _images(self.module, freezer)
        for name in (*self.images, *(n for n in now if n not in self.images)):
            if name not in now or name not in self.images or now[name] != self.images[name]:
                return name
        for table in STATE:  # a trace puts values of its own into them: only names count
            changed = self.tables[table].keys() ^ self.module.__dict__[table].keys()
            if changed:
                return min(changed)
        if type(self.module) is not self.kind:  # torch's parametrizations give it another
            return "__class__"
        for table in HOOKS:
            old, new = self.tables[table], self.module.__dict__[table]
            if any(not is_harmless((old | new)[key]) for key in old.keys() ^ new.keys()):
                return table
        return None

    def replaced(self) -> str | None:
        """Name of a parameter or submodule where another one stands."""
        for table in ("_parameters", "_modules"):
            old, new = self.tables[table], self.module.__dict__[table]
            for (name, value), (now, present) in zip(old.items(), new.items(), strict=False):
                if name != now or value is not present:
                    return name
        return None

    def restore(self) -> None:
        if type(self.module) is not self.kind:
            self.module.__class__ = self.kind
        _put_back(self.module.__dict__, self.attributes)
        for table, content in self.tables.items():
            _put_back(self.module.__dict__[table], content)


def _images(module: torch.nn.Module, freezer: Freezer) -> dict[str, Any]:
    return {
        name: freezer(value, name)
        for name, value in module.__dict__.items()
        if name not in TABLES and name not in _ALLOWED
    }


class Attributes:
    """All attributes of a module and its submodules, as they are at construction."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._own = own_tensors(module)  # a trace puts others in their place
        freezer = Freezer(self._own, _ALLOWED)
        self._subs = [_Sub(name, sub, freezer) for name, sub in module.named_modules()]
        self._containers = freezer.watched

    def written(self) -> str | None:
        """The first attribute that is not as it was, as "place (Class).name", or None."""
        freezer = Freezer(self._own, _ALLOWED)
        return self._first(lambda sub: sub.written(freezer))

    def replaced(self) -> str | None:
        """The first parameter or submodule where another one stands, in the same form.

        During a trace it says nothing: the exporter puts tensors of its own there.
        """
        return self._first(_Sub.replaced)

    def _first(self, found: Callable[[_Sub], str | None]) -> str | None:
        names = ((sub, found(sub)) for sub in self._subs)
        return next((f"{sub.where}.{name}" for sub, name in names if name is not None), None)

    def restore(self) -> None:
        """Puts back attributes, parameters, buffers and hooks, and the contents of containers."""
        for sub in self._subs:
            sub.restore()
        for container, copy in self._containers:
            if not _same_items(container, copy):
                _refill(container, copy)


def _put_back(target: dict, saved: dict) -> None:
    for name in [n for n in target if n not in saved]:
        del target[name]
    if list(target) != list(saved):
        target.clear()  # one that was taken away gets its place among the others back
    for name, value in saved.items():
        if name not in target or target[name] is not value:
            target[name] = value


def _same_items(container: Any, copy: Any) -> bool:
    if isinstance(container, set):
        return container == copy
    if len(container) != len(copy):
        return False
    pairs = zip(image(container), image(copy), strict=True)  # in the same order, too
    return all(all(map(operator.is_, now, then)) for now, then in pairs)


def _refill(container: Any, copy: Any) -> None:
    if isinstance(container, dict):
        filled = {k: v for k, v in dict.items(container) if k in FILLED_IN}
        copy = {**dict(copy), **filled}
    refill(container, image(copy))
