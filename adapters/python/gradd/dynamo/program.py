"""A lowered graph in the form that the translation to ONNX takes, and the resulting capture.

The translation is that of torch's exporter with gradd's own operators (graph/translation). It needs
a graph whose inputs and outputs have a signature like those of torch.export.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import graph_signature as signatures

from gradd import private
from gradd.dynamo import lower
from gradd.dynamo.inputs import Input
from gradd.graph import fx, rules
from gradd.graph.locations import location_of, source_of
from gradd.graph.translation import model_bytes, translate
from gradd.memory.shm import DTYPE_CODES
from gradd.spec import Capture, CaptureError, InputSpec, OutputSpec

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


class Program:
    """The part of an exported program that the translation reads."""

    def __init__(self, done: lower.Lowered, inputs: Sequence[Input]) -> None:
        """Args:
        done: The lowered graph.
        inputs: Of its placeholders, in their order.
        """
        self.inputs = inputs
        # A GraphModule would make code of it, which nothing runs.
        self.graph_module: Any = torch.nn.Module()
        self.graph_module.graph = done.graph
        self.range_constraints: dict[Any, Any] = {}
        self.states: dict[str, torch.Tensor] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.taken: list[Input] = []  # those that come with each call, in order
        written = set(done.written)
        specs = []
        for i, (node, given) in enumerate(zip(done.placeholders(), inputs, strict=True)):
            kind, target = self._kind(given, i in written)
            number = isinstance(node.meta["val"], torch.SymInt)
            form = signatures.SymIntArgument if number else signatures.TensorArgument
            argument = form(node.name)
            specs.append(signatures.InputSpec(kind, argument, target, persistent=True))
            value = given.tensor if given.tensor is not None else node.meta["val"]
            if kind is signatures.InputKind.CONSTANT_TENSOR:
                self.constants[str(target)] = value.cpu()  # they become bytes of the model
            elif target is not None:
                self.states[target] = value
            else:
                self.taken.append(given)
        (results,) = done.graph.output_node().args
        self.graph_signature = signatures.ExportGraphSignature(
            specs,
            [
                signatures.OutputSpec(
                    signatures.OutputKind.USER_OUTPUT, signatures.TensorArgument(node.name), None
                )
                for node in results
            ],
        )

    @staticmethod
    def _kind(given: Input, written: bool) -> tuple[Any, str | None]:
        if given.position < 0:
            return signatures.InputKind.CONSTANT_TENSOR, given.name
        if given.bound and isinstance(given.tensor, torch.nn.Parameter):
            return signatures.InputKind.PARAMETER, given.name
        if given.bound or written:
            return signatures.InputKind.BUFFER, given.name
        return signatures.InputKind.USER_INPUT, None

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        names = self.graph_signature.parameters
        return [(name, self.states[name]) for name in names]

    def named_buffers(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Buffers by name, and inputs that the graph writes."""
        names = self.graph_signature.buffers
        return [(name, self.states[name]) for name in names]

    def exported(self) -> Any:
        """The same as torch's own program, which can decompose operators."""
        graph = _ordered(self.graph_module.graph, self.graph_signature)
        return torch.export.ExportedProgram(
            torch.fx.GraphModule(torch.nn.Module(), graph),
            graph,
            self.graph_signature,
            dict(self.states),
            {},
            _call_graph(self.graph_signature),
            constants=dict(self.constants),
            verifiers=[_verifier()],
        )


@functools.cache
def _verifier() -> Any:
    """That of torch's programs before autograd, which lets them write in place."""
    return torch.export.export(torch.nn.Identity(), (torch.zeros(1, device="cpu"),)).verifier


_ORDER = {
    signatures.InputKind.PARAMETER: 0,
    signatures.InputKind.BUFFER: 1,
    signatures.InputKind.CONSTANT_TENSOR: 2,
    signatures.InputKind.USER_INPUT: 3,
}


def _ordered(graph: torch.fx.Graph, signature: Any) -> torch.fx.Graph:
    """States first, as torch's programs have them."""
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    signature.input_specs.sort(key=lambda spec: _ORDER[spec.kind])
    first = next(iter(graph.nodes))
    anchor = None
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if anchor is not None:
            anchor.append(node)
        elif node is not first:
            first.prepend(node)
        anchor = node
    return graph


