"""The engine in process: plans, variants of the backward, reuse of memory, against torch.

Random graphs mix views, in-place candidates, shared operands and several outputs, which is where a
planner goes wrong; every gradient is compared with torch.autograd.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from helpers.graphs import engine as E

F = TensorProto.FLOAT


def make_model(nodes, inputs, outputs, initializers=()):
    """ModelProto bytes; inputs: name -> shape; outputs: names (all float)."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, F, s) for n, s in inputs.items()],
        [helper.make_tensor_value_info(n, F, None) for n in outputs],
        list(initializers),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    return model.SerializeToString()


def two_layer():
    """y = relu(x W1) W2, loss = mean((y - t)^2); outputs loss and y."""
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
        helper.make_node("Sub", ["y", "t"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]
    shapes = {"x": (5, 3), "w1": (3, 4), "w2": (4, 2), "t": (5, 2)}
    model = E.Model(make_model(nodes, shapes, ["loss", "y"]))
    rng = np.random.default_rng(1)
    return model, {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def torch_two_layer(feed, dloss, dy):
    t = {k: torch.tensor(v, requires_grad=k in ("w1", "w2", "x")) for k, v in feed.items()}
    y = (t["x"] @ t["w1"]).relu() @ t["w2"]
    loss = ((y - t["t"]) ** 2).mean()
    roots = [(o, torch.tensor(g)) for o, g in ((loss, dloss), (y, dy)) if g is not None]
    torch.autograd.backward([o for o, _ in roots], [g for _, g in roots])
    return {k: t[k].grad.numpy() for k in ("w1", "w2", "x")}


ONE = np.ones((), np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("which", ["loss", "y", "both"])
def test_any_subset_of_gradients(which):
    model, feed = two_layer()
    plan = E.Plan(model, feed, ["w1", "w2", "x"], None, ["loss", "y"])
    dy = np.random.default_rng(2).standard_normal((5, 2)).astype(np.float32)
    dloss = ONE if which != "y" else None
    dy = dy if which != "loss" else None
    run = E.Run(plan)
    run.forward(feed)
    arrive = {k: v for k, v in (("loss", dloss), ("y", dy)) if v is not None}
    got, want = run.backward(arrive), torch_two_layer(feed, dloss, dy)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)


def test_keep_allows_another_backward():
    model, feed = two_layer()
    plan = E.Plan(model, feed, ["w1", "w2", "x"], None, ["loss", "y"])
    run = E.Run(plan)
    run.forward(feed)
    first = run.backward({"loss": ONE}, keep=True)
    second = run.backward({"loss": ONE}, keep=True)
    third = run.backward({"loss": ONE})
    for name in first:
        assert np.array_equal(first[name], second[name])
        assert np.array_equal(first[name], third[name])
    with pytest.raises(E.EngineError, match="activations of this run are gone"):
        run.backward({"loss": ONE})


def test_runs_do_not_disturb_each_other():
    model, feed = two_layer()
    plan = E.Plan(model, feed, ["w1", "w2", "x"], None, ["loss", "y"])
    other = {**feed, "x": feed["x"] * 2 + 1}
    alone = {}
    for name, f in (("a", feed), ("b", other)):
        run = E.Run(plan)
        run.forward(f)
        alone[name] = run.backward({"loss": ONE})
    a, b = E.Run(plan), E.Run(plan)
    a.forward(feed)
    b.forward(other)
    for name, run in (("a", a), ("b", b)):
        got = run.backward({"loss": ONE})
        assert all(np.array_equal(got[k], alone[name][k]) for k in got)


def test_inference_plan_saves_nothing():
    model, feed = two_layer()
    plan = E.Plan(model, feed, [], ["y"], [])
    assert plan.info.saved_bytes == 0
    run = E.Run(plan)
    want = np.maximum(feed["x"] @ feed["w1"], 0) @ feed["w2"]
    np.testing.assert_allclose(run.forward(feed)["y"], want, rtol=1e-5, atol=1e-6)
    with pytest.raises(E.EngineError, match="inference"):
        run.backward({"y": want})


def test_frozen_parameters_cost_no_nodes():
    model, feed = two_layer()
    every = E.Plan(model, feed, ["w1", "w2"], None, ["loss"])
    last = E.Plan(model, feed, ["w2"], None, ["loss"])
    assert last.info.n_launches_backward < every.info.n_launches_backward
    run = E.Run(last)
    run.forward(feed)
    want = torch_two_layer(feed, ONE, None)
    np.testing.assert_allclose(run.backward({"loss": ONE})["w2"], want["w2"], rtol=1e-5)


def test_no_path_is_no_gradient():
    nodes = [
        helper.make_node("Mul", ["a", "a"], ["y"]),
        helper.make_node("StopGradient", ["b"], ["s"], domain="com.gradd"),
        helper.make_node("Add", ["y", "s"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, F, (3,)) for n in "ab"],
        [helper.make_tensor_value_info("z", F, None)],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.gradd", 1)]
    model = E.Model(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    feed = {n: np.arange(3, dtype=np.float32) for n in "ab"}
    plan = E.Plan(model, feed, ["a", "b"], None, ["z"])
    assert [plan.info.has_grad[i] for i in range(2)] == [True, False]
    run = E.Run(plan)
    run.forward(feed)
    got = run.backward({"z": np.ones(3, np.float32)})
    assert got["b"] is None
    np.testing.assert_allclose(got["a"], 2 * feed["a"])


def straight_through(value, x):
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["h"]),
        helper.make_node("Mul", ["value", "h"], ["v"]),
        helper.make_node("StraightThrough", ["v", "h"], ["s"], name="straight", domain="com.gradd"),
        helper.make_node("Mul", ["s", "s"], ["y"]),
    ]
    shapes = {"x": x.shape, "value": value.shape}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, F, shape) for n, shape in shapes.items()],
        [helper.make_tensor_value_info("y", F, None)],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.gradd", 1)]
    return E.Model(helper.make_model(graph, opset_imports=opsets).SerializeToString())


