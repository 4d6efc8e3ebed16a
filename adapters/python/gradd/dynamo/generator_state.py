"""Detects that a forward seeds torch's generator, by the state of the generator.

For the same seed the daemon's random numbers differ from PyTorch's. A forward sets a seed to get
the same numbers every time, those of PyTorch: graphs that draw after it run in PyTorch. After a
seed, the state of the generator differs from that after the last graph, or at the beginning of the
call.
"""

from __future__ import annotations

import threading

import torch

from gradd import private
from gradd.graph.nodes import argument
from gradd.spec import CaptureError

# That of Tensor is watched for writes, and torch.equal() takes 10 us.
_numpy = torch.Tensor.__base__.numpy  # type: ignore[union-attr]


class GeneratorState(threading.local):
    """The state of torch's generators at the last known point of a call of this thread.

    Of the CPU's, and of that of the device on which the module computes.

    To copy it takes as long as all guards of a small module: calls that are one graph each, and
    draw nothing, do without. If one of them turns out to have a graph that draws, the state at its
    beginning is not known: the graph runs in the daemon if nothing of the call has run before it,
    else in PyTorch, this once.
    """

    def __init__(self) -> None:
        self._state: list[torch.Tensor] | None = None
        self._device: torch.device | None = None

    def note(self, device: torch.device) -> None:
        """A call begins, of a module on this device."""
        self._state, self._device = _now(device), device

    def go_on(self, device: torch.device) -> None:
        """A graph has run, and may have drawn."""
        if self._state is not None:
            self.note(device)

    def forget(self) -> None:
        self._state = None

    def is_moved(self, device: torch.device, unknown: bool) -> bool:
        """Whether something else than a graph has drawn, or seeded, in this call.

        Args:
            device: On which the module computes.
            unknown: The answer if the state was not noted, or that of another device: the module
                has moved, which the call has found out.
        """
        if self._state is None or self._device != device:
            return unknown
        pairs = zip(self._state, _now(device), strict=True)
        return any(_numpy(a).tobytes() != _numpy(b).tobytes() for a, b in pairs)


def _now(device: torch.device) -> list[torch.Tensor]:
    if device.type == "cpu":
        return [torch.default_generator.get_state()]
    return [torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)]


def refusal() -> CaptureError:
    """For a graph that draws after a seed."""
    return CaptureError(
        "python_random",
        "forward() seeds the generator of random numbers, or draws outside of a graph, before one "
        "that draws; seed outside of forward()",
    )


def draws(graph: torch.fx.Graph) -> bool:
    """Whether a graph of aten operators draws random numbers."""
    return any(map(_draws, graph.nodes))


def _draws(node: torch.fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    for given in private.schema(node.target).arguments:
        if given.name in ("p", "dropout_p"):
            chance = argument(node, given.name)
            return (given.default_value if chance is None else chance) != 0
    return True