def _call_graph(signature: Any) -> list[Any]:
    from torch.export import ModuleCallEntry, ModuleCallSignature

    kind = signatures.InputKind.USER_INPUT
    taken = [s.arg for s in signature.input_specs if s.kind is kind]
    # Without names: torch does not follow those of a result among several when it decomposes.
    given = [signatures.TensorArgument("") for _ in signature.user_outputs]
    in_spec = private.pytree.tree_flatten((tuple(taken), {}))[1]
    out_spec = private.pytree.tree_flatten(tuple(given))[1]
    return [ModuleCallEntry("", ModuleCallSignature(taken, given, in_spec, out_spec))]


def capture(
    done: lower.Lowered, inputs: Sequence[Input], names: Sequence[str], checkpoints: bool = False
) -> Capture:
    """Translates a lowered graph.

    Args:
        done: The graph.
        inputs: Of its placeholders; their names are different.
        names: Of its outputs; the first scalar among them is the loss.
        checkpoints: It was made of a forward with activation checkpoints.

    Raises:
        CaptureError: It cannot be translated.
    """
    program = Program(done, inputs)
    _check_states(done, inputs)
    # Dynamo has a mode of its own for back ends, which is not that of the graph's tensors.
    with private.tracing(None), _numbers_of_tensors(done), _silence(), rules.sound():
        fx.prepare(program)
        model, used = translate.to_onnx(program)
        cleaned = model_bytes.clean(model, used)
    named = _Named(program, used, cleaned, names)
    found = _find_loss(names, cleaned.user_outputs)
    below = _dependencies(cleaned.model.graph, cleaned.user_outputs)
    model_bytes.rename(cleaned.model.graph, named.fixed)
    lines = _sources_of(cleaned.model.graph)
    data = model_bytes.serialize(cleaned.model)
    return Capture(
        onnx=data,
        inputs=tuple(named.inputs),
        params=tuple(named.parameters),
        buffers=tuple(named.buffers),
        outputs=tuple(named.outputs),
        loss_leaf=found,
        depends={i: leaves for i, leaves in enumerate(below) if leaves},
        sources=lines,
        checkpoints=checkpoints,
    )


