"""A network that multiplies by the result of a function of the test.

It is not in nets.py, for whose networks the tests keep captures by their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Scaled(nn.Module):
    """A layer whose result is scaled with what a function finds."""

    def __init__(self, take: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.layer.weight)
        self.take = (take,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.take[0]()
