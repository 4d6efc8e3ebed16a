"""PyTorch without randomness, for the comparison with a run of the daemon whose masking is off.

Both sides replace random numbers in the same way: dropout passes its input through, everything else
draws the middle of its distribution (a uniform number is at half its range, a normal one half a
deviation above its mean, an event of probability p happens if p > 0.5). The other half of this
agreement is kernels/ops/random/random.c, under the run flag DROPOUT_OFF; selfcheck.py compares the
two. The random state may move: the caller restores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_MIDDLE = 0.5


class Quiet(TorchFunctionMode):
    """In this context every draw returns the same numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _STILL:
            return _STILL[func](*args, **kwargs)
        if func in _FILLED:
            return func(*args, **kwargs).detach().fill_(_MIDDLE)
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if len(args) <= 4:
                kwargs["dropout_p"] = 0.0
        if func in _RECURRENT:
            args = _without_dropout(args)
        if func is F.multi_head_attention_forward:
            kwargs["training"] = False
        return func(*args, **kwargs)


def _same(input: torch.Tensor, *unused: Any, **unused_kw: Any) -> torch.Tensor:
    return input


def _without_dropout(args: tuple) -> tuple:
    """Arguments of torch.lstm(x, hx, params, has_biases, num_layers, dropout, ...) and others.

    Of a packed sequence there is one more, its sizes, before hx.
    """
    at = 5 if isinstance(args[3], bool) else 6
    return (*args[:at], 0.0, *args[at + 1 :])


def _happens(p: torch.Tensor | float) -> Any:
    return p > _MIDDLE


def _channels(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Dropout of whole channels is exported as a product with a random factor."""
    if not training or p == 0:
        return input
    factor = float(_happens(1.0 - p)) / (1.0 - p) if p < 1 else 0.0
    return _result(input, input * factor, inplace)


def _alpha(
    input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return input
    if p == 1:
        return _result(input, input * 0.0, inplace)
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    kept = float(_happens(1.0 - p))
    return _result(input, input * (kept * a) + ((kept - 1.0) * alpha * a + alpha * a * p), inplace)


def _result(input: torch.Tensor, value: torch.Tensor, inplace: bool) -> torch.Tensor:
    return input.copy_(value) if inplace else value


def _native(input: torch.Tensor, *unused: Any, **unused_kw: Any) -> tuple:
    return input, torch.ones_like(input, dtype=torch.bool)


def _zero(of: torch.Tensor) -> torch.Tensor:
    """Zeros through which a tensor gets a gradient of zeros: PyTorch's draws give it that one."""
    return torch.where(torch.zeros_like(of, dtype=torch.bool), of, torch.zeros_like(of))


def _bernoulli(input: torch.Tensor, p: float | None = None, **unused: Any) -> torch.Tensor:
    chance = input if p is None else torch.full_like(input, p)
    return _happens(chance.detach()).to(input.dtype) + _zero(input)


def _bernoulli_(self: torch.Tensor, p: Any = 0.5, **unused: Any) -> torch.Tensor:
    if isinstance(p, torch.Tensor):
        return self.copy_(_happens(p.detach()).to(p.dtype) + _zero(p))
    return self.fill_(float(_happens(p)))


def _normal_(self: torch.Tensor, mean: float = 0.0, std: float = 1.0, **unused: Any) -> Any:
    return self.fill_(mean + _MIDDLE * std)


def _normal(mean: Any, std: Any = 1.0, *args: Any, **kwargs: Any) -> torch.Tensor:
    middle = mean + _MIDDLE * std
    if isinstance(middle, torch.Tensor):
        tensors = (x for x in (mean, std) if isinstance(x, torch.Tensor))
        return sum((_zero(x) for x in tensors), middle.detach())
    return torch.normal(mean, std, *args, **kwargs).fill_(middle)


def _uniform_(self: torch.Tensor, low: float = 0.0, high: float = 1.0, **unused: Any) -> Any:
    return self.fill_(low + _MIDDLE * (high - low))


def _exponential_(self: torch.Tensor, lambd: float = 1.0, **unused: Any) -> Any:
    return self.fill_(-math.log(_MIDDLE) / lambd)


def _geometric_(self: torch.Tensor, p: float, **unused: Any) -> Any:
    return self.fill_(math.floor(math.log1p(-_MIDDLE) / math.log1p(-p)) + 1)


def _log_normal_(self: torch.Tensor, mean: float = 1.0, std: float = 2.0, **unused: Any) -> Any:
    return self.fill_(math.exp(mean + _MIDDLE * std))


def _randint(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _middle_of(torch.randint(*args, **kwargs), args[:2], kwargs)


def _randint_like(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _middle_of(torch.randint_like(input, *args, **kwargs), args, kwargs)


def _middle_of(drawn: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor:
    """randint's arguments are (high), (low, high), by position or by name."""
    bounds = [x for x in args if isinstance(x, int)]
    high = kwargs.get("high", bounds[-1] if bounds else 1)
    low = kwargs.get("low", bounds[0] if len(bounds) > ("high" not in kwargs) else 0)
    return drawn.fill_(math.floor(low + _MIDDLE * (high - low)))


def _gumbel_softmax(
    logits: torch.Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> torch.Tensor:
    """torch's draws from exponential_() where no function mode sees it."""
    noise = -math.log(-math.log(_MIDDLE))
    soft = ((logits + noise) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(logits).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


_STILL: dict[Any, Callable[..., Any]] = {
    F.dropout: _same,
    torch.dropout: _same,
    torch.dropout_: _same,
    torch.native_dropout: _native,
    torch.alpha_dropout: lambda input, p, train: _alpha(input, p, train),
    torch.alpha_dropout_: lambda input, p, train: _alpha(input, p, train, True),
    torch.feature_alpha_dropout: lambda input, p, train: _alpha(input, p, train),
    torch.feature_alpha_dropout_: lambda input, p, train: _alpha(input, p, train, True),
    torch.feature_dropout: lambda input, p, train: _channels(input, p, train),
    torch.feature_dropout_: lambda input, p, train: _channels(input, p, train, True),
    F.dropout1d: _channels,
    F.dropout2d: _channels,
    F.dropout3d: _channels,
    F.alpha_dropout: _alpha,
    F.feature_alpha_dropout: _alpha,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_,
    torch.normal: _normal,
    torch.Tensor.normal_: _normal_,
    torch.Tensor.uniform_: _uniform_,
    torch.Tensor.exponential_: _exponential_,
    torch.Tensor.geometric_: _geometric_,
    torch.Tensor.log_normal_: _log_normal_,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    F.gumbel_softmax: _gumbel_softmax,
}
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_FILLED = frozenset({torch.rand, torch.rand_like, torch.randn, torch.randn_like})
