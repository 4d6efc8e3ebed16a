"""Small networks that read state from outside, as rows of text: more of outside_cases, by class.

A row is what stands in the user's module, an expression by which forward() multiplies, and a change
of the state. `net` in a change is the network; the change is applied to each copy of it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from gradd import ORTModule

_PRELUDE = """
import array, collections, copy, ctypes, dataclasses, functools, gc, inspect, itertools, json
import mmap, operator, pickle, pprint, string, struct, types, weakref
import numpy as np
import torch
from torch import nn
"""
_NETWORK = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)
        MADE

    def forward(self, x):
        return self.lin(x) * (READ)
"""
X = torch.ones(2, 4)


@dataclass(frozen=True)
class Row:
    """A network that reads state, and a change of that state.

    Attributes:
        before: What stands in the module of the network.
        read: The expression in forward().
        change: Statements that change what it gives.
        made: Statements at the end of the constructor.
        refused: The reading cannot be watched: the calls run in PyTorch, by this name.
    """

    before: str
    read: str
    change: str
    made: str = "pass"
    refused: str = ""

    def network(self) -> tuple[torch.nn.Module, dict[str, Any]]:
        """The network, and the names of its module."""
        names: dict[str, Any] = {"__name__": __name__}
        exec(_PRELUDE + self.before, names)
        exec(_NETWORK.replace("READ", self.read).replace("MADE", self.made), names)
        torch.manual_seed(0)
        return names["Net"](), names


def rows_of(before: str, reads: dict[str, str], made: str = "pass", refused: str = "") -> list[Row]:
    """Rows with the same beginning: reading -> change."""
    return [Row(before, read, change, made, refused) for read, change in reads.items()]


def follow(row: Row) -> None:
    """Compares both sides before and after the change.

    Raises:
        AssertionError: They differ, the change is none, or it was neither seen nor refused.
    """
    eager, names = row.network()
    ours = ORTModule(copy.deepcopy(eager))
    before = eager(X).detach()  # its history would keep alive what it saves
    assert torch.allclose(ours(X), before, rtol=1e-4, atol=1e-6), "at first"
    in_place = "net" in row.change
    for net in (ours.module, eager) if in_place else (eager,):
        exec(row.change, names | {"net": net} if in_place else names)
    after = eager(X)
    assert not torch.allclose(after, before), "the change changes nothing"
    assert torch.allclose(ours(X), after, rtol=1e-4, atol=1e-6), "after the change"
    stats = ours.gradd_stats()
    if row.refused:
        assert stats["captures"] == 0 and set(stats["fallbacks"]) == {row.refused}, stats
    else:
        assert not stats["fallbacks"], stats
