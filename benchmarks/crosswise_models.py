"""Models that gradd.train and ONNX Runtime's training on the device both train (crosswise.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CLASSES, FEATURES, BATCH, VOCABULARY = 5, 20, 16, 30


@dataclass
class Model:
    """A model with what its artifacts are made of.

    Attributes:
        proto: The forward.
        loss: Name of a LossType.
        optimizer: Name of an OptimType.
        rate: The learning rate.
        frozen: Parameters that are not trained.
        constants: Initializers that are no parameters.
        inputs: "features", "images" or "words".
    """

    proto: onnx.ModelProto
    loss: str
    optimizer: str
    rate: float
    frozen: list[str] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    inputs: str = "features"

    def trained(self) -> list[str]:
        """Names of the parameters that are trained."""
        others = {*self.frozen, *self.constants}
        return [t.name for t in self.proto.graph.initializer if t.name not in others]

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of a step."""
        rng = np.random.default_rng(100 + step)
        if self.inputs == "words":
            words = rng.integers(0, VOCABULARY, (4, 12))
            return words, (words.reshape(-1) * 7 + 3) % VOCABULARY
        shape = (BATCH, 1, 8, 8) if self.inputs == "images" else (BATCH, FEATURES)
        values = rng.standard_normal(shape).astype(np.float32)
        first = values.reshape(BATCH, -1)[:, :CLASSES]
        if self.loss == "CrossEntropyLoss":
            return values, np.abs(first).argmax(1).astype(np.int64)
        return values, (first > 0).astype(np.float32) if "BCE" in self.loss else np.sin(first)


class _Builder:
    """Nodes and initializers of a graph; nodes have names, as ONNX Runtime needs."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, np.ndarray] = {}

    def weight(self, name: str, *shape: int, scale: float = 0.3) -> str:
        self.values[name] = (self._rng.standard_normal(shape) * scale).astype(np.float32)
        return name

    def full(self, name: str, size: int, value: float) -> str:
        self.values[name] = np.full(size, value, np.float32)
        return name

    def add(self, op: str, inputs: list[str], outputs: str, **attributes: object) -> str:
        names = outputs.split()
        node = helper.make_node(op, inputs, names, f"{op}_{len(self.nodes)}", **attributes)
        self.nodes.append(node)
        return names[0]

    def model(self, kind: int, shape: list, output: list) -> onnx.ModelProto:
        tensors = [numpy_helper.from_array(array, name) for name, array in self.values.items()]
        inputs = [helper.make_tensor_value_info("x", kind, shape)]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, tensors)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        made.ir_version = 8
        return made


def mlp(*sizes: int) -> onnx.ModelProto:
    """Layers with Relu and Tanh between them."""
    build, now = _Builder(0), "x"
    for i, (rows, columns) in enumerate(zip(sizes, sizes[1:])):
        inputs = [now, build.weight(f"w{i}", columns, rows), build.full(f"b{i}", columns, 0)]
        last = i == len(sizes) - 2
        now = build.add("Gemm", inputs, "y" if last else f"h{i}", transB=1)
        if not last:
            now = build.add("Relu" if i % 2 == 0 else "Tanh", [now], f"a{i}")
    return build.model(TensorProto.FLOAT, ["n", sizes[0]], ["n", sizes[-1]])


def convolutions() -> onnx.ModelProto:
    """A convolution, a batch norm, a depthwise convolution and pooling."""
    build = _Builder(1)
    kernel = {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}
    build.add("Conv", ["x", build.weight("c", 8, 1, 3, 3), build.full("cb", 8, 0)], "a", **kernel)
    norm = [build.full(n, 8, v) for n, v in (("s", 1), ("b", 0), ("mean", 0), ("var", 1))]
    build.add("BatchNormalization", ["a", *norm], "n mean_out var_out", training_mode=1)
    build.add("Relu", ["n"], "r")
    build.add("Conv", ["r", build.weight("d", 8, 1, 3, 3)], "e", group=8, **kernel)
    build.add("MaxPool", ["e"], "p", kernel_shape=[2, 2], strides=[2, 2])
    build.add("GlobalAveragePool", ["p"], "q")
    build.add("Flatten", ["q"], "f")
    head = [build.weight("w", CLASSES, 8), build.full("wb", CLASSES, 0)]
    build.add("Gemm", ["f", *head], "y", transB=1)
    return build.model(TensorProto.FLOAT, ["n", 1, 8, 8], ["n", CLASSES])


def attention(width: int = 16, heads: int = 2) -> onnx.ModelProto:
    """An encoder layer over an embedding, and a head over the vocabulary."""
    build = _Builder(2)
    build.values["split"] = np.array([0, 0, heads, width // heads])
    build.values["join"] = np.array([0, 0, width])
    build.values["rows"] = np.array([-1, VOCABULARY])
    build.values["scale"] = np.float32((width // heads) ** -0.5)
    embedded = build.add("Gather", [build.weight("embedding", VOCABULARY, width), "x"], "e")
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        build.add("MatMul", [embedded, build.weight(f"w{name}", width, width)], f"{name}0")
        build.add("Reshape", [f"{name}0", "split"], f"{name}1")
        build.add("Transpose", [f"{name}1"], name, perm=order)
    build.add("MatMul", ["q", "k"], "s0")
    build.add("Mul", ["s0", "scale"], "s1")
    build.add("Softmax", ["s1"], "s2", axis=-1)
    build.add("MatMul", ["s2", "v"], "o0")
    build.add("Transpose", ["o0"], "o1", perm=[0, 2, 1, 3])
    build.add("Reshape", ["o1", "join"], "o2")
    build.add("MatMul", ["o2", build.weight("wo", width, width)], "o3")
    build.add("Add", ["o3", embedded], "o4")
    norm = [build.full("g1", width, 1), build.full("b1", width, 0)]
    build.add("LayerNormalization", ["o4", *norm], "l1 m1 r1", axis=-1)
    build.add("MatMul", ["l1", build.weight("up", width, 32)], "f0")
    build.add("Relu", ["f0"], "f1")
    build.add("MatMul", ["f1", build.weight("down", 32, width)], "f2")
    build.add("Add", ["f2", "l1"], "f3")
    norm = [build.full("g2", width, 1), build.full("b2", width, 0)]
    build.add("LayerNormalization", ["f3", *norm], "l2 m2 r2", axis=-1)
    build.add("MatMul", ["l2", build.weight("head", width, VOCABULARY)], "z")
    build.add("Reshape", ["z", "rows"], "y")
    return build.model(TensorProto.INT64, ["n", "s"], ["ns", VOCABULARY])


def models() -> dict[str, Model]:
    """All of them by name."""
    small, deep = (FEATURES, 24, CLASSES), (FEATURES, 32, 16, CLASSES)
    entropy = "CrossEntropyLoss"
    return {
        "mlp, SGD": Model(mlp(*deep), entropy, "SGD", 0.1, frozen=["w0"]),
        "mlp, AdamW": Model(mlp(*deep), entropy, "AdamW", 3e-3),
        "mse": Model(mlp(*small), "MSELoss", "AdamW", 3e-3),
        "l1": Model(mlp(*small), "L1Loss", "SGD", 0.01),
        "bce": Model(mlp(*small), "BCEWithLogitsLoss", "AdamW", 3e-3),
        "convolutions": Model(
            convolutions(), entropy, "AdamW", 3e-3, frozen=["mean", "var"], inputs="images"
        ),
        "attention": Model(
            attention(),
            entropy,
            "AdamW",
            3e-3,
            constants=["split", "join", "rows", "scale"],
            inputs="words",
        ),
    }