@pytest.mark.parametrize("shape", [(3,), (), (0, 2)])
def test_straight_through_has_the_history_of_its_second_operand(shape):
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(shape).astype(np.float32) for n in ("x", "value")}
    plan = E.Plan(straight_through(**feed), feed, ["x", "value"], None, ["y"])
    assert [plan.info.has_grad[i] for i in range(2)] == [True, False]
    run = E.Run(plan)
    v = feed["value"] * feed["x"] ** 2
    np.testing.assert_allclose(run.forward(feed)["y"], v * v, rtol=1e-6)
    got = run.backward({"y": np.ones(shape, np.float32)})
    np.testing.assert_allclose(got["x"], 2 * v * 2 * feed["x"], rtol=1e-6)
    assert got["value"] is None


def test_straight_through_wants_equal_types():
    feed = {"x": np.zeros((2, 3), np.float32), "value": np.zeros((2, 1), np.float32)}
    model = straight_through(**feed)
    E.Plan(model, feed, [], None, [])  # v has the shape of h
    nodes = [helper.make_node("StraightThrough", ["x", "w"], ["y"], name="s", domain="com.gradd")]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, F, s) for n, s in (("x", (2, 3)), ("w", (3, 2)))],
        [helper.make_tensor_value_info("y", F, None)],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.gradd", 1)]
    model = E.Model(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    bad = {"x": np.zeros((2, 3), np.float32), "w": np.zeros((3, 2), np.float32)}
    with pytest.raises(E.EngineError, match=r"'s'.*value is f32\[2,3\] and x is f32\[3,2\]"):
        E.Plan(model, bad, [], None, [])


def test_errors_name_the_node():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="linear_7")]
    model = E.Model(make_model(nodes, {"x": (2, 3), "w": ("k", 4)}, ["y"]))
    bad = {"x": np.zeros((2, 3), np.float32), "w": np.zeros((5, 4), np.float32)}
    with pytest.raises(E.EngineError, match=r"node 0 'linear_7' \(MatMul\)") as caught:
        E.Plan(model, bad, [], None, [])
    assert caught.value.code == "GRAPH"
    wrong = {"x": np.zeros((2, 3), np.float64), "w": np.zeros((3, 4), np.float32)}
    with pytest.raises(E.EngineError, match="input 'x'.*f32.*f64"):
        E.Plan(model, wrong, [], None, [])


