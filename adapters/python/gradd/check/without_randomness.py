"""PyTorch without randomness, for the comparison with a run of the daemon whose masking is off.

Both sides replace random numbers in the same way: dropout passes its input through, everything else
draws the middle of its distribution (a uniform number is at half its range, a normal one half a
deviation above its mean, an event of probability p happens if p > 0.5). The other half of this
agreement is kernels/ops/random/random.c, under the run flag DROPOUT_OFF; selfcheck.py compares the
two. The random state may move: the caller restores it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_MIDDLE = 0.5
_aten = torch.ops.aten


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """In this context every draw returns the same numbers."""
    with _WithoutDropout(), _Middles():
        yield


class _WithoutDropout(TorchFunctionMode):
    """Below functions a dropout is an event like any other. That of whole channels, and that which
    keeps mean and variance, are so on both sides.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (F.dropout, torch.dropout, torch.dropout_):
            return args[0] if args else kwargs["input"]
        if func is torch.native_dropout:
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
        if func in _RECURRENT:
            args = _without_dropout(args)
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False
        return func(*args, **kwargs)


class _Middles(TorchDispatchMode):
    """Below autograd, which gives probabilities and bounds their gradients of zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        middle = _MIDDLES.get(getattr(func, "overloadpacket", None))
        value = middle(*args) if middle is not None else None
        result = func(*args, **(kwargs or {}))
        if middle is not None:
            result.copy_(value) if isinstance(value, torch.Tensor) else result.fill_(value)
        return result


def _without_dropout(args: tuple) -> tuple:
    """Arguments of torch.lstm(x, hx, params, has_biases, num_layers, dropout, ...) and others.

    Of a packed sequence there is one more, its sizes, before hx.
    """
    at = 5 if isinstance(args[3], bool) else 6
    return (*args[:at], 0.0, *args[at + 1 :])


def _happens(self: torch.Tensor, p: torch.Tensor | float | None = None) -> Any:
    return (self if p is None else p) > _MIDDLE


def _between(low: float, high: float) -> float:
    return low + _MIDDLE * (high - low)


def _integer(*args: Any) -> int:
    """Bounds are (high) or (low, high), between other arguments."""
    bounds = [x for x in args if isinstance(x, int)]
    return math.floor(_between(bounds[0] if len(bounds) > 1 else 0, bounds[-1]))


_MIDDLES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.rand, _aten.rand_like), lambda *_: _MIDDLE),
    **dict.fromkeys((_aten.randn, _aten.randn_like), lambda *_: _MIDDLE),
    _aten.randint: _integer,
    _aten.randint_like: _integer,
    _aten.bernoulli: _happens,
    _aten.bernoulli_: lambda self, p=0.5: _happens(self, p),
    _aten.uniform_: lambda self, low=0.0, high=1.0: _between(low, high),
    _aten.normal: lambda mean, std=1.0, *_: mean + _MIDDLE * std,
    _aten.normal_: lambda self, mean=0.0, std=1.0: mean + _MIDDLE * std,
    _aten.log_normal_: lambda self, mean=1.0, std=2.0: math.exp(mean + _MIDDLE * std),
    _aten.exponential_: lambda self, rate=1.0: -math.log(_MIDDLE) / rate,
    _aten.geometric_: lambda self, p: math.floor(math.log(_MIDDLE) / math.log1p(-p)) + 1,
}
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
