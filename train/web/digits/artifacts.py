"""Writes the files of the page: a convolutional net for digits that has learnt nothing yet."""

from __future__ import annotations

import sys

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gradd.train import artifacts

SIDE, CLASSES, SEED = 28, 10, 1
# Name, shape; the page trains all of it, or the head alone.
WEIGHTS = {
    "body.conv0": (8, 1, 3, 3),
    "body.conv1": (16, 8, 3, 3),
    "body.dense": (16 * (SIDE // 4) ** 2, 32),
    "head": (32, CLASSES),
}


def _initializers() -> list[TensorProto]:
    """Weights by the rule of He et al. (2015), and biases of zero."""
    draw = np.random.default_rng(SEED)
    made = []
    for name, shape in WEIGHTS.items():
        is_conv = len(shape) == 4
        n_in = int(np.prod(shape[1:])) if is_conv else shape[0]
        values = draw.standard_normal(shape) * np.sqrt(2 / n_in)
        bias = np.zeros(shape[0] if is_conv else shape[1], np.float32)
        made.append(numpy_helper.from_array(values.astype(np.float32), f"{name}.weight"))
        made.append(numpy_helper.from_array(bias, f"{name}.bias"))
    return made


def _layer(op: str, name: str, given: str, **more: object) -> NodeProto:
    inputs = [given, f"{name}.weight", f"{name}.bias"]
    return helper.make_node(op, inputs, [f"{name}.out"], name, **more)


def _model() -> ModelProto:
    """x f32[n, 1, 28, 28], ink is 1, to scores f32[n, 10]."""
    conv = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        _layer("Conv", "body.conv0", "x", **conv),
        helper.make_node("Relu", ["body.conv0.out"], ["r0"]),
        _layer("Conv", "body.conv1", "r0", **conv),
        helper.make_node("Relu", ["body.conv1.out"], ["r1"]),
        helper.make_node("Flatten", ["r1"], ["flat"]),
        _layer("Gemm", "body.dense", "flat"),
        helper.make_node("Relu", ["body.dense.out"], ["r2"]),
        helper.make_node("Gemm", ["r2", "head.weight", "head.bias"], ["scores"], "head"),
    ]
    info = helper.make_tensor_value_info
    x = info("x", TensorProto.FLOAT, ["n", 1, SIDE, SIDE])
    scores = info("scores", TensorProto.FLOAT, ["n", CLASSES])
    graph = helper.make_graph(nodes, "digits", [x], [scores], _initializers())
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def main(folder: str) -> None:
    """Writes into a folder that is there."""
    artifacts.generate_artifacts(
        _model(),
        requires_grad=[f"{name}.{part}" for name in WEIGHTS for part in ("weight", "bias")],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        additional_output_names=["scores"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
