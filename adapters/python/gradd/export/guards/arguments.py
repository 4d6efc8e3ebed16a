"""What a forward() may ask a call's tensors beside their values, types and sizes.

How they lie in memory, where they came from, what somebody has written to their attributes: where a
forward asks for such, a capture holds for calls whose tensors give the same answers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from gradd.calls.watch import untyped_storage
from gradd.export.guards import images
from gradd.export.guards.spots import ABSENT, Spot, static


def _room(tensor: torch.Tensor) -> Any:
    """How much memory there is, of which a tensor may see a part."""
    return untyped_storage(tensor).nbytes() if tensor.layout is torch.strided else ABSENT


STORAGES = frozenset({"untyped_storage", "storage", "_typed_storage"})
SHARED_FACTS = STORAGES | {"is_neg", "is_conj", "_is_zerotensor"}  # by all views of a memory
# By name: the answer as far as a forward can decide by it.
FACTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "is_leaf": lambda t: t.is_leaf,
    "grad_fn": lambda t: t.grad_fn is None,
    "output_nr": lambda t: t.output_nr,
    "retains_grad": lambda t: t.retains_grad,
    "_base": lambda t: t._base is None,
    "_is_view": lambda t: t._is_view(),
    "is_inference": lambda t: t.is_inference(),
    "is_shared": lambda t: t.is_shared(),
    "_backward_hooks": lambda t: bool(t._backward_hooks),
    "_post_accumulate_grad_hooks": lambda t: bool(t._post_accumulate_grad_hooks),
    "is_neg": lambda t: t.is_neg(),
    "is_conj": lambda t: t.is_conj(),
    "_is_zerotensor": lambda t: t._is_zerotensor(),
    "names": lambda t: t.names,
    "has_names": lambda t: t.has_names(),
    "is_pinned": lambda t: t.is_pinned(),
    **dict.fromkeys(STORAGES, _room),
    "__dict__": lambda t: tuple(t.__dict__.items()),
}


# What the methods of a tensor tell that compute nothing, by the attributes that decide it.
_METHODS = {
    **dict.fromkeys(("size", "dim", "ndimension", "numel", "nelement", "is_same_size"), "shape"),
    **dict.fromkeys(("type", "element_size", "is_floating_point", "is_complex"), "dtype"),
    **dict.fromkeys(("is_signed", "itemsize"), "dtype"),
    **dict.fromkeys(("ndim", "nbytes"), "shape"),
    **dict.fromkeys(("get_device", "is_cuda", "is_cpu"), "device"),
}
# Those that are asked themselves.
_ASKED = frozenset(
    {
        *("stride", "storage_offset", "is_contiguous", "dim_order", "is_coalesced", "sparse_dim"),
        *("dense_dim", "_nnz", "qscheme", "q_scale", "q_zero_point", "is_inference"),
        "is_non_overlapping_and_dense",
    }
)
FORM = "form"  # all that code in C may ask a tensor that it is handed
# Attributes, beside those that begin with is_.
_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "layout", "requires_grad", "_version", "grad_dtype", "name"}
)


def form(value: Any) -> tuple:
    """What a graph assumes about an input."""
    if images.is_a(value, np.ndarray):
        return (np.ndarray, value.dtype.str, value.shape)
    if not images.is_a(value, torch.Tensor):
        return (type(value),)
    return (type(value), value.dtype, tuple(value.shape), value.requires_grad, value.device.type)


def asked_of(tensor: torch.Tensor, name: str) -> str:
    """The fact of a tensor that an attribute or method tells, or "" if it computes or is none."""
    name = _METHODS.get(name, name)
    if name in FACTS or name in _ASKED or name in _ATTRIBUTES or name == FORM:
        return name
    is_attribute = isinstance(static(type(tensor), name), types.GetSetDescriptorType)
    return name if is_attribute and name.startswith("is_") else ""


def told(tensor: torch.Tensor, name: str) -> Any:
    """A fact for which asked_of() has the name, or ABSENT."""
    try:
        if name == FORM:
            return form(tensor)
        if name == "grad_fn":
            return type(tensor.grad_fn)
        if name in FACTS:
            return _answer(tensor, name)
        found = getattr(tensor, name)
        return found() if name in _ASKED else found
    except Exception:  # not every kind of tensor knows everything
        return ABSENT


class Fact(Spot):
    """What the tensor `owner` of outside tells under the name `key`."""

    __slots__ = ()
    KIND = "fact"

    def now(self) -> Any:
        return told(self.owner, self.key)

    def put_back(self) -> None:
        """What forward() does to such a tensor is undone, or refused, by other means."""

    def rebind(self) -> None:
        """Facts are compared by value."""


def is_fact(name: str) -> bool:
    """True for what else than values, types and sizes an attribute of a tensor tells."""
    return name in FACTS or not hasattr(torch.Tensor, name)


def fact_of(table: dict, key: Any, name: str) -> Any:
    """What the tensor in an entry of a table, or ABSENT, answers."""
    tensor = table.get(key)
    return _answer(tensor, name) if isinstance(tensor, torch.Tensor) else ABSENT


def is_plain_fact(name: str, answer: Any) -> bool:
    """True if what stands for a parameter in a trace gives this answer."""
    return answer is (name in ("grad_fn", "_base", "is_leaf")) or name == "output_nr" and not answer


class Asked:
    """Answers of a call's tensors to what a forward asks."""

    def __init__(self, names: Iterable[str], leaves: Iterable[Any]) -> None:
        """Args:
        names: Attributes for which is_fact() holds.
        leaves: Of the call.
        """
        self.names = sorted(names)
        self._answers = self._ask(leaves)

    def _ask(self, leaves: Iterable[Any]) -> list[tuple]:
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return [tuple(_answer(t, name) for t in tensors) for name in self.names]

    def differ(self, leaves: Iterable[Any]) -> str | None:
        """The first name for which tensors give other answers."""
        if not self.names:
            return None
        now = self._ask(leaves)
        pairs = zip(self.names, self._answers, now, strict=True)
        return next((name for name, then, answer in pairs if not images.alike(then, answer)), None)


def _answer(tensor: torch.Tensor, name: str) -> Any:
    ask = FACTS.get(name)
    return ask(tensor) if ask is not None else tensor.__dict__.get(name, ABSENT)


def own_layouts(module: torch.nn.Module) -> Callable[[], bool | tuple]:
    """Asks how the parameters and buffers of a module lie in memory: True if all contiguous."""
    subs = list(module.modules())
    places = [(s._parameters, k) for s in subs for k in s._parameters]
    places += [(s._buffers, k) for s in subs for k in s._buffers]

    def ask() -> bool | tuple:
        found = [table.get(key) for table, key in places]
        strided = [t for t in found if t is not None and t.layout is torch.strided]
        return all(t.is_contiguous() for t in strided) or layouts(found)

    return ask


def layouts(leaves: Iterable[Any]) -> tuple:
    """How tensors lie in memory, as far as a forward() may ask: None for what is contiguous."""
    tensors = (x for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided)
    return tuple(None if t.is_contiguous() else t.stride() for t in tensors)
