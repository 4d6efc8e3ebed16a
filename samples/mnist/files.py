"""Writes what the programs beside it train: a perceptron for MNIST, 784-128-10, with AdamW.

python files.py FOLDER
"""

from __future__ import annotations

import sys

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from gradd.train import artifacts

SIZES = (784, 128, 10)


def main(folder: str) -> None:
    """Model: x f32[n, 784] to scores f32[n, 10]."""
    draw = np.random.default_rng(1)
    tensors, nodes, now = [], [], "x"
    for i in range(2):
        weight = draw.standard_normal(SIZES[i : i + 2]) * np.sqrt(2 / SIZES[i])
        tensors.append(numpy_helper.from_array(weight.astype(np.float32), f"weight{i}"))
        tensors.append(numpy_helper.from_array(np.zeros(SIZES[i + 1], np.float32), f"bias{i}"))
        out = f"h{i}" if i == 0 else "scores"
        nodes.append(helper.make_node("Gemm", [now, f"weight{i}", f"bias{i}"], [out]))
        now = out
        if i == 0:
            nodes.append(helper.make_node("Relu", ["h0"], ["r0"]))
            now = "r0"
    info = helper.make_tensor_value_info
    x = info("x", TensorProto.FLOAT, ["n", SIZES[0]])
    scores = info("scores", TensorProto.FLOAT, ["n", SIZES[2]])
    graph = helper.make_graph(nodes, "mnist", [x], [scores], tensors)
    artifacts.generate_artifacts(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]),
        requires_grad=[tensor.name for tensor in tensors],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder,
        additional_output_names=["scores"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
