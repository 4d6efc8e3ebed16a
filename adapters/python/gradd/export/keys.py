"""capture_key(): when may a capture be used again?

The key has two parts. The call's part is schema_key(). The module's part describes everything
in the module that shapes a graph: classes, training flags, Dropout on or off, parameter and
buffer names, shapes, types and sharing, which buffers are masks of zeros and ones (mask_buffers.py
says how that is known), hooks, attributes and configuration objects that forward() may read
(freeze.py says how each is described). Building it walks the whole module, so it is cached per
module and only rebuilt if a cheap look at every submodule shows a change.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable
from operator import is_
from typing import Any

import torch
from torch.nn.parameter import Parameter, is_lazy

from gradd import schema
from gradd.export import autocast
from gradd.export.attributes import FILLED_IN, HOOKS, STATE, is_harmless
from gradd.export.freeze import TABLES, Freezer, is_config, own_tensors
from gradd.export.guards import images
from gradd.export.mask_buffers import Binaries
from gradd.spec import CaptureError
from gradd.tensor_kinds import is_dense, is_plain

_GLOBAL_HOOKS = tuple(getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS)
# Settings that saving a model writes; no forward() reads them, and types are in the key anyway.
_WRITTEN = frozenset({"architectures", "dtype", "torch_dtype"})
# Settings of generate(), which evaluation fills in.
_GENERATION = "generation_config"
# What torch's own code for modules reads, which nobody records.
_OF_TORCH = frozenset({*torch.nn.Module().__dict__, "forward"})
_FORM = operator.attrgetter("dtype", "shape")
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
_VERSION = operator.attrgetter("_version")
# Weakly on both sides: attributes, which the parts hold, may lead to the module.
_cache: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[ModulePart]]
_cache = weakref.WeakKeyDictionary()


class ModuleKey:
    """A key whose hash is computed once: hashing a hundred submodules every step is not free."""

    __slots__ = ("_hash", "training", "value")

    def __init__(self, value: Hashable, training: bool) -> None:
        self.value = value
        self.training = training
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ModuleKey) or self._hash != other._hash:
            return False
        return self.value == other.value


class ModulePart:
    """Cached module part of the key with what it takes to see that it is out of date.

    Values are the same if they are the same object, or plain and alike (guards/images.py): `==`
    takes 1 for True, an object for another by the user's word, and a tensor of one element for any
    equal one.
    """

    def __init__(self, module: torch.nn.Module, before: ModulePart | None = None) -> None:
        configs = _configs(module)
        freezer = Freezer(own_tensors(module))
        self.binaries = Binaries(module, before and before.binaries)
        self.own = own_names(module)
        hooks = tuple(len(table) for table in _GLOBAL_HOOKS)
        state = (*_state_key(module), self.binaries.names, hooks)
        self.key = ModuleKey(_module_key(module, configs, freezer, state), module.training)
        self._tables: list[tuple[dict, list, list]] = []
        self._empty: list[dict] = []
        self._tensors: list[torch.Tensor] = []
        self._subs: list[tuple[torch.nn.Module, type, list, list]] = []
        for table in _GLOBAL_HOOKS:
            self._watch(table)
        for sub in module.modules():
            own = sub.__dict__
            self._subs.append((sub, type(sub), list(own), list(own.values())))
            for name, value in sub.__dict__.items():
                if name in STATE or name in HOOKS:
                    self._watch(value)
            for table in (sub._parameters, sub._buffers):
                self._tensors += [t for t in table.values() if t is not None]
        # Replaced attributes show above; these are the ones that change and stay the same object.
        self._contents = [(c, images.image(c)) for c, _ in freezer.watched if len(c)]
        self._empty += [c for c, _ in freezer.watched if not len(c)]
        self._contents += [(names, images.image(names)) for _, names in _unsaved(module)]
        self._loose = [t for t in freezer.tensors if not t.is_inference()]
        self._buffers = list(module.buffers())
        self._forms = self._take_forms()
        self._versions = list(map(_VERSION, self._loose))

    def _watch(self, table: dict) -> None:
        if table:
            self._tables.append((table, list(table), list(table.values())))
        else:
            self._empty.append(table)

    def _take_forms(self) -> tuple[list, list]:
        # module.half() changes tensors in place; their memory is no part of the key.
        return list(map(_FORM, self._tensors)), list(map(_REQUIRES_GRAD, self._buffers))

    def is_fresh(self) -> bool:
        """True if nothing that the key describes has changed since it was made.

        Every call asks this, so loops that functions of C can do are left to them.
        """
        if any(self._empty):
            return False
        try:
            for sub, kind, names, values in self._subs:
                own = sub.__dict__
                if type(sub) is not kind or list(own) != names:
                    return False
                now = own.values()
                if not all(map(is_, now, values)) and not all(map(images.alike, now, values)):
                    return False
            for table, names, values in self._tables:
                if list(table) != names or not all(map(is_, table.values(), values)):
                    return False
            for container, copy in self._contents:
                if type(container) is dict and len(container) == len(copy[0]):
                    keys, values = copy
                    if all(map(is_, container, keys)) and all(map(is_, container.values(), values)):
                        continue
                if not images.contents_alike(container, copy):
                    return False
        except RuntimeError:
            return False  # another thread has changed a table meanwhile
        forms, trained = self._forms
        if list(map(_FORM, self._tensors)) != forms:
            return False
        if list(map(_REQUIRES_GRAD, self._buffers)) != trained:
            return False
        if list(map(_VERSION, self._loose)) != self._versions:
            return False
        return not self.binaries.known or self.binaries.is_fresh()


def _configs(module: torch.nn.Module) -> list[Any]:
    """Configuration objects (anything called config with attributes of its own), each once."""
    found: dict[int, Any] = {}
    for sub in module.modules():
        for name, value in sub.__dict__.items():
            if is_config(name, value) and name != _GENERATION:
                found.setdefault(id(value), value)
    return list(found.values())


def _module_key(
    module: torch.nn.Module, configs: list[Any], freezer: Freezer, state: Hashable
) -> Hashable:
    parts = []
    for name, sub in module.named_modules():
        attributes = tuple(
            (key, freezer(value, key))
            for key, value in sub.__dict__.items()
            if key not in TABLES and not is_config(key, value)
        )
        hooks = tuple(_count(getattr(sub, h)) for h in HOOKS)
        parts.append((name, type(sub), attributes, hooks))
    settings = tuple(
        tuple((n, image) for n, image in freezer.items_of(c.__dict__) if n not in _WRITTEN)
        for c in configs
    )
    return (tuple(parts), state, settings)


def _count(hooks: dict) -> int:
    """Hooks that matter; transformers adds another one that does not with each checkpointing."""
    return sum(not is_harmless(hook) for hook in hooks.values())


def _state_key(module: torch.nn.Module) -> tuple:
    from gradd.export.aliases import alias_groups

    buffers = list(module.named_buffers(remove_duplicate=False))
    named = [*module.named_parameters(remove_duplicate=False), *buffers]
    for name, tensor in named:
        if is_lazy(tensor):
            raise CaptureError(
                "unsupported_parameter", f"{name} has no size before the first forward"
            )
        if not is_dense(tensor):
            raise CaptureError(
                "unsupported_parameter",
                f"{name} is {tensor.dtype}, {tensor.layout}; only dense tensors can be shared",
            )
    states = tuple((n, t.dtype, tuple(t.shape), t.device.type, _kind(t)) for n, t in named)
    trained = tuple(n for n, t in buffers if t.requires_grad)
    wrapped = tuple(
        (name, key)
        for name, sub in module.named_modules()
        for key, child in sub._modules.items()
        if child is not None and "_gradd_bridge" in child.__dict__
    )
    unsaved = tuple((path, frozenset(names)) for path, names in _unsaved(module))
    # functional_call() puts other tensors there, as which nothing can be captured.
    strange = tuple(n for n, t in module.named_parameters() if not isinstance(t, Parameter))
    return (states, alias_groups(module), trained, wrapped, unsaved, strange)


def _unsaved(module: torch.nn.Module) -> list[tuple[str, set[str]]]:
    """Of submodules with buffers, which of them state_dict() leaves out."""
    return [
        (path, sub._non_persistent_buffers_set)
        for path, sub in module.named_modules()
        if sub._buffers
    ]


def _kind(tensor: torch.Tensor) -> type | None:
    return None if is_plain(type(tensor)) else type(tensor)


def _part(module: torch.nn.Module) -> ModulePart:
    known = _cache.get(module)
    part = known() if known is not None else None
    if part is None or not part.is_fresh():
        part = ModulePart(module, part)
        _cache[module] = weakref.ref(part)
    return part


def module_key(module: torch.nn.Module) -> ModuleKey:
    """The module's part of capture_key(), from the cache where nothing has changed."""
    return _part(module).key


