"""Trains a small model: some steps for each line on its input, whose losses it prints."""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn

STEPS = 4


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Of the next steps."""
    found = []
    x = torch.linspace(-1, 1, 24).reshape(6, 4)
    for _ in range(STEPS):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def main() -> None:
    from gradd import ORTModule

    model, optimizer = net()
    model = ORTModule(model, strict=True)
    for _ in sys.stdin:
        print(json.dumps({"uid": os.getuid(), "losses": losses(model, optimizer)}), flush=True)


if __name__ == "__main__":
    main()
