"""Overwriting a whole tensor keeps its history: its gradients are zeros, not none.

An optimizer makes a difference between the two: weight decay and momentum go on with zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.nets import assert_close
from helpers.selection import one_in

pytestmark = pytest.mark.usefixtures("shared_daemon")
ONES = torch.ones(4, 8)


class Two(nn.Module):
    """h is that of `second`; the result also has a part of `first`."""

    def __init__(self, write: Callable) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(x).clone()
        result = self.write(h, x)
        return self.first(x) + (h if result is None else result)


class Alone(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(x)
        result = self.write(h, x)
        return h if result is None else result


def _no_grad(h: torch.Tensor, x: torch.Tensor) -> None:
    with torch.no_grad():
        h.zero_()


CASES: dict[str, Callable] = {
    "zero_": lambda h, x: (h.zero_(), None)[1],
    "its result": lambda h, x: h.zero_(),
    "fill_": lambda h, x: (h.fill_(2.0), None)[1],
    "fill_ with a tensor": lambda h, x: (h.fill_(torch.tensor(3.0)), None)[1],
    "fill_ with a history": lambda h, x: (h.fill_(x.sum()), None)[1],
    "copy_ of a constant": lambda h, x: (h.copy_(ONES), None)[1],
    "copy_ of a row": lambda h, x: (h.copy_(ONES[0] * 2), None)[1],
    "copy_ of an argument": lambda h, x: (h.copy_(x * 2), None)[1],
    "copy_ of another type": lambda h, x: (h.copy_(ONES.double()), None)[1],
    "copy_ of what was computed from it": lambda h, x: (h.copy_(h.tanh() * 2), None)[1],
    "a view of all": lambda h, x: (h.view(-1).zero_(), None)[1],
    "a transposed view": lambda h, x: (h.t().fill_(0.5), None)[1],
    "an index of all": lambda h, x: (h.__setitem__(slice(None), 1.5), None)[1],
    "dots": lambda h, x: (h.__setitem__(..., ONES), None)[1],
    "rows": lambda h, x: (h[:2].zero_(), None)[1],
    "every row": lambda h, x: ([h[i].zero_() for i in range(4)], None)[1],
    "twice": lambda h, x: (h.zero_().add_(x).fill_(1.0), None)[1],
    "written and read": lambda h, x: (h.zero_(), h.add_(x.square()), None)[2],
    "normal_": lambda h, x: (h.normal_(1.0, 0.0), None)[1],
    "uniform_": lambda h, x: (h.uniform_(2.0, 2.0), None)[1],
    "bernoulli_": lambda h, x: (h.bernoulli_(1.0), None)[1],
    "without gradients": lambda h, x: (_no_grad(h, x), None)[1],
    "a list with nothing": lambda h, x: torch.cat([torch.empty(0), h, torch.tensor([])], 1),
}


@pytest.mark.parametrize("kind", [Two, Alone])
@pytest.mark.parametrize("case", one_in(2, CASES))
def test_gradients_are_zeros(case: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    torch.manual_seed(0)
    plain = kind(CASES[case])
    ours = ORTModule(copy.deepcopy(plain))
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in (plain, ours)
    ]
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            out = model(x)
            assert out.requires_grad
            out.square().sum().backward()
        for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                assert_close(b.grad, a.grad, name)
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert_close(b, a)
    reasons = set(ours.gradd_stats()["fallbacks"])
    assert not reasons or case in ("normal_", "uniform_", "bernoulli_")


def test_several_after_an_empty_one() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.first(x), torch.tensor([]), self.second(x)], 1)

    ours = ORTModule(Net(), strict=True)
    x = torch.randn(3, 8)
    assert_close(ours(x), ours.module(x))
