"""Turns the translated model into the bytes of graph.put: weightless, small, deterministic.

Parameters and buffers become graph inputs before any optimisation, so that no pass can fold a
weight, or merge two weights that happen to be equal. The cleanup folds constants and shape
arithmetic, drops dead nodes and merges equal nodes, but never two draws. Then everything without
meaning (metadata, shapes of inner values, exporter names) is removed.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import rewriter

from gradd.graph.translation import doubles, inference, rewrites
from gradd.graph.translation.build import SPARSE
from gradd.graph.translation.translate import OPSET
from gradd.spec import CaptureError

IR_VERSION = 10
_MOST = 64  # operands of a node
_REFUSED = {"Loop", "Scan", "If", "Optional", "OptionalGetElement", "OptionalHasElement"}
_OPTIONAL_OUTPUTS = {
    *("BatchNormalization", "Dropout", "LayerNormalization", "MaxPool", "SoftmaxCrossEntropyLoss"),
}


class Cleaned:
    """The cleaned model and the meaning of its inputs and outputs."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.user_inputs: dict[str, ir.Value] = {}
        self.states: dict[str, ir.Value] = {}
        self.user_outputs: list[ir.Value] = []
        self.buffer_outputs: dict[str, ir.Value] = {}
        # Lookups in parameters that have a sparse gradient: parameter, indices, padding index.
        self.lookups: list[tuple[str, ir.Value, int]] = []
        self.read_densely: set[str] = set()  # states that something else reads


def clean(model: ir.Model, program: Any) -> Cleaned:
    """Turns the exporter's model into a weightless graph with explicit buffer outputs.

    Args:
        model: Translated model; changed in place.
        program: The program it was made from.

    Raises:
        CaptureError: "sequence_or_loop" for graphs with control flow or sequences.
    """
    graph = model.graph
    done = Cleaned(model)
    signature = program.graph_signature
    states = _state_names(signature)
    done.user_inputs = {v.name: v for v in graph.inputs}
    for name in [n for n in graph.initializers if n in states]:
        value = done.states[name] = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)
    _separate_outputs(graph)
    n_user = len(graph.outputs)
    _add_buffer_outputs(graph, signature, done)
    _add_lookup_outputs(graph, signature, done)
    _mark_draws(graph)
    _optimize_or_named(model)
    doubles.check(graph)
    _unmark_draws(graph)
    _trim_outputs(graph)
    _narrow(graph)
    _canonical_order(graph)
    _check_nodes(graph)
    done.user_outputs = list(graph.outputs[:n_user])
    names = list(done.buffer_outputs)
    n_rows = n_user + len(names)
    done.buffer_outputs = dict(zip(names, graph.outputs[n_user:n_rows], strict=True))
    done.lookups = [
        (fqn, value, padding)
        for (fqn, _, padding), value in zip(done.lookups, graph.outputs[n_rows:], strict=True)
    ]
    return done


def _state_names(signature: Any) -> set[str]:
    return set(signature.inputs_to_parameters.values()) | set(signature.inputs_to_buffers.values())


def _separate_outputs(graph: ir.Graph) -> None:
    """Every output is its own value with a producer: no pass-through and no duplicates."""
    seen: set[int] = set()
    for i, value in enumerate(graph.outputs):
        if value.producer() is not None and id(value) not in seen:
            seen.add(id(value))
            continue
        graph.outputs[i] = _copy_of(graph, value)


def _copy_of(graph: ir.Graph, value: ir.Value) -> ir.Value:
    node = ir.Node("", "Identity", [value])
    if value.dtype is not None:
        node.outputs[0].dtype = value.dtype
    node.outputs[0].shape = value.shape
    graph.append(node)
    return node.outputs[0]


def _add_buffer_outputs(graph: ir.Graph, signature: Any, done: Cleaned) -> None:
    values = {v.name: v for v in graph.inputs}
    values |= {v.name: v for n in graph for v in n.outputs}
    for output_name, fqn in signature.buffers_to_mutate.items():
        value = _copy_of(graph, values[output_name])
        graph.outputs.append(value)
        done.buffer_outputs[fqn] = value


