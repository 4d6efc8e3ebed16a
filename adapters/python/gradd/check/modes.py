"""Modes in which PyTorch computes its side of a self-check.

Without randomness: both sides replace random numbers in the same way. Dropout passes its input
through, everything else draws the middle of its distribution (a uniform number is at half its
range, a normal one half a deviation above its mean, an event of probability p happens if p > 0.5).
The other half of this agreement is kernels/ops/random/random.c, under the run flag DROPOUT_OFF.

In higher precision, without a second set of parameters: a leaf of autograd that stands in for a
parameter has its shape, a gradient in the higher precision, and memory for one element. Below
autograd, an operation that reads it, or a view of it, gets the parameter's values, converted for
that one operation; so it does in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradd import private

STEP = {0: 2.0**-23, 16: 2.0**-8, 10: 2.0**-11}  # between numbers, relative, by codes; 0 = f32
_PERIOD = 8191  # of drawn numbers
_REAL = "gradd_values"  # of what stands in for a parameter, or of its views
_aten = torch.ops.aten
_CONVERTS = _aten._to_copy.default
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class WithoutDropout(TorchFunctionMode):
    """Below functions a dropout is an event like any other. That of whole channels, and that which
    keeps mean and variance, are so on both sides.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        at = len(args)  # of the argument that says how much is dropped
        if func in (F.dropout, torch.dropout, torch.dropout_):
            return args[0] if args else kwargs["input"]
        if func is torch.native_dropout:
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False
        elif func is F.scaled_dot_product_attention and at <= 4:
            kwargs["dropout_p"] = 0.0
        elif func is F.scaled_dot_product_attention:
            at = 4
        elif func in _RECURRENT:  # a packed sequence has its sizes before hx
            at = 5 if isinstance(args[3], bool) else 6
        return func(*args[:at], *([0.0] if at < len(args) else []), *args[at + 1 :], **kwargs)


class Middles(TorchDispatchMode):
    """Below autograd, which gives probabilities and bounds their gradients of zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        middle = _MIDDLES.get(getattr(func, "overloadpacket", None))
        if middle is None:
            return result
        return result.copy_(torch.as_tensor(middle(*args), dtype=result.dtype))


def _integer(*args: Any) -> int:
    """Bounds are (high) or (low, high), between other arguments."""
    bounds = [x for x in args if isinstance(x, int)]
    return (bounds[-1] + (bounds[0] if len(bounds) > 1 else 0)) // 2


_MIDDLES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.rand, _aten.rand_like, _aten.randn, _aten.randn_like), lambda *_: 0.5),
    **dict.fromkeys((_aten.randint, _aten.randint_like), _integer),
    _aten.bernoulli: lambda self, p=None: (self if p is None else p) > 0.5,
    _aten.bernoulli_: lambda self, p=0.5: p > 0.5,
    _aten.uniform_: lambda self, low=0.0, high=1.0: (low + high) / 2,
    _aten.normal: lambda mean, std=1.0, *_: mean + std / 2,
    _aten.normal_: lambda self, mean=0.0, std=1.0: mean + std / 2,
    _aten.log_normal_: lambda self, mean=1.0, std=2.0: math.exp(mean + std / 2),
    _aten.exponential_: lambda self, rate=1.0: math.log(2) / rate,
    _aten.geometric_: lambda self, p: math.floor(math.log(0.5) / math.log1p(-p)) + 1,
}


class Precise(TorchDispatchMode):
    """In this context operations are computed in one precision, and may be a rounding off.

    PyTorch's own result is one sample of what roundings do, and may be exact by luck. Here results,
    and the parameters that are read, are off by a drawn part of a rounding; conversions, which are
    exact, are not, nor is what is written in place.
    (Stochastic arithmetic; Vignes, "A stochastic arithmetic for reliable scientific computation",
    1993.)

    Attributes:
        paused: Operations are what they are elsewhere.
    """

    def __init__(self, dtype: torch.dtype | None, half: int = 0, draw: int | None = None) -> None:
        """Args:
        dtype: The precision; None = that of every operand.
        half: Code of the element type whose roundings are drawn; 0 = f32.
        draw: Number of the draw; None = nothing is off. Two in a row are opposite to each other:
            a unit near zero flips in one of them. In f32, where long sums are many roundings off,
            these are 16 times as far off, the next two 64 times.
        """
        super().__init__()
        self._dtype, self.paused = dtype, False
        pair, second = divmod(draw or 0, 2)
        self._drawn = None if draw is None else torch.Generator("cpu").manual_seed(pair)
        self._rounding = STEP[half] / (2 if second else -2) * (1 if half else 16 * 4 ** (pair % 2))

    def stand_in(self, parameter: torch.Tensor, wants: bool) -> torch.nn.Parameter:
        """A leaf to be read in place of a parameter of floats, with a gradient if it wants one."""
        one = torch.zeros((), dtype=self._dtype or parameter.dtype, device=parameter.device)
        leaf = torch.nn.Parameter(one.expand(parameter.shape), wants)
        setattr(leaf, _REAL, parameter.detach())
        return leaf

    def real(self, value: Any) -> Any:
        """What an operation reads of its operand."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        values = getattr(value, _REAL, None)
        if values is None:
            return value.to(self._dtype or value.dtype)
        return self._shaken(values.to(value.dtype, copy=self._drawn is not None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.paused:
            return func(*args, **kwargs)
        schema, pytree = private.schema(func), private.pytree
        aliases = [a.alias_info for a in schema.arguments]
        operands = [
            x if alias is not None else pytree.tree_map(self.real, x)
            for x, alias in zip(args, aliases, strict=False)
        ]
        if func is _CONVERTS and (to := kwargs.get("dtype")) is not None and to.is_floating_point:
            kwargs["dtype"] = self._dtype or to
        parameter = getattr(args[0], _REAL, None) if args else None
        if parameter is not None and aliases[0] is not None and aliases[0].is_write:
            raise TypeError(f"{func} writes a parameter")
        results = func(*operands, **kwargs)
        if all(r.alias_info is None for r in schema.returns):
            return results if func is _CONVERTS else pytree.tree_map(self._shaken, results)
        if parameter is not None:
            views = func(parameter, *operands[1:], **kwargs)
            for view, real in zip(*map(pytree.tree_leaves, (results, views)), strict=True):
                setattr(view, _REAL, real)
        return results

    def _shaken(self, value: Any) -> Any:
        """Every number by its own rounding, and all by a common one: sums average the former."""
        if self._drawn is None or not torch.is_tensor(value) or not value.is_floating_point():
            return value
        own = 2 * torch.rand(_PERIOD + 1, generator=self._drawn, dtype=torch.float64) - 1
        wide = torch.promote_types(value.dtype, torch.float32)
        factors = (1 + self._rounding * (own[1:] + own[0].sign())).to(value.device, wide)
        flat = value.as_strided((value.numel(),), (1,))
        rest = flat.numel() % _PERIOD
        for part in (flat[rest:].view(-1, _PERIOD), flat[:rest]):
            part.mul_(factors[: part.shape[-1]])
        return value
