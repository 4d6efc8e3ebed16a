"""Models for tests of training on devices, made with onnx alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gradd.train import CheckpointState, Module, artifacts

IN, HIDDEN, OUT, ROWS = 4, 6, 3, 5


def mlp(seed: int = 0) -> onnx.ModelProto:
    """Two layers with a Relu between them: x[batch, 4] to scores[batch, 3]."""
    rng = np.random.default_rng(seed)
    shapes = {"fc1.weight": (HIDDEN, IN), "fc1.bias": (HIDDEN,)}
    shapes |= {"fc2.weight": (OUT, HIDDEN), "fc2.bias": (OUT,)}
    values = {n: rng.standard_normal(s).astype(np.float32) * 0.5 for n, s in shapes.items()}
    nodes = [
        helper.make_node("Gemm", ["x", "fc1.weight", "fc1.bias"], ["h"], transB=1),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "fc2.weight", "fc2.bias"], ["scores"], transB=1),
    ]
    return model(nodes, {"x": ["batch", IN]}, {"scores": ["batch", OUT]}, values)


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list],
    outputs: dict[str, list],
    values: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    """A model of f32 inputs and outputs."""

    def described(values: dict[str, list]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in values.items()
        ]

    tensors = [numpy_helper.from_array(array, name) for name, array in (values or {}).items()]
    graph = helper.make_graph(nodes, "g", described(inputs), described(outputs), tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    made.ir_version = 8
    return made


def names(made: onnx.ModelProto) -> list[str]:
    """Names of its initializers."""
    return [tensor.name for tensor in made.graph.initializer]


def generate(folder: Path, made: onnx.ModelProto | None = None, **arguments) -> Path:
    """Artifacts of a model, by default of mlp() with all of it trained by AdamW."""
    made = made or mlp()
    defaults = {
        "requires_grad": names(made),
        "loss": artifacts.LossType.CrossEntropyLoss,
        "optimizer": artifacts.OptimType.AdamW,
        "artifact_directory": folder,
    }
    artifacts.generate_artifacts(made, **(defaults | arguments))
    return folder


def load(folder: Path, checkpoint: str = "checkpoint", **arguments) -> tuple:
    """State and module of artifacts."""
    state = CheckpointState.load_checkpoint(folder / checkpoint)
    training, evaluation = (folder / f"{kind}_model.onnx" for kind in ("training", "eval"))
    return state, Module(training, state, evaluation, **arguments)


def batch(seed: int = 1, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels of mlp()."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((rows, IN)).astype(np.float32)
    return inputs, rng.integers(0, OUT, rows)
