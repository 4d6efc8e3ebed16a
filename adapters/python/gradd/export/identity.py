"""Stand-ins that Python code cannot tell from the tensors whose place they take.

A forward may ask more of a tensor than its values: whether it is another one (`is`, a set, a
dictionary), whether it is a Parameter, what somebody has written to its attributes. What runs in
the place of a call's tensors, or of the module's own, answers as those do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gradd import schema
from gradd.export.keys import own_names


def like(stand_in: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The stand-in with the attributes of a tensor, and a Parameter if that is one."""
    stand_in.__dict__.update(tensor.__dict__)
    if isinstance(tensor, torch.nn.Parameter) and not isinstance(stand_in, torch.nn.Parameter):
        stand_in._is_param = True
    return stand_in


class Same:
    """Which tensors of a call are one, or the module's own."""

    def __init__(self, module: torch.nn.Module, leaves: list[Any]) -> None:
        self._pairs = schema.same_tensors(leaves, own_names(module))

    def own(self) -> set[int]:
        """Numbers of the leaves that are parameters or buffers."""
        return {number for number, known in self._pairs if isinstance(known, str)}

    def fill(self, leaves: list[Any], own: Mapping[str, torch.Tensor]) -> None:
        """Puts one tensor into all of its places.

        Args:
            leaves: Stand-ins for the leaves; changed.
            own: What stands for the module's parameters and buffers, by name.
        """
        for number, known in self._pairs:
            if isinstance(known, str):
                leaves[number] = own[known]
        self.follow(leaves)

    def follow(self, leaves: list[Any]) -> None:
        """The same for tensors that are given more than once only."""
        for number, known in self._pairs:
            if isinstance(known, int):
                leaves[number] = leaves[known]


def standing(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers as they are in the module's tables now."""
    return {".".join(filter(None, place)): tensor for place, tensor in _places(module)}


class Originals:
    """The module's own tensors, before a trace puts others into their places."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known = dict(_places(module))

    def impersonate(self) -> None:
        """Makes what stands in the places of these tensors now answer as they do."""
        for place, tensor in _places(self._module):
            known = self._known.get(place)
            if known is not None and known is not tensor:
                like(tensor, known)


def _places(module: torch.nn.Module) -> Iterator[tuple[tuple[str, str], torch.Tensor]]:
    for path, sub in module.named_modules():
        for table in (sub._parameters, sub._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield (path, key), tensor
