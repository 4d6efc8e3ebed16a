"""Tensors that a forward is about to write in place, as they were, and putting them back.

Values are kept by the place in memory that is written, not by the tensor: views of one memory may
be written one after the other, and a tensor that is resized or gets another memory (`set_()`) no
longer leads to its own. Gradients are kept by the tensor that has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from gradd.tensor_kinds import is_plain


class _Form:
    """How a tensor lies in memory, and how large that memory is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._storage = tensor, tensor.untyped_storage()
        self._bytes, self._type = self._storage.nbytes(), tensor.dtype
        self._place = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def shrink(self) -> bool:
        """Gives the memory its size back; True if it had another one."""
        if self._storage.nbytes() == self._bytes:
            return False
        self._storage.resize_(self._bytes)
        return True

    def put_back(self) -> bool:
        """Gives the tensor its memory, type and form back; True if it had others."""
        tensor = self._tensor
        place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        same = place == self._place and tensor.dtype == self._type
        if same and tensor.untyped_storage()._cdata == self._storage._cdata:
            return False
        made = torch.empty(0, dtype=self._type, device=self._storage.device)
        tensor.data = made.set_(self._storage, *self._place)
        return True


class _Values:
    """What stands in the place of a tensor; the tensor itself may move."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.place = _place(tensor)
        self._before = self.place.clone()

    def put_back(self) -> bool:
        """True if something else stood there."""
        if not _fits(self.place):  # it was written when forward() had made the memory larger
            return False
        if torch.equal(_bytes(self.place), _bytes(self._before)):
            return False
        self.place.copy_(self._before)
        return True


class _Whole:
    """A tensor without a memory of its own (a sparse one): it is taken as written."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._before = tensor, tensor.detach().clone()

    def put_back(self) -> bool:
        """True: nobody compares such tensors."""
        self._tensor.data = self._before
        return True


def _place(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory, where an element that is repeated stands once."""
    sizes = [1 if step == 0 and n else n for n, step in zip(tensor.size(), tensor.stride())]
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), sizes, tensor.stride())


def _fits(place: torch.Tensor) -> bool:
    if not place.numel():
        return True
    reach = sum((n - 1) * step for n, step in zip(place.size(), place.stride(), strict=True))
    end = place.storage_offset() + reach + 1
    return end * place.itemsize <= place.untyped_storage().nbytes()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Written:
    """What is kept of one forward."""

    def __init__(self) -> None:
        self._forms: dict[int, tuple[torch.Tensor, _Form]] = {}
        self._values: dict[tuple, tuple[torch.Tensor, Any]] = {}

    def keep_form(self, tensor: torch.Tensor) -> None:
        """A tensor of outside is about to be written, resized or moved."""
        if id(tensor) not in self._forms:
            with contextlib.suppress(Exception):  # without a memory it has no such form
                self._forms[id(tensor)] = (tensor, _Form(tensor))

    def keep_values(self, owner: torch.Tensor, tensor: torch.Tensor) -> None:
        """The memory of `owner`, which is of outside, is about to be written through `tensor`."""
        place = (tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)
        key = (tensor.untyped_storage()._cdata, place)
        if key not in self._values:
            self._values[key] = (owner, _Values(tensor))

    def keep_whole(self, tensor: torch.Tensor) -> None:
        """The same for a tensor without memory of its own."""
        self._values.setdefault((id(tensor),), (tensor, _Whole(tensor)))

    def put_back(self, young: set[int]) -> list[torch.Tensor]:
        """Undoes all, but to what is `young`; returns the tensors that had changed."""
        forms = [form for form in self._forms.values() if id(form[0]) not in young]
        values = [value for value in self._values.values() if id(value[0]) not in young]
        with torch.no_grad():
            changed = [tensor for tensor, form in forms if form.shrink()]
            # The first values of a place that others overlap are the oldest.
            changed += [owner for owner, value in reversed(values) if value.put_back()]
            changed += [tensor for tensor, form in forms if form.put_back()]
        self._forms.clear()
        self._values.clear()
        return list({id(tensor): tensor for tensor in changed}.values())


class Gradients:
    """The `.grad` of parameters and tensors of outside."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for tensor in tensors:
            self.note(tensor)

    def note(self, tensor: torch.Tensor) -> None:
        """A tensor that a backward may reach; others are not held."""
        if id(tensor) in self._before or not is_plain(type(tensor)) or not tensor.is_leaf:
            return
        if tensor.requires_grad or tensor.grad is not None:
            self._before[id(tensor)] = (tensor, tensor.grad)

    def put_back(self, young: set[int]) -> bool:
        """Puts them back; True if one was another."""
        kept = [pair for pair in self._before.values() if id(pair[0]) not in young]
        changed = [(tensor, grad) for tensor, grad in kept if tensor.grad is not grad]
        for tensor, grad in changed:
            tensor.grad = grad
        self._before.clear()
        return bool(changed)
