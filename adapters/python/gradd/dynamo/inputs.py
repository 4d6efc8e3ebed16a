"""What the placeholders of a lowered graph stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Input:
    """The input of a placeholder of a lowered graph.

    Attributes:
        name: For messages, and in the ONNX graph.
        position: Index among the arguments of the graph; -1: it is a constant.
        bound: A parameter or a buffer, which lives in shared memory.
        tensor: The tensor of the first call (or the constant).
        varies: It has other sizes in other calls.
        planned: It stands for a number, see planned_numbers.py.
    """

    name: str
    position: int
    bound: bool
    tensor: torch.Tensor | None
    varies: bool = False
    planned: bool = False
