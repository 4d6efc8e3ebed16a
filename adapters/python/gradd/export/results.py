"""The module's result: its tensor leaves go into the graph, everything else stays in Python.

Result.flatten() runs inside the trace and remembers a template of the structure; the template
alone (no tensors, no tracer objects) is kept for unflatten(). Supported are tensors, None,
numbers, strings, lists, tuples, named tuples, mappings, Hugging Face ModelOutputs and caches.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from gradd import schema
from gradd.spec import CaptureError


class Leaf:
    """Place of a result leaf in the template."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Result:
    """Structure of a module's result, learnt during the trace."""

    def __init__(self) -> None:
        self.template: Any = None
        self.paths: list[tuple[str, ...]] = []
        self._tensors: list[torch.Tensor] = []

    def flatten(self, value: Any) -> tuple:
        """Remembers the structure of `value` and returns its tensor leaves."""
        self.paths = []
        self._tensors = []
        self.template = self._walk(value, ())
        tensors, self._tensors = tuple(self._tensors), []
        return tensors

    def _walk(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            self.paths.append(path)
            self._tensors.append(value)
            return Leaf(len(self.paths) - 1)
        if isinstance(value, schema.CONSTANTS):
            return value
        if isinstance(value, Mapping):
            items = {k: self._walk(v, (*path, str(k))) for k, v in value.items()}
            return _Mapping(type(value), items)
        if isinstance(value, (list, tuple)):
            names = getattr(value, "_fields", None) or [str(i) for i in range(len(value))]
            items = [self._walk(v, (*path, n)) for n, v in zip(names, value, strict=True)]
            return _Sequence(type(value), items)
        if _is_cache(value):
            return self._walk_cache(value, path)
        if _is_pair_of_caches(value):
            return _Pair(
                type(value), {k: self._walk(v, (*path, k)) for k, v in value.__dict__.items()}
            )
        raise CaptureError(
            "unsupported_output_type",
            f"forward() returns a {type(value).__module__}.{type(value).__qualname__} at "
            f"{'.'.join(path) or 'the top'}; return tensors, lists, tuples or dicts of them",
        )

    def _walk_cache(self, cache: Any, path: tuple[str, ...]) -> Any:
        """A key/value cache: copies of its layers whose tensors are leaves of the result."""
        layers = []
        for i, layer in enumerate(cache.layers):
            tensors = {
                name: self._walk(value, (*path, str(i), name))
                for name, value in layer.__dict__.items()
                if isinstance(value, torch.Tensor)
            }
            rest = {
                k: copy.copy(v)
                for k, v in layer.__dict__.items()
                if k not in tensors and isinstance(v, schema.CONSTANTS)
            }
            layers.append((type(layer), rest, tensors))
        rest = {k: v for k, v in cache.__dict__.items() if isinstance(v, schema.CONSTANTS)}
        return _Cache(type(cache), rest, layers)

    def flat(self) -> tuple[type | None, list[str], list[int]] | None:
        """Class, keys and leaves of a result that is a tensor, a tuple, a list or a dict of some.

        The class is None for a tensor, and all of it for a result of another form.
        """
        template = self.template
        if isinstance(template, Leaf):
            return None, [], [template.number]
        items: list = []
        if isinstance(template, _Mapping) and template.kind is dict:
            items = list(template.items.values())
        elif isinstance(template, _Sequence) and template.kind in (tuple, list):
            items = template.items
        if not items or not all(isinstance(item, Leaf) for item in items):
            return None
        keys = list(template.items) if template.kind is dict else []
        return template.kind, keys, [item.number for item in items]

    def unflatten(self, leaves: list) -> Any:
        """Builds the module's result from its leaves (tensors, or whatever stands for them)."""
        return _fill(self.template, leaves)


class _Mapping:
    def __init__(self, kind: type, items: dict) -> None:
        self.kind, self.items = kind, items


class _Sequence:
    def __init__(self, kind: type, items: list) -> None:
        self.kind, self.items = kind, items


class _Cache:
    def __init__(self, kind: type, rest: dict, layers: list) -> None:
        self.kind, self.rest, self.layers = kind, rest, layers


class _Pair:
    def __init__(self, kind: type, attributes: dict) -> None:
        self.kind, self.attributes = kind, attributes


def _is_pair_of_caches(value: Any) -> bool:
    """An EncoderDecoderCache: one cache of the decoder, one of what it reads of the encoder."""
    where = type(value).__module__
    return where == "transformers.cache_utils" and hasattr(value, "cross_attention_cache")


def _is_cache(value: Any) -> bool:
    return type(value).__module__ == "transformers.cache_utils" and hasattr(value, "layers")


def _fill(template: Any, leaves: list) -> Any:
    if isinstance(template, Leaf):
        return leaves[template.number]
    if isinstance(template, _Mapping):
        items = {k: _fill(v, leaves) for k, v in template.items.items()}
        return _make_mapping(template.kind, items)
    if isinstance(template, _Sequence):
        items = [_fill(v, leaves) for v in template.items]
        if hasattr(template.kind, "_fields"):
            return template.kind(*items)
        return template.kind(items)
    if isinstance(template, _Cache):
        return _fill_cache(template, leaves)
    if isinstance(template, _Pair):
        pair = template.kind.__new__(template.kind)
        pair.__dict__.update({k: _fill(v, leaves) for k, v in template.attributes.items()})
        return pair
    return template


def _make_mapping(kind: type, items: dict) -> Any:
    if kind is dict:
        return items
    try:
        return kind(**items)  # dataclass-like mappings such as ModelOutput
    except TypeError:
        return kind(items)


def _fill_cache(template: _Cache, leaves: list) -> Any:
    cache = template.kind.__new__(template.kind)
    cache.__dict__.update(template.rest)
    cache.layers = []
    for kind, rest, tensors in template.layers:
        layer = kind.__new__(kind)
        layer.__dict__.update(rest)
        for name, leaf in tensors.items():
            setattr(layer, name, _fill(leaf, leaves))
        cache.layers.append(layer)
    return cache
