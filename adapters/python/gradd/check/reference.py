"""PyTorch's side of the self-check: a call without chance and without a trace.

It works on stand-ins that share the parameters' memory and on copies of buffers and arguments, so
that `.grad`, hooks, buffers, attributes and the random state of the trainer stay as they are. Each
value is handed on when it is there and dropped then: gradients come one by one, from hooks of the
stand-ins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gradd import schema
from gradd.calls.captured import CapturedGraph
from gradd.check.agreement import BUFFER, GRADIENT, INPUT, OUTPUT, Key
from gradd.check.other_data import Data
from gradd.check.perturbed import Shaken
from gradd.check.precise import Precise
from gradd.check.without_chance import Quiet, without_checkpoints
from gradd.export.functions import custom_functions, leaves_of
from gradd.export.identity import like
from gradd.spec import CaptureError

if TYPE_CHECKING:
    from gradd.bridge import Bridge

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


def shared_name(leaf: int) -> str:
    """What a result is called that is a view of another result or of an argument."""
    return f"view {leaf}"


class Reference:
    """One run in PyTorch."""

    def __init__(
        self,
        bridge: Bridge,
        graph: CapturedGraph,
        task: Task,
        dtype: torch.dtype | None = None,
        shaken: int | None = None,
    ) -> None:
        """Args:
        bridge: The bridge, whose lock the caller holds.
        graph: The graph whose values are compared.
        task: What to compute.
        dtype: A higher precision, in which everything is computed.
        shaken: Seed of results that are a rounding of f32 off, see perturbed.py.
        """
        self.bridge = bridge
        self.module = bridge.module
        self.graph = graph
        self.task = task
        self.dtype = dtype
        self.shaken = shaken

    def run(self, data: Data, take: Take) -> None:
        """Hands every output, buffer and gradient to `take`; those that there are not as None.

        Raises:
            CaptureError: The forward does what no graph can hold, see `_check_graph`.
            Exception: Whatever the module raises.
        """
        from torch.nn.utils.stateless import _reparametrize_module

        from gradd.export.refuse import kept_state

        with torch.inference_mode(False), torch.no_grad():
            parameters = self._parameters()
            buffers = {
                n: like(self._cast(t.detach().clone()), t) for n, t in self.module.named_buffers()
            }
            leaves = [self._argument(x) for x in data.leaves]
            own = {name: known for table in (parameters, buffers) for name, known in table.items()}
            data.same.fill(leaves, own)
        known = {n: (t, t._version) for n, t in buffers.items()}
        args, kwargs = schema.unflatten_inputs(data.args, data.kwargs, leaves)
        precise = self.dtype and Precise(parameters.values(), self.dtype)
        with (
            contextlib.closing(precise) if precise else contextlib.nullcontext(),
            kept_state(self.module),
            torch.inference_mode(False),
            torch.set_grad_enabled(self.task.grad),
            self._casts(),
            _reparametrize_module(self.module, {**parameters, **buffers}, tie_weights=True),
            precise or contextlib.nullcontext(),
            Quiet(),
            without_checkpoints(),
            contextlib.nullcontext() if self.shaken is None else Shaken(self.shaken),
            # not the trainer's hooks
            torch.autograd.graph.saved_tensors_hooks(
                precise.pack if precise else detached, precise.unpack if precise else same
            ),
        ):
            outputs = self._forward(args, kwargs, take)
            if precise:
                precise.forward_is_over()
            self._check_arguments(data.leaves, leaves)
            self._take_buffers(known, take)
            if self.task.grad:
                self._check_graph(outputs, parameters, leaves)
                self._backward(outputs, parameters, leaves, take, precise)

    # ---- stand-ins ----

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Leaves that share the memory of the parameters, by their names."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in self.module.named_parameters():
            leaf = tensor.detach().requires_grad_(tensor.requires_grad and self.task.grad)
            found[name] = like(leaf, tensor)
        return found

    def _argument(self, leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        copy = self._cast(leaf.detach().clone())
        return like(copy.requires_grad_(leaf.requires_grad and self.task.grad), leaf)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self.dtype)

    @contextlib.contextmanager
    def _casts(self) -> Iterator[None]:
        """Autocast as it is around the call, without its memory of what it has cast."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            off = torch.autocast("cpu", enabled=False)
            with off if self.dtype else contextlib.nullcontext():
                yield
        finally:
            torch.set_autocast_cache_enabled(cached)

    # ---- the run ----

    def _forward(self, args: tuple, kwargs: dict, take: Take) -> dict[int, torch.Tensor]:
        """Hands on the outputs; returns those from which a backward can start."""
        from gradd.export.regions import slices_hold_parameters
        from gradd.export.results import Result

        with slices_hold_parameters(self.module):
            flat = Result().flatten(self.bridge.forward(*args, **kwargs))
        outputs = {i: flat[spec.leaf] for i, spec in enumerate(self.graph.user)}
        for i in self.task.outputs:
            take((OUTPUT, str(i)), outputs[i])
        for spec in self.graph.cap.shared:
            if not spec.same and spec.kind in ("output", "argument"):
                take((OUTPUT, shared_name(spec.leaf)), flat[spec.leaf])
        return {i: t for i, t in outputs.items() if t.requires_grad}

    def _check_arguments(self, before: list, after: list) -> None:
        for old, new in zip(before, after, strict=True):
            if not torch.is_tensor(old) or not new._version:
                continue
            if not torch.equal(self._cast(old.detach()), new.detach()):
                raise CaptureError(
                    "input_mutation",
                    f"forward() writes its argument of shape {list(old.shape)} in place, which a "
                    "graph does not do: work on a copy",
                )

    def _take_buffers(self, known: dict[str, tuple[torch.Tensor, int]], take: Take) -> None:
        """Hands on what the forward has changed, or should have changed."""
        expected = {spec.fqn for spec in self.graph.changed}
        now = dict(self.module.named_buffers(remove_duplicate=False))
        for name, (copy, version) in known.items():
            value = now.get(name)
            if value is None or (value is copy and copy._version == version):
                if name not in expected:
                    continue
                value = copy if value is None else value
            take((BUFFER, name), value)

    def _check_graph(
        self, outputs: dict[int, torch.Tensor], ours: dict[str, torch.Tensor], leaves: list
    ) -> None:
        """Refuses what only PyTorch's own graph shows."""
        from gradd.export.refuse import custom_function

        for name in custom_functions(outputs.values()):
            raise custom_function(name)
        known = {id(t) for t in (*ours.values(), *leaves)}
        for leaf in leaves_of(outputs.values()):
            if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in known:
                raise CaptureError(
                    "unsupported_parameter",
                    f"forward() uses a trainable parameter of shape {list(leaf.shape)} that is "
                    "not registered in the module (in a plain list?) and would get no gradient; "
                    "register it, or keep modules in a ModuleList",
                )

    def _backward(
        self,
        outputs: dict[int, torch.Tensor],
        parameters: dict[str, torch.Tensor],
        leaves: list,
        take: Take,
        precise: Precise | None,
    ) -> None:
        wanted: dict[int, tuple[torch.Tensor, Key]] = {}
        for name, tensor in parameters.items():
            wanted.setdefault(id(tensor), (tensor, (GRADIENT, name)))
        for name, spec in self.graph.specs.items():
            leaf = leaves[spec.leaf]
            if torch.is_tensor(leaf):
                wanted.setdefault(id(leaf), (leaf, (INPUT, name)))
        wanted = {i: (t, key) for i, (t, key) in wanted.items() if t.requires_grad}
        backward(self.task, outputs, wanted, take, precise, self.dtype)


def backward(
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
            _backward(tensors, seeds, set(wanted))
            if precise:
                precise.finish()
        finally:
            for hook in hooks:
                hook.remove()  # they know what knows their tensor
    for i, (_, key) in wanted.items():
        if i not in taken:
            take(key, None)


def _backward(outputs: list[torch.Tensor], seeds: list[torch.Tensor], known: set[int]) -> None:
    """A backward that leaves `.grad` of tensors that are not known as it is.

    What a module computes again in its backward does not know autograd.grad() or `inputs`, and
    needs the caller's contexts: they must still be open.
    """
    others = [(t, t.grad) for t in leaves_of(outputs) if id(t) not in known]
    for leaf, _ in others:
        leaf.grad = None  # else it would be added to in place
    try:
        torch.autograd.backward(outputs, seeds)
    finally:
        for leaf, grad in others:
            leaf.grad = grad


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its history: a result that its own node saves would keep itself alive."""
    return tensor.detach()


def same(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor."""
    return tensor
