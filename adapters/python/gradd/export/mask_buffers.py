"""Which buffers of a module hold nothing but zeros and ones, and the watch over them.

A model may keep its mask as floats and subtract it from 1 (OpenAI-GPT does). The graph then says
that the buffer is a mask (masks.py), which holds for as long as its values are zeros and ones: so
the module's key says which buffers are. Values are looked at when a key is made. In between, a
buffer that was found is known by its version, its address and its values, for writes through .data
have no version: all values of a small buffer, drawn ones of a large one, and all again after its
memory was given away (watch.py).
"""

from __future__ import annotations

import torch

from gradd.calls.watch import accesses, data_ptr
from gradd.tensor_kinds import is_dense

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_FIRST = 16  # elements that rule out most buffers
_SMALL_BYTES = 64 << 10
_DRAWN = 512  # elements of a larger buffer


class Binaries:
    """The buffers of a module that can be masks: zeros and ones, as floats, on two axes or more.

    Buffers of zeros alone are left out. They hide everything, so no model has such a mask, but
    many have buffers that begin as zeros, and their first change should not cost a capture.

    Attributes:
        names: Qualified names, those of tied buffers included, in the module's order.
    """

    def __init__(self, module: torch.nn.Module, before: Binaries | None = None) -> None:
        """Args:
        module: The module.
        before: Of the same module, to look only at values that have changed since.
        """
        named = list(module.named_buffers(remove_duplicate=False))
        known = {} if before is None else {id(k.tensor): k for k in before.known if k.is_same()}
        candidates = {id(t): t for _, t in named if is_dense(t) and _can_be_mask(t)}
        found = {i: t for i, t in candidates.items() if i in known or _is_binary(t)}
        self.known = [known[i] if i in known else _Known(t) for i, t in found.items()]
        shared = _shared(module, found)
        self.names = tuple(n for n, t in named if id(t) in found and id(t) not in shared)

    def is_fresh(self) -> bool:
        """True if all of them still hold zeros and ones; looks at values only after a write."""
        changed = [k for k in self.known if not k.is_same()]
        if not all(_can_be_mask(k.tensor) and _is_binary(k.tensor) for k in changed):
            return False
        for known in changed:
            known.keep()
        return True


class _Known:
    """A buffer of zeros and ones as it was when somebody looked at all of it."""

    __slots__ = ("_accesses", "_drawn", "_state", "_values", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Strongly, as the module's key holds it too: ids of tensors that are gone come again.
        self.tensor = tensor
        self.keep()

    def keep(self) -> None:
        """What the tensor holds now is what is_same() compares with."""
        tensor = self.tensor
        self._accesses = accesses.count
        self._state = _state(tensor)
        self._drawn = None
        if tensor.nbytes > _SMALL_BYTES:
            places = torch.linspace(0, tensor.numel() - 1, _DRAWN, dtype=torch.float64).long()
            # Places in even steps would all be in one column of a matrix.
            places = (places + torch.arange(_DRAWN) % 61).clamp_(max=tensor.numel() - 1)
            self._drawn = torch.unravel_index(places, tensor.shape)
        self._values = tensor.clone() if self._drawn is None else tensor[self._drawn]

    def is_same(self) -> bool:
        """False if the tensor was written since, or may have been."""
        tensor = self.tensor
        if _state(tensor) != self._state:
            return False
        if self._drawn is None:
            return torch.equal(tensor, self._values)
        if accesses.count != self._accesses or accesses.is_given(tensor):
            return False  # who has looked at all of it keeps it again
        return torch.equal(tensor[self._drawn], self._values)


def _can_be_mask(tensor: torch.Tensor) -> bool:
    """True for tensors with more than one axis whose values and versions can be read at no cost."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _FLOATS
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dim() >= 2
        and not (tensor.requires_grad or tensor.is_inference())
    )


def _state(tensor: torch.Tensor) -> tuple:
    """Changes with every write that torch knows of."""
    return (tensor._version, data_ptr(tensor), tensor.dtype, tensor.requires_grad)


def _is_binary(tensor: torch.Tensor) -> bool:
    """True if a cast to bool and back keeps every bit and some element is 1."""
    first = tensor
    while first.dim() > 1 and len(first):
        first = first[0]
    return _is_kept(first[:_FIRST]) and bool(tensor.any()) and _is_kept(tensor)


def _is_kept(tensor: torch.Tensor) -> bool:
    same = torch.equal(tensor.bool().to(tensor.dtype), tensor)
    return same and not bool(tensor.signbit().any())  # -0. becomes 0.


def _shared(module: torch.nn.Module, found: dict[int, torch.Tensor]) -> set[int]:
    """Ids of those whose memory somebody else in the module may write without their version."""
    if not found:
        return set()
    named = [*module.parameters(), *module.buffers()]
    others = [_span(t) for t in named if id(t) not in found and _has_memory(t)]
    shared = set()
    for i, tensor in found.items():
        first, end = _span(tensor)
        if any(a < end and first < b for a, b in others):
            shared.add(i)
    return shared


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return data_ptr(tensor), data_ptr(tensor) + (last + 1) * tensor.element_size()
