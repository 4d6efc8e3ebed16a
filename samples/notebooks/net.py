"""What both notebooks train: a small network, with its steps noted in the session."""

from __future__ import annotations

import torch
from torch import nn

from gradd import ORTModule
from gradd.keeping import Kept

torch.manual_seed(0)
X = torch.randn(512, 20)
Y = X.sum(1, keepdim=True)


def new_model() -> ORTModule:
    """The network, with the same start each time."""
    torch.manual_seed(0)
    return ORTModule(nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 1)))


def train(model: ORTModule, optimizer: torch.optim.Optimizer, kept: Kept, steps: int) -> float:
    """Trains from where the session is to that step; returns the last loss."""
    for step in range(kept.steps, steps):
        loss = nn.functional.mse_loss(model(X), Y)
        loss.backward()
        kept.note(step=step + 1, loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()
