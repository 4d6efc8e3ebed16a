"""The phases of capture(): turning one module call into a Capture, and their bookkeeping.

Trace, keep what gradients need (fx), translate, clean, name, serialise. Each phase is a file of
its own; this one knows only their order. Captures run one at a time per process: tracing
patches process-wide state of torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd import schema
from gradd.export import fx, graph, outputs, refuse, trace, translate
from gradd.export.aliases import alias_groups
from gradd.export.types import ONNX_DTYPES, Capture, CaptureError, InputSpec, OutputSpec

_lock = threading.RLock()


def capture(
    module: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    *,
    forward: Callable | None = None,
) -> Capture:
    """Captures one call of a module, in the module's current train or eval mode.

    Args:
        module: The module; neither its weights nor its attributes nor torch's random state are
            changed.
        args: Positional arguments; only sizes and types of tensors are looked at.
        kwargs: Keyword arguments.
        forward: What to trace instead of module.forward.

    Returns:
        The capture.

    Raises:
        CaptureError: The module does something that a graph cannot hold; see its reason.
    """
    with _lock:
        refuse.check_module(module)
        clock = _Clock()
        traced = trace.trace(module, args, kwargs, forward or module.forward)
        clock.lap("trace")
        fx.prepare(traced.program)
        with trace.silence():
            model, program = translate.to_onnx(traced.program)
            clock.lap("translate")
            cleaned = graph.clean(model, program)
        clock.lap("optimize")
        done = _assemble(module, args, kwargs, traced, program, cleaned, clock)
        return done


class _Clock:
    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now

    def total(self) -> dict[str, float]:
        self.lap("serialize")
        return {**self.seconds, "total": self.last - self.start}


def _assemble(
    module: torch.nn.Module,
    args: tuple,
    kwargs: dict,
    traced: trace.Trace,
    program: Any,
    cleaned: graph.Cleaned,
    clock: _Clock,
) -> Capture:
    model = cleaned.model
    groups = alias_groups(module)
    canonical = {name: group[0] for group in groups for name in group}
    _drop_unused(model.graph, cleaned)
    states = {canonical.get(n, n): v for n, v in cleaned.states.items()}
    names = graph.Names(set(states))
    fixed: dict[ir.Value, str] = {value: name for name, value in states.items()}
    inputs = _name_inputs(module, args, kwargs, traced, program, cleaned, names, fixed)
    specs = _name_outputs(traced, program, cleaned, canonical, names, fixed)
    _order_inputs(model.graph, module, inputs, states, fixed)
    loss, needed = _loss(traced, program, cleaned)
    graph.rename(model.graph, fixed)
    sources = _sources(model.graph)
    data = graph.serialize(model)
    is_param = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    order = [v.name for v in model.graph.inputs]
    return Capture(
        onnx=data,
        inputs=tuple(inputs),
        params=tuple(n for n in order if n in states and n in is_param),
        buffers=tuple(n for n in order if n in states and n not in is_param),
        aliases=groups,
        outputs=tuple(specs),
        unflatten=traced.result.unflatten,
        loss_leaf=loss,
        loss_ancestors=needed,
        sources=sources,
        seconds=clock.total(),
        dims=traced.rules,
    )


def _drop_unused(model_graph: ir.Graph, cleaned: graph.Cleaned) -> None:
    used = {v for n in model_graph for v in n.inputs if v is not None}
    for value in list(model_graph.inputs):
        if value not in used:
            model_graph.inputs.remove(value)
    cleaned.states = {n: v for n, v in cleaned.states.items() if v in used}
    cleaned.user_inputs = {n: v for n, v in cleaned.user_inputs.items() if v in used}


def _dtype(value: ir.Value) -> str:
    code = int(value.dtype)
    if code not in ONNX_DTYPES:
        raise CaptureError("unsupported_operator", f"{value.name} has the type {value.dtype}")
    return ONNX_DTYPES[code]


def _name_inputs(module, args, kwargs, traced, program, cleaned, names, fixed) -> list[InputSpec]:
    """Names the call's tensors by parameter name of forward(), in the order of the call."""
    _, _, paths = schema.flatten_inputs(args, kwargs)
    positional = _positional_names(module)
    signature = program.graph_signature
    user = [s.arg.name for s in signature.input_specs if s.kind.name == "USER_INPUT"]
    specs = []
    for fx_name, leaf in zip(user, traced.leaf_numbers, strict=True):
        value = cleaned.user_inputs.get(fx_name)
        if value is None:
            continue
        name = names.fresh(_input_name(paths[leaf], positional), "_in")
        fixed[value] = name
        specs.append(InputSpec(name, leaf, _dtype(value)))
    return specs


def _positional_names(module: torch.nn.Module) -> list[str]:
    import inspect

    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in kinds]


def _input_name(path: str, positional: list[str]) -> str:
    head, _, rest = path.partition("_")
    if not head.isdigit():
        return path
    number = int(head)
    name = positional[number] if number < len(positional) else f"input_{number}"
    return f"{name}_{rest}" if rest else name


def _name_outputs(traced, program, cleaned, canonical, names, fixed) -> list[OutputSpec]:
    paths = traced.result.paths
    specs = []
    for leaf, value in enumerate(cleaned.user_outputs):
        name = names.fresh(outputs.output_name(paths[leaf]), "_out")
        fixed[value] = name
        specs.append(OutputSpec(name, "user", None, leaf, _dtype(value)))
    for fqn, value in cleaned.buffer_outputs.items():
        name = names.fresh(f"{fqn}:new")
        fixed[value] = name
        specs.append(OutputSpec(name, "buffer", canonical.get(fqn, fqn), None, _dtype(value)))
    return specs


def _order_inputs(model_graph, module, inputs, states, fixed) -> None:
    """Graph inputs: the call's tensors, then states in the module's own order."""
    by_name = {name: value for value, name in fixed.items()}
    ordered = [by_name[spec.name] for spec in inputs]
    own = [n for n, _ in module.named_parameters(remove_duplicate=False)]
    own += [n for n, _ in module.named_buffers(remove_duplicate=False)]
    ordered += [states[n] for n in own if n in states]
    model_graph.inputs.clear()
    model_graph.inputs.extend(ordered)


def _loss(traced, program, cleaned) -> tuple[int | None, frozenset[int]]:
    paths, values = traced.result.paths, cleaned.user_outputs
    number = outputs.find_loss(paths, values)
    if number is None:
        return None, frozenset()
    return number, outputs.ancestors(values[number], values)


def _sources(model_graph: ir.Graph) -> tuple[tuple[str, str], ...]:
    return tuple((n.name, text) for n in model_graph if (text := trace.source_of(n)))
