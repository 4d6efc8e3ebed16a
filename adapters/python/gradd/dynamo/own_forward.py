"""Runs the user's own forward again for a self-check, which shows what Dynamo's guards miss.

It does so only if a call consists of one graph and has no other effects; Dynamo knows the other
effects of a traced function.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._dynamo import config
from torch.func import functional_call

from gradd import private

if TYPE_CHECKING:
    from gradd.check.cut import Data
    from gradd.dynamo import between_graphs
    from gradd.dynamo.compiled_graph import CompiledGraph
    from gradd.dynamo.owner import Owner

logger = logging.getLogger("gradd")
StandIn = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]


def does_more(code: CodeType | None) -> bool:
    """Whether the graph that Dynamo has just made is not all that a call of this code does.

    It may be that of another function, or come with side effects; objects that the call makes are
    none. Where Dynamo cannot be asked, it counts as one that does.
    """
    try:
        output = private.tracer.current_tx().output
        effects = output.side_effects
        if output.root_tx.f_code is not code or effects.tensor_hooks or effects.save_for_backward:
            return True
        return any(
            effects.is_modified(item)
            for item in effects.id_to_variable.values()
            if not type(item.mutation_type).__name__.endswith("New")
        )
    except Exception:  # other names in another version of torch
        return True


def begins(code: CodeType | None) -> bool:
    """Whether the graph that Dynamo has just made is the first thing that a call of this code does.

    Where Dynamo cannot be asked, it counts as one that is not.
    """
    try:
        return code is not None and private.tracer.current_tx().output.root_tx.f_code is code
    except Exception:  # other names in another version of torch
        return False


def stored() -> set[str]:
    """The names of nodes whose tensors the call stores, as in `self.last = h`.

    They are in the graph that Dynamo has just made. Empty where Dynamo cannot be asked.
    """
    found: set[str] = set()

    def note(item: Any) -> None:
        # To ask an item that Dynamo has not looked at would make an argument of the graph of it.
        if (proxy := getattr(item, "__dict__", {}).get("proxy")) is not None:
            found.add(proxy.node.name)

    try:
        effects = private.tracer.current_tx().output.side_effects
        for item in list(effects.id_to_variable.values()):
            new = type(item.mutation_type).__name__.endswith("New")
            if not new and effects.is_modified(item):
                values = (item, list(effects.store_attr_mutations.get(item, {}).values()))
                type(item).visit(note, values, side_effects=effects)
    except Exception:  # other names in another version of torch
        return set()
    return found


class Present(NamedTuple):
    """The call of a module that is computed now."""

    module: torch.nn.Module  # owner of the parameters
    forward: Callable[..., Any]  # what is called: the module, or a forward that it was given
    compiled: Callable[..., Any]  # the same in the daemon
    args: tuple  # of the call
    kwargs: dict[str, Any]  # of the call
    before: int  # calls of graphs before this one


class Now(threading.local):
    """The present computation of a thread.

    Attributes:
        call: Of a module.
        graphs: Calls of graphs so far, in the daemon or not.
        run: The same call, as far as it has got; None within a graph.
    """

    call: tuple | None = None  # what a Present is made of
    graphs = 0
    run: between_graphs.Call | None = None


def of(owner: Owner, graph: CompiledGraph) -> OwnForward | None:
    """A function that computes the present call in PyTorch, if the graph is all that it does."""
    present = None if owner.now.call is None else Present(*owner.now.call)
    if present is None or owner.now.graphs != present.before + 1 or graph.whole[0].graph.changed:
        return None  # writes may be seen elsewhere
    return OwnForward(owner, graph, present)


def _by_place(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by every name that they have, but each child by one of its names.

    functional_call() would leave stand-ins in a child that it is told of twice.
    """
    for prefix, child in module.named_modules():
        yield from itertools.chain(
            child.named_parameters(prefix, recurse=False, remove_duplicate=False),
            child.named_buffers(prefix, recurse=False, remove_duplicate=False),
        )


def _exchanged(value: Any, stands: dict[int, torch.Tensor], done: dict[int, Any]) -> Any:
    """A value with stand-ins in place of tensors. What holds none is itself, and a container that
    occurs twice is one again: a forward may ask which objects it gets, and of which types.
    """
    if id(value) in stands:
        return stands[id(value)]
    if id(value) not in done:
        done[id(value)] = value
        inside, spec = private.pytree.tree_flatten(value, is_leaf=lambda x: x is not value)
        found = [x if x is value else _exchanged(x, stands, done) for x in inside]
        if any(x is not y for x, y in zip(inside, found, strict=True)):
            done[id(value)] = private.pytree.tree_unflatten(found, spec)
    return done[id(value)]


