"""Where the tensors of an optimizer's step lie, as long as none of them has moved.

Most steps find all of them where they were. So the place of each is looked up once, and later steps
compare addresses, of all tensors together, in a few calls of C.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradd import errors
from gradd.memory.shm import DTYPE_CODES
from gradd.memory.watch import data_ptr
from gradd.session import protocol

if TYPE_CHECKING:
    from gradd.session.client import Client

_dtype = operator.attrgetter("dtype")
_is_contiguous = torch.Tensor.is_contiguous
_numel = torch.Tensor.numel
_step = operator.itemgetter("step")


def _seen(tensors: Sequence[torch.Tensor]) -> tuple[list, list, list] | None:
    """Addresses, types and numbers of elements; None if one is not contiguous."""
    if not all(map(_is_contiguous, tensors)):
        return None
    return [*map(data_ptr, tensors)], [*map(_dtype, tensors)], [*map(_numel, tensors)]


class Bound:
    """Tensors that the daemon knows as one binding; keeps their memory alive while it does."""

    def __init__(self, client: Client, tensors: list[torch.Tensor]) -> None:
        self.key = tuple(data_ptr(t) for t in tensors)
        self._client = client
        self._tensors = [t.detach() for t in tensors]
        self.id = client.next_id()
        client.bind(self.id, [wire(client, t) for t in tensors])

    def __del__(self) -> None:
        self._client.later("unbind", {"bind": self.id})


def wire(client: Client, tensor: torch.Tensor) -> protocol.Tensor:
    place = client.locate(tensor)
    if place is None:
        raise errors.TensorError("a tensor of the optimizer has left shared memory during the step")
    return (*place, DTYPE_CODES[tensor.dtype], tuple(tensor.shape))


class StatePlaces:
    """Of parameters and their state.

    Attributes:
        stepped: What the daemon updates: the parameters, or copies of those that are not in shared
            memory.
        held: Of these copies the parameter and the copy.
        states: Of each parameter its entry in the optimizer's `state`.
        bound: Fields of the request that name them.
    """

    def __init__(
        self,
        params: list[torch.Tensor],
        stepped: list[torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
        masters: bool,
        bound: dict[str, int],
    ) -> None:
        """Args:
        params: Parameters, in the order of the request.
        stepped: See above.
        state: Of the optimizer.
        masters: The optimizer's `master_weights`.
        bound: See above.
        """
        self._params, self._masters = params, masters
        self.stepped = stepped
        self.held = [(p, copy) for p, copy in zip(params, stepped, strict=True) if copy is not p]
        self.states = [state[p] for p in params]
        self.bound = bound
        self._tensors_of = [
            operator.itemgetter(*(name for name, x in s.items() if isinstance(x, torch.Tensor)))
            for s in self.states
        ]
        self._keys, self._entries = list(state), list(state.values())
        self._seen = _seen(self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        of_states = zip(self._tensors_of, self.states, strict=True)
        return [*self._params, *(tensor for get, s in of_states for tensor in get(s))]

    def hold(
        self,
        params: list[torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
        masters: bool,
    ) -> bool:
        """Whether a step of these parameters finds them and their state where they were."""
        if not (
            masters is self._masters
            and _are_same(params, self._params)
            and _are_same(state, self._keys)
            and _are_same(state.values(), self._entries)
        ):
            return False
        try:
            counts = {*map(type, map(_step, self.states))}
            return counts == {int} and self._seen == _seen(self._tensors())
        except (KeyError, TypeError, RuntimeError):  # an entry is gone, or has no memory
            return False


class GradientPlaces:
    """Of gradients in shared memory.

    Attributes:
        places: Of each the place.
        field: All of them as the field of a request.
    """

    def __init__(
        self, client: Client, grads: list[torch.Tensor], places: list[protocol.Tensor]
    ) -> None:
        self.places, self.field = places, protocol.tensors(places)
        self._segments = client.segment_ids()
        self._seen = _seen(grads)

    def hold(self, client: Client, grads: list[torch.Tensor]) -> bool:
        """Whether these gradients lie in the same places of the same segments."""
        try:
            return self._seen == _seen(grads) and self._segments == client.segment_ids()
        except (TypeError, RuntimeError):  # a sparse one has no address
            return False


def _are_same(some: Any, others: list) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
