"""Random graphs from a grammar of the parts of models, fast plan against plain plan.

Each graph is a row of blocks (norms, linear layers, gates, attention, dropout, embeddings, losses)
with random shapes and random deviations from the form that is recognised: operands swapped, another
reader of an inner value, an axis or constant that does not fit. With and without recognition the
numbers must be the same, whatever was recognised. Then one thing is broken, and both plans must
refuse it, naming a node, or run; neither may end otherwise.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from helpers.graphs import engine as E

F = TensorProto.FLOAT
GRAPHS = 400


class Grammar:
    """Writes one random model; `x` is always f32[rows, width] and flows through all blocks."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.nodes: list = []
        self.inits: list = []
        self.feed: dict[str, np.ndarray] = {}
        self.readers: list[str] = []  # inner values that become outputs, too
        self.heads = self.draw.choice([1, 2])
        self.width = self.heads * self.draw.choice([2, 4, 6])
        self.rows = self.draw.choice([1, 3, 5])
        self.x = self.input("x", (self.rows, self.width))

    def input(self, name: str, shape: tuple[int, ...]) -> str:
        self.feed[name] = (self.numbers.standard_normal(shape) * 0.5).astype(np.float32)
        return name

    def parameter(self, *shape: int) -> str:
        return self.input(f"p{len(self.feed)}", shape)

    def constant(self, value, dtype=np.float32) -> str:
        name = f"c{len(self.inits)}"
        self.inits.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        """A node; commutative operands are swapped now and then, inner values leak now and then."""
        names = list(inputs)
        if kind in ("Add", "Mul") and self.draw.random() < 0.3:
            names.reverse()
        out = f"t{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, names, [out], name=f"n{len(self.nodes)}", **attributes)
        )
        if self.draw.random() < 0.04:
            self.readers.append(out)
        return out

    # ---- blocks ----

    def rms_norm(self, x: str) -> str:
        square = self.op("Pow", x, self.constant(self.draw.choice([2, 2, 2, 3])))
        axis = self.draw.choice([-1, -1, 1, 0])
        mean = self.op("ReduceMean", square, self.constant([axis], np.int64))
        safe = self.op("Add", mean, self.constant(self.draw.choice([1e-6, 1e-5, 2.0])))
        if self.draw.random() < 0.3:
            scaled = self.op("Div", x, self.op("Sqrt", self.op("Abs", safe)))
        else:
            scaled = self.op("Mul", x, self.op("Reciprocal", self.op("Sqrt", self.op("Abs", safe))))
        return self.op("Mul", self.parameter(self.width), scaled)

    def layer_norm(self, x: str) -> str:
        axes = self.constant([-1], np.int64)
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes))
        variance = self.op("ReduceMean", self.op("Mul", centred, centred), axes)
        root = self.op("Sqrt", self.op("Add", variance, self.constant(1e-5)))
        y = self.op("Mul", self.op("Div", centred, root), self.parameter(self.width))
        return self.op("Add", y, self.parameter(self.width)) if self.draw.random() < 0.7 else y

    def linear(self, x: str, n: int | None = None) -> str:
        n = n or self.width
        shape = (n, self.width) if self.draw.random() < 0.6 else (self.width, n)
        w = self.parameter(*shape)
        if shape[0] == n and (shape[0] != self.width or self.draw.random() < 0.5):
            w = self.op("Transpose", w, perm=[1, 0])
        y = self.op("MatMul", x, w)
        bias = self.draw.choice([(n,), (1, n), (1,), (self.rows, n), None])
        return y if bias is None else self.op("Add", y, self.parameter(*bias))

    def gated(self, x: str) -> str:
        gate, up = self.linear(x), self.linear(x)
        how = self.draw.choice(["silu", "gelu", "tanh", "sigmoid"])
        if how == "silu":
            act = self.op("Mul", gate, self.op("Sigmoid", gate))
        elif how == "sigmoid":
            act = self.op("Mul", up, self.op("Sigmoid", gate))
        else:
            act = self.gelu(gate, how == "tanh")
        return self.op("Mul", act, up)

    def gelu(self, x: str, tanh: bool) -> str:
        if not tanh:
            inner = self.op(
                "Erf", self.op("Div", x, self.constant(self.draw.choice([2**0.5, 1.5])))
            )
        else:
            cube = self.op("Pow", x, self.constant(3.0))
            sum_ = self.op("Add", x, self.op("Mul", cube, self.constant(0.044715)))
            inner = self.op("Tanh", self.op("Mul", sum_, self.constant(0.7978845608028654)))
        half = self.op("Mul", x, self.constant(0.5))
        return self.op("Mul", half, self.op("Add", inner, self.constant(1.0)))

    def attention(self, x: str) -> str:
        size = self.width // self.heads
        shape = self.constant([self.rows, self.heads, size], np.int64)
        q, k, v = (
            self.op("Transpose", self.op("Reshape", self.linear(x), shape), perm=[1, 0, 2])
            for _ in range(3)
        )
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 2, 1]))
        scores = self.op("Mul", scores, self.constant(self.draw.choice([size**-0.5, 1.0, -0.3])))
        if self.draw.random() < 0.7:
            keep = np.tril(np.ones((self.rows, self.rows), bool), self.draw.choice([0, 0, -1]))
            low = self.constant(np.finfo(np.float32).min)
            scores = self.op("Where", self.constant(keep, bool), scores, low)
        weights = self.op("Softmax", scores, axis=self.draw.choice([-1, -1, -1, 2, 1]))
        y = self.op("Transpose", self.op("MatMul", weights, v), perm=[1, 0, 2])
        return self.op("Reshape", y, self.constant([self.rows, self.width], np.int64))

    def dropout(self, x: str) -> str:
        ratio, on = self.constant(self.draw.choice([0.1, 0.5, 0.0])), self.constant(True, bool)
        return self.op("Add", self.op("Dropout", x, ratio, on), self.x)

    def embedding(self, x: str) -> str:
        ids = f"i{len(self.feed)}"
        self.feed[ids] = self.numbers.integers(0, 7, self.rows)
        where = self.constant(np.arange(self.rows) % 4, np.int64)
        words = self.op("Gather", self.parameter(7, self.width), ids)
        places = self.op("Gather", self.parameter(4, self.width), where)
        return self.op("Add", self.op("Add", words, places), x)

    def residual(self, x: str) -> str:
        return self.op("Add", x, self.x)

    def loss(self, x: str) -> str:
        labels = "labels"
        self.feed[labels] = self.numbers.integers(0, 6, self.rows)
        self.feed[labels][0] = -100
        logits = self.linear(x, 6)
        reduction = self.draw.choice(["sum", "mean", "none"])
        y = self.op("SoftmaxCrossEntropyLoss", logits, labels, reduction=reduction,
                    ignore_index=-100)  # fmt: skip
        return y if reduction != "sum" else self.op("Div", y, self.constant(3.0))

    def model(self) -> tuple[ModelProto, list[str]]:
        """The whole graph, and its outputs."""
        blocks = [self.rms_norm, self.layer_norm, self.linear, self.gated, self.attention,
                  self.dropout, self.embedding, self.residual]  # fmt: skip
        y = self.x
        for _ in range(self.draw.randint(1, 5)):
            y = self.draw.choice(blocks)(y)
        if self.draw.random() < 0.5:
            y = self.loss(y)
        outputs = list(dict.fromkeys([y, *self.readers]))
        infos = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in self.feed.items()
        ]
        outs = [helper.make_tensor_value_info(n, F, None) for n in outputs]
        graph = helper.make_graph(self.nodes, "g", infos, outs, self.inits)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), outputs


