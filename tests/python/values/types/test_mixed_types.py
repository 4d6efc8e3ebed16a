"""Arithmetic of integer or boolean masks with floats: torch's promotion, values and gradients.

All expressions of a kind are one graph; `strict` refuses a cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.graphs.captures import Lambda

_Expressions = dict[str, Callable]

# Of floats x and a mask m of integers, booleans or both.
_ANY: _Expressions = {
    "m * -10000.0": lambda x, m: x + m * -10000.0,
    "0.5 * m": lambda x, m: 0.5 * m,
    "m / 2": lambda x, m: m / 2,
    "2.0 / m": lambda x, m: 2.0 / (m + 1),
    "m + 0.5": lambda x, m: m + 0.5,
    "x + m": lambda x, m: x + m,
    "x * m": lambda x, m: m * x,
    "m / x": lambda x, m: m / (x.abs() + 1),
    "m > 0.5": lambda x, m: m > 0.5,
    "0.5 >= m": lambda x, m: m <= 0.5,
    "m == 1.0": lambda x, m: m == 1.0,
    "m != 0.5": lambda x, m: m != 0.5,
    "x > m": lambda x, m: x > m,
    "m <= x": lambda x, m: m <= x,
    "2.0 ** m": lambda x, m: 2.0**m,
    "m ** 0.5": lambda x, m: m**0.5,
    "m ** x": lambda x, m: torch.pow(m, x.abs()),
    "m % 0.3": lambda x, m: m % 0.3,
    "m // 0.3": lambda x, m: m // 0.3,
    "add alpha": lambda x, m: torch.add(x, m, alpha=0.5),
    "maximum": lambda x, m: torch.maximum(x, m),
    "where": lambda x, m: torch.where(m > 0, x, m),
    "where number": lambda x, m: torch.where(m > 0, 1.5, m),
    "where number behind": lambda x, m: torch.where(m > 0, m, -1e4),
    "rank 0": lambda x, m: torch.tensor(2.5) * m - m.sum(),
    "exp": lambda x, m: torch.exp(m) - torch.sqrt(m),
}
_INTEGERS: _Expressions = {
    "1.0 - m": lambda x, m: 1.0 - m,
    "x * (1.0 - m)": lambda x, m: x * (1.0 - m),
    "(1.0 - m) * min": lambda x, m: x + (1.0 - m) * torch.finfo(x.dtype).min,
    "(1 - m) * min": lambda x, m: x + (1 - m) * torch.finfo(x.dtype).min,
    "m - 0.5": lambda x, m: m - 0.5,
    "x - m": lambda x, m: x - m,
    "m - x": lambda x, m: m - x,
    "rsub": lambda x, m: torch.rsub(m, 1.5, alpha=2),
    "rsub tensors": lambda x, m: torch.rsub(m, x, alpha=2),
    "x ** m": lambda x, m: x.abs() ** (m + 1),
    "clamp": lambda x, m: torch.clamp(m, 0.5, 1.5),
    "clamp to two kinds": lambda x, m: torch.clamp(m, -3, 1.7),
    "clip to two kinds": lambda x, m: torch.clip(m, 0.5, 2),
    "clamp_min": lambda x, m: torch.clamp_min(m, 0.5),
    "clamp from above": lambda x, m: m.clamp(max=1.5),
    "relu": lambda x, m: torch.relu(m - 1) * x,
    "fmod": lambda x, m: torch.fmod(m, 0.7),
    "div trunc": lambda x, m: torch.div(m, 0.3, rounding_mode="trunc"),
}


class _All(nn.Module):
    """Every expression of a table, of weighted rows."""

    def __init__(self, expressions: _Expressions, dtype: torch.dtype) -> None:
        super().__init__()
        self.expressions = expressions
        self.weight = nn.Parameter(torch.linspace(-1, 2, 4, dtype=dtype))

    def forward(self, x, m):
        x = x * self.weight
        return tuple(f(x, m) for f in self.expressions.values())


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_masks_beside_floats(kind, dtype, cast, shared_daemon):
    table = _ANY if kind is torch.bool else _ANY | _INTEGERS
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=dtype)
    m = torch.tensor([[0, 1, 0, 2], [1, 1, 2, 0], [0, 0, 3, 1]]).to(kind)
    plain, wrapped = _All(table, dtype), ORTModule(_All(table, dtype), strict=True)
    context = torch.autocast("cpu", cast) if cast else contextlib.nullcontext()
    with context:
        wanted, found = plain(x, m), wrapped(x, m)
    for name, want, got in zip(table, wanted, found, strict=True):
        assert got.dtype is want.dtype, name
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda t, n=name: f"{n}: {t}")
    for results in (wanted, found):
        sum(r.double().clamp(-9, 9).nansum() for r in results if r.requires_grad).backward()
    torch.testing.assert_close(next(wrapped.parameters()).grad, plain.weight.grad)
    assert wrapped.gradd_stats()["in_torch"] == {}


class _Changing(nn.Module):
    """Numbers that change, and sizes, beside a mask."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=dtype))

    def forward(self, x, m, number):
        return x * self.weight * (number - m) + (m.shape[0] ** 0.5 - m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_change_beside_a_mask(dtype, shared_daemon):
    plain, wrapped = _Changing(dtype), ORTModule(_Changing(dtype), strict=True)
    for rows, number in ((3, 1.0), (3, 2.5), (5, 0.3), (2, -1e4)):
        x, m = torch.randn(rows, 4, dtype=dtype), torch.randint(0, 2, (rows, 4))
        torch.testing.assert_close(wrapped(x, m, number), plain(x, m, number))


def test_numbers_beside_no_float_are_floats_of_the_default_type(shared_daemon):
    class Numbers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, m):
            return 1.0 - m, torch.where(m > 0, m, 0.5), self.weight * 1

    m = torch.tensor([0, 1, 2**24 + 1])
    for got, want in zip(ORTModule(Numbers(), strict=True)(m), Numbers()(m), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)


