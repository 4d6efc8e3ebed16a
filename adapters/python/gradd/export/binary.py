"""Which buffers of a module hold nothing but zeros and ones, and the watch over them.

A model may keep its mask as floats and subtract it from 1 (OpenAI-GPT does). The graph then says
that the buffer is a mask (masks.py), which holds for as long as its values are zeros and ones: so
the module's key says which buffers are. Values are looked at when a key is made; in between, a
buffer that was found is known by its version and its address. Writes through .data, which have
no version, are not seen.
"""

from __future__ import annotations

import torch

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_FIRST = 16  # elements that rule out most buffers


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
        known = {} if before is None else dict(zip(map(id, before._watched), before._states))
        candidates = {id(t): t for _, t in named if _can_be_mask(t)}
        states = {i: _state(t) for i, t in candidates.items()}
        found = {i: t for i, t in candidates.items() if known.get(i) == states[i] or _is_binary(t)}
        # Strongly, as the module's key holds them too: ids of tensors that are gone come again.
        self._watched = list(found.values())
        self._states = [states[i] for i in found]
        shared = _shared(module, found)
        self.names = tuple(n for n, t in named if id(t) in found and id(t) not in shared)

    def is_fresh(self) -> bool:
        """True if all of them still hold zeros and ones; looks at values only after a write."""
        states = [_state(t) for t in self._watched]
        if states == self._states:
            return True
        if not all(_can_be_mask(t) and _is_binary(t) for t in self._watched):
            return False
        self._states = states
        return True


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
    return (tensor._version, tensor.data_ptr(), tensor.dtype, tensor.requires_grad)


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
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