def evaluate(model: E.Model, feed: dict, outputs: list[str], plain: bool) -> tuple[dict, dict]:
    """Outputs and gradients of all floats."""
    floats = [n for n, v in feed.items() if v.dtype in (np.float32, np.float64)]
    plan = E.Plan(model, feed, floats, outputs, outputs, threads=1, plain=plain)
    run = E.Run(plan)
    out = run.forward(feed, seed=5)
    numbers = np.random.default_rng(11)
    arrive = {n: numbers.standard_normal(v.shape).astype(v.dtype) for n, v in out.items()}
    return out, run.backward(arrive)


def in_f64(model: ModelProto, feed: dict) -> tuple[E.Model, dict]:
    """The same graph on doubles."""
    wide = ModelProto()
    wide.CopyFrom(model)
    for info in (*wide.graph.input, *wide.graph.output):
        if info.type.tensor_type.elem_type == F:
            info.type.tensor_type.elem_type = TensorProto.DOUBLE
    for init in wide.graph.initializer:
        if init.data_type == F:
            value = numpy_helper.to_array(init).astype(np.float64)
            init.CopyFrom(numpy_helper.from_array(value, init.name))
    doubles = {n: v.astype(np.float64) if v.dtype == np.float32 else v for n, v in feed.items()}
    return E.Model(wide.SerializeToString()), doubles


