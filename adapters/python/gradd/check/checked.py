"""The interface of a piece that a self-check checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from gradd.calls.call import Call
from gradd.calls.graph import Graph
from gradd.check.cut import Data


class Forward(Protocol):
    """The user's own forward, to be run in place of the piece's graph."""

    parameters: set[int]  # identities of the module's own

    def stand_ins(self, data: Data, stand_in: Callable[..., Any]) -> dict[int, torch.Tensor]:
        """Tensors to run with, by the identities of those of the call."""

    def __call__(self, stands: dict[int, torch.Tensor]) -> list[torch.Tensor] | None:
        """The results in the order of the graph; None if the call returns something else."""


class Checked(Protocol):
    """A piece of a graph. Session, slots, state and counts are those of its calls."""

    title: str
    graph: Graph
    inputs_: Sequence[Any]
    client: Any
    slots: Any
    state: Any
    counts: Any
    fallback: Any
    owner: Any
    in_torch: Callable[..., Sequence[Any]]

    def arguments(self, leaves: Sequence[torch.Tensor] | None) -> list[Any]:
        """All arguments of a call, with these free inputs."""

    def buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Those that a call may change, by name."""

    def call(self, *args: Any) -> Call:
        """The common part of runs with such inputs."""

    def fits(self, data: Data) -> bool:
        """Whether the graph may take data of other sizes."""

    def own_forward(self) -> Forward | None:
        """The user's forward, if the graph is all that it does."""
