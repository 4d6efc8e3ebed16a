"""PyTorch's side of the self-check of a piece: Dynamo's own graph, run without chance.

It works on stand-ins that share the parameters' memory and on copies of the other arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradd.check import reference
from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Key
from gradd.check.other_data import Data
from gradd.check.perturbed import Shaken
from gradd.check.precise import Precise
from gradd.check.reference import Take, Task
from gradd.check.without_chance import Quiet

if TYPE_CHECKING:
    from gradd.dynamo.piece import Piece


class Reference:
    """One run in PyTorch."""

    def __init__(
        self,
        piece: Piece,
        arguments: Callable[[Sequence[torch.Tensor]], list[Any]],
        task: Task,
        dtype: torch.dtype | None = None,
        shaken: int | None = None,
    ) -> None:
        """Args:
        piece: Whose values are compared.
        arguments: All arguments of a call with these free inputs.
        task: What to compute.
        dtype: A higher precision, in which everything is computed.
        shaken: Seed of results that are a rounding of f32 off.
        """
        self.piece = piece
        self.arguments = arguments
        self.task = task
        self.dtype = dtype
        self.shaken = shaken

    def run(self, data: Data, take: Take) -> None:
        """Hands every output, buffer and gradient to `take`; those that there are not as None.

        Raises:
            Exception: Whatever the graph raises.
        """
        args = self.arguments(data.leaves)
        wanted: dict[int, tuple[torch.Tensor, Key]] = {}
        parameters = []
        versions: dict[int, int] = {}  # of copies
        with torch.inference_mode(False), torch.no_grad():
            for given in self.piece.inputs_:
                tensor = args[given.place]
                own = self._stand_in(tensor, given.bound and isinstance(tensor, torch.nn.Parameter))
                args[given.place] = own
                if isinstance(tensor, torch.nn.Parameter) and given.bound:
                    parameters.append(own)
                else:
                    versions[given.place] = own._version
                if own.requires_grad:
                    kind = GRADIENT if given.bound else INPUT
                    wanted[id(own)] = (own, (kind, given.name))
        precise = self.dtype and Precise(parameters, self.dtype)
        with (
            contextlib.closing(precise) if precise else contextlib.nullcontext(),
            torch.inference_mode(False),
            torch.set_grad_enabled(self.task.grad),
            torch.random.fork_rng(devices=[]),
            precise or contextlib.nullcontext(),
            Quiet(),
            contextlib.nullcontext() if self.shaken is None else Shaken(self.shaken),
            torch.autograd.graph.saved_tensors_hooks(
                precise.pack if precise else reference.detached,
                precise.unpack if precise else reference.same,
            ),
        ):
            found = self.piece.in_torch(args, self.dtype is not None)
            outputs = dict(enumerate(found))
            for i in self.task.outputs:
                take((OUTPUT, str(i)), outputs[i])
            if precise:
                precise.forward_is_over()
            changed = {place.name for place in self.piece.graph.changed_places}
            for given in self.piece.inputs_:
                own = args[given.place]
                version = versions.get(given.place)
                if given.name in changed or version not in (None, own._version):
                    take((BUFFER, given.name), own)
            if self.task.grad:
                outputs = {i: t for i, t in outputs.items() if t.requires_grad}
                reference.backward(self.task, outputs, wanted, take, precise, self.dtype)

    def _stand_in(self, tensor: torch.Tensor, shared: bool) -> torch.Tensor:
        wants = tensor.requires_grad and self.task.grad
        if shared:
            return tensor.detach().requires_grad_(wants)
        copy = tensor.detach().clone()
        if self.dtype is not None and copy.is_floating_point():
            copy = copy.to(self.dtype)
        return copy.requires_grad_(wants)
