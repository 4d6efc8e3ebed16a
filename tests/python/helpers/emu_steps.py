"""A small trainer on the emulated GPU whose steps wait for nothing but labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule, optim
from gradd.session import client as clients

DEVICE = "emu:0"  # no device yet where this file is only collected
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: optim.FusedAdam(p, lr=1e-2, max_grad_norm=1.0),
}


class Words(nn.Module):
    """A loss of classes of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 16), nn.Linear(16, 7)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Both of shape [N]."""
        return F.cross_entropy(self.head(torch.tanh(self.words(ids))), labels)


class Squares(Words):
    """A loss without labels: no value decides about a call."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Both of shape [N]."""
        return (self.head(torch.tanh(self.words(ids))) - labels[:, None]).square().mean()


class Trainer:
    """A module, its optimizer, and batches by number."""

    def __init__(self, optimizer: str, model: type[Words] = Words) -> None:
        torch.manual_seed(3)
        self.model = ORTModule(model().to(DEVICE), strict=True)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.client = clients.get_client(device=torch.device(DEVICE))
        self.ones = torch.ones((), device=DEVICE)
        self.batches = [self.batch(i) for i in range(4)]

    @staticmethod
    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels."""
        generator = torch.Generator().manual_seed(number)
        ids, labels = (torch.randint(n, (24,), generator=generator) for n in (20, 7))
        return ids.to(DEVICE), labels.to(DEVICE)

    def step(self, number: int) -> torch.Tensor:
        """The loss, without a wait for it."""
        loss = self.model(*self.batches[number % 4])
        loss.backward(self.ones)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def values(self) -> list[torch.Tensor]:
        """The parameters on the CPU."""
        return [p.detach().cpu() for p in self.model.parameters()]
