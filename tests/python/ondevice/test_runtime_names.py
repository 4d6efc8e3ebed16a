"""ONNX Runtime's training models have operators of ONNX under other names: the same training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from gradd.train import CheckpointState, Module, Optimizer, TrainError
from helpers import device_models as models

MICROSOFT, WIDTH, STEPS = "com.microsoft", 6, 3
Node = tuple[str, dict]
# Under the other name, and in ONNX: operator and attributes.
PAIRS: dict[str, tuple[Node, Node]] = {
    "Gelu": (("Gelu", {}), ("Gelu", {})),
    "FastGelu": (("FastGelu", {}), ("Gelu", {"approximate": "tanh"})),
    "QuickGelu": (("QuickGelu", {}), ("Swish", {"alpha": 1.702})),
    "silu": (("QuickGelu", {"alpha": 1.0}), ("Swish", {"alpha": 1.0})),
    "Concat": (("ConcatTraining", {"axis": 1}), ("Concat", {"axis": 1})),
    "RMS": (("SimplifiedLayerNormalization", {}), ("RMSNormalization", {"epsilon": 1e-5})),
    "GRU": (("GRUTraining", {"hidden_size": WIDTH}), ("GRU", {"hidden_size": WIDTH})),
    "LSTM": (("LSTMTraining", {"hidden_size": WIDTH}), ("LSTM", {"hidden_size": WIDTH})),
}
MORE = {"Concat": 2, "RMS": 2, "GRU": 3, "LSTM": 5}  # results that ONNX Runtime asks for


def model(node: Node, kind: str, more: bool) -> onnx.ModelProto:
    """x[n, 4] through a layer, the node and another layer, to scores[n, 3].

    Args:
        node: Operator and attributes.
        kind: A key of PAIRS.
        more: As in ONNX Runtime's models: with all results, and a gradient node that reads the
            last one.
    """
    rng = np.random.default_rng(3)

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) * 0.4

    gates = {"GRU": 3, "LSTM": 4}.get(kind, 0)
    wide = 2 * WIDTH if kind == "Concat" else WIDTH
    values = {"w1": weight(models.IN, WIDTH), "w2": weight(wide, models.OUT)}
    nodes = [helper.make_node("MatMul", ["x", "w1"], ["h"], "first")]
    inputs = {"Concat": ["h", "h"], "RMS": ["h", "scale"]}.get(kind, ["h"])
    if kind == "RMS":
        values["scale"] = 1 + weight(WIDTH)
    if gates:
        values |= {f"{n}_w": weight(1, gates * WIDTH, WIDTH) for n in ("input", "state")}
        values["axis"] = np.array([0])
        values["axes"] = np.array([0, 1])
        nodes.append(helper.make_node("Unsqueeze", ["h", "axis"], ["steps"], "steps"))
        inputs = ["steps", "input_w", "state_w"]
    op, attributes = node
    domain = MICROSOFT if more and kind != "RMS" else ""
    outputs = [f"r{i}" for i in range(MORE.get(kind, 1) if more else 1)]
    nodes.append(helper.make_node(op, inputs, outputs, "node", domain=domain, **attributes))
    last = "r0"
    if gates:  # [steps, directions, n, wide]
        nodes.append(helper.make_node("Squeeze", ["r0", "axes"], ["flat"], "flat"))
        last = "flat"
    nodes.append(helper.make_node("MatMul", [last, "w2"], ["scores"], "last"))
    shown = {"scores": ["n", models.OUT]}
    if more and len(outputs) > 1:
        gradient = helper.make_node("ItsGrad", [outputs[-1]], ["w.accumulation.out"], "gradient")
        gradient.domain = MICROSOFT
        nodes.append(gradient)
        shown["w.accumulation.out"] = [1]
    made = models.model(nodes, {"x": ["n", models.IN]}, shown, values)
    del made.opset_import[:]
    versions = [("", 17 if more else 24), (MICROSOFT, 1)]
    made.opset_import.extend(helper.make_opsetid(*version) for version in versions)
    return made


def training_model(made: onnx.ModelProto) -> onnx.ModelProto:
    """The mean of the squared scores as its loss; floats are inputs, as in artifacts."""
    graph = made.graph
    graph.node.append(helper.make_node("Mul", ["scores", "scores"], ["squares"], "squares"))
    graph.node.append(helper.make_node("ReduceMean", ["squares"], ["loss"], "mean", keepdims=0))
    kept = list(graph.output)
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    graph.output.extend(kept)
    for tensor in [t for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT]:
        graph.input.append(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
        graph.initializer.remove(tensor)
    return made


def losses(folder: Path, made: onnx.ModelProto) -> list[float]:
    """Of some steps. State and optimizer are those of artifacts of a plain model."""
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    onnx.save(made, folder / "training_model.onnx")
    module = Module(folder / "training_model.onnx", state)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.05)
    found = []
    for _ in range(STEPS):
        loss, *_ = module(models.batch()[0])
        found.append(float(loss))
        optimizer.step()
        module.lazy_reset_grad()
    return found


@pytest.mark.parametrize("kind", PAIRS)
def test_an_operator_under_another_name_trains_with_the_same_bits(
    kind: str, tmp_path: Path
) -> None:
    theirs, ours = PAIRS[kind]
    plain = model(ours, kind, more=False)
    floats = [t.name for t in plain.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    folder = models.generate(tmp_path, plain, requires_grad=floats)
    expected = losses(folder, training_model(plain))
    assert expected[-1] < expected[0]
    assert losses(folder, training_model(model(theirs, kind, more=True))) == expected


def test_a_result_for_gradient_nodes_is_not_read_by_others(tmp_path: Path) -> None:
    theirs, ours = PAIRS["GRU"]
    folder = models.generate(tmp_path, model(ours, "GRU", more=False), requires_grad=["w2"])
    made = training_model(model(theirs, "GRU", more=True))
    made.graph.node.append(helper.make_node("Relu", ["r2"], ["q"], "reader"))
    with pytest.raises(TrainError, match="'reader'.*'r2' is a result for gradient nodes alone"):
        losses(folder, made)
    made.graph.node.pop()
    made.graph.output.append(helper.make_empty_tensor_value_info("r2"))
    with pytest.raises(TrainError, match="'r2' is a result for gradient nodes alone"):
        losses(folder, made)
