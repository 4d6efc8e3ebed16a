"""Python code that reads sizes during a capture gets the answers of a plain call."""

from __future__ import annotations

import fractions
import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.nets import Asserting, pair, step_agrees

pytestmark = pytest.mark.usefixtures("shared_daemon")

CEILING = {
    "ceiling": lambda y, n: y / -(-n // 3),
    "negative end": lambda y, n: y[-n // 2 :],
    "negative by negative": lambda y, n: y * (n // -3) + (-n // -2),
    "difference": lambda y, n: y + (4 - n) // 2,
    "number by size": lambda y, n: y * (-20 // n),
    "padding": lambda y, n: nn.functional.pad(y, (0, 0, 0, -(-n // 4) * 4 - n)),
    "rows of a mask": lambda y, n: torch.ones(n, n).tril(-n // 2) @ y,
    "range": lambda y, n: y * torch.arange(-n // 2, n // 2).sum(),
    "floor": lambda y, n: y * math.floor(-n / 3),
}
KINDS = {
    "isinstance": lambda n: isinstance(n, int),
    "isinstance of several": lambda n: isinstance(2 * n, (str, float, int)),
    "Integral": lambda n: isinstance(n, numbers.Integral),
    "float": lambda n: isinstance(n / 2, float),
    "bool": lambda n: isinstance(n > 6, bool),
    "type is": lambda n: type(n) is int,
    "type ==": lambda n: type(n + 1) == int,  # noqa: E721
    "type of a quotient": lambda n: type(n / 2) is float,
    "type's name": lambda n: type(n).__name__ == "int",
    "type in a set": lambda n: type(n) in {int, float},
    "case": lambda n: _case(n),
    "dispatch": lambda n: _name(n) == "int",
    "array": lambda n: np.array([n, 4]).dtype.kind == "i",
    "fraction": lambda n: fractions.Fraction(n, 2) == fractions.Fraction(2 * n, 4),
    "methods": lambda n: hasattr(n, "to_bytes") and n.bit_length() > 0 and n.real == n,
}
TEXTS = {
    "str": lambda n: str(n) == "8",
    "repr": lambda n: repr(n) == "8",
    "format": lambda n: f"{n}" == "8" and f"{n!r}" == "8" and f"{n:>3}" == "  8",
    "method": lambda n: "{}".format(n) == "8",  # noqa: UP032
    "length": lambda n: len(str(n)) > 1,
    "joined": lambda n: "x".join(map(str, (n, n))) == "8x8",
    "of a quotient": lambda n: str(n / 2) == "4.0",
    "of a comparison": lambda n: str(n > 6) == "True",
}
COMPARISONS = {
    "table": lambda n: {True: True, False: False}[n % 8 == 0],
    "summed": lambda n: (n > 6) + (n > 7) == 2,
}
POWERS = {
    "high": lambda n: n**30 % 97,
    "low": lambda n: n**3 % 97,
}


def _case(n: Any) -> bool:
    match n:
        case int():
            return True
    return False


@functools.singledispatch
def _name(_: Any) -> str:
    return "other"


_name.register(int)(lambda _: "int")
_name(1)  # fills its cache, which a forward() would write otherwise


class Sized(nn.Module):
    """Computes with the number of rows."""

    def __init__(self, use: Callable) -> None:
        super().__init__()
        self.lin, self.use = nn.Linear(4, 4), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.lin(x), x.shape[0])


def _agrees(use: Callable, monkeypatch: pytest.MonkeyPatch) -> ORTModule:
    """The same as PyTorch at sizes that a first capture has not seen."""
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.manual_seed(0)
    ours, theirs = pair(Sized(use))
    for rows in (5, 4, 7, 8, 16):
        step_agrees(ours, theirs, torch.randn(rows, 4))
    return ours


@pytest.mark.parametrize("use", CEILING.values(), ids=CEILING)
def test_quotients_are_rounded_down(use, monkeypatch):
    _agrees(use, monkeypatch)


def test_quotients_of_sizes_need_one_capture(monkeypatch):
    ours = _agrees(CEILING["padding"], monkeypatch)
    assert ours.gradd_stats()["captures"] == 1


@pytest.mark.parametrize(
    "ask", [*KINDS.values(), *COMPARISONS.values()], ids=[*KINDS, *COMPARISONS]
)
def test_a_size_is_a_number_to_python(ask, monkeypatch):
    _agrees(lambda y, n: y * 2 if ask(n) and n > 6 else y.tanh(), monkeypatch)


@pytest.mark.parametrize("ask", TEXTS.values(), ids=TEXTS)
def test_the_text_of_a_size_is_the_numbers(ask, monkeypatch):
    _agrees(lambda y, n: y * 2 if ask(n) else y.tanh(), monkeypatch)


@pytest.mark.parametrize("power", POWERS.values(), ids=POWERS)
def test_powers_do_not_overflow(power, monkeypatch):
    _agrees(lambda y, n: y * power(n), monkeypatch)


def test_an_assertion_about_data_is_no_branch(monkeypatch):
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    ours, theirs = pair(Asserting())
    for rows in (5, 4, 7):
        step_agrees(ours, theirs, torch.randn(rows, 4))
    assert ours.gradd_stats()["fallbacks"] == {}


def test_asking_for_a_kind_needs_no_capture_per_size(monkeypatch):
    ours = _agrees(lambda y, n: y * 2 if isinstance(n, int) and type(n) is int else y, monkeypatch)
    assert ours.gradd_stats()["captures"] == 1
