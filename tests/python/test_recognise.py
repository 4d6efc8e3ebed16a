"""Recognised patterns: one operator in place of many, with the numbers of the plain plan."""

from __future__ import annotations

from typing import NamedTuple

import engine as E
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

F = TensorProto.FLOAT


class Sizes(NamedTuple):
    """Nodes of a plan."""

    forward: int
    backward: int


class Writer:
    """Collects nodes and constants of one small model."""

    def __init__(self):
        self.nodes, self.constants = [], []

    def __call__(self, op, *inputs, **attrs):
        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], **attrs))
        return out

    def constant(self, value, dtype=np.float32):
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def model(self, inputs, outputs):
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(n, F, s) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, F, None) for n in outputs],
            self.constants,
        )
        opsets = [helper.make_opsetid("", 20)]
        return E.Model(helper.make_model(graph, opset_imports=opsets).SerializeToString())


def rms_norm(w, x, scale, *, axis=-1, eps=1e-6, square="pow", inverse="reciprocal", swap=False):
    """The pattern as models write it, in one of its forms."""
    squared = w("Pow", x, w.constant(2)) if square == "pow" else w("Mul", x, x)
    mean = w("ReduceMean", squared, w.constant([axis], np.int64), keepdims=1)
    root = w("Sqrt", w("Add", mean, w.constant(eps)))
    inv = w("Reciprocal", root) if inverse == "reciprocal" else w("Div", w.constant(1), root)
    normal = w("Mul", inv, x) if swap else w("Mul", x, inv)
    return w("Mul", normal, scale) if swap else w("Mul", scale, normal)


def run(model, feed, outputs, plain):
    """Outputs, gradients of all inputs for fixed output gradients, and the plan's sizes."""
    plan = E.Plan(model, feed, list(feed), outputs, outputs, plain=plain)
    one = E.Run(plan)
    out = one.forward(feed)
    rng = np.random.default_rng(3)
    seeds = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in out.items()}
    sizes = Sizes(plan.info.n_nodes_forward, plan.info.n_nodes_backward)
    return out, one.backward(seeds), sizes


def compare(model, feed, outputs):
    """Checks recognised against plain; returns both plans' sizes."""
    fast, plain = (run(model, feed, outputs, p) for p in (False, True))
    for name in outputs:
        np.testing.assert_allclose(fast[0][name], plain[0][name], rtol=2e-6, atol=2e-6)
    for name, want in plain[1].items():
        scale = max(1e-6, float(np.abs(want).max()))
        np.testing.assert_allclose(fast[1][name] / scale, want / scale, atol=5e-6)
    return fast[2], plain[2]


def arrays(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


@pytest.mark.quick
@pytest.mark.parametrize("square", ["pow", "mul"])
@pytest.mark.parametrize("inverse", ["reciprocal", "div"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (1, 2, 3, 33), (4, 1, 129)])
def test_rms_norm(square, inverse, swap, shape):
    w = Writer()
    shapes = {"x": shape, "w": shape[-1:]}
    y = rms_norm(w, "x", "w", square=square, inverse=inverse, swap=swap, eps=1e-5)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 1 and plain.forward == 7
    assert fast.backward < plain.backward


def test_rms_norm_of_a_shifted_weight():
    w = Writer()
    shapes = {"x": (2, 3, 16), "w": (16,)}
    y = rms_norm(w, "x", w("Add", "w", w.constant(1)))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 2


def test_rms_norm_whose_middle_is_read_elsewhere():
    w = Writer()
    shapes = {"x": (4, 8), "w": (8,)}
    y = rms_norm(w, "x", "w")
    middle = w.nodes[-1].input[1]
    z = w("Tanh", middle)
    compare(w.model(shapes, [y, z]), arrays(shapes), [y, z])


@pytest.mark.parametrize("change", ["axis", "power", "scale"])
def test_what_only_looks_like_rms_norm_stays(change):
    w = Writer()
    shapes = {"x": (5, 6, 6), "w": (6,)}
    if change == "scale":
        shapes["w"] = (6, 6)
    y = rms_norm(w, "x", "w", axis=1 if change == "axis" else -1)
    if change == "power":
        w.constants[0].CopyFrom(numpy_helper.from_array(np.float32(4), "c0"))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == plain.forward


def test_one_switch_gives_the_plain_plan(monkeypatch: pytest.MonkeyPatch):
    w = Writer()
    shapes = {"x": (3, 8), "w": (8,)}
    y = rms_norm(w, "x", "w")
    model, feed = w.model(shapes, [y]), arrays(shapes)
    assert E.Plan(model, feed, ["w"], None, [y]).info.n_nodes_forward == 1
    monkeypatch.setenv("GRADD_FUSE", "0")
    assert E.Plan(model, feed, ["w"], None, [y]).info.n_nodes_forward == 7
