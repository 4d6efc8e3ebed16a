"""Tensors that forward() reaches outside of its arguments, parameters and buffers.

Every operator that runs passes a dispatch mode here, so no way of reaching a tensor escapes. A
tensor of outside becomes an input of the graph, unless Python took its value (`if self.flag:`,
`int(t)`, `t.tolist()`), which is then part of what the capture read. What forward() writes in
place into such a tensor, or into a parameter, is undone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gradd.calls.watch import untyped_storage
from gradd.export.guards.images import is_a
from gradd.export.guards.uncomputed import Uncomputed
from gradd.export.guards.written import Gradients, Written

_TAKES_VALUE = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item"})
MEMORY_METHODS = frozenset({"numpy", "__array__", "data_ptr", "__dlpack__"})
VALUE_METHODS = MEMORY_METHODS | {"tolist", "item"}


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if is_a(value, torch.Tensor):
            yield value
        elif is_a(value, (list, tuple)):
            yield from _tensors_in(value)


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # sparse tensors and the like have no storage
        return 0


def _addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Of its memory, and of the storage that holds it: share_memory_() gives that another one."""
    pointer = _pointer(tensor)
    return (pointer, tensor.untyped_storage()._cdata) if pointer else ()


class Tensors(TorchDispatchMode):
    """Watches the operators of one forward.

    Attributes:
        foreign: Tensors that no operator made and that do not belong to the call, by id; weakly,
            because some are activations that an operator returned in another skin.
        by_value: Ids of those whose value Python has taken.
        used: Ids of those that an operator has read.
        overwritten: Tensors that an operator has written, and no other has made, by address.
        gradients_written: Some `.grad` was another when put_back() came.
        uncomputed: Results without values.
    """

    supports_higher_order_operators = True

    def __init__(
        self, own: dict[int, torch.Tensor], inputs: Iterable[torch.Tensor], whole: bool = True
    ) -> None:
        """Args:
        own: Parameters and buffers, and the stand-ins of buffers, by id.
        inputs: Tensors of the call.
        whole: Every result is computed, large ones too.
        """
        super().__init__()
        self.uncomputed = Uncomputed(not whole)
        self.foreign: dict[int, weakref.ref[torch.Tensor]] = {}
        self.by_value: set[int] = set()
        self.used: set[int] = set()
        self.overwritten: dict[int, torch.Tensor] = {}
        self.gradients_written = False
        self._written, self._gradients = Written(), Gradients(own.values())
        self._own = own
        self._inputs = {id(t) for t in inputs}
        self._made: set[int] = set()
        self._from: dict[int, frozenset[int]] = {}  # made of foreign ones only
        self._kept = {at: weakref.ref(t) for t in own.values() for at in _addresses(t)}
        self._free: set[int] = set()
        self._lifted: set[int] = set()

    def free_to_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stand-ins: nothing is lost if forward() writes them."""
        for tensor in tensors:
            self._free.add(id(tensor))
            for address in _addresses(tensor):
                self._kept.pop(address, None)

    def keep_forms(self) -> None:
        """Where parameters and their gradients lie: Module.double() gives them another memory.

        It does so by `.data`, which is no operator. Nobody records it in torch's own code.
        """
        for tensor in self._own.values():
            for part in () if id(tensor) in self._free else (tensor, tensor.grad):
                if part is not None:
                    self._written.keep_form(part)

    def is_own(self, tensor: torch.Tensor) -> bool:
        """True for parameters and buffers."""
        return id(tensor) in self._own

    def is_input(self, tensor: torch.Tensor) -> bool:
        """True for tensors of the call."""
        return id(tensor) in self._inputs

    def is_made(self, tensor: torch.Tensor) -> bool:
        """True for what an operator of this forward has returned."""
        return id(tensor) in self._made and not self.is_own(tensor) and not self.is_input(tensor)

    def is_foreign(self, tensor: torch.Tensor) -> bool:
        """True for tensors of outside that have been noted."""
        return self._knows(tensor)

    def is_id(self, number: int) -> bool:
        """True for id() of a tensor of the call or the module."""
        return number in self._inputs or number in self._own

    def note(self, tensor: torch.Tensor) -> None:
        """Python code has this tensor in its hands."""
        key = id(tensor)
        if key in self._own or key in self._inputs or key in self._made or self._knows(tensor):
            return
        self.foreign[key] = weakref.ref(tensor)
        self._gradients.note(tensor)
        for address in _addresses(tensor):
            if self._holder(address) is None:
                self._kept[address] = weakref.ref(tensor)

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self.foreign.get(id(tensor))
        return known is not None and known() is tensor

    def taken(self, tensor: torch.Tensor) -> None:
        """Python code takes the value of this tensor."""
        self.uncomputed.missed()
        self.note(tensor)
        self.by_value |= self._origin(tensor)

    def exposed(self, tensor: torch.Tensor) -> None:
        """All of its memory is in other hands than torch's, which may write it."""
        self.uncomputed.missed()
        with _disable_current_modes(), contextlib.suppress(Exception):  # it may have none
            self._kept_from(tensor, _memory(tensor))
        self.about_to_write(tensor)

    def _holder(self, address: int) -> torch.Tensor | None:
        known = self._kept.get(address)
        return known() if known is not None else None

    def _kept_from(self, tensor: torch.Tensor, place: torch.Tensor) -> bool:
        holders = map(self._holder, _addresses(tensor))
        kept = next((holder for holder in holders if holder is not None), None)
        if kept is not None:
            self._written.keep_values(kept, place)
        return kept is not None

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """An operator is about to write it."""
        old = (self.is_own(tensor) or self._knows(tensor)) and id(tensor) not in self._free
        with _disable_current_modes():
            if old:
                self._written.keep_form(tensor)
            if not self._kept_from(tensor, tensor) and old and tensor.layout is not torch.strided:
                self._written.keep_whole(tensor)

    def _origin(self, tensor: torch.Tensor) -> frozenset[int]:
        if self._knows(tensor):
            return frozenset([id(tensor)])
        return self._from.get(id(tensor), frozenset())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # torch.cond and its like have none
        name = schema.name.rpartition("::")[2] if schema is not None else ""
        operands = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        if name.startswith("lift_fresh"):
            self._made.update(map(id, operands))  # a literal of forward(), or over an array
            self._lifted.update(map(_pointer, operands))
        origin: frozenset[int] = frozenset()
        for tensor in operands:
            self.note(tensor)
            if self._knows(tensor):
                self.used.add(id(tensor))
            origin |= self._origin(tensor)
        if schema is not None and schema.is_mutable:
            self._keep_written(schema, args, kwargs)
        result = None
        if schema is not None:
            result = self.uncomputed.stand_in(func, operands, args, kwargs)
        if result is None:
            result = func(*args, **kwargs)
        if name in _TAKES_VALUE:
            self.uncomputed.missed()
            self.by_value |= origin
        for tensor in _tensors_in((result,)):
            if self._knows(tensor) or id(tensor) in self._own or id(tensor) in self._inputs:
                continue
            self._made.add(id(tensor))
            if origin:
                self._from[id(tensor)] = origin
            else:
                self._from.pop(id(tensor), None)
        return result

    def _keep_written(self, schema: Any, args: tuple, kwargs: dict) -> None:
        values = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors_in((values.get(argument.name),)):
                if not self.is_made(tensor):
                    self.uncomputed.missed()
                self.about_to_write(tensor)
                self._note_overwritten(tensor)

    def _note_overwritten(self, tensor: torch.Tensor) -> None:
        pointer = _pointer(tensor)
        if pointer in self._lifted or self._holder(pointer) is not None:
            self.overwritten[pointer] = tensor

    def put_back(self, young: set[int]) -> list[torch.Tensor]:
        """Undoes writes, but to what is `young`; returns the tensors whose values had changed."""
        self.overwritten.clear()
        self.gradients_written = self._gradients.put_back(young)
        return self._written.put_back(young)

    def old(self, young: set[int]) -> list[torch.Tensor]:
        """The tensors of outside."""
        alive = (ref() for ref in self.foreign.values())
        return [t for t in alive if t is not None and id(t) not in young]


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(untyped_storage(tensor))