def far_apart(got: dict, want: dict) -> list[str]:
    """Names whose values differ by more than rounding does in a well-conditioned graph."""
    far = []
    for name, reference in want.items():
        if reference is None or got[name] is None:
            assert got[name] is reference, f"{name}: a gradient in one plan only"
            continue
        finite = np.isfinite(reference)
        scale = max(1e-3, float(np.abs(reference[finite]).max(initial=0)))
        np.testing.assert_array_equal(np.isfinite(got[name]), finite, name)
        if np.abs(got[name][finite] - reference[finite]).max(initial=0) > 3e-5 * scale:
            far.append(name)
    return far


def distance(values: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(values.astype(np.float64) - exact).max(initial=0))


def check_same(fast: tuple, plain: tuple, exact: Callable[[], tuple], what: str) -> None:
    """Equal but for rounding; where rounding is large, f64 says how large it may be."""
    for k in (0, 1):
        for name in far_apart(fast[k], plain[k]):
            truth = exact()[k][name]
            theirs, ours = distance(plain[k][name], truth), distance(fast[k][name], truth)
            largest = max(
                float(np.abs(v).max(initial=0)) for v in plain[k].values() if v is not None
            )
            # a gradient that is zero but for rounding has the rounding of the large ones
            allowed = 8 * theirs + 1e-4 * float(np.abs(truth).max()) + 1e-5 * max(largest, 1)
            assert ours <= allowed, f"{what}: {name}: {ours}, allowed {allowed}"


def breaks(model: ModelProto, draw: random.Random) -> ModelProto:
    """One thing is wrong now, or odd."""
    broken = ModelProto()
    broken.CopyFrom(model)
    node = draw.choice(broken.graph.node)
    how = draw.randrange(6)
    if how == 0:
        node.input[draw.randrange(len(node.input))] = draw.choice(broken.graph.node).output[0]
    elif how == 1:
        node.op_type = draw.choice(["Add", "MatMul", "Softmax", "Transpose", "Sigmoid", "Where"])
    elif how == 2 and node.attribute:
        attribute = draw.choice(node.attribute)
        attribute.i, attribute.ints[:] = draw.choice([-9, 0, 7]), [draw.choice([-3, 0, 5])]
    elif how == 3:
        node.input.append(node.input[0])
    elif how == 4:
        value = draw.choice(broken.graph.input).type.tensor_type.shape.dim
        value.add().dim_value = draw.choice([0, 2, 1 << 40])
    else:
        del node.input[draw.randrange(len(node.input))]
    return broken


@pytest.mark.parametrize("part", range(5))
def test_recognition_changes_no_numbers(part: int) -> None:
    for seed in range(part * GRAPHS, (part + 1) * GRAPHS):
        grammar = Grammar(seed)
        model, outputs = grammar.model()
        loaded = E.Model(model.SerializeToString())
        fast, plain = (evaluate(loaded, grammar.feed, outputs, p) for p in (False, True))

        def exact(model: ModelProto = model, feed: dict = grammar.feed, outs: list = outputs):
            return evaluate(*in_f64(model, feed), outs, plain=True)

        check_same(fast, plain, exact, f"seed {seed}")


@pytest.mark.parametrize("part", range(5))
def test_broken_patterns_are_refused_by_name(part: int) -> None:
    refused = 0
    for seed in range(part * GRAPHS, (part + 1) * GRAPHS):
        grammar = Grammar(seed)
        model, outputs = grammar.model()
        broken = breaks(model, grammar.draw).SerializeToString()
        verdicts = []
        for plain in (False, True):
            try:
                evaluate(E.Model(broken), grammar.feed, outputs, plain)
                verdicts.append("ok")
            except E.EngineError as error:
                verdicts.append(error.code)
                named = any(word in str(error) for word in ("node ", "input ", "output "))
                assert named, f"seed {seed}: {error}"
                assert error.code != "INTERNAL", f"seed {seed}: {error}"
        assert verdicts[0] == verdicts[1], f"seed {seed}: {verdicts}"
        refused += verdicts[0] != "ok"
    assert refused > GRAPHS // 3