def _add_lookup_outputs(graph: ir.Graph, signature: Any, done: Cleaned) -> None:
    """The indices of lookups in a parameter whose gradient is sparse become outputs."""
    parameters = set(signature.inputs_to_parameters.values())
    for fqn, value in done.states.items():
        if any(use.node.meta.get(SPARSE) is None for use in value.uses()):
            done.read_densely.add(fqn)
    of = {value: fqn for fqn, value in done.states.items() if fqn in parameters}
    for node in [n for n in graph if SPARSE in n.meta]:
        table, ids = node.inputs
        if table not in of:
            raise CaptureError(
                "unsupported_operator",
                "Embedding(sparse=True) of a weight that is no parameter is not supported",
            )
        value = _copy_of(graph, ids)
        graph.outputs.append(value)
        done.lookups.append((of[table], value, node.meta[SPARSE]))


_DRAWS = {"Dropout", "Bernoulli"}


def _mark_draws(graph: ir.Graph) -> None:
    """A seed of its own per random node keeps common-subexpression elimination from merging them;
    it knows of the other random operators by itself."""
    for i, node in enumerate(n for n in graph if n.op_type in _DRAWS):
        attribute = ir.AttrInt64 if node.op_type == "Dropout" else ir.AttrFloat32
        node.attributes["seed"] = attribute("seed", i)


def _unmark_draws(graph: ir.Graph) -> None:
    for node in graph:
        if node.op_type in _DRAWS:
            node.attributes.pop("seed", None)


def _trim_outputs(graph: ir.Graph) -> None:
    """Drops unused trailing optional outputs (the mask of a Dropout and the like)."""
    wanted = set(graph.outputs)
    for node in graph:
        count = len(node.outputs)
        while count > 1 and not node.outputs[count - 1].uses():
            if node.outputs[count - 1] in wanted:
                break
            count -= 1
        if count != len(node.outputs) and node.op_type in _OPTIONAL_OUTPUTS:
            node.resize_outputs(count)


def _inline_functions(model: ir.Model) -> None:
    """Puts the bodies of functions in place of their calls; nodes keep the line that made the call.

    Results have their names afterwards, and steps before them are made for what follows.
    """
    calls = [node for node in model.graph if node.op_identifier() in model.functions]
    made_by = {v.name: node.meta.get("node") for node in calls for v in node.outputs}
    before = set(model.graph)
    passes.InlinePass()(model)
    for node in reversed(model.graph):
        if node not in before:
            readers = (use.node for v in node.outputs for use in v.uses())
            known = [made_by.get(v.name) for v in node.outputs]
            known += [reader.meta.get("node") for reader in readers if reader not in before]
            call = next(filter(None, known), None)
            if call is not None:
                node.meta["node"] = call


def _optimize(model: ir.Model) -> None:
    _inline_functions(model)
    ir.passes.Sequential(
        passes.RemoveUnusedNodesPass(),  # so that only computed nodes are compared
        ir.passes.PassManager(
            [
                inference.Folding(),
                rewriter.RewritePass([rewrites.rules()]),
                passes.RemoveUnusedNodesPass(),
            ],
            steps=2,
            early_stop=True,
        ),
        passes.RemoveUnusedFunctionsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.RemoveUnusedNodesPass(),
    )(model)


def _optimize_or_named(model: ir.Model) -> None:
    try:
        _optimize(model)
    except Exception as error:  # whatever a rewrite raises for a form that it does not expect
        causes = [error]
        while (cause := causes[-1].__cause__) is not None:
            causes.append(cause)
        for named in causes:
            if isinstance(named, CaptureError):
                raise named from error
        texts = [str(c).splitlines()[0] for c in causes if str(c)]
        raise CaptureError(
            "export_failed", f"the translated graph cannot be simplified: {'; '.join(texts[-2:])}"
        ) from error


def _narrow(graph: ir.Graph) -> None:
    """Splits a Concat with more operands than the daemon takes into several, in place."""
    for node in list(graph):
        if node.op_type != "Concat" or len(node.inputs) <= _MOST:
            continue
        operands, made = list(node.inputs), []
        while len(operands) > _MOST:
            groups = [operands[i : i + _MOST] for i in range(0, len(operands), _MOST)]
            joined = [_joined(node, group) for group in groups]
            made += joined
            operands = [join.outputs[0] for join in joined]
        made.append(_joined(node, operands))
        (old,), (new,) = node.outputs, made[-1].outputs
        new.name, new.shape = old.name, old.shape
        ir.convenience.replace_nodes_and_values(graph, node, [node], made, [old], [new])


