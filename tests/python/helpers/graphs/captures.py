"""Graphs as TorchDynamo and the translation make them, and calls beside PyTorch.

`capture()` needs no daemon, and gives the graph that a call of a module would send to one, with the
values of its inputs in that call. `assert_same()` compares a call in the daemon with PyTorch:
results, gradients and buffers.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gradd import ORTModule
from gradd.dynamo import checkpoints, derived, lower, modes, partition, program, settings, sizes
from gradd.dynamo.compiled_graph import CompiledGraph
from gradd.dynamo.compiled_graph import refusal as refusal
from gradd.dynamo.owner import source_name
from gradd.spec import Capture, CaptureError
from helpers.nets import assert_close


class Lambda(nn.Module):
    """A module from a function of (self, *args); keyword arguments become attributes."""

    def __init__(self, function: Any, **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in parts.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


@dataclass
class Captured:
    """A graph and a call.

    Attributes:
        cap: The graph.
        values: For each of its inputs; parameters are copies that want a gradient.
    """

    cap: Capture
    values: dict[str, torch.Tensor]

    @property
    def loss(self) -> str:
        """The name of the output that is the loss."""
        return next(o.name for o in self.cap.outputs if o.leaf == self.cap.loss_leaf)

    @property
    def graph(self) -> onnx.GraphProto:
        """As ONNX."""
        return onnx.ModelProto.FromString(self.cap.onnx).graph

    @property
    def operators(self) -> dict[str, int]:
        """How often each occurs."""
        nodes = self.graph.node
        return Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in nodes)


def capture(module: nn.Module, args: tuple = (), kwargs: dict | None = None) -> Captured:
    """The graph of a call that is one graph.

    Raises:
        CaptureError: There is something that the daemon cannot run.
    """
    found: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        try:
            found.append(_captured(module, graph, examples))
        except Exception as error:  # Dynamo would go on without a word
            found.append(refusal(error))
        return graph.forward

    def target(gradd_derived: derived.Derived, *args: Any, **kwargs: Any) -> Any:
        gradd_derived  # noqa: B018  (torch 2.14 forgets arguments that nothing reads)
        return module(*args, **kwargs)

    torch.compiler.reset()
    call = derived.called(torch.compile(target, backend=backend), derived.Derivation())
    sizes.mark(pytree.tree_leaves((args, kwargs or {})))
    with settings.Applied():
        call(*args, **kwargs or {})
    if len(found) != 1:
        raise CaptureError("data_dependent_control_flow", f"the call has {len(found)} graphs")
    if isinstance(found[0], CaptureError):
        raise found[0]
    return found[0]


def _captured(module: nn.Module, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Captured:
    inlined = checkpoints.inline(graph)
    modes.mark(graph.graph, modes.now())
    (part,) = partition.split(graph.graph, {})
    attributes = [n for n in graph.graph.nodes if n.op == "get_attr"]
    given = [n for n in part.inputs if isinstance(lower.value_of(n), torch.Tensor)]
    done = lower.lower([*attributes, *part.nodes], given, part.outputs, graph)
    names = {id(t): n for n, t in (*module.named_parameters(), *module.named_buffers())}
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    owner = SimpleNamespace(name_of=lambda t, node: names.get(id(t)) or source_name(node))
    maker = SimpleNamespace(placeholders=placeholders, examples=examples, owner=owner)
    maker._name_of = functools.partial(CompiledGraph._name_of, maker)  # type: ignore[arg-type]
    inputs = CompiledGraph._inputs(maker, done, given)  # type: ignore[arg-type]
    cap = program.capture(done, inputs, [n.name for n in part.outputs], bool(inlined))
    tensors = {i.name: i.tensor for i in inputs if i.tensor is not None}
    known = dict(zip(placeholders, examples, strict=True))
    values = {i.name: torch.as_tensor(known[given[i.leaf]]).detach() for i in cap.inputs}
    values |= {n: tensors[n].detach().clone().requires_grad_() for n in cap.params}
    values |= {n: tensors[n].detach().clone() for n in cap.buffers}
    return Captured(cap, values)


def assert_same(
    module: nn.Module, *calls: tuple, exact: float | None = None, captures: int | None = 1
) -> ORTModule:
    """Calls in the daemon and in PyTorch: results, their types, gradients and buffers.

    The daemon's own self-check is off, so that the graph alone has to be right.

    Args:
        module: Without active randomness; it is left alone.
        calls: The arguments of each call; a dictionary at the end has those by name.
        exact: The relative and absolute difference that is allowed (default: that of parity).
        captures: How many there should be; None = any number.

    Returns:
        The module in the daemon.
    """
    theirs = copy.deepcopy(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADD_SELF_CHECK", "0")
        ours = ORTModule(copy.deepcopy(module), strict=True)
    for number, call in enumerate(calls):
        _assert_call(ours, theirs, call, f"call {number}", exact)
    stats = ours.gradd_stats()
    assert stats["fallbacks"] == {} and stats["parts_in_torch"] == {}
    assert captures in (None, stats["captures"])
    return ours


def _assert_call(
    ours: nn.Module, theirs: nn.Module, call: tuple, what: str, exact: float | None
) -> None:
    def same(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
        assert a.dtype is b.dtype and a.requires_grad is b.requires_grad, f"{what}: {name}"
        if exact is None:
            torch.testing.assert_close(
                a.detach(), b.detach(), rtol=1e-4, atol=1e-5, msg=lambda m: f"{what}: {name}: {m}"
            )
        else:
            torch.testing.assert_close(a.detach(), b.detach(), rtol=exact, atol=exact)

    sides = []
    for model in (ours, theirs):
        model.zero_grad()
        args = copy.deepcopy(call)
        named = args[-1] if args and isinstance(args[-1], dict) else {}
        result = model(*(args[:-1] if named else args), **named)
        found = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        wanted = [x for x in found if x.requires_grad]
        if wanted:
            sum((i + 1.0) * x.float().sum() for i, x in enumerate(wanted)).backward()
        given = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        sides.append((found, [x.grad for x in given], given))
    for name, a, b in zip(("result", "gradient of an argument", "argument"), *sides, strict=True):
        assert len(a) == len(b), f"{what}: {name}"
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert (x is None) is (y is None), f"{what}: {name} {number}"
            if x is not None:
                same(x, y, f"{name} {number}")
    largest = max((float(p.grad.abs().max()) for p in theirs.parameters() if p.grad is not None),
                  default=0.0)  # fmt: skip
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), f"{what}: gradient of {name}"
        if p.grad is not None and float(p.grad.abs().max()) <= 1e-4 * largest:
            assert float(q.grad.abs().max()) <= 1e-3 * largest, f"{what}: gradient of {name}"
        elif p.grad is not None and exact is None:
            assert_close(q.grad, p.grad, f"{what}: gradient of {name}")
        elif p.grad is not None:
            same(q.grad, p.grad, f"gradient of {name}")
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        same(a, b, name)
