"""The phases of capture(): turning one module call into a Capture, and their bookkeeping.

Trace, keep what gradients need (fx), translate, clean, name, serialise. Each phase is a file of
its own; this one knows only their order. Captures run one at a time per process: tracing
patches process-wide state of torch.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gradd import interrupts, schema, transforms
from gradd.check.without_chance import checkpoints_called
from gradd.export import (
    autocast,
    backward,
    functions,
    fx,
    keys,
    naming,
    observe,
    outputs,
    refuse,
    replaced,
    shared,
    sources,
    trace,
)
from gradd.export.guards.arguments import layouts
from gradd.export.guards.contexts import Trial
from gradd.export.silence import silence
from gradd.export.translation import decompositions, masks, model_bytes, translate
from gradd.spec import Capture, CaptureError, SharedSpec

_lock = threading.RLock()


def capture(
    module: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    forward: Callable | None = None,
    observed: bool = True,
) -> Capture:
    """Captures one call of a module, in the module's current train or eval mode.

    Args:
        module: The module; neither its weights nor its attributes nor torch's random state are
            changed.
        args: Positional arguments; only sizes and types of tensors are looked at.
        kwargs: Keyword arguments.
        forward: What to trace instead of module.forward.
        observed: False for a capture that is looked at and not run (estimates, models without
            weights): its forward does not run in PyTorch, and what it reads is not watched.

    Returns:
        The capture.

    Raises:
        CaptureError: The module does something that a graph cannot hold; see its reason.
    """
    with _lock:
        refuse.check_module(module)
        replaced.check_methods()
        schema.schema_key(module, args, kwargs)  # raises for arguments of other types
        cast = autocast.ambient()
        # Checkpoints and the like around the call must not see what tracing and translating save.
        unseen = torch.autograd.graph.saved_tensors_hooks(_same, _same)
        with autocast.left(), unseen, transforms.capturing():
            call = naming.Call(module, args, kwargs, forward or module.forward)
            return Trial().run(_capture, call, cast, observed)  # a trace sets context variables


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _capture(call: naming.Call, cast: torch.dtype | None, observed: bool) -> Capture:
    clock = _Clock()
    checkpoints = checkpoints_called()
    binary = keys.binary_buffers(call.module)
    seen = observe.observe(call, cast) if observed else observe.Observation()
    for name in functions.custom_functions(seen.outputs):
        raise refuse.custom_function(name)
    why = backward.refusal(seen.outputs) if torch.is_grad_enabled() else None
    if why is not None:
        raise CaptureError("backward_refused", f"PyTorch refuses the backward of forward(): {why}")
    clock.lap("observe")
    with observe.kept_outside(seen), decompositions.sound():
        traced = trace.trace(call, cast, seen.gradients, seen.asking)
    clock.lap("trace")
    if not traced.result.paths and not traced.program.graph_signature.buffers_to_mutate:
        raise CaptureError("unsupported_output_type", "forward() returns no tensor")
    observe.bind(seen, traced.program)
    _prepare(fx.inline, traced.program)
    specs = _shared(call, seen, traced)
    _prepare(fx.prepare, traced.program)
    refuse.check_states(call.module, traced.program)
    with silence(), decompositions.sound():
        model, program = translate.to_onnx(traced.program)
        traced.close()
        clock.lap("translate")
        dropped = _dropped(specs, len(traced.result.paths))
        cleaned = model_bytes.clean(model, program, observe.inputs(seen), dropped)
    clock.lap("optimize")
    capture = _assemble(call, traced, program, cleaned, binary, clock)
    _check_buffers(seen, capture)
    return dataclasses.replace(
        capture,
        guards=observe.guards(seen),
        shared=specs,
        checkpoints=checkpoints_called() > checkpoints,
    )


def _shared(
    call: naming.Call, seen: observe.Observation, traced: trace.Trace
) -> tuple[SharedSpec, ...]:
    """The results that are no outputs; views of arguments bind the capture to their layouts."""
    leaves, _, _ = schema.flatten_inputs(call.args, call.kwargs)
    if not seen.handed.leaves:
        return ()
    specs = shared.find(seen.handed, traced, leaves, seen.outside)
    if shared.depends_on_layout(specs, traced):
        seen.layouts = layouts(leaves)
    return specs


def _dropped(specs: tuple[SharedSpec, ...], count: int) -> frozenset[int]:
    """The results that are no outputs of the graph, which needs one."""
    dropped = {spec.leaf for spec in specs}
    return frozenset(dropped if len(dropped) < count else dropped - {0})


def _prepare(step: Callable[[Any], None], program: Any) -> None:
    try:
        step(program)
    except CaptureError:
        raise
    except Exception as error:  # torch.fx itself fails on some graphs with sizes that data decide
        sized = fx.sized_by_data(program.graph.nodes)
        if sized is not None:
            raise sized from error
        text = f"the traced graph cannot be rewritten: {type(error).__name__}: {error}"
        raise CaptureError("export_failed", text) from error


def observed(
    module: torch.nn.Module, args: tuple, kwargs: dict, forward: Callable | None = None
) -> Any:
    """The guards of a capture of this call without the capture."""
    cast = autocast.ambient()
    with _lock, autocast.left(), transforms.capturing():
        call = naming.Call(module, args, kwargs, forward or module.forward)
        return observe.guards(observe.observe(call, cast))


def _check_buffers(seen: observe.Observation, capture: Capture) -> None:
    """Every buffer that forward() changes in PyTorch must be a result of the model_bytes."""
    results = {spec.fqn for spec in capture.outputs if spec.kind == "buffer"}
    for group in capture.aliases:
        if not results.isdisjoint(group):
            results.update(group)
    for name, buffer in seen.buffers.items():
        if name not in results and buffer.changed():
            raise CaptureError(
                "attribute_written",
                f"forward() changes the buffer {name!r} in a way that the graph has lost; write "
                "to it with copy_() under torch.no_grad()",
            )


class _Clock:
    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """A part of the capture is over; the whole may end here by Ctrl-C."""
        interrupts.deliver()
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now

    def total(self) -> dict[str, float]:
        self.lap("serialize")
        return {**self.seconds, "total": self.last - self.start}


def _assemble(
    call: naming.Call,
    traced: trace.Trace,
    program: Any,
    cleaned: model_bytes.Cleaned,
    binary: tuple[str, ...],
    clock: _Clock,
) -> Capture:
    model = cleaned.model
    named = naming.Naming(call, traced, program, cleaned)
    loss = outputs.find_loss([traced.result.paths[i] for i in cleaned.leaves], cleaned.user_outputs)
    leaves = cleaned.leaves
    below = outputs.dependencies(model.graph, cleaned.user_outputs)
    depends = {
        leaves[i]: frozenset(leaves[j] for j in found) for i, found in enumerate(below) if found
    }
    changed = {spec.fqn for spec in named.outputs}
    constant = {name: value for name, value in named.states.items() if name not in changed}
    masks.mark(model.graph, constant, binary)
    model_bytes.rename(model.graph, named.fixed)
    found = sources.sources_of(model.graph)
    data = model_bytes.serialize(model)
    own = {name for name, _ in call.module.named_parameters(remove_duplicate=False)}
    order = [v.name for v in model.graph.inputs if v.name in named.states]
    return Capture(
        onnx=data,
        inputs=named.inputs,
        params=tuple(n for n in order if n in own),
        buffers=tuple(n for n in order if n not in own),
        aliases=named.aliases,
        outputs=named.outputs,
        unflatten=traced.result.unflatten,
        flat=traced.result.flat(),
        loss_leaf=None if loss is None else leaves[loss],
        depends=depends,
        sources=found,
        seconds=clock.total(),
        dims=traced.rules,
        outside=tuple((named.outside[name], source) for name, source in cleaned.sources.items()),
    )
