"""PyTorch in higher precision without a second set of parameters.

What a forward reads of a parameter is converted for that one operation, and what autograd saves of
it is remembered by name and converted again in the backward. Of a large model only a few parameters
exist in the higher precision at a time. Gradients arrive in it too, use by use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TENSOR = torch.Tensor
# What these say of a parameter is the same in every precision.
_SAME = {
    getter.__get__
    for getter in (
        *(_TENSOR.shape, _TENSOR.device, _TENSOR.requires_grad, _TENSOR.ndim, _TENSOR.layout),
        *(_TENSOR.is_leaf, _TENSOR.grad, _TENSOR.is_cpu, _TENSOR.is_cuda, _TENSOR._version),
    )
} | {
    *(_TENSOR.size, _TENSOR.dim, _TENSOR.numel, _TENSOR.is_floating_point, _TENSOR.__len__),
    *(_TENSOR.stride, _TENSOR.is_contiguous, _TENSOR.is_complex, _TENSOR.__hash__),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}


class Precise(TorchFunctionMode):
    """Inside this context the given leaves are read in a higher precision.

    Use the methods `pack` and `unpack` as saved_tensors_hooks in the same context.
    """

    def __init__(self, leaves: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._over = False
        self.gradients: dict[int, torch.Tensor] = {}
        self._leaves = {id(t): t for t in leaves if t.is_floating_point() and t.dtype != dtype}
        self._made: dict[int, tuple[weakref.ref, torch.Tensor]] = {}  # by address
        self._uses: dict[int, list[Any]] = {}
        self._left: dict[int, int] = {}
        self._take: Callable[[torch.Tensor, torch.Tensor], None] = lambda leaf, grad: None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if self._over:
            return func(*args, **(kwargs or {}))
        if func == _TENSOR.dtype.__get__ and id(args[0]) in self._leaves:
            return self.dtype
        if func in _SAME:
            return func(*args, **(kwargs or {}))
        args, kwargs = self._converted(args), self._converted(kwargs or {})
        return func(*args, **kwargs)

    def _converted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._convert(value) if id(value) in self._leaves else value
        if type(value) in (tuple, list):
            return type(value)(self._converted(v) for v in value)
        if type(value) is dict:
            return {k: self._converted(v) for k, v in value.items()}
        return value

    def _convert(self, leaf: torch.Tensor) -> torch.Tensor:
        made = leaf.to(self.dtype)
        where = made.untyped_storage().data_ptr()
        # The entry must go before the address can be another tensor's.
        self._made[where] = (weakref.ref(made, lambda _: self._made.pop(where, None)), leaf)
        if made.requires_grad:
            self._uses.setdefault(id(leaf), []).append(made.grad_fn)
            made.register_hook(lambda grad: self._arrived(leaf, grad))
        return made

    def forward_is_over(self) -> None:
        """From now on leaves are what they are; nothing but backwards follow."""
        self._over = True

    # ---- what autograd saves ----

    def pack(self, tensor: torch.Tensor) -> Any:
        """What to keep of a tensor that a backward needs."""
        found = self._made.get(tensor.untyped_storage().data_ptr())
        if found is None or found[0]() is None or tensor.dtype != self.dtype:
            return tensor.detach()
        return found[1], tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(kept, torch.Tensor):
            return kept
        leaf, shape, stride, offset = kept
        return leaf.detach().to(self.dtype).as_strided(shape, stride, offset)

    # ---- gradients ----

    def expect(
        self, outputs: list[torch.Tensor], take: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """To be called before the backward from `outputs`.

        Args:
            outputs: Where it starts.
            take: Called with a leaf and its whole gradient, as soon as every use has given its own.
        """
        reached = set(nodes_of(outputs))
        self._left = {
            leaf: sum(node in reached for node in nodes) for leaf, nodes in self._uses.items()
        }
        self._take = take

    def finish(self) -> None:
        """After the backward: hands on what not every use has contributed to."""
        for leaf in list(self.gradients):
            self._take(self._leaves[leaf], self.gradients.pop(leaf))

    def close(self) -> None:
        """Forgets everything: nodes know hooks, and hooks know this object."""
        self.gradients.clear()
        self._uses.clear()
        self._made.clear()
        self._leaves.clear()
        self._take = lambda leaf, grad: None

    def _arrived(self, leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        key = id(leaf)
        self._left[key] = self._left.get(key, 0) - 1
        if grad is not None:
            before = self.gradients.pop(key, None)
            self.gradients[key] = grad.detach() if before is None else before + grad.detach()
        if self._left[key] == 0 and key in self.gradients:
            self._take(leaf, self.gradients.pop(key))


def nodes_of(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes behind these tensors, each once."""
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        more = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= more
        nodes += more