# Of tensors that broadcast: the left operand grows, the right one, or both.
_BITS: dict[str, Callable] = {
    ">>": lambda a, b: a >> b,
    "<<": lambda a, b: a << b,
    "bitwise_right_shift": torch.bitwise_right_shift,
    "bitwise_left_shift": torch.bitwise_left_shift,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_bits_of_operands_that_broadcast(kind, shared_daemon):
    """As packed weights of 4 bits are unpacked (GPTQ, AWQ)."""

    def forward(self, a, b):
        pairs = ((a[:, None], b[:, None]), (b[:, None], a[:, None]), (a[0, 0], b), (b, a[0, 0]))
        found = tuple(f(x, y) for f in _BITS.values() for x, y in pairs)
        return (
            self.weight * 1,
            *found,
            *(f(3, b) for f in _BITS.values() if kind is not torch.uint8),
        )

    plain = Lambda(forward, weight=nn.Parameter(torch.ones(1)))
    a = torch.randint(0, 100, (2, 8), dtype=kind)
    b = torch.arange(0, 8, 2, dtype=kind)
    for got, want in zip(ORTModule(plain, strict=True)(a, b), plain(a, b), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)


# Of two tensors of 8-bit integers.
_SMALL: _Expressions = {
    "compare": lambda a, b: (a == 1, a < b, a >= 100, a != b, a < 5),
    "extremes": lambda a, b: (a.argmax(-1), a.argmin(), a.amax(1), a.amin(), a.max(), a.min()),
    "wraps": lambda a, b: (a + b, a - b, a * b, -a, a + 100, 100 - a, a.abs(), a // 3, a % 7),
    "limits": lambda a, b: (torch.maximum(a, b), a.clamp(3, 100), a.clamp(min=5)),
    "bits": lambda a, b: (a & b, a | 15, a ^ b, ~a, a >> 3, a << 2, a << (b & 7), a >> (b & 7)),
    "orders": lambda a, b: (a.sort().values, a.sort(0).indices, *a.topk(2), a**2, b.argsort()),
    "wider": lambda a, b: (a.sum(1), a / 3, a * b.int(), a + 0.5, torch.cat([a, b])),
}


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16])
def test_integers_of_8_and_16_bits(kind, shared_daemon):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, a, b):
            found = [r for f in _SMALL.values() for r in f(a, b)]
            return torch.where(a == b, self.weight, -self.weight), *found

    torch.manual_seed(0)
    lowest, highest = torch.iinfo(kind).min, torch.iinfo(kind).max
    a, b = (torch.randint(lowest, highest + 1, (4, 6), dtype=kind) for _ in "ab")
    a[0, 0], b[0, 0], a[0, 1], b[0, 1] = highest, highest, lowest, highest
    wrapped = ORTModule(Small(), strict=True)
    for got, want in zip(wrapped(a, b), wrapped.module(a, b), strict=True):
        assert got.dtype is want.dtype
        torch.testing.assert_close(got, want)