def binary_buffers(module: torch.nn.Module) -> tuple[str, ...]:
    """Names of the buffers that hold zeros and ones as far as module_key() says.

    A capture may rely on these and on no others: a buffer that has become a mask since the key
    was made can become something else again without another key.
    """
    return _part(module).binaries.names


def capture_key(module: torch.nn.Module, args: tuple, kwargs: dict, holder: Any = None) -> Hashable:
    """Key under which captures of this call may be shared.

    Sizes are not part of it (check_dynamic() decides), nor are weights or requires_grad of
    parameters. Two modules of equal structure have equal keys.

    Args:
        module: The module.
        args: Of the call.
        kwargs: The same.
        holder: Gets an attribute `described`: as long as it has it, the next key of this module
            costs a look at what has changed and no description from scratch.

    Raises:
        CaptureError: "unsupported_input_type", as schema_key().
    """
    part = _part(module)
    if holder is not None:
        holder.described = part
    call = schema.schema_key(module, args, kwargs, part.own)
    return (call, part.key, autocast.state())


def own_names(module: torch.nn.Module) -> dict[int, str]:
    """Id of every parameter and buffer -> its first name."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {id(tensor): name for name, tensor in named}


def changed_attributes(before: Hashable, after: Hashable) -> set[tuple[str, str]] | None:
    """What differs between two capture_key()s: path of a submodule and name of its attribute.

    None if anything else differs: the call, classes, parameters, hooks, modes, configurations.
    """
    (call, module, cast), (call_after, module_after, cast_after) = before, after
    (parts, *rest), (parts_after, *rest_after) = module.value, module_after.value
    if (call, cast, rest) != (call_after, cast_after, rest_after):
        return None
    if len(parts) != len(parts_after):
        return None
    found: set[tuple[str, str]] = set()
    for (path, kind, own, hooks), (*same, own_after, hooks_after) in zip(
        parts, parts_after, strict=True
    ):
        if ([path, kind], hooks) != (same, hooks_after):
            return None
        if own is not own_after and own != own_after:
            pairs = set(own) ^ set(own_after)
            found.update((path, name) for name, _ in pairs)
    return None if any(name in _OF_TORCH for _, name in found) else found


def form_of(key: Hashable) -> Hashable:
    """What a capture_key() says without the attributes: the call, train or eval, autocast."""
    call, module, cast = key  # type: ignore[misc]
    return (call, module.training, cast)


def unfilled(module: torch.nn.Module) -> list[tuple[dict, str]]:
    """Tables and names of settings that a first call may fill in: they are None now."""
    tables = [config.__dict__ for config in _configs(module)]
    return [(t, n) for t in tables for n in FILLED_IN if n in t and t[n] is None]


def same_but_filled_in(before: Hashable, after: Hashable) -> bool:
    """True if a call only filled in values of a configuration that it would have filled in again.

    Args:
        before: capture_key() before the capture of a call.
        after: capture_key() of the same call, after it.
    """
    (call, module, cast), (call_after, module_after, cast_after) = before, after
    (*parts, configs), (*parts_after, configs_after) = module.value, module_after.value
    if (call, cast, parts) != (call_after, cast_after, parts_after):
        return False
    for items, items_after in zip(configs, configs_after, strict=True):
        filled = dict(items_after)
        for name, value in items:
            if value is None and name in FILLED_IN:
                filled[name] = None
        if filled != dict(items):
            return False
    return True