def test_finite_check_names_the_first_node():
    nodes = [
        helper.make_node("Log", ["x"], ["l"], name="bad_log"),
        helper.make_node("Exp", ["l"], ["y"]),
    ]
    model = E.Model(make_model(nodes, {"x": (3,)}, ["y"]))
    feed = {"x": np.array([1, -1, 2], np.float32)}
    run = E.Run(E.Plan(model, feed, [], None, []))
    run.forward(feed)
    with pytest.raises(E.EngineError, match="bad_log.*element 1 of 3") as caught:
        run.forward(feed, flags=2)
    assert caught.value.code == "NONFINITE"


def test_finite_check_lets_infinities_pass_inside():
    """A mask of -inf, and an exp that overflows under a division, belong to a healthy graph."""
    nodes = [
        helper.make_node("Log", ["m"], ["mask"], name="mask"),  # 0 and -inf
        helper.make_node("Add", ["x", "mask"], ["s"]),
        helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Reciprocal", ["e"], ["r"]),
        helper.make_node("Add", ["p", "r"], ["y"]),
    ]
    model = E.Model(make_model(nodes, {"x": (3,), "m": (3,)}, ["y"]))
    feed = {"x": np.array([1, 2, 1000], np.float32), "m": np.array([1, 1, 0], np.float32)}
    plan = E.Plan(model, feed, ["x"], None, ["y"], plain=True)
    run = E.Run(plan)
    want = [1 / (1 + np.e) + np.exp(-1), 1 / (1 + np.exp(-1)) + np.exp(-2), 0]
    got = run.forward(feed, flags=2)["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_finite_check_names_where_an_infinity_came_from():
    nodes = [
        helper.make_node("Exp", ["x"], ["e"], name="overflow"),
        helper.make_node("Add", ["e", "x"], ["y"], name="last"),
    ]
    model = E.Model(make_model(nodes, {"x": (3,)}, ["y"]))
    feed = {"x": np.array([1, -1000, 1000], np.float32)}
    run = E.Run(E.Plan(model, feed, [], None, []))
    with pytest.raises(E.EngineError, match=r"'last'.*element 2 of 3 is inf.*'overflow' \(Exp\)"):
        run.forward(feed, flags=2)


# ---- random graphs ----------------------------------------------------------------------------


class RandomGraph:
    """Builds the same random function as ONNX nodes and as torch operations."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.constants, self.values = [], [], {}
        self.feed = {f"p{i}": self.array((2, 3, 4)) for i in range(3)}
        for name, array in self.feed.items():
            self.values[name] = torch.tensor(array, requires_grad=True)

    def array(self, shape):
        return self.rng.uniform(-1, 1, shape).astype(np.float32)

    def pick(self, shape=None):
        names = [n for n, v in self.values.items() if shape is None or v.shape == shape]
        return names[self.rng.integers(len(names))]

    def ints(self, values):
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def add(self, op, inputs, result, **attrs):
        name = f"v{len(self.values)}"
        self.nodes.append(helper.make_node(op, inputs, [name], **attrs))
        self.values[name] = result
        return name

    def grow(self):
        kind = self.rng.integers(9)
        a = self.pick()
        va = self.values[a]
        if kind <= 2:
            b = self.pick(va.shape)
            op, f = [("Add", torch.add), ("Mul", torch.mul), ("Sub", torch.sub)][kind]
            self.add(op, [a, b], f(va, self.values[b]))
        elif kind == 3:
            self.add("Tanh", [a], va.tanh())
        elif kind == 4:
            self.add("Sigmoid", [a], va.sigmoid())
        elif kind == 5:
            shape = (va.numel(),) if va.dim() > 1 else (va.numel() // 12, 3, 4)
            self.add("Reshape", [a, self.ints(shape)], va.reshape(shape))
        elif kind == 6:
            perm = list(self.rng.permutation(va.dim()).tolist())
            self.add("Transpose", [a], va.permute(perm), perm=perm)
        elif kind == 7:
            self.add("Identity", [a], va.clone())
        else:
            both = torch.cat([va, va.neg()], 0)
            n = self.add("Neg", [a], va.neg())
            c = self.add("Concat", [a, n], both, axis=0)
            size = va.shape[0]
            args = [c, self.ints([size - 1]), self.ints([2 * size - 1]), self.ints([0])]
            self.add("Slice", args, both[size - 1 : 2 * size - 1])


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_match_torch(seed):
    g = RandomGraph(seed)
    for _ in range(25):
        g.grow()
    names = list(g.values)[3:]
    outputs = [names[-1], *{g.pick() for _ in range(2)} - {names[-1]}]
    outputs = [o for o in outputs if o not in g.feed]
    shapes = {n: a.shape for n, a in g.feed.items()}
    model = E.Model(make_model(g.nodes, shapes, outputs, g.constants))
    plan = E.Plan(model, g.feed, list(g.feed), None, outputs)
    run = E.Run(plan)
    out = run.forward(g.feed)
    for name in outputs:
        np.testing.assert_allclose(out[name], g.values[name].detach(), rtol=1e-5, atol=1e-6)
    rng = np.random.default_rng(seed)
    seeds = {n: rng.standard_normal(out[n].shape).astype(np.float32) for n in outputs}
    for chosen, keep in ((outputs[:1], True), (outputs, True), (outputs, False)):
        params = [g.values[n] for n in g.feed]
        want = torch.autograd.grad(
            [g.values[n] for n in chosen],
            params,
            [torch.tensor(seeds[n]) for n in chosen],
            retain_graph=True,
            allow_unused=True,
        )
        for n in chosen:
            out[n][...] = 99  # what the client does with an output must not matter
        got = run.backward({n: seeds[n] for n in chosen}, keep=keep)
        for name, w in zip(g.feed, want, strict=True):
            if w is None or got[name] is None:
                assert got[name] is None or not got[name].any()
                assert w is None or not w.any()
                continue
            scale = max(1.0, float(w.abs().max()))
            np.testing.assert_allclose(got[name] / scale, w.numpy() / scale, atol=2e-6)


@pytest.mark.parametrize("reduction", ["none", "add"])
@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
def test_updates_that_are_the_data_as_well(op, reduction):
    """The result may not take the place of an operand that is read in another order."""
    deep = op == "ScatterND"
    index = np.array([[1], [2], [0]] if deep else [1, 2, 0], np.int64)
    nodes = [
        helper.make_node("Add", ["a", "b"], ["x"]),
        helper.make_node(op, ["x", "index", "x"], ["y"], reduction=reduction),
        helper.make_node("Neg", ["y"], ["z"]),
    ]
    known = [numpy_helper.from_array(index, "index")]
    model = E.Model(make_model(nodes, {"a": (3,), "b": (3,)}, ["z"], known))
    feed = {"a": np.array([1, 2, 3], np.float32), "b": np.zeros(3, np.float32)}
    result = E.Run(E.Plan(model, feed)).forward(feed)["z"]
    moved = np.array([3, 1, 2], np.float32)
    np.testing.assert_array_equal(-result, moved + (feed["a"] if reduction == "add" else 0))


def test_a_gradient_without_a_node_that_is_not_finite():
    """Twice the input itself: the sum of gradients has no node to name."""
    model = E.Model(make_model([], {"x": (2,)}, ["x", "x"]))
    model.outputs = ["x", "again"]  # by position
    feed = {"x": np.ones(2, np.float32)}
    plan = E.Plan(model, feed, ["x"], grad_outputs=["x", "again"])
    run = E.Run(plan)
    run.forward(feed, flags=1 << 1)  # GRADD_RUN_FINITE_CHECK
    with pytest.raises(E.EngineError, match="gradient of"):
        run.backward({n: np.full(2, np.nan, np.float32) for n in model.outputs})


@pytest.mark.quick
@pytest.mark.parametrize("opset", [13, 20])
def test_a_sum_of_absolute_values(opset):
    """ReduceL1, whose axes are an attribute before opset 18."""
    given = {"axes": [1, -1]} if opset < 18 else {}
    inputs = ["x"] if opset < 18 else ["x", "axes"]
    axes = numpy_helper.from_array(np.array([1, -1]), "axes")
    node = helper.make_node("ReduceL1", inputs, ["y"], keepdims=0, **given)
    model = onnx.load_from_string(make_model([node], {"x": (3, 4, 5)}, ["y"], [axes]))
    model.opset_import[0].version = opset
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    x[0, 0, 0] = 0
    plan = E.Plan(E.Model(model.SerializeToString()), {"x": x}, ["x"], None, ["y"])
    run = E.Run(plan)
    (y,) = run.forward({"x": x}).values()
    np.testing.assert_allclose(y, np.abs(x).sum((1, 2)), rtol=1e-6)
    dy = np.array([1, -2, 3], np.float32)
    got = run.backward({"y": dy})["x"]
    np.testing.assert_array_equal(got, np.sign(x) * dy[:, None, None])
