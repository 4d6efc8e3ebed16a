"""What the placeholders of a lowered graph stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Input:
    """The input of a placeholder of a lowered graph."""

    name: str  # for messages, and in the ONNX graph
    position: int  # index among the arguments of the graph; -1: it is a constant
    bound: bool  # a parameter or a buffer, which lives in shared memory
    tensor: torch.Tensor | None  # the tensor of the first call (or the constant)
    varies: bool = False  # it has other sizes in other calls
    planned: bool = False  # it stands for a number, see planned_numbers.py
