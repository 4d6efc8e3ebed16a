"""Values that a capture returns: the inputs, results and meaning of a captured graph.

This module neither imports torch nor knows how a graph is made. All types are frozen: equal graphs
share a Capture, also between threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradd import reasons


class CaptureError(Exception):
    """A module cannot be captured; the caller falls back to torch or raises.

    Attributes:
        reason: Name of a row of the list of reasons.
        message: The problem, its location, and a remedy.
        node: Of Dynamo's graph, which cannot be captured; a copy of the error has none.
    """

    def __init__(self, reason: str, message: str, node: Any = None) -> None:
        if reason not in reasons.BY_NAME:
            raise ValueError(f"unknown capture error reason {reason!r}")
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.node = node

    def __reduce__(self) -> tuple:
        return (type(self), (self.reason, self.message))


@dataclass(frozen=True)
class InputSpec:
    """A graph input that comes from the call: its name and its leaf number."""

    name: str
    leaf: int


@dataclass(frozen=True)
class OutputSpec:
    """A graph output, of one of three kinds.

    "user": a leaf of the module's result; "buffer": a buffer's new value; "rows": the indices of a
    lookup in a parameter, whose gradient is sparse and has these rows, but for the padding index.
    """

    name: str
    kind: str
    fqn: str | None
    leaf: int | None
    padding: int = -1


@dataclass(frozen=True)
class Capture:
    """One captured graph and everything needed to feed it.

    Attributes:
        onnx: Serialised ModelProto without weights, opset 23 and domain com.gradd version 1.
            Parameters and buffers in use are graph inputs named by their qualified name.
        inputs: Inputs of the call that the graph uses, in the order of the graph.
        params: Qualified names of the parameters that are graph inputs (canonical aliases).
        buffers: Qualified names of the buffers that are graph inputs.
        outputs: Graph outputs in order.
        loss_leaf: Result leaf that is the loss: a scalar of floats, the one called "loss" before
            others; or None.
        depends: Result leaves on which a result leaf depends, for those that do.
        sources: (node name, "module.path @ file:line"), for messages; not part of the bytes.
        checkpoints: forward() has called activation checkpoints, which are not in the graph.
    """

    onnx: bytes
    inputs: tuple[InputSpec, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[OutputSpec, ...]
    loss_leaf: int | None
    depends: Mapping[int, frozenset[int]]
    sources: tuple[tuple[str, str], ...]
    checkpoints: bool = False

    @property
    def loss_ancestors(self) -> frozenset[int]:
        """Result leaves on which the loss depends."""
        return self.depends.get(self.loss_leaf, frozenset())  # type: ignore[arg-type]
