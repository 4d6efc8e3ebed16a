"""PyTorch in higher precision without a second set of parameters, and the effect of f32 rounding.

A parameter that a graph reads is converted for that one operation; the tensors that autograd saves
of it are remembered by name and converted again in the backward. Of a large model only a few
parameters exist in the higher precision at a time. The leaf of autograd is a stand-in that occupies
one element: its gradient is summed in the higher precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradd import private

_ROUNDING = 2.0**-24  # of f32, relative


class _Read(torch.autograd.Function):
    """The values of a parameter, in the precision of the leaf that stands in for it."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.to(leaf.dtype)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


class Precise:
    """Reads parameters in a higher precision.

    The methods `pack` and `unpack` are for saved_tensors_hooks.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the leaf
        self._made: dict[int, tuple[weakref.ref, torch.Tensor]] = {}  # by address

    def leaf(self, parameter: torch.Tensor, wants: bool) -> torch.nn.Parameter:
        """A leaf of the parameter's shape, to be given to `convert` wherever it is read.

        Args:
            parameter: Floats of another precision.
            wants: Whether it gets a gradient.
        """
        one = torch.zeros((), dtype=self._dtype, device=parameter.device)
        leaf = torch.nn.Parameter(one.expand(parameter.shape), wants)
        vars(leaf).update(vars(parameter))  # attributes that a script has written there
        self._parameters[id(leaf)] = leaf, parameter.detach()
        return leaf

    def differs(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has another precision."""
        return tensor.is_floating_point() and tensor.dtype != self._dtype

    def convert(self, value: Any) -> Any:
        """An operand of an operation, or a result of the graph."""
        found = self._parameters.get(id(value))
        if found is None:
            return value
        made = _Read.apply(*found)
        where = made.untyped_storage().data_ptr()
        # The entry must go before the address can be another tensor's.
        self._made[where] = (weakref.ref(made, lambda _: self._made.pop(where, None)), found[1])
        return made

    def pack(self, tensor: torch.Tensor) -> Any:
        """The part to keep of a tensor that a backward needs."""
        found = self._made.get(tensor.untyped_storage().data_ptr())
        if found is None or found[0]() is None or tensor.dtype != self._dtype:
            return tensor.detach()
        return found[1], tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(kept, torch.Tensor):
            return kept
        parameter, *place = kept
        return parameter.to(self._dtype).as_strided(*place)


class Shaken(TorchDispatchMode):
    """Inside this context the results of operators on float64 are a rounding of f32 off.

    PyTorch's own f32 result is one sample of what roundings do, and may be exact by luck. Views and
    what is written in place stay as they are: what they show was shaken when it was made. So do
    conversions, which are exact.
    (Stochastic arithmetic; Vignes, "A stochastic arithmetic for reliable scientific computation",
    1993.)
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        exact = func is torch.ops.aten._to_copy.default
        if not exact and all(r.alias_info is None for r in private.schema(func).returns):
            for value in private.pytree.tree_leaves(results):
                if isinstance(value, torch.Tensor) and value.dtype is torch.float64:
                    self._shake(value)
        return results

    def _shake(self, value: torch.Tensor) -> None:
        """Every number by its own rounding, and all by a common one: sums average the former."""
        own = self._drawn(value.shape).to(value.device)
        common = float(self._drawn(()) < 0.5)
        value.mul_(1.0 + (2.0 * (own + common) - 2.0) * _ROUNDING)

    def _drawn(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64, device="cpu")
