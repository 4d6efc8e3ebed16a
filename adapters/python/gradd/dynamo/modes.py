"""Modes under which each node of a graph of Dynamo runs: gradients, inference, autocast.

Dynamo writes a change of mode into its graph as a node. Pieces of a graph, and nodes that PyTorch
computes, may begin anywhere, so each node carries its modes; the nodes that change modes are not
computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.fx

from gradd import private
from gradd.graph import autocast
from gradd.memory import devices

KEY = "gradd_modes"
LEFT = "gradd_left_inference"  # mark of nodes that stand in inference_mode(False)
_GRAD = "grad"
_AUTOCAST = torch.amp.autocast_mode.__name__
_INFERENCE = torch.autograd.grad_mode.__name__


class Modes(NamedTuple):
    """The modes of a node."""

    grad: bool  # gradients are recorded
    inference: bool  # by inference_mode that they are not
    casts: autocast.Active  # where autocast is on, and to which element types

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            autocast.entered(self.casts),
        ):
            yield


def now() -> Modes:
    """Those of the caller.

    Raises:
        CaptureError: "autocast" for an element type that the daemon does not have.
    """
    return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast.ambient())


def of(node: torch.fx.Node) -> Modes:
    """Those of a node, after `mark`."""
    return node.meta[KEY]


def leaves_inference(node: torch.fx.Node) -> bool:
    """Whether a node stands in inference_mode(False), which counts whatever is around the call."""
    return bool(node.meta.get(LEFT))


def inside(nodes: Iterable[torch.fx.Node], around: Modes) -> Modes:
    """Those that are on while a piece runs, in which single nodes may switch gradients off.

    Args:
        nodes: Of the piece, after `mark`.
        around: Those of the call.
    """
    recorded = [n for n in nodes if of(n).grad]
    leaves = any(map(leaves_inference, recorded))
    return around._replace(grad=bool(recorded), inference=around.inference and not leaves)


def changes(node: torch.fx.Node) -> bool:
    """Whether a node does nothing but change modes."""
    return _kind(node) != ""


def mark(graph: torch.fx.Graph, around: Modes) -> None:
    """Tells every node of a graph its modes.

    Args:
        graph: Of Dynamo.
        around: Those of its call.

    Raises:
        CaptureError: "autocast" for an element type that the daemon does not have.
    """
    modes = around
    casts: list[tuple[torch.fx.Node, autocast.Active]] = []
    inferences: list[tuple[torch.fx.Node, Modes, bool]] = []
    left = False
    for node in graph.nodes:
        kind = _kind(node)
        begun = node.args[0] if kind else None  # what the end of a region names
        if kind == _GRAD:
            modes = modes._replace(grad=bool(begun))
        elif kind == _AUTOCAST and isinstance(begun, torch.fx.Node):
            active = next(active for begin, active in casts if begin is begun)
            modes = modes._replace(casts=active)
        elif kind == _AUTOCAST:
            casts.append((node, modes.casts))
            modes = modes._replace(casts=_entered(node, modes.casts))
        elif kind == _INFERENCE and isinstance(begun, torch.fx.Node):
            before, left = next(m for begin, *m in inferences if begin is begun)
            modes = modes._replace(inference=before.inference, grad=before.grad)
        elif kind == _INFERENCE:
            inferences.append((node, modes, left))
            left = not begun
            modes = modes._replace(inference=bool(begun), grad=not begun)
        node.meta[KEY] = modes
        if left:
            node.meta[LEFT] = True


def _kind(node: torch.fx.Node) -> str:
    """Which mode a node changes; "" = none.

    What Dynamo's graphs call of the modules of autocast and of inference mode begins a region of
    theirs, or ends the one that it names.
    """
    if node.op != "call_function":
        return ""
    if node.target is private.set_grad_enabled:
        return _GRAD
    module = getattr(node.target, "__module__", "")
    return module if module in (_AUTOCAST, _INFERENCE) else ""


def _entered(node: torch.fx.Node, before: autocast.Active) -> autocast.Active:
    device, dtype, enabled, *_ = node.args
    if device not in devices.types():  # says nothing about the tensors of a daemon
        return before
    others = frozenset(pair for pair in before if pair[0] != device)
    if not enabled:
        return others
    dtype = dtype or torch.get_autocast_dtype(device)
    autocast.check(device, dtype, "inside forward()")
    return others | {(device, dtype)}
