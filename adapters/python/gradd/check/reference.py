"""PyTorch's side of the self-check of a piece: Dynamo's own graph, run without chance.

It works on stand-ins that share the parameters' memory and on copies of the other arguments. Each
value is handed on when it is there and dropped then: gradients come one by one, from hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Key
from gradd.check.other_data import Data
from gradd.check.perturbed import Shaken
from gradd.check.precise import Precise
from gradd.check.without_chance import Quiet

if TYPE_CHECKING:
    from gradd.dynamo.piece import Piece

_PERIOD = 8191  # of the pattern: a prime, so that rows of a tensor start differently
Take = Callable[[Key, torch.Tensor | None], None]


@dataclass(frozen=True)
class Task:
    """What both sides compute.

    Attributes:
        outputs: Positions in the graph's user outputs of those that are compared.
        seeds: The gradients to start from, by position.
        grad: Whether gradients are on in the call.
    """

    outputs: tuple[int, ...]
    seeds: dict[int, torch.Tensor]
    grad: bool


def seed(tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A gradient to start from: one for a scalar, else a fixed pattern without structure."""
    if not tensor.dim():
        return torch.full_like(tensor, scale)
    n = tensor.numel()
    pattern = torch.cos(torch.arange(min(n, _PERIOD), dtype=torch.float64) * 1.7)
    pattern = (pattern * scale).to(tensor.dtype)
    return pattern.repeat(n // _PERIOD + 1)[:n].reshape(tensor.shape)


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
                precise.pack if precise else _detached,
                precise.unpack if precise else _same,
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
                _backward(self.task, outputs, wanted, take, precise, self.dtype)

    def _stand_in(self, tensor: torch.Tensor, shared: bool) -> torch.Tensor:
        wants = tensor.requires_grad and self.task.grad
        if shared:
            return tensor.detach().requires_grad_(wants)
        copy = tensor.detach().clone()
        if self.dtype is not None and copy.is_floating_point():
            copy = copy.to(self.dtype)
        return copy.requires_grad_(wants)


def _backward(
    task: Task,
    outputs: dict[int, torch.Tensor],
    wanted: dict[int, tuple[torch.Tensor, Key]],
    take: Take,
    precise: Precise | None,
    dtype: torch.dtype | None,
) -> None:
    """Hands on gradients one by one, as they come.

    Args:
        task: What is computed.
        outputs: From which a backward may start; given up here.
        wanted: Leaves by id, with what they are called.
        take: Gets each gradient; None where there is none.
        precise: Of a run in higher precision.
        dtype: That precision.
    """
    taken: set[int] = set()

    def arrived(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
        dense = grad.to_dense() if grad is not None and grad.is_sparse else grad
        take(wanted[id(leaf)][1], dense)
        taken.add(id(leaf))

    def made(leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if precise is None or leaf.dtype == dtype:
            arrived(leaf, grad)

    seeded = ((outputs[i], s) for i, s in task.seeds.items() if i in outputs)
    start = [(t, s) for t, s in seeded if t.shape == s.shape]  # else that is the finding
    outputs.clear()
    if start:
        tensors, seeds = [t for t, _ in start], [s.to(t.dtype) for t, s in start]
        start.clear()
        if precise:
            precise.expect(tensors, arrived)
        hooks = [t.register_post_accumulate_grad_hook(made) for t, _ in wanted.values()]
        try:
            torch.autograd.backward(tensors, seeds)
            if precise:
                precise.finish()
        finally:
            for hook in hooks:
                hook.remove()  # they know what knows their tensor
    for i, (_, key) in wanted.items():
        if i not in taken:
            take(key, None)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: a result that its own node saves would keep itself alive."""
    return tensor.detach()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor."""
    return tensor
