"""Names of a captured graph's inputs, parameters and outputs, and the specs that list them.

Parameters and buffers keep their qualified names (the canonical alias where tensors are tied);
inputs are called as the parameters of forward() are, outputs as the fields of the result. A
clash is resolved in favour of the parameter: the input gets "_in", the output "_out" appended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from gradd import schema
from gradd.export import outputs
from gradd.export.aliases import alias_groups
from gradd.export.translation import model_bytes
from gradd.spec import ONNX_DTYPES, CaptureError, InputSpec, OutputSpec


@dataclass(frozen=True)
class Call:
    """The call that was traced."""

    module: torch.nn.Module
    args: tuple
    kwargs: dict
    forward: Callable


class Naming:
    """Decides all names; model_bytes.rename() applies them.

    Attributes:
        fixed: Name of every graph input and output value.
        states: Canonical qualified name -> value of the parameters and buffers in use.
        aliases: Groups of tied names.
        inputs: Specs of the call's inputs.
        outputs: Specs of the outputs.
        outside: Exporter's name of each input from outside -> its name.
    """

    def __init__(self, call: Call, traced: Any, program: Any, cleaned: model_bytes.Cleaned) -> None:
        self._names = model_bytes.Names(set())
        self._model_graph = cleaned.model.graph
        self.fixed: dict[ir.Value, str] = {}
        self.aliases = alias_groups(call.module)
        self._canonical = {name: group[0] for group in self.aliases for name in group}
        _drop_unused(cleaned)
        self.states = self._name_states(cleaned)
        self.inputs = tuple(self._name_inputs(call, traced, program, cleaned))
        self.outside = self._name_outside(cleaned)
        self.outputs = tuple(self._name_outputs(traced, cleaned))
        self._order_inputs(call.module)

    def _name_states(self, cleaned: model_bytes.Cleaned) -> dict[str, ir.Value]:
        states: dict[str, ir.Value] = {}
        for fqn, value in cleaned.states.items():
            name = self._canonical.get(fqn, fqn)
            if name in states:  # two tensors over the same memory: one input
                value.replace_all_uses_with(states[name])
                continue
            states[name] = value
            self.fixed[value] = self._names.fresh(name)
        return states

    def _name_inputs(
        self, call: Call, traced: Any, program: Any, cleaned: model_bytes.Cleaned
    ) -> list[InputSpec]:
        _, _, paths = schema.flatten_inputs(call.args, call.kwargs)
        positional = _positional_names(call.forward)
        signature = program.graph_signature
        user = [s.arg.name for s in signature.input_specs if s.kind.name == "USER_INPUT"]
        specs = []
        for fx_name, leaf in zip(user, traced.leaf_numbers, strict=True):
            value = cleaned.user_inputs.get(fx_name)
            if value is None:
                continue
            name = self._names.fresh(_input_name(paths[leaf], positional), "_in")
            self.fixed[value] = name
            specs.append(InputSpec(name, leaf, _dtype(value)))
        return specs

    def _name_outside(self, cleaned: model_bytes.Cleaned) -> dict[str, str]:
        names = {}
        for number, (key, value) in enumerate(cleaned.outside.items()):
            names[key] = self.fixed[value] = self._names.fresh(f"outside_{number}")
            _dtype(value)
        return names

    def _name_outputs(self, traced: Any, cleaned: model_bytes.Cleaned) -> list[OutputSpec]:
        paths = traced.result.paths
        specs = []
        for leaf, value in zip(cleaned.leaves, cleaned.user_outputs, strict=True):
            name = self._names.fresh(outputs.output_name(paths[leaf]), "_out")
            self.fixed[value] = name
            specs.append(OutputSpec(name, "user", None, leaf, _dtype(value)))
        for fqn, value in cleaned.buffer_outputs.items():
            canonical = self._canonical.get(fqn, fqn)
            name = self._names.fresh(f"{canonical}:new")
            self.fixed[value] = name
            specs.append(OutputSpec(name, "buffer", canonical, None, _dtype(value)))
        return specs + self._name_rows(cleaned)

    def _name_rows(self, cleaned: model_bytes.Cleaned) -> list[OutputSpec]:
        """As in torch, the gradient is sparse where every reader of the parameter is a lookup of
        that kind; the indices of others are given up."""
        dense = {self._canonical.get(fqn, fqn) for fqn in cleaned.read_densely}
        specs = []
        for fqn, value, padding in cleaned.lookups:
            canonical = self._canonical.get(fqn, fqn)
            if canonical in dense or canonical not in self.states:
                self._model_graph.outputs.remove(value)
                continue
            name = self._names.fresh(f"{canonical}:rows")
            self.fixed[value] = name
            specs.append(OutputSpec(name, "rows", canonical, None, _dtype(value), padding))
        return specs

    def _order_inputs(self, module: torch.nn.Module) -> None:
        """The call's tensors first, those of outside, then states in the module's own order."""
        values = {name: value for value, name in self.fixed.items()}
        ordered = [values[spec.name] for spec in self.inputs]
        ordered += [values[name] for name in self.outside.values()]
        own = [n for n, _ in module.named_parameters(remove_duplicate=False)]
        own += [n for n, _ in module.named_buffers(remove_duplicate=False)]
        ordered += [self.states[n] for n in own if n in self.states]
        self._model_graph.inputs.clear()
        self._model_graph.inputs.extend(ordered)


def _drop_unused(cleaned: model_bytes.Cleaned) -> None:
    used = {v for node in cleaned.model.graph for v in node.inputs if v is not None}
    cleaned.states = {n: v for n, v in cleaned.states.items() if v in used}
    cleaned.user_inputs = {n: v for n, v in cleaned.user_inputs.items() if v in used}
    cleaned.outside = {n: v for n, v in cleaned.outside.items() if v in used}
    cleaned.sources = {n: cleaned.sources[n] for n in cleaned.outside}


def _dtype(value: ir.Value) -> str:
    code = int(value.dtype)
    if code not in ONNX_DTYPES:
        raise CaptureError("unsupported_operator", f"{value.name} has the type {value.dtype}")
    return ONNX_DTYPES[code]


def _positional_names(forward: Callable) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(forward).parameters.values()
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
