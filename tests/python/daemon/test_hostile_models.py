"""Models made to hurt the daemon: compiling and running them stays bounded in time and memory.

The engine thread serves every client, so a model that takes minutes to compile, or folds gigabytes
of constants, stops them all. Sizes here are near the limits that model.h sets; without the bounds
these tests take minutes, or crash.
"""

from __future__ import annotations

import resource
import threading
import time

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers.graphs import engine as E

F = TensorProto.FLOAT


def model_bytes(nodes, inputs, outputs, initializers=()):
    """ModelProto bytes; inputs: name -> shape (floats) or array that shows shape and type."""
    infos = [
        helper.make_tensor_value_info(n, F, s)
        if isinstance(s, tuple)
        else helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(s.dtype), s.shape)
        for n, s in inputs.items()
    ]
    graph = helper.make_graph(
        nodes, "g", infos,
        [helper.make_tensor_value_info(n, TensorProto.UNDEFINED, None) for n in outputs],
        [numpy_helper.from_array(v, k) for k, v in dict(initializers).items()],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph, opset_imports=opset).SerializeToString()


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Clock:
    """Fails if the block takes longer than `seconds` of processor time."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self):
        self.start = time.process_time()

    def __exit__(self, *error):
        took = time.process_time() - self.start
        assert error[0] or took < self.seconds, f"took {took:.1f} s"


def chain(n, make, x="x"):
    """n nodes, each reading the one before; make(i, in, out) -> NodeProto."""
    names = [x] + [f"v{i}" for i in range(n)]
    return [make(i, names[i], names[i + 1]) for i in range(n)], names[-1]


@pytest.mark.quick
def test_folding_many_large_constants_is_bounded():
    n = 2000  # 4 MiB each: 8 GB if all are kept
    nodes = [helper.make_node("Add", ["big", f"c{i}"], [f"s{i}"]) for i in range(n)] + [
        helper.make_node("Add", ["x", f"s{n - 1}"], ["y"])
    ]
    big = np.ones((1 << 20) - 1, np.float32)
    consts = {"big": big} | {f"c{i}": np.float32(i) for i in range(n)}
    model = E.Model(model_bytes(nodes, {"x": (1,)}, ["y"], consts))
    before = peak_mib()
    feed = {"x": np.ones(1, np.float32)}
    with Clock(5):
        plan = E.Plan(model, feed)
    assert peak_mib() - before < 300
    assert plan.info.constant_bytes < 100 << 20
    run = E.Run(plan)
    np.testing.assert_array_equal(run.forward(feed)["y"], big + n)


@pytest.mark.quick
def test_folding_many_products_is_bounded():
    n, side = 4000, 256  # 16 million multiplications each
    nodes = []
    for i in range(n):
        nodes.append(helper.make_node("Mul", ["small", f"c{i}"], [f"b{i}"]))
        nodes.append(helper.make_node("MatMul", ["a", f"b{i}"], [f"s{i}"]))
    nodes.append(helper.make_node("Add", ["x", f"s{n - 1}"], ["y"]))
    consts = {"a": np.ones((side * 16, side // 16), np.float32),
              "small": np.ones((side // 16, side), np.float32)}  # fmt: skip
    consts |= {f"c{i}": np.float32(i) for i in range(n)}
    model = E.Model(model_bytes(nodes, {"x": (1,)}, ["y"], consts))
    feed = {"x": np.ones(1, np.float32)}
    with Clock(5):
        plan = E.Plan(model, feed)
    assert plan.info.constant_bytes < 100 << 20
    want = np.full((side * 16, side), side // 16 * (n - 1) + 1, np.float32)
    np.testing.assert_array_equal(E.Run(plan).forward(feed)["y"], want)


@pytest.mark.slow
def test_nodes_that_differ_in_an_attribute_only():
    n = 60000  # equal but for alpha: one bucket, if attributes are not hashed
    nodes = [
        helper.make_node("LeakyRelu", ["x"], [f"v{i}"], alpha=1 / (i + 2)) for i in range(n)
    ] + [helper.make_node("Add", ["v0", "v1"], ["y"])]
    model = E.Model(model_bytes(nodes, {"x": (2,)}, ["y"]))
    feed = {"x": np.array([-6, 6], np.float32)}
    with Clock(10):
        plan = E.Plan(model, feed)
    np.testing.assert_allclose(E.Run(plan).forward(feed)["y"], [-5, 12], rtol=1e-6)


@pytest.mark.quick
def test_a_long_chain_of_views():
    n = 60000
    shapes = {"a": np.array([2, 3]), "b": np.array([3, 2])}
    nodes, last = chain(n, lambda i, a, b: helper.make_node("Reshape", [a, "ab"[i % 2]], [b]))
    nodes.append(helper.make_node("Relu", [last], ["y"]))
    model = E.Model(model_bytes(nodes, {"x": (3, 2)}, ["y"], shapes))
    feed = {"x": np.arange(6, dtype=np.float32).reshape(3, 2) - 2}
    with Clock(10):
        plan = E.Plan(model, feed, ["x"], None, ["y"])
    run = E.Run(plan)
    np.testing.assert_array_equal(run.forward(feed)["y"], np.maximum(feed["x"], 0))
    got = run.backward({"y": np.ones((3, 2), np.float32)})["x"]
    np.testing.assert_array_equal(got, (feed["x"] > 0).astype(np.float32))


@pytest.mark.slow
def test_very_many_live_values():
    n = 60000
    nodes = [helper.make_node("Mul", ["x", f"c{i}"], [f"v{i}"]) for i in range(n)]
    sums, last = chain(n, lambda i, a, b: helper.make_node("Add", [a, f"w{i}"], [b]), "v0")
    for i, node in enumerate(sums):
        node.input[1] = f"v{n - 1 - i}"  # the first made is the last used
        node.output[0] = f"s{i}"
        node.input[0] = f"s{i - 1}" if i else "v0"
    nodes += sums
    consts = {f"c{i}": np.float32(1) for i in range(n)}
    consts = {k: v + i for i, (k, v) in enumerate(consts.items())}
    model = E.Model(model_bytes(nodes, {"x": (3,)}, [f"s{n - 1}"], consts))
    feed = {"x": np.zeros(3, np.float32)}
    with Clock(15):
        plan = E.Plan(model, feed, ["x"], None, [f"s{n - 1}"])
    run = E.Run(plan)
    run.forward(feed)
    got = run.backward({f"s{n - 1}": np.ones(3, np.float32)})["x"]
    np.testing.assert_allclose(got, np.full(3, n * (n + 1) / 2 + 1), rtol=1e-4)


@pytest.mark.quick
def test_sizes_that_add_up_to_more_than_64_bits():
    shape = {"s": np.array([1 << 60])}
    nodes = [helper.make_node("Expand", ["x", "s"], ["a"])]
    last = "a"
    for i in range(4):
        nodes.append(helper.make_node("Sin", [last], [f"v{i}"]))
        nodes.append(helper.make_node("Add", ["a", f"v{i}"], [f"w{i}"]))
        last = f"w{i}"
    nodes.append(helper.make_node("ReduceSum", [last], ["y"], keepdims=0))
    model = E.Model(model_bytes(nodes, {"x": (1,)}, ["y"], shape))
    with pytest.raises(E.EngineError) as error:
        E.Plan(model, {"x": np.ones(1, np.float32)})
    assert error.value.code == "LIMIT"


@pytest.mark.quick
def test_empty_tensors_with_huge_other_dimensions():
    """[2^40, 0] has no elements, so nothing may loop over its rows."""
    nodes = [
        helper.make_node("Expand", ["x", "s"], ["a"]),
        helper.make_node("Softmax", ["a"], ["b"], axis=1),
        helper.make_node("CumSum", ["b", "one"], ["c"]),
        helper.make_node("Concat", ["c", "c"], ["d"], axis=1),
        helper.make_node("Transpose", ["d"], ["e"]),
        helper.make_node("ReduceSum", ["e", "one"], ["y"], keepdims=0),
        helper.make_node("LayerNormalization", ["a", "w"], ["z"], axis=1),
    ]
    consts = {"s": np.array([1 << 40, 0]), "one": np.array([1]), "w": np.ones(0, np.float32)}
    model = E.Model(model_bytes(nodes, {"x": (1, 0)}, ["y", "z"], consts))
    feed = {"x": np.ones((1, 0), np.float32)}
    with Clock(5):
        plan = E.Plan(model, feed, ["x"], ["y"], ["y"])
        run = E.Run(plan)
        assert run.forward(feed)["y"].size == 0
        assert run.backward({"y": np.ones(0, np.float32)})["x"].size == 0


class Flipping:
    """Another thread changes the last element all the time: good when checked, bad when used."""

    def __init__(self, array, good, bad):
        self.array, self.values, self.over = array, (good, bad), threading.Event()
        self.thread = threading.Thread(target=self.flip, daemon=True)

    def flip(self):
        while not self.over.is_set():
            for value in self.values:
                self.array[-1] = value

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *error):
        self.over.set()
        self.thread.join()


def survive(run, feed, backward=None, rounds=1500):
    """Runs that may be refused, and nothing worse."""
    for _ in range(rounds):
        try:
            run.forward(feed)
            if backward:
                run.backward(backward)
        except E.EngineError as error:
            assert error.code == "INDEX"


def test_labels_that_change_during_the_run():
    nodes = [helper.make_node("SoftmaxCrossEntropyLoss", ["x", "t"], ["y"], reduction="sum")]
    feed = {"x": np.zeros((20000, 4), np.float32), "t": np.zeros(20000, np.int64)}
    model = E.Model(model_bytes(nodes, feed, ["y"]))
    run = E.Run(E.Plan(model, feed, ["x"], None, ["y"]))
    run.forward(feed)
    with Flipping(feed["t"], 1, 1 << 50):
        survive(run, feed, {"y": np.ones((), np.float32)})


def test_divisors_that_change_during_the_run():
    nodes = [
        helper.make_node("Div", ["x", "d"], ["y"]),
        helper.make_node("Mod", ["x", "d"], ["z"]),
        helper.make_node("Mod", ["x", "d"], ["w"], fmod=1),
    ]
    feed = {"x": np.ones(50000, np.int64), "d": np.ones(50000, np.int64)}
    model = E.Model(model_bytes(nodes, feed, ["y", "z", "w"]))
    run = E.Run(E.Plan(model, feed))
    with Flipping(feed["d"], 3, 0):
        survive(run, feed)


def test_every_subset_of_gradients_does_not_grow_the_plan():
    n, deep = 9, 400  # each subset compiled on its own: 1 GB
    nodes = []
    for i in range(n):
        nodes.append(helper.make_node("Mul", ["x", f"c{i}"], [f"v{i}_0"]))
        for k in range(deep):
            nodes.append(helper.make_node("Neg", [f"v{i}_{k}"], [f"v{i}_{k + 1}"]))
    outputs = [f"v{i}_{deep}" for i in range(n)]
    consts = {f"c{i}": np.float32(i + 1) for i in range(n)}
    model = E.Model(model_bytes(nodes, {"x": (2,)}, outputs, consts))
    feed = {"x": np.ones(2, np.float32)}
    run = E.Run(E.Plan(model, feed, ["x"], None, outputs))
    run.forward(feed)
    before = peak_mib()
    for subset in range(1, 1 << n):
        arrive = {v: np.ones(2, np.float32) for i, v in enumerate(outputs) if subset >> i & 1}
        want = sum(i + 1 for i in range(n) if subset >> i & 1)
        got = run.backward(arrive, keep=True)["x"]
        np.testing.assert_array_equal(got, np.full(2, want, np.float32))
    assert peak_mib() - before < 200


@pytest.mark.quick
def test_an_exponent_of_another_type():
    """Found by fuzz_import: the gradient of the exponent had the type of the base."""
    nodes = [helper.make_node("Pow", ["x", "e"], ["y"])]
    feed = {"x": np.array([0.5, 2, 3], np.float32), "e": np.array([2.5, -1, 0.5])}
    model = E.Model(model_bytes(nodes, feed, ["y"]))
    run = E.Run(E.Plan(model, feed, ["x", "e"], None, ["y"]))
    y = run.forward(feed)["y"]
    got = run.backward({"y": np.ones(3, np.float32)})
    np.testing.assert_allclose(y, feed["x"] ** feed["e"], rtol=1e-6)
    np.testing.assert_allclose(got["e"], y * np.log(feed["x"]), rtol=1e-5)
    np.testing.assert_allclose(got["x"], feed["e"] * feed["x"] ** (feed["e"] - 1), rtol=1e-5)
