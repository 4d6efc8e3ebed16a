"""What a forward() asks tensors beside their values: part of reads.py."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradd.export.guards import tracing
from gradd.export.guards.arguments import (
    FACTS,
    SHARED_FACTS,
    STORAGES,
    asked_of,
    fact_of,
    is_fact,
    is_plain_fact,
    told,
)
from gradd.export.guards.spots import Entry, Spot
from gradd.export.guards.tensors import MEMORY_METHODS, VALUE_METHODS, Tensors

if TYPE_CHECKING:
    from gradd.export.guards.methods import TensorMethods

ASK = object()  # in the place of a value: that of now
# What a tensor's memory layout decides; code in C is asked by these names too (calls.py).
LAYOUT = frozenset(
    {
        *("is_contiguous", "stride", "dim_order", "is_non_overlapping_and_dense"),
        *("as_strided", "as_strided_", "as_strided_copy"),
    }
)
_PLACE = frozenset({"storage_offset", "_version"})  # differ from call to call
ACCUMULATED = frozenset({"grad", "_grad"})  # from step to step
_GRADIENT = frozenset({"requires_grad", "grad_fn", "is_leaf"})


class TensorReads:
    """Attributes and methods of tensors; everything else is in Reads."""

    spots: dict[tuple, Spot]
    tensors: Tensors
    methods: TensorMethods
    facts: set[str]
    layout: set[str]
    grad_mode: bool
    gradients: bool
    blank: Callable[..., None]
    effect: Callable[..., None]
    answer: Callable[..., None]
    item: Callable[..., None]
    asks_tracer: Callable[[str], bool]
    _parameters: dict[int, tuple[dict, str]]
    _facts: dict[tuple, tuple]
    _casts: dict[str, Any]

    def flagged(self, tensor: torch.Tensor, value: Any) -> None:
        """tensor.requires_grad is set to `value`; what it is already has to stay so."""
        if self.tensors.is_made(tensor):
            return
        if value is not tensor.requires_grad:
            self.effect("changes .requires_grad of a tensor that it has not made", tensor)
        self._of_tensor(tensor, "requires_grad")

    def _of_tensor(self, tensor: torch.Tensor, name: str) -> None:
        self.methods.use(name)
        if tracing.of_tensor(tensor, name):
            self.asks_tracer(f"reads .{name} of a tensor")
        if is_fact(name) and self.tensors.is_input(tensor):
            self.facts.add(name)
            return
        if name in tensor.__dict__ or not hasattr(torch.Tensor, name):
            self.item(tensor.__dict__, name, f"a tensor's .{name}", tensor)
            return
        if name in _GRADIENT:
            if id(tensor) in self._parameters:
                self._flag_of(tensor, name)
            elif not self.tensors.is_input(tensor):
                self._ask_for_gradients()
        elif id(tensor) in self._parameters and is_fact(name):
            self._fact_of(tensor, name)
        elif name in FACTS and name not in SHARED_FACTS and self.tensors.is_own(tensor):
            self.blank(f"reads .{name} of a buffer, which a graph does not know")
        elif name in SHARED_FACTS:
            self._of_memory(tensor, name)
        self.tensors.note(tensor)
        self._of_foreign(tensor, name)
        self.layout |= LAYOUT & {name}
        given = self.tensors.is_input(tensor)
        if name in _PLACE and (given or self.tensors.is_own(tensor)):
            self.blank(f"reads .{name} of {'an argument' if given else 'a tensor of the module'}")
        if name in ACCUMULATED and not self.tensors.is_made(tensor):
            ours = given or self.tensors.is_own(tensor)  # or a copy, which is young
            self.blank(f"reads .{name} of a tensor", None if ours else tensor)
        if name in VALUE_METHODS:
            self.tensors.taken(tensor)
        if name in MEMORY_METHODS:
            self.tensors.exposed(tensor)

    def _of_foreign(self, tensor: torch.Tensor, name: str) -> None:
        """What a tensor of outside tells of itself, also where nothing is computed with it.

        Weakly until the forward is over: it may be an activation.
        """
        asked = asked_of(tensor, name) if self.tensors.is_foreign(tensor) else ""
        known = self._facts.get((id(tensor), asked))
        if asked and (known is None or known[0]() is not tensor):
            self._facts[id(tensor), asked] = (weakref.ref(tensor), told(tensor, asked))

    def _of_memory(self, tensor: torch.Tensor, name: str) -> None:
        """What a view tells of the memory that it shares, and so of an argument perhaps."""
        made = self.tensors.is_made(tensor)
        if name in STORAGES:
            by = None if made else tensor
            self.blank(f"reads .{name} of a tensor that is no argument", by)
        elif made:
            self.facts.add(name)

    def _flag_of(self, parameter: torch.Tensor, name: str) -> None:
        place = self._parameters[id(parameter)]
        spot = Entry(*place, getattr(parameter, name), f"{place[1]}.{name}")
        spot.field = name
        self.spots.setdefault(("entry", id(place[0]), (place[1], name)), spot)

    def _fact_of(self, parameter: torch.Tensor, name: str) -> None:
        """What a parameter answers beside values, types and sizes."""
        table, key = self._parameters[id(parameter)]
        ask = functools.partial(fact_of, table, key, name)
        if not is_plain_fact(name, ask()):
            self.blank(f"reads .{name} of the parameter {key}, which a graph does not know")
        self.answer(ask, f"{key}.{name}", by=table)

    def cast(self, device: str) -> None:
        """Asks to which type autocast casts, also where it is off; regions of forward() set it."""
        ask = functools.partial(torch.get_autocast_dtype, device)
        label = f"torch.get_autocast_dtype({device!r})"
        self.answer(ask, label, self._casts.get(device, ASK), torch.get_autocast_dtype)

    def ask_grad_mode(self) -> None:
        """What forward() does depends on whether the caller records gradients."""
        self.grad_mode = True
        self.answer(torch.is_grad_enabled, "torch.is_grad_enabled()", self.gradients)

    def _ask_for_gradients(self) -> None:
        """Whether a result has a gradient is up to the mode and to every parameter before it.

        Those of the call's tensors are in the key.
        """
        self.ask_grad_mode()
        for table, name in list(self._parameters.values()):
            if table.get(name) is not None:
                self._flag_of(table[name], "requires_grad")
