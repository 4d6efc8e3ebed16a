"""Structure of a module call: flattening of arguments and the cheap per-step schema key.

flatten_inputs() is used in every forward, so it is a plain recursive walk without torch's
pytree registry. A leaf is whatever is not a list, tuple or mapping; tensors are leaves, and so
are None, numbers and strings. Keyword arguments are walked in the order of the call, which a
forward(**kwargs) sees: f(a=1, b=2) and f(b=2, a=1) are two forms of call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from gradd import tensor_kinds

# Numbers under these names differ from step to step and are data, not structure: they become
# 0-d tensor inputs. Every other python number is a constant of the graph and part of the key.
NUMERIC_INPUTS = frozenset({"num_items_in_batch"})

CONSTANTS = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device)


def _walk(value: Any, path: str, leaves: list, paths: list) -> Hashable:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        paths.append(path)
        return "*"
    if isinstance(value, Mapping):
        keys = list(value)
        return (
            type(value),
            tuple(k if type(k) is str else (type(k), repr(k)) for k in keys),
            tuple(_walk(value[k], f"{path}_{k}", leaves, paths) for k in keys),
        )
    if isinstance(value, (list, tuple)):
        return (
            type(value),
            len(value),
            tuple(_walk(v, f"{path}_{i}", leaves, paths) for i, v in enumerate(value)),
        )
    leaves.append(value)
    paths.append(path)
    return "*"


def flatten_inputs(args: tuple, kwargs: dict) -> tuple[list, Hashable, list[str]]:
    """Flattens a call.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The leaves, a hashable description of the structure, and one path per leaf
        ("0_1", "input_ids", "batch_x"): positional paths start with the position.
    """
    leaves: list = []
    paths: list[str] = []
    structure: list = [len(args)]
    for i, value in enumerate(args):
        structure.append(_walk(value, str(i), leaves, paths))
    for name, value in kwargs.items():
        structure.append((name, _walk(value, name, leaves, paths)))
    return leaves, tuple(structure), paths


def unflatten_inputs(args: tuple, kwargs: dict, leaves: list) -> tuple[tuple, dict]:
    """Rebuilds (args, kwargs) of the same structure with other leaves."""
    it = iter(leaves)
    new_args = tuple(_rebuild(a, it) for a in args)
    return new_args, {name: _rebuild(value, it) for name, value in kwargs.items()}


def same_tensors(
    leaves: Iterable[Any], own: Mapping[int, str]
) -> tuple[tuple[int, int | str], ...]:
    """Leaves that are a tensor known already: () unless forward() could tell with `is`.

    Args:
        leaves: The leaves of a call.
        own: Names of the module's parameters and buffers by id.

    Returns:
        Number of a leaf -> number of the first leaf that is the same tensor, or a name from `own`.
    """
    ids = [id(x) if isinstance(x, torch.Tensor) else None for x in leaves]
    known = [i for i in ids if i is not None]
    if len(set(known)) == len(known) and own.keys().isdisjoint(known):
        return ()
    found: list[tuple[int, int | str]] = []
    for number, key in enumerate(ids):
        if key is not None and (key in own or ids.index(key) < number):
            found.append((number, own.get(key, ids.index(key))))
    return tuple(found)


def _rebuild(value: Any, it: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return next(it)
    if isinstance(value, Mapping):
        items = {k: _rebuild(value[k], it) for k in value}
        return items if type(value) is dict else _rebuild_mapping(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rebuild(v, it) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_rebuild(v, it) for v in value)
    return next(it)


def _rebuild_mapping(value: Mapping, items: dict) -> Mapping:
    try:
        return type(value)(items)
    except TypeError:
        return type(value)(**items)


def is_tensor_leaf(leaf: Any, path: str) -> bool:
    """True if the leaf travels to the graph as a tensor (numbers in NUMERIC_INPUTS do)."""
    if isinstance(leaf, torch.Tensor):
        return True
    return path in NUMERIC_INPUTS and isinstance(leaf, (int, float)) and not isinstance(leaf, bool)


def as_tensor_leaf(leaf: Any) -> torch.Tensor:
    """The tensor that stands for a leaf for which is_tensor_leaf() holds."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    return torch.tensor(leaf, dtype=torch.int64 if isinstance(leaf, int) else torch.float32)


def _is_taken(kind: type) -> bool:
    return (
        tensor_kinds.is_plain(kind) or kind.__module__ == "gradd.calls.lazy"
    )  # which stands for a plain one


def _leaf_key(leaf: Any, path: str) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) is not torch.Tensor and not _is_taken(type(leaf)):
            raise tensor_kinds.refusal(f"argument {path!r}", type(leaf))
        form = (leaf.dtype, leaf.dim(), leaf.requires_grad, leaf.device.type)
        if leaf.layout is torch.strided and not leaf.is_nested and type(leaf) is torch.Tensor:
            return form
        return (*form, leaf.layout, leaf.is_nested, isinstance(leaf, torch.nn.Parameter))
    if is_tensor_leaf(leaf, path):
        # Same key as the 0-d tensor that as_tensor_leaf() makes of it.
        return (torch.int64 if isinstance(leaf, int) else torch.float32, 0, False, "cpu")
    if isinstance(leaf, CONSTANTS):
        # repr() tells 0.0 from -0.0, and NaN equals itself.
        return (type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf)
    from gradd.spec import CaptureError  # that package imports this module

    raise CaptureError(
        "unsupported_input_type",
        f"argument {path!r} is a {type(leaf).__module__}.{type(leaf).__qualname__}; pass tensors, "
        "numbers, strings, None or lists, tuples and dicts of them",
    )


def schema_key(
    module: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    own: Mapping[int, str] = MappingProxyType({}),
) -> Hashable:
    """Key of a call's form: structure, dtypes, ranks, constants, which inputs need a gradient.

    Which arguments are one tensor, or one of `own` (see same_tensors()), is part of it; sizes are
    not. Costs a few microseconds per leaf; called in every forward.

    Raises:
        CaptureError: "unsupported_input_type" for an argument that is neither a tensor nor a
            constant, "tensor_subclass" for a tensor of a class with a meaning of its own.
    """
    del module  # same signature as capture_key(); the module's own state is in that key
    leaves, structure, paths = flatten_inputs(args, kwargs)
    forms = tuple(_leaf_key(leaf, p) for leaf, p in zip(leaves, paths, strict=True))
    return (structure, forms, same_tensors(leaves, own))
