"""The back end that Dynamo calls: `torch.compile(model, backend="gradd")`, `model.compile(...)`.

    model.compile(backend="gradd")
    step = torch.compile(step, backend="gradd", options={"memory_budget": "2GiB"})

Such a function has the contract of torch.compile: changes that Dynamo does not guard go unnoticed,
calls that reach no graph run in PyTorch silently, and nothing is moved before the first call.
Options are those of ORTModule: `strict` and `memory_budget`.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
import torch.fx
from torch._dynamo import config

from gradd import interrupts, progress
from gradd.dynamo import between_graphs, masked_rows, work
from gradd.dynamo.compiled_graph import CompiledGraph, bare, refusal
from gradd.dynamo.own_forward import begins, does_more, stored
from gradd.dynamo.owner import SOURCE, Owner, device_of
from gradd.dynamo.refused import MistracedError
from gradd.memory import saved_tensors, unused
from gradd.session import daemon
from gradd.spec import CaptureError

logger = logging.getLogger("gradd")
_Run = tuple[Callable[..., Any], Callable[[], work.Amounts]]
_OPTIONS = ("memory_budget", "strict")
_owners: dict[tuple, Owner] = {}
_lock = threading.Lock()


def gradd(
    graph: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Makes the function that runs a graph of Dynamo.

    Args:
        graph: The graph that Dynamo has traced.
        examples: Its arguments in the call that Dynamo traces.
        options: "strict" and "memory_budget", as ORTModule takes them.

    Returns:
        A function that Dynamo calls with the graph's arguments.

    Raises:
        ValueError: An option is unknown, or the budget is not a positive size.
        TypeError: The budget is neither a number nor text.
        SessionError: No daemon could be reached, and the policy does not allow PyTorch then.
    """
    return compiled(_owner(options or {}, device_of(None, examples)), graph, examples)


def _owner(options: dict[str, Any], device: torch.device) -> Owner:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ValueError(
            f"backend='gradd' has no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}"
        )
    with _lock:
        key = (daemon.directory(), device, *sorted(options.items()))
        known = _owners.get(key)
        gone = known is not None and (known.client.closed or known.client.pid != os.getpid())
        if known is None or gone:
            known = _owners[key] = Owner(
                None,
                "a compiled function",
                device=device,
                strict=bool(options.get("strict")),
                memory_budget=options.get("memory_budget"),
            )
        return known


def compiled(
    owner: Owner,
    graph: torch.fx.GraphModule,
    examples: Sequence[Any],
    code: CodeType | None = None,
) -> Callable[..., Any]:
    """The function that Dynamo calls in place of a graph; it holds its lock.

    Args:
        owner: The common state of the graphs.
        graph: Dynamo's.
        examples: Arguments of the call that it is made for.
        code: That of the compiled function, if self-checks may call what that calls.
    """
    owner.compiled += 1
    owner.follow(examples)
    graph = _copied(graph)
    if masked_rows.has_choices(graph.graph):
        graph, error = _in_places(graph)
        if error is not None and owner.keeps_places:
            run, amounts = _open(owner, graph, error, begins(code))
            return between_graphs.entry(owner, graph, run, amounts)
    run, amounts = _run_of(owner, graph, examples, code)
    return between_graphs.entry(owner, graph, run, amounts)


def _in_places(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, CaptureError | None]:
    """A graph whose chosen rows keep their places; or itself, and why there is none."""
    made = _copied(graph)
    error = masked_rows.keep_places(made.graph)
    if error is not None:
        return graph, error
    made.recompile()
    return made, None


def _open(owner: Owner, graph: torch.fx.GraphModule, error: CaptureError, first: bool) -> _Run:
    """A graph with sizes that depend on data: the next trace breaks there.

    Nothing of the call has run if the graph is its first: the call is traced again at once.
    Otherwise PyTorch runs the graph.
    """
    owner.keeps_places = False
    if first:

        def again(*args: Any) -> Any:
            raise masked_rows.AgainError

        return again, work.Amounts
    try:
        reason = owner.fallback.decide(error)
    except CaptureError:
        return _raising(error)
    owner.fallback.warn(reason, error, 0.0, 0.0, in_part=True)

    def run(*args: Any) -> Any:
        owner.ran_in_torch(reason)
        return graph.forward(*args)

    return run, lambda: work.amounts(graph.graph.nodes, False)


def _run_of(
    owner: Owner, graph: torch.fx.GraphModule, examples: Sequence[Any], code: CodeType | None
) -> _Run:
    """The function that runs a graph, and the one that returns its work."""
    if owner.failed is not None:
        return _refused(owner, graph, owner.failed)
    start = time.perf_counter()
    said = progress.Compiling(owner.title, "for another form of call")
    deferred = interrupts.deferred_for(f"the capture of {owner.title}")
    with said, deferred, unused.unkept(), saved_tensors.own_hooks():
        try:
            alone = not does_more(code)
            made = CompiledGraph(
                owner, graph, examples, alone=alone, begins=begins(code), stored=stored()
            )
        except Exception as error:  # raised here, it would leave Dynamo's state as it is
            return _refused(owner, graph, refusal(error))
    owner.made(made)
    logger.info("captured %s in %.1f s", owner.title, time.perf_counter() - start)
    # The first one may name all operators at once.
    for error in filter(None, (made.first, *made.refusals.values())):
        try:
            owner.fallback.decide(error)
        except type(error):  # where nothing may run in PyTorch
            return _raising(error)
    if made.refusals:
        made.tell = _telling(owner, made)
    return made.run, made.amounts


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph of our own: that of Dynamo holds all nodes that it has ever had, and their module."""
    graph = torch.fx.Graph()
    values: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, values))
    for node, made in values.items():
        if found := node.meta.get("grapharg"):
            made.meta.pop("grapharg")  # it holds a tensor
            made.meta[SOURCE] = found.source
    made = torch.fx.GraphModule(module, graph)
    made.compile_subgraph_reason = module.compile_subgraph_reason
    return made


def _raising(error: Exception) -> _Run:
    """A graph that may not run. Raised at once, Dynamo would take the error for one of its own."""

    error = copy.copy(bare(error))  # one that knows no node, and no frames

    def run(*args: Any) -> Any:
        raise copy.copy(error)  # another one each time: its frames hold tensors

    return run, work.Amounts


def _telling(owner: Owner, made: CompiledGraph) -> Callable[[], None]:
    """One warning that names every cut, if there are new ones."""
    places, cuts = made.cut_places(), made.cuts()

    def tell() -> None:
        if list(filter(owner.is_new, places)):
            logger.warning(
                "%s: parts of a graph run in PyTorch: %s; strict=True or "
                "ORTMODULE_FALLBACK_POLICY=FALLBACK_DISABLE raises instead (docs/messages.md)",
                owner.title,
                cuts,
            )

    return tell


def _refused(owner: Owner, graph: torch.fx.GraphModule, error: Exception) -> _Run:
    owner.refused = error
    try:
        reason = owner.fallback.decide(error)
    except type(error):
        return _raising(error)
    if owner.is_new(str(error)):
        owner.fallback.warn(reason, error, 0.0, 0.0)
    if isinstance(error, MistracedError) and config.suppress_errors:
        raise error  # Dynamo runs the function as it is written

    def run(*args: Any) -> Any:
        owner.ran_in_torch(reason)
        owner.fallback.count(reason)
        return graph.forward(*args)

    return run, lambda: work.amounts(graph.graph.nodes, False)
