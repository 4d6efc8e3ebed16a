"""Graphs of TorchDynamo in the daemon beside PyTorch: families, numbers among arguments, sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.models import families
from helpers.parity import steps

FEW = ("mlp_ce", "llama", "bert_mlm")


pytestmark = pytest.mark.usefixtures("shared_daemon")


def train(name: str) -> dict[str, Any]:
    model, make = families.build(name)
    pair = steps.Pair(model)
    sizes = [(6, 0), (6, 0), (1, 0), (13, 0)] if name in families.MLPS else [(2, 8), (2, 8), (3, 6)]
    for seed, (batch, length) in enumerate(sizes):
        pair.step(make(batch, length, seed))
    stats = pair.wrapped.gradd_stats()
    assert stats["fallbacks"] == {} and stats["self_checks"] > 0
    return stats


@pytest.mark.quick
def test_an_mlp() -> None:
    assert train("mlp_ce")["captures"] == 2  # one row is a graph of its own


@pytest.mark.parametrize("name", FEW[1:])
def test_a_model_of_text(name: str) -> None:
    stats = train(name)
    assert stats["captures"] == 1
    assert stats["unlabelled_rows_left_out"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(set(families.FAMILIES) - set(FEW)))
def test_every_family(name: str) -> None:
    train(name)


class Scaled(nn.Module):
    """Numbers of Python take part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.alpha = 0.5

    def forward(self, x: torch.Tensor, k: int = 1, f: float = 1.0) -> tuple[torch.Tensor, int]:
        return self.linear(x) * k * f + self.alpha, x.shape[0] * 2


def test_numbers_that_change_are_inputs() -> None:
    ours, theirs = Scaled(), Scaled()
    theirs.load_state_dict(ours.state_dict())
    wrapped = ORTModule(ours, strict=True)
    for i in range(8):
        x = torch.randn(3 + i, 8)
        ours.alpha = theirs.alpha = 0.1 * i
        (a, n), (b, m) = (s(x, k=i + 2, f=0.3 * i + 1.1) for s in (wrapped, theirs))
        torch.testing.assert_close(a, b)
        assert n == m == 2 * (3 + i)
    assert wrapped.gradd_stats()["captures"] == 2


def test_an_equal_graph_is_translated_once() -> None:
    """Twenty instances of one class, each with a Dynamo of its own."""
    x = torch.randn(3, 8)
    for _ in range(20):
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        twin = copy.deepcopy(net)
        wrapped = ORTModule(net, strict=True)
        torch.testing.assert_close(wrapped(x), twin(x))
        assert wrapped.gradd_stats()["forwards"] > 0


class Switched(nn.Module):
    """Gradients are recorded inside, whatever the modes around the call are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.linear(x).tanh()


def test_a_graph_that_switches_gradients_on() -> None:
    wrapped = ORTModule(Switched(), strict=True)
    x = torch.randn(2, 4)
    for mode in (torch.enable_grad, torch.no_grad, torch.enable_grad):
        with mode():
            result = wrapped(x)
        result.sum().backward()
        assert wrapped.linear.weight.grad is not None
        wrapped.zero_grad()
