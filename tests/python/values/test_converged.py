"""Losses near zero: probabilities near 1 must not cost digits, nor make a right model suspect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradd import ORTModule

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": lambda x, y: F.cross_entropy(x, y),
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none").mean(),
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "ignoring": lambda x, y: F.cross_entropy(x, y, ignore_index=0),
    "likelihood": lambda x, y: F.nll_loss(F.log_softmax(x, 1), y),
    "positions": lambda x, y: F.cross_entropy(x.view(2, -1, 13).mT, y.view(2, -1)),
}


class Scaled(nn.Module):
    def __init__(self, loss: Callable) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(x * self.weight, y)


def _scores(lead: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x, y = torch.randn(6, 13, generator=gen) + 20, torch.randint(1, 13, (6,), generator=gen)
    x[torch.arange(6), y] += lead
    return x, y


@pytest.mark.parametrize("lead", [6.0, 10.0, 14.0, 30.0])
@pytest.mark.parametrize("name", list(LOSSES))
def test_digits_are_kept(name: str, lead: float, shared_daemon) -> None:
    model = ORTModule(Scaled(LOSSES[name]))
    for seed in range(4):
        x, y = _scores(lead, seed)
        given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        loss, right = model(given, y), LOSSES[name](exact, y)
        loss.backward(), right.backward()
        digits = 1e-6 if lead < 30 else 1e-3  # in the end those of the exponential
        torch.testing.assert_close(loss.double(), right, rtol=digits, atol=0.0)
        largest = float(exact.grad.abs().max())
        torch.testing.assert_close(given.grad.double(), exact.grad, rtol=0.0, atol=digits * largest)
    assert model.gradd_stats()["fallbacks"] == {}


def test_a_model_may_be_wrapped_when_it_has_converged(shared_daemon) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 13))
        x, y = torch.randn(12, 8), torch.randint(13, (12,))
        optimizer = torch.optim.Adam(net.parameters(), 0.05)
        for _ in range(150):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

        class Trained(nn.Module):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                return F.cross_entropy(self.net(x), y)

        model = ORTModule(Trained(net))
        model(x, y).backward()
        assert model.gradd_stats()["fallbacks"] == {}