class _Called(torch.nn.Module):
    """Calls a function with a module inside, so that functional_call() can exchange its tensors."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._function = module, (function,)  # it may be a module, but no child

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Without hooks of all modules, which are not to see it."""
        return self._function[0](*args, **kwargs)


class OwnForward:
    """Runs of one call's forward.

    Attributes:
        parameters: Identities of the module's own.
    """

    def __init__(self, owner: Owner, graph: CompiledGraph, present: Present) -> None:
        self._owner, self._graph, self._present = owner, graph, present
        self._leaves: list[int] = []  # where they are among those of the call
        self._tensors = dict(_by_place(present.module))
        self.parameters = {id(p) for p in present.module.parameters()}

    def takes(self, data: Data) -> bool:
        """Whether the graph applies to other tensors in place of the call's.

        It does not where forward() asks which tensors they are (`is`, id(), keys of dictionaries):
        with stand-ins it would do something else, and keep them for later calls. Dynamo compares
        that with its guards, and makes no graph now. It alone knows how it makes the call's results
        of the graph's, too: it is given marked tensors.
        """
        marks = [torch.empty(0) for _ in self._graph.results]
        now, frames = self._owner.now, private.counters["frames"]
        calls, total = now.graphs, frames["total"]
        try:
            with (
                self._owner.planning.given(self._graph, marks),
                config.patch(error_on_recompile=True, suppress_errors=False),
            ):
                stands = self.stand_ins(data, _alias)
                result = self._call(self._present.compiled, stands)
        except Exception as error:  # Dynamo's, most often
            logger.debug("forward() is not run on stand-ins: %s", error)
            frames["total"] = total
            return False
        finally:
            now.graphs = calls
        at = {id(x): i for i, x in enumerate(private.pytree.tree_leaves(result))}
        self._leaves = [at.get(id(mark), -1) for mark in marks]
        return bool(marks) and -1 not in self._leaves

    def stand_ins(self, data: Data, stand_in: StandIn) -> dict[int, torch.Tensor]:
        """Tensors to run with, by those of the call: that part of it which the data are."""
        found = {
            id(t): stand_in(t, t, isinstance(t, torch.nn.Parameter)) for t in self._tensors.values()
        }
        present = self._present
        for x in private.pytree.tree_leaves((present.args, present.kwargs)):
            if isinstance(x, torch.Tensor) and id(x) not in found:
                found[id(x)] = stand_in(x, data.part_of(x), False)
        return found

    def __call__(self, stands: dict[int, torch.Tensor]) -> list[torch.Tensor] | None:
        """The results in the order of the graph; None if the call returns something else."""
        leaves = private.pytree.tree_leaves(self._call(self._present.forward, stands))
        if len(leaves) <= max(self._leaves):
            return None
        found = [leaves[i] for i in self._leaves]
        return found if all(isinstance(x, torch.Tensor) for x in found) else None

    def _call(self, function: Callable[..., Any], stands: dict[int, torch.Tensor]) -> Any:
        args, kwargs = _exchanged((self._present.args, self._present.kwargs), stands, {})
        names = {f"module.{name}": stands[id(t)] for name, t in self._tensors.items()}
        called = _Called(self._present.module, function)
        return functional_call(called, names, args, kwargs, tie_weights=False)


def _alias(tensor: torch.Tensor, values: torch.Tensor, shared: bool) -> torch.Tensor:
    """Another object with the same values, and all that a guard asks of a tensor."""
    found = values.detach()
    if values is not tensor:  # a part of it, whose strides are to fit its sizes, also of one row
        order = sorted(range(values.dim()), key=tensor.stride, reverse=True)
        part = torch.empty_permuted(values.shape, order, dtype=values.dtype, device=values.device)
        found = part.copy_(found)
    if isinstance(tensor, torch.nn.Parameter):
        found = torch.nn.Parameter(found, tensor.requires_grad)
    vars(found).update(vars(tensor))
    return found.requires_grad_(tensor.requires_grad)
