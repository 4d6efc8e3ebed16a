"""Recurrent layers run in PyTorch, while the rest of the model may run in the daemon.

They keep lists of their weights beside the tables, which a capture must leave as they were.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.nets import assert_close

pytestmark = pytest.mark.usefixtures("shared_daemon")


class Reads(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0])


CELLS = {
    "RNN": lambda: nn.RNN(3, 4, batch_first=True),
    "RNN with relu": lambda: nn.RNN(3, 4, nonlinearity="relu", num_layers=2),
    "LSTM": lambda: nn.LSTM(3, 4, batch_first=True),
    "GRU": lambda: nn.GRU(3, 4, num_layers=2),
}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_layers(name: str) -> None:
    torch.manual_seed(0)
    theirs = Reads(CELLS[name]())
    ours = ORTModule(copy.deepcopy(theirs))
    for _ in range(2):
        x = torch.randn(2, 5, 3)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(a.grad, b.grad)
    cell = ours.cell
    assert all(a is getattr(cell, n) for a, n in zip(cell._flat_weights, cell._flat_weights_names))
    assert not cell._weights_have_changed()
