"""Tensors and arrays of outside as inputs of the graph.

The exporter keeps a tensor that is neither parameter nor argument as a constant. Where that
constant is a tensor (or the memory of a numpy array) which a spot of outside holds, it becomes an
input instead, whose value is read from that spot at every call. What Python took the value of
stays a constant, and its bytes are watched; what no spot leads to is refused.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradd.export.functions import leaves_of, nodes_of
from gradd.export.guards.arguments import FORM, Fact, form, told
from gradd.export.guards.images import is_a
from gradd.export.guards.spots import Bytes, Contents, Item, Spot
from gradd.export.guards.tensors import Tensors
from gradd.spec import CaptureError

_WATCHED = 1 << 16  # bytes of a constant that are compared at every call


@dataclass(frozen=True, eq=False)
class Source:
    """Where an input of outside is read: the spot, or the tensor itself where it cannot move."""

    spot: Spot | None
    tensor: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        """The tensor of now."""
        value = self.tensor if self.spot is None else self.spot.now()
        return torch.from_numpy(value) if is_a(value, np.ndarray) else value


class Form(Spot):
    """A spot whose tensor or array may be exchanged for one of the same form.

    `owner` is the spot that it stands for, `key` what else forward() has asked the tensor.
    """

    __slots__ = ()
    KIND = "form"

    def now(self) -> Any:
        value = self.owner.now()
        facts = tuple(told(value, name) for name in self.key)
        return (form(value), facts) if facts else form(value)

    def put_back(self) -> None:
        self.owner.put_back()

    def rebind(self) -> None:
        """The form is the same."""


class Element(Spot):
    """A tensor among the elements of a container, which are watched; `owner` is the tensor."""

    __slots__ = ()
    KIND = "element"

    def now(self) -> Any:
        return self.owner

    def put_back(self) -> None:
        """It stays where it is, in whatever form."""


def refuse_trainable(
    outputs: list[torch.Tensor], old: list[torch.Tensor], tensors: Tensors
) -> None:
    """Refuses tensors that PyTorch would give a gradient, and the daemon would not.

    Args:
        outputs: Outputs of the forward, with their graph.
        old: Tensors of outside that forward() had in its hands.
        tensors: What watched the operators: it knows parameters, buffers and tensors of the call.

    Raises:
        CaptureError: "unsupported_parameter".
    """
    strangers = {id(t) for t in old if not (tensors.is_own(t) or tensors.is_input(t))}
    for leaf in leaves_of(outputs):
        shape = list(leaf.shape)
        if id(leaf) in strangers:  # others have been made by forward() itself
            what = "parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor"
            _refuse(
                f"a trainable {what} of shape {shape} that is not registered in the module (in a "
                "plain list?)",
                "register it, or keep modules in a ModuleList",
            )
        if tensors.is_own(leaf) and not isinstance(leaf, torch.nn.Parameter):
            _refuse(
                f"a tensor of the module, of shape {shape}, that requires a gradient and is no "
                "Parameter (a buffer, or what functional_call put there)",
                "make it a Parameter, or call the module as it is first",
            )
    nodes = set(nodes_of(outputs))
    for tensor in old:
        if tensor.grad_fn in nodes and id(tensor) in strangers:
            _refuse(
                f"a tensor of shape {list(tensor.shape)} that was computed outside of it with "
                "gradients",
                "pass it as an argument",
            )


def _refuse(what: str, remedy: str) -> None:
    raise CaptureError(
        "unsupported_parameter", f"forward() uses {what} and would get no gradient; {remedy}"
    )


class Outside:
    """Decides for one capture what becomes of every outside tensor and array.

    Attributes:
        inputs: Exporter's name of a constant -> where its value is read from.
        spots: The spots to watch, with forms in the place of identities for inputs.
    """

    def __init__(self, spots: list[Spot], tensors: list, by_value: set[int]) -> None:
        """Args:
        spots: The spots of outside.
        tensors: The tensors of outside that forward() had in its hands.
        by_value: Ids of tensors and arrays whose value Python has taken.
        """
        self.inputs: dict[str, Source] = {}
        self.spots = spots
        self._tensors = tensors
        self._by_value = by_value
        self._holders: dict[int, Spot] = {}
        self._elements: set[int] = set()
        for spot in spots:
            if is_a(spot, Contents):
                self._elements.update(map(id, spot.value[-1]))
            elif type(spot) is Item or id(spot.value) not in self._holders:
                self._holders.setdefault(id(spot.value), spot)
            if is_a(spot.value, tuple):
                self._elements.update(map(id, spot.value))

    def sources(self) -> list[Source]:
        """Where the tensors of outside are found; after bind()."""
        bound = [s for s in self.inputs.values() if is_a(s.get(), torch.Tensor)]
        known = {id(s.get()) for s in bound}
        return bound + [Source(None, t) for t in self._tensors if id(t) not in known]

    def put_back(self) -> None:
        """Puts back what has changed since the forward was recorded."""
        for spot in self.spots:
            with contextlib.suppress(Exception):  # what is gone cannot be put back
                if not spot.same():
                    spot.put_back()

    def bind(self, constants: dict[str, Any], used: set[int]) -> None:
        """Matches the constants of a trace.

        Args:
            constants: By the exporter's name.
            used: Ids of the tensors that operators have read.

        Raises:
            CaptureError: "outside_state".
        """
        places: dict[tuple, list[str]] = {}  # an array may be several constants
        for name, constant in constants.items():
            if isinstance(constant, torch.Tensor):
                places.setdefault(_memory(constant), []).append(name)
        for tensor in self._tensors:
            names = places.get(_memory(tensor), []) if tensor.numel() else []
            if names and id(tensor) not in self._by_value:
                for name in names:
                    self._bind_tensor(name, tensor)
            elif id(tensor) in used or id(tensor) in self._by_value:
                self._watch(tensor)
        for spot in [s for s in self.spots if is_a(s, Bytes)]:
            if is_a(spot.owner, np.ndarray):
                self._bind_array(spot, places)

    def _bind_tensor(self, name: str, tensor: torch.Tensor) -> None:
        holder = self._holders.get(id(tensor))
        if holder is not None:
            self._read_from(name, holder)
        elif id(tensor) in self._elements:
            self.inputs[name] = Source(None, tensor)
            element = Element(tensor, None, None, "a tensor in an outside container")
            self._watch_form(element, tensor)
        else:
            raise CaptureError(
                "outside_state",
                f"forward() uses a tensor of shape {list(tensor.shape)} that it reaches in a way "
                "which cannot be watched (a cached function, a weak reference, code in C?); keep "
                "it in a buffer",
            )

    def _read_from(self, name: str, holder: Spot) -> None:
        self.inputs[name] = Source(holder)
        if holder not in self.spots:  # the form of what it holds is watched already
            return
        self.spots = [s for s in self.spots if s is not holder]
        self._watch_form(holder, holder.value)

    def _watch_form(self, holder: Spot, value: Any) -> None:
        """The form of what a spot holds, and the facts of it that forward() has asked."""
        facts = [s for s in self.spots if is_a(s, Fact) and s.owner is value]
        self.spots = [s for s in self.spots if s not in facts]
        spot = Form(holder, tuple(s.key for s in facts if s.key != FORM), None, holder.label)
        spot.value = spot.now()
        self.spots.append(spot)

    def _watch(self, tensor: torch.Tensor) -> None:
        if tensor.is_sparse or tensor.device.type != "cpu" or tensor.nbytes > _WATCHED:
            raise CaptureError(
                "outside_state",
                f"forward() takes values out of an outside tensor of shape {list(tensor.shape)}, "
                "which is too large to be compared at every call; pass it as an argument or keep "
                "it in a buffer",
            )
        spot = Bytes(tensor, None, None, f"a tensor of shape {list(tensor.shape)}")
        spot.value = spot.now()
        self.spots.append(spot)

    def _bind_array(self, spot: Bytes, places: dict[tuple, list[str]]) -> None:
        array = spot.owner
        holder = self._holders.get(id(array))
        if holder is not None and id(array) not in self._by_value and array.flags.writeable:
            names = places.get(_memory(torch.from_numpy(array)), [])
            if names:
                self.spots = [s for s in self.spots if s is not spot]
                for name in names:
                    self._read_from(name, holder)
                return
        if array.nbytes > _WATCHED:
            raise CaptureError(
                "outside_state",
                f"forward() takes values out of {spot.label}, which is too large to be compared "
                "at every call; make it a buffer",
            )


def _memory(tensor: torch.Tensor) -> tuple:
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:
        return (id(tensor),)
    return (pointer, tensor.dtype, tuple(tensor.shape), tensor.stride())
