"""PyTorch's side of the self-check, without randomness: the user's own forward, or Dynamo's graph.

Both work on stand-ins that share the parameters' memory and on copies of everything else. Each
value is passed on as soon as it exists and is then dropped: gradients come one by one, from hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Key
from gradd.check.cut import Data
from gradd.check.modes import Middles, Precise, WithoutDropout
from gradd.memory import saved_tensors, unused

Piece = Any  # of gradd.dynamo, as are its forward(): folders above this one
Forward = Any
_PERIOD = 8191  # of the pattern: a prime, so that rows of a tensor start differently
Take = Callable[[Key, torch.Tensor | None], None]


class Task(NamedTuple):
    """The computation of both sides."""

    outputs: tuple[int, ...]  # positions in the graph's user outputs of those that are compared
    seeds: dict[int, torch.Tensor]  # the gradients to start from, by position
    grad: bool  # whether gradients are on in the call


def seed(tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A gradient to start from: one for a scalar, else a fixed pattern without structure."""
    if not tensor.dim():
        return torch.full_like(tensor, scale)
    n = tensor.numel()
    pattern = torch.arange(_PERIOD, dtype=torch.float64, device="cpu").mul_(1.7).cos_().mul_(scale)
    repeated = pattern.to(tensor.device, tensor.dtype).repeat(n // _PERIOD + 1)
    return repeated[:n].reshape(tensor.shape)


class Reference:
    """Runs the computation of one piece of a graph in PyTorch."""

    def __init__(
        self,
        piece: Piece,
        task: Task,
        precise: Precise | None = None,
        only: Collection[Key] | None = None,
    ) -> None:
        """Args:
        piece: The piece.
        task: What to compute.
        precise: How the graph is computed (default: as the user does).
        only: The gradients that are wanted, for the memory of the others; None = all.
        """
        self.piece, self.task, self.precise, self._only = piece, task, precise, only

    def run(self, data: Data, take: Take) -> None:
        """Dynamo's graph; hands every output, buffer and gradient to `take`, or None for it.

        Raises:
            Exception: Any exception of the graph.
        """
        args = self.piece.arguments(data.leaves)
        for given in self.piece.inputs_:
            tensor = args[given.position]
            shared = given.bound and isinstance(tensor, torch.nn.Parameter)
            args[given.position] = self.stand_in(tensor, tensor, shared)
        inputs = [(given, args[given.position]) for given in self.piece.inputs_]
        versions = [_version(own) for _, own in inputs]
        changed = {entry.name for entry in self.piece.graph.changed_entries}
        precise = self.precise

        def read(key: Key, value: torch.Tensor | None) -> None:
            if precise is None:
                return take(key, value)
            precise.paused = True
            take(key, precise.real(value))
            precise.paused = False

        with precise or contextlib.nullcontext(), self._quiet():
            self._hand_over(list(self.piece.in_torch(args)), inputs, read)
            for (given, own), version in zip(inputs, versions, strict=True):
                if given.name in changed or version != _version(own):
                    read((BUFFER, given.name), own)

    def run_forward(self, own: Forward, data: Data, take: Take) -> bool:
        """The user's forward in place of the graph; False = it cannot be compared.

        Raises:
            Exception: Any exception of forward().
        """
        if not own.takes(data):
            return False
        stands = own.stand_ins(data, self._like)
        args, inputs = self.piece.arguments(), []
        for given in self.piece.inputs_:
            tensor = args[given.position]
            if (stand := stands.get(id(tensor))) is not None:
                inputs.append((given, _leaf_of(stand)))
            elif tensor.requires_grad or data.parts and not given.bound:
                return False
        versions = list(map(_version, stands.values()))
        with self._quiet():
            results = own(stands)
            if results is None or _others_reached(results, own.parameters):
                return False
            if versions != list(map(_version, stands.values())):
                return False  # it writes
            self._hand_over(results, inputs, take)
        return True

    @torch.inference_mode(False)
    @torch.no_grad()
    def stand_in(self, tensor: torch.Tensor, values: torch.Tensor, shared: bool) -> torch.Tensor:
        """A leaf like a tensor, with a gradient if that has one, and with these values."""
        wants = tensor.requires_grad and self.task.grad
        if self.precise is not None and shared and tensor.is_floating_point():
            own = self.precise.stand_in(tensor, wants)
        else:
            own = values.detach() if shared else values.detach().clone()
            own = own if self.precise is None else self.precise.real(own)
            if isinstance(tensor, torch.nn.Parameter):
                own = torch.nn.Parameter(own, wants)
        vars(own).update(vars(tensor))  # attributes that a script has written there
        return own.requires_grad_(wants)

    @torch.inference_mode(False)
    def _like(self, tensor: torch.Tensor, values: torch.Tensor, shared: bool) -> torch.Tensor:
        """A stand-in that tells forward() of itself what the tensor does: a history, a gradient."""
        if tensor.grad_fn is None:
            return self.stand_in(tensor, values, shared).requires_grad_(tensor.requires_grad)
        leaf = values.detach().requires_grad_()
        with torch.enable_grad():
            own = leaf.clone()
        vars(own).update(vars(tensor))
        return own

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        unused.trim()
        device = self.piece.client.memory.device
        numbers = [] if device.type == "cpu" else [device.index]
        on, cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.task.grad),
            torch.random.fork_rng(numbers, device_type=device.type),
            # The cache, which all devices share, would outlive the stand-ins.
            torch.autocast("cpu", cast, enabled=on, cache_enabled=False),
            WithoutDropout(),
            Middles(),
            # Without its history: a result that its own node saves would keep itself alive.
            saved_tensors.own_hooks(_saved, _unchanged),
        ):
            yield

    def _hand_over(
        self, results: list[torch.Tensor], inputs: list[tuple[Any, torch.Tensor]], take: Take
    ) -> None:
        """Passes outputs on, which it takes, and gradients one by one as they arrive."""
        wanted = {}
        for given, own in inputs:
            key = GRADIENT if given.bound else INPUT, given.name
            wants = own.requires_grad and self.task.grad
            if wants and (self._only is None or key in self._only):
                wanted[id(own)] = own, key

        def made(leaf: torch.Tensor) -> None:
            grad, leaf.grad = leaf.grad, None
            take(wanted.pop(id(leaf))[1], grad.to_dense() if grad.is_sparse else grad)

        for i in self.task.outputs:
            take((OUTPUT, str(i)), results[i])
        # Another shape is a finding already.
        start = [
            (results[i], s.to(results[i].dtype))
            for i, s in self.task.seeds.items()
            if results[i].requires_grad and results[i].shape == s.shape
        ]
        results.clear()
        if start and wanted:
            leaves = [leaf for leaf, _ in wanted.values()]
            hooks = [leaf.register_post_accumulate_grad_hook(made) for leaf in leaves]
            tensors, grads = zip(*start, strict=True)
            start.clear()
            try:
                torch.autograd.backward(tensors, grads, inputs=leaves)
            finally:
                for hook in hooks:
                    hook.remove()  # they know what knows their tensor
        for _, key in wanted.values():
            take(key, None)


def _leaf_of(stand: torch.Tensor) -> torch.Tensor:
    """Where the gradient of a stand-in arrives."""
    node: Any = stand.grad_fn
    return stand if node is None else node.next_functions[0][0].variable


def _saved(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    return tensor.detach(), _version(tensor)


def _unchanged(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """What autograd has saved; PyTorch's error if it has been written to meanwhile."""
    tensor, version = saved
    if _version(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def _version(tensor: torch.Tensor) -> int:
    """A number that a write changes."""
    return 0 if tensor.is_inference() else tensor._version


def _others_reached(results: Sequence[torch.Tensor], parameters: set[int]) -> bool:
    """Whether a forward has read parameters by another way than through their module."""
    nodes: list[Any] = [t.grad_fn for t in results]
    seen = {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            if id(getattr(node, "variable", None)) in parameters:
                return True
            seen.add(node)
            nodes += [n for n, _ in node.next_functions]
    return False