# Of the exporter, and of what it calls.
_LOUD = (
    *("onnxscript", "onnx_ir", "torch.onnx", "torch.fx", "torch.export", "torch._export"),
    *("torch._dynamo", "torch._subclasses"),
)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without warnings and log lines: a failure is raised, not logged."""
    loggers = [logging.getLogger(name) for name in _LOUD]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextlib.contextmanager
def _numbers_of_tensors(done: lower.Lowered) -> Iterator[None]:
    """A decomposition of torch may meet the number of a tensor, which Dynamo has let pass."""
    values = (node.meta["val"] for node in done.placeholders())
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)
    if mode is None:
        yield
        return
    before, mode.allow_scalar_outputs = mode.allow_scalar_outputs, True
    try:
        yield
    finally:
        mode.allow_scalar_outputs = before


def _check_states(done: lower.Lowered, inputs: Sequence[Input]) -> None:
    for node, given in zip(done.placeholders(), inputs, strict=True):
        if not isinstance(node.meta["val"], torch.Tensor):
            continue
        if node.users and node.meta["val"].dtype not in DTYPE_CODES:
            reader = location_of(next(iter(node.users)))
            raise CaptureError(
                "unsupported_parameter" if given.bound else "unsupported_input_type",
                f"{reader}: forward() reads {given.name!r}, of {node.meta['val'].dtype}, which the "
                "daemon does not have",
            )
    for node in done.graph.output_node().args[0]:  # type: ignore[union-attr]
        if node.meta["val"].dtype not in DTYPE_CODES:  # type: ignore[union-attr]
            raise CaptureError(
                "unsupported_operator",
                f"{location_of(node)}: gives {node.meta['val'].dtype}, which the daemon does not "
                "have",
                node.meta.get(lower.ORIGIN),
            )


class _Named:
    """Names of the inputs and outputs of a cleaned graph.

    Attributes:
        fixed: Of all of them.
        inputs: Those that come with each call; a spec's leaf is a position among the arguments.
        parameters: Names of parameters in use.
        buffers: Names of buffers in use, and of inputs that are written.
        outputs: In the order of the graph.
    """

    def __init__(
        self,
        program: Program,
        used: Any,
        cleaned: model_bytes.Cleaned,
        names: Sequence[str],
    ) -> None:
        graph = cleaned.model.graph
        self.fixed: dict[ir.Value, str] = {}
        self._names = model_bytes.Names({given.name for given in program.inputs})
        read = {v for node in graph for v in node.inputs if v is not None}
        kinds = signatures.InputKind
        user = [s.arg.name for s in used.graph_signature.input_specs if s.kind is kinds.USER_INPUT]
        pairs = zip(program.taken, user, strict=True)
        values = [(i, cleaned.user_inputs.get(name)) for i, name in pairs]
        self.inputs = []
        for one, value in values:
            if value is not None and value in read:
                self.fixed[value] = one.name
                self.inputs.append(InputSpec(one.name, one.position))
        states = {name: value for name, value in cleaned.states.items() if value in read}
        self.fixed.update({value: name for name, value in states.items()})
        own = set(program.graph_signature.parameters)
        order = [i.name for i in program.inputs if i.name in states]
        self.parameters = [n for n in order if n in own]
        self.buffers = [n for n in order if n not in own]
        by_name: Mapping[str, ir.Value] = {name: value for value, name in self.fixed.items()}
        graph.inputs.clear()
        graph.inputs.extend(
            [by_name[n] for n in (*(s.name for s in self.inputs), *self.parameters, *self.buffers)]
        )
        self.outputs = list(self._outputs(cleaned, names, states))

    def _outputs(
        self, cleaned: model_bytes.Cleaned, names: Sequence[str], states: Mapping[str, Any]
    ) -> Iterable[OutputSpec]:
        for leaf, (name, value) in enumerate(zip(names, cleaned.user_outputs, strict=True)):
            name = self.fixed[value] = self._names.fresh(name, "_out")
            yield OutputSpec(name, "user", None, leaf)
        for state, value in cleaned.buffer_outputs.items():
            name = self.fixed[value] = self._names.fresh(f"{state}:new")
            yield OutputSpec(name, "buffer", state, None)
        for state, value, padding in cleaned.lookups:
            if state in cleaned.read_densely or state not in states:
                cleaned.model.graph.outputs.remove(value)
                continue
            name = self.fixed[value] = self._names.fresh(f"{state}:rows")
            yield OutputSpec(name, "rows", state, None, padding)


def _find_loss(names: Sequence[str], values: list[ir.Value]) -> int | None:
    """Position of the loss: a scalar of floats called "loss", or else the first scalar."""
    scalars = [
        i
        for i, value in enumerate(values)
        if value.dtype in _FLOATS and value.shape is not None and len(value.shape) == 0
    ]
    named = [i for i in scalars if names[i] == "loss"]
    return (named or scalars or [None])[0]


def _dependencies(graph: ir.Graph, values: list[ir.Value]) -> list[frozenset[int]]:
    """Per value, the numbers of the values on which it depends."""
    own: dict[ir.Value, int] = {}
    for i, value in enumerate(values):
        own[value] = own.get(value, 0) | 1 << i
    below = {value: own.get(value, 0) for value in graph.inputs}  # a bit per value, its own among
    for node in graph:
        bits = 0
        for value in node.inputs:
            bits |= below.get(value, 0) if value is not None else 0
        for value in node.outputs:
            below[value] = bits | own.get(value, 0)
    masks = [below.get(value, 0) & ~own[value] for value in values]
    return [frozenset(i for i in range(len(values)) if mask >> i & 1) for mask in masks]


def _sources_of(graph: ir.Graph) -> tuple[tuple[str, str], ...]:
    """(node name, "module.path @ file:line") of every node that has one, or a known neighbour.

    A rewrite makes nodes without: they take the place of their operands, or else of their readers.
    """

    def first(nodes: Iterable[Any]) -> str | None:
        return next((known[n] for n in nodes if n in known), None)

    known: dict[ir.Node, str] = {}
    for node in graph:
        operands = (v.producer() for v in node.inputs if v is not None)
        if text := source_of(node) or first(operands):
            known[node] = text
    for node in reversed(graph):
        readers = (user for v in node.outputs for user, _ in v.uses())
        if node not in known and (text := first(readers)):
            known[node] = text
    return tuple((node.name, known[node]) for node in graph if node in known)
