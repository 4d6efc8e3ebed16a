"""Calls that are planned but not run: `gradd.estimate()`, `gradd_explain(**batch)`, budgets.

Python runs as in a call. Each graph from Dynamo plans its pieces, and returns tensors of the right
sizes: small ones filled with zeros, which a branch may read, and empty ones. Operators that would
run in PyTorch between two pieces do not run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from gradd import arguments, errors, private
from gradd.calls.planned import Planned
from gradd.dynamo import settings, sizes
from gradd.dynamo.budget import curve_of, shares
from gradd.dynamo.lower import value_of

if TYPE_CHECKING:
    from gradd.dynamo.compiled_graph import CompiledGraph, Step
    from gradd.dynamo.owner import Owner

Node = torch.fx.Node
_ZEROS = 1 << 20  # bytes; memory of larger results is never touched


class Planning(threading.local):
    """The call that a thread plans.

    Attributes:
        on: There is one, or one whose results are given.
        values: Its tensors have the values of a call.
        pieces: The planned pieces.
        in_torch: Why something runs in PyTorch, by the names of operators.
    """

    on = False
    _given: tuple[CompiledGraph, Sequence[torch.Tensor]] | None = None

    @contextlib.contextmanager
    def begun(self, values: bool) -> Iterator[None]:
        self.on, self.values = True, values
        self.pieces: list[Planned] = []
        self.in_torch: dict[str, Exception] = {}
        try:
            yield
        finally:
            self.on, self.pieces = False, []  # these hold parameters

    @contextlib.contextmanager
    def given(self, graph: CompiledGraph, results: Sequence[torch.Tensor]) -> Iterator[None]:
        """In this thread a graph returns these, and computes nothing; another one raises."""
        self.on, self._given = True, (graph, results)
        try:
            yield
        finally:
            self.on, self._given = False, None

    def results(self, made: CompiledGraph, args: Sequence[Any]) -> tuple[Any, ...]:
        """Plans a graph; its results have sizes alone."""
        if self._given is not None:
            graph, given = self._given
            if made is not graph:
                raise RuntimeError("another graph")
            return tuple(given)
        found = Imagined(made, args)
        self.pieces += plan(made, found, self.values)
        self.in_torch |= made.reasons()
        return tuple(found.get(r) if isinstance(r, Node) else r for r in made.results)


class Imagined:
    """Values of a graph's nodes: arguments, and empty tensors for the others."""

    def __init__(self, made: CompiledGraph, args: Sequence[Any]) -> None:
        self._known: dict[Node, Any] = dict(zip(made.placeholders, args, strict=True))
        self._numbers = made.numbers(args)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        self._device = tensors[0].device if tensors else torch.device("cpu")

    def get(self, node: Node) -> Any:
        if node not in self._known:
            self._known[node] = private.pytree.tree_map(self._one, value_of(node))
        return self._known[node]

    def _one(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._numbers(value)
        shape, strides = self._numbers(tuple(value.shape)), self._numbers(value.stride())
        device = self._device if value.device.type in ("cpu", "meta") else value.device
        tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=device)
        if tensor.nbytes <= _ZEROS:
            tensor.zero_()
        return tensor.requires_grad_(value.requires_grad)


def plan(made: CompiledGraph, found: Imagined, values: bool) -> list[Planned]:
    planned = []
    by_torch = {n for s in made.steps if s.piece is None for n in s.part.nodes}
    for step in made.steps:
        if step.piece is None:
            continue
        pinned = sum(found.get(n).nbytes for n in step.part.inputs if n in by_torch)
        planned.append(replace(plan_step(step, found, values), pinned=pinned))
    return planned


def plan_step(step: Step, found: Imagined, values: bool) -> Planned:
    given = step.part.inputs
    real = values and all(n.op == "placeholder" for n in given)
    with torch.set_grad_enabled(step.grad):
        return step.piece.plan(step.piece.tensors([found.get(n) for n in given]), real)


def plans(
    owner: Owner,
    function: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    values: bool,
    budget: int,
) -> tuple[list[Planned], dict[str, Exception]]:
    """Plans a call of a compiled function, see Planner.plans."""
    sizes.mark(arguments.leaves(args, kwargs))
    planning = owner.planning
    with planning.begun(values), settings.Applied():
        try:
            function(*args, **kwargs)
        except sizes.UnknownNumberError as error:
            text = f"the call cannot be planned: {error.message}"
            raise errors.UnsupportedError(text) from error
        except RuntimeError as error:
            if isinstance(error, errors.GraddError):
                raise
            # Between graphs forward() has used their results.
            raise errors.UnsupportedError(
                "the call cannot be planned: planning does not run its graphs, and with "
                f"placeholders for their results forward() raises {error}"
            ) from error
        found, in_torch = planning.pieces, planning.in_torch
    if not budget:
        return found, in_torch
    given = [budget]
    if len(found) > 1:
        given = shares(budget, [curve_of(owner.client, p) for p in found])
    return [p.within(n) for p, n in zip(found, given, strict=True)], in_torch
