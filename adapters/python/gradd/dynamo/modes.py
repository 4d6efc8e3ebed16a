"""Modes under which each node of a graph of Dynamo runs: gradients, inference, autocast.

Dynamo writes a change of mode into its graph as a node. Pieces of a graph, and nodes that PyTorch
computes, begin anywhere, so each node is told the modes in which it runs; the nodes that change
them are not computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.fx

from gradd.dynamo import private
from gradd.graph import autocast

KEY = "gradd_modes"
_LEFT = "gradd_left_inference"
_DEVICE = "cpu"


class Modes(NamedTuple):
    """What a node runs under.

    Attributes:
        grad: Gradients are recorded.
        inference: By inference_mode that they are not.
        cast: Element type of autocast on the CPU; None = off.
    """

    grad: bool
    inference: bool
    cast: torch.dtype | None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """These modes for real."""
        cast = torch.autocast(_DEVICE, self.cast, enabled=self.cast is not None)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), cast:
            yield


def now() -> Modes:
    """Those of the caller.

    Raises:
        CaptureError: "autocast" for a device or an element type that the daemon does not have.
    """
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast.ambient())


def of(node: torch.fx.Node) -> Modes:
    """Those of a node, after `mark`."""
    return node.meta[KEY]


def leaves_inference(node: torch.fx.Node) -> bool:
    """Whether a node stands in inference_mode(False), which counts whatever is around the call."""
    return bool(node.meta.get(_LEFT))


def changes(node: torch.fx.Node) -> bool:
    """Whether a node does nothing but change modes."""
    return node.op == "call_function" and node.target in _CHANGES


def mark(graph: torch.fx.Graph, around: Modes) -> None:
    """Tells every node of a graph its modes.

    Args:
        graph: Of Dynamo.
        around: Those of its call.

    Raises:
        CaptureError: "autocast" for an element type that the daemon does not have.
    """
    modes = around
    casts: list[tuple[torch.fx.Node, torch.dtype | None]] = []
    inferences: list[tuple[torch.fx.Node, Modes, bool]] = []
    left = False
    for node in graph.nodes:
        target = node.target
        if not changes(node):
            pass
        elif target is private._set_grad_enabled:
            modes = modes._replace(grad=bool(node.args[0]))
        elif target is private._enter_autocast:
            casts.append((node, modes.cast))
            modes = modes._replace(cast=_entered(node, modes.cast))
        elif target is private._exit_autocast:
            before = next(cast for begin, cast in casts if begin is node.args[0])
            modes = modes._replace(cast=before)
        elif target is private._enter_inference_mode:
            inferences.append((node, modes, left))
            left = not node.args[0]
            modes = modes._replace(inference=bool(node.args[0]), grad=not node.args[0])
        else:
            before, left = next(m for begin, *m in inferences if begin is node.args[0])
            modes = modes._replace(inference=before.inference, grad=before.grad)
        node.meta[KEY] = modes
        if left:
            node.meta[_LEFT] = True


_CHANGES = frozenset(
    {
        *(private._set_grad_enabled, private._enter_autocast, private._exit_autocast),
        *(private._enter_inference_mode, private._exit_inference_mode),
    }
)


def _entered(node: torch.fx.Node, before: torch.dtype | None) -> torch.dtype | None:
    device, dtype, enabled, *_ = node.args
    if device != _DEVICE:  # says nothing about tensors on the CPU
        return before
    if not enabled:
        return None
    dtype = dtype or torch.get_autocast_dtype(_DEVICE)
    autocast.check(device, dtype, "inside forward()")
    return dtype