def _joined(node: ir.Node, operands: list[ir.Value | None]) -> ir.Node:
    made = ir.Node(
        "",
        "Concat",
        operands,
        list(node.attributes.values()),
        metadata_props=dict(node.metadata_props),
    )
    made.outputs[0].type = node.outputs[0].type
    return made


def _canonical_order(graph: ir.Graph) -> None:
    """Orders nodes depth first from the outputs, so that order depends on meaning alone.

    Module code may iterate over sets of strings (Gemma-3's layer types): the order of a trace
    then differs from process to process, and with it the hash of the graph.
    """
    order: dict[ir.Node, None] = {}
    stack = [(v.producer(), False) for v in reversed(graph.outputs)]
    while stack:
        node, done = stack.pop()
        if node is None or node in order:
            continue
        if done:
            order[node] = None
            continue
        stack.append((node, True))
        stack.extend((v.producer(), False) for v in reversed(node.inputs) if v is not None)
    nodes = list(order)
    graph.remove(list(graph))
    graph.extend(nodes)


def _check_nodes(graph: ir.Graph) -> None:
    for node in graph:
        kind = node.op_type
        if kind in _REFUSED or "Sequence" in kind:
            raise CaptureError(
                "sequence_or_loop",
                f"the graph needs {kind} (node {node.name}); control flow and lists of tensors "
                "cannot be differentiated yet",
            )


class Names:
    """Deterministic names for a cleaned graph: decided ones kept, inner values v0, v1, ..."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = set(taken)

    def fresh(self, wanted: str, suffix: str = "_") -> str:
        """Returns `wanted`, with suffixes until the name is unique."""
        while wanted in self._taken:
            wanted += suffix
        self._taken.add(wanted)
        return wanted


def rename(graph: ir.Graph, fixed: dict[ir.Value, str]) -> None:
    """Names every value and node by position; `fixed` holds inputs, states and outputs."""
    names = Names(set(fixed.values()))
    constants = list(graph.initializers.values())
    order = {v: i for i, v in enumerate(_used_order(graph))}
    constants.sort(key=lambda v: order.get(v, len(order)))
    graph.initializers.clear()
    for i, value in enumerate(constants):
        value.name = fixed.get(value) or names.fresh(f"c{i}")
        if value.const_value is not None:
            value.const_value.name = value.name
        graph.initializers[value.name] = value
    count = 0
    for value, name in fixed.items():
        value.name = name
    for i, node in enumerate(graph):
        node.name = f"n{i}"
        for value in node.outputs:
            if value in fixed:
                continue
            value.name = names.fresh(f"v{count}")
            count += 1


def _used_order(graph: ir.Graph) -> list[ir.Value]:
    seen: dict[ir.Value, None] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None:
                seen.setdefault(value)
    return list(seen)


def serialize(model: ir.Model) -> bytes:
    """Bytes of the model without metadata, types of inner values and versions of the exporter."""
    graph = model.graph
    outputs = set(graph.outputs)
    symbols: dict[str, str] = {}
    for value in graph.inputs:
        value.metadata_props.clear()
        value.shape = _plain_shape(value.shape, symbols)
    for value in graph.initializers.values():
        value.metadata_props.clear()
        value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name, dtype=value.dtype)
    for node in graph:
        node.metadata_props.clear()
        node.doc_string = None
        node.version = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
            if value in outputs:
                value.shape = None
            else:
                value.type = value.shape = None
    graph.metadata_props.clear()
    graph.name, graph.doc_string = "gradd", None
    model.metadata_props.clear()
    model.functions.clear()
    model.opset_imports.clear()
    model.opset_imports.update({"": OPSET, "com.gradd": 1})
    model.producer_name, model.producer_version = "gradd", None
    model.doc_string = model.domain = None
    model.ir_version = IR_VERSION
    proto = ir.serde.serialize_model(model)
    del proto.graph.value_info[:]
    return proto.SerializeToString(deterministic=True)


def _plain_shape(shape: Any, symbols: dict[str, str]) -> Any:
    """Sizes as numbers, symbols renamed d0, d1, ... in order of appearance."""
    if shape is None:
        return None
    sizes = []
    for size in shape:
        if isinstance(size, int):
            sizes.append(size)
        else:
            sizes.append(symbols.setdefault(str(size), f"d{len(symbols)}"))
    return ir.Shape(sizes)
