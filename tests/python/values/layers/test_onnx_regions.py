"""ONNX's If, Loop, Scan and sequences: its node tests and evaluator, gradients, what is refused."""

from __future__ import annotations

import copy
import importlib
import warnings

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from helpers.graphs import engine as E

pytestmark = pytest.mark.quick
N, graph = helper.make_node, helper.make_graph
DOUBLE, BOOL, INT = TensorProto.DOUBLE, TensorProto.BOOL, TensorProto.INT64
# Those with sequences or optionals as inputs of the model are left out.
NODE_TESTS = ("if", "loop11", "scan9_sum", "scan9_multi_state", "scan9_scalar")


def info(name: str, dtype: int = DOUBLE, shape: tuple | None = None):
    return helper.make_tensor_value_info(name, dtype, shape)


def const(name: str, value) -> object:
    return numpy_helper.from_array(np.array(value), name)


def model(nodes: list, shapes: dict, outputs: list[str], known: tuple = ()) -> bytes:
    made = graph(nodes, "g", [info(n, shape=s) for n, s in shapes.items()],
                 [info(n) for n in outputs], known)  # fmt: skip
    return helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()


def feed_of(shapes: dict) -> dict:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s) for n, s in shapes.items()}


# --- ONNX's own tests ---


def node_cases() -> dict:
    from onnx.backend.test.case import node

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for name in ("if_", "loop", "scan"):
            importlib.import_module(f"{node.__name__}.{name}")
    return {case.name: case for case in node._NodeTestCases}


@pytest.mark.parametrize("name", NODE_TESTS)
def test_nodes_give_what_onnx_says(name: str) -> None:
    """Conditions and numbers of steps are constants of the model, as plans need them."""
    case = node_cases()[f"test_{name}"]
    proto = copy.deepcopy(case.model)
    proto.opset_import[0].version = 13  # at least; nothing of theirs has changed by then
    inputs, outputs = case.data_sets[0]
    feed = {v.name: np.asarray(x) for v, x in zip(proto.graph.input, inputs, strict=True)}
    for value in [v for v in proto.graph.input if v.name in ("cond", "trip_count")]:
        proto.graph.initializer.append(numpy_helper.from_array(feed.pop(value.name), value.name))
        proto.graph.input.remove(value)
    plan = E.Plan(E.Model(proto.SerializeToString()), feed)
    found = E.Run(plan).forward(feed).values()
    for got, want in zip(found, outputs, strict=True):
        np.testing.assert_allclose(got, np.asarray(want), case.rtol, case.atol)


# --- others, against its evaluator and differences ---


def by_size() -> tuple[bytes, dict]:
    """A branch by the number of rows; a Loop in one of them, whose names the other has too."""
    step = graph(
        [N("Mul", ["h", "w"], ["q"]), N("Tanh", ["q"], ["h2"]), N("Identity", ["go"], ["go2"])],
        "step", [info("i", INT), info("go", BOOL), info("h")],
        [info("go2", BOOL), info("h2"), info("q")],
    )  # fmt: skip
    many = graph(
        [N("Loop", ["three", "yes", "x"], ["z", "all"], body=step),
         N("ReduceSum", ["all"], ["sums"], keepdims=0), N("Add", ["z", "sums"], ["r"])],
        "many", [], [info("r")],
    )  # fmt: skip
    few = graph([N("Neg", ["x"], ["r"])], "few", [], [info("r")])
    nodes = [
        N("Shape", ["x"], ["n"], end=1), N("Squeeze", ["n"], ["rows"]),
        N("Greater", ["rows", "two"], ["c"]),
        N("If", ["c"], ["y"], then_branch=many, else_branch=few),
    ]  # fmt: skip
    known = (const("three", np.int64(3)), const("two", np.int64(2)), const("yes", np.bool_(True)))
    return model(nodes, {"x": ("r", 2), "w": (2,)}, ["y"], known), {"x": (3, 2), "w": (2,)}


def until() -> tuple[bytes, dict]:
    """A Loop without a number of steps, which ends by its own count; it reads w from outside."""
    step = graph(
        [N("Less", ["i", "five"], ["go2"]), N("Mul", ["h", "w"], ["p"]), N("Sin", ["p"], ["h2"])],
        "step", [info("i", INT), info("go", BOOL), info("h")],
        [info("go2", BOOL), info("h2")],
    )  # fmt: skip
    known = (const("five", np.int64(5)), const("yes", np.bool_(True)))
    nodes = [N("Loop", ["", "yes", "x"], ["y"], body=step)]
    return model(nodes, {"x": (2,), "w": (2,)}, ["y"], known), {"x": (2,), "w": (2,)}


def scans() -> tuple[bytes, dict]:
    """Two operands along other axes, one from its end; results stacked behind and backwards."""
    step = graph(
        [N("Mul", ["h", "a"], ["p"]), N("Add", ["p", "b"], ["h2"]), N("Tanh", ["h2"], ["o"]),
         N("Identity", ["p"], ["o2"])],
        "step", [info("h"), info("a"), info("b")], [info("h2"), info("o"), info("o2")],
    )  # fmt: skip
    lists = {"scan_input_axes": [0, -1], "scan_input_directions": [0, 1]}
    lists |= {"scan_output_axes": [1, 0], "scan_output_directions": [0, 1]}
    nodes = [N("Scan", ["s", "x", "y"], ["z", "u", "v"], body=step, num_scan_inputs=2, **lists)]
    shapes = {"s": (3,), "x": (80, 3), "y": (3, 80)}
    return model(nodes, shapes, ["z", "u", "v"]), shapes


def sequences() -> tuple[bytes, dict]:
    """Each operator on sequences, and a Loop that appends to one; parts above a node's 64 too."""
    step = graph(
        [N("SequenceAt", ["rows", "i"], ["row"]), N("Sin", ["row"], ["sine"]),
         N("SequenceInsert", ["l", "sine"], ["l2"]), N("Identity", ["go"], ["go2"])],
        "step",
        [info("i", INT), info("go", BOOL),
         helper.make_tensor_sequence_value_info("l", DOUBLE, None)],
        [info("go2", BOOL), helper.make_tensor_sequence_value_info("l2", DOUBLE, None)],
    )  # fmt: skip
    nodes = [
        N("SplitToSequence", ["x"], ["rows"], keepdims=0),
        N("SequenceLength", ["rows"], ["n"]),
        N("SequenceEmpty", [], ["none"], dtype=DOUBLE),
        N("Loop", ["n", "", "none"], ["sines"], body=step),
        N("Identity", ["sines"], ["same"]),
        N("SequenceErase", ["same", "minus"], ["fewer"]),
        N("SequenceErase", ["fewer"], ["fewest"]),
        N("ConcatFromSequence", ["fewest"], ["stacked"], axis=-1, new_axis=1),
        N("SplitToSequence", ["x", "two"], ["pairs"], axis=-1, keepdims=0),
        N("SequenceAt", ["pairs", "minus"], ["last"]),
        N("SplitToSequence", ["x", "sizes"], ["parts"], axis=1),
        N("SequenceAt", ["parts", "one"], ["part"]),
        N("Tanh", ["part"], ["t"]),
        N("SequenceConstruct", ["t", "last"], ["both"]),
        N("SequenceInsert", ["both", "t", "one"], ["three"]),
        N("ConcatFromSequence", ["three"], ["joined"], axis=1),
    ]  # fmt: skip
    known = (const("two", np.int32(2)), const("one", np.int64(1)), const("minus", np.int64(-1)))
    known += (const("sizes", np.int64([1, 4])),)
    return model(nodes, {"x": (70, 5)}, ["stacked", "joined"], known), {"x": (70, 5)}


def in_numpy(x: np.ndarray) -> list[np.ndarray]:
    """What sequences() gives."""
    t = np.tanh(x[:, 1:])
    return [np.sin(x[:-2]).T, np.concatenate([t, t, x[:, 4:]], 1)]


def scanned(s: np.ndarray, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """What scans() gives."""
    h, outs, products = s, [], []
    for t in range(len(x)):
        p = h * x[t]
        h = p + y[:, -1 - t]
        outs.append(np.tanh(h))
        products.append(p)
    return [h, np.stack(outs, 1), np.stack(products[::-1])]


# ONNX's evaluator has no directions, and takes no Loop with sequences.
IN_NUMPY = {scans: scanned, sequences: in_numpy}


@pytest.mark.parametrize("case", [by_size, until, scans, sequences])
def test_values_and_gradients(case) -> None:
    data, shapes = case()
    feed = feed_of(shapes)
    loaded = E.Model(data)
    plan = E.Plan(loaded, feed, list(feed), None, loaded.outputs)
    run = E.Run(plan)
    found = run.forward(feed)
    known = IN_NUMPY.get(case)
    wanted = known(**feed) if known else ReferenceEvaluator(data).run(None, feed)
    for got, want in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    ones = {n: np.ones_like(v) for n, v in found.items()}
    grads = run.backward(ones)

    def total(name: str, at: tuple, by: float) -> float:
        moved = {n: v.copy() for n, v in feed.items()}
        moved[name][at] += by
        return sum(float(v.sum()) for v in E.Run(plan).forward(moved).values())

    for name, value in feed.items():
        for at in [(0,) * value.ndim, (-1,) * value.ndim]:
            difference = (total(name, at, 1e-6) - total(name, at, -1e-6)) / 2e-6
            np.testing.assert_allclose(grads[name][at], difference, rtol=1e-6, atol=1e-7)


def test_the_other_branch_and_another_size() -> None:
    data, _ = by_size()
    loaded = E.Model(data)
    feed = feed_of({"x": (2, 2), "w": (2,)})
    found = E.Run(E.Plan(loaded, feed)).forward(feed)
    np.testing.assert_array_equal(found["y"], -feed["x"])


# --- refused ---


def body(*names: str, **given) -> object:
    nodes = given.get("nodes", [N("Identity", ["h"], ["h2"]), N("Identity", ["go"], ["go2"])])
    inputs = given.get("inputs", [info("i", INT), info("go", BOOL), info("h")])
    return graph(nodes, "step", inputs, [info(n) for n in names])


STEP = body("go2", "h2")
BRANCH = graph([N("Neg", ["x"], ["r"])], "branch", [], [info("r")])
ROWS = N("SplitToSequence", ["x"], ["rows"])
REFUSED = {
    "data": ("UNSUPPORTED", "the condition depends on data",
             [N("ReduceSum", ["x"], ["s"], keepdims=0), N("IsNaN", ["s"], ["c"]),
              N("If", ["c"], ["y"], then_branch=BRANCH, else_branch=BRANCH)]),
    "no end": ("LIMIT", "more than 65536 steps", [N("Loop", ["", "", "x"], ["y"], body=STEP)]),
    "no step": ("UNSUPPORTED", "output 1 has no step",
                [N("Loop", ["none", "", "x"], ["z", "y"], body=body("go2", "h2", "h2"))]),
    "random": ("UNSUPPORTED", "draws random numbers in a body",
               [N("Loop", ["one", "", "x"], ["y"], body=body("go2", "h2", nodes=[
                   N("RandomNormalLike", ["h"], ["h2"]), N("Identity", ["go"], ["go2"])]))]),
    "an unknown operator": ("UNSUPPORTED", "Frobnicate",
                            [N("Loop", ["one", "", "x"], ["y"], body=body("go2", "h2", nodes=[
                                N("Frobnicate", ["h"], ["h2"]), N("Identity", ["go"], ["go2"])]))]),
    "too few inputs": ("GRAPH", "the body has 3 inputs, expected 4",
                       [N("Loop", ["one", "", "x", "x"], ["y"], body=STEP)]),
    "too many results": ("GRAPH", "the body has 2 outputs for 1 states and 2 results",
                         [N("Loop", ["one", "", "x"], ["y", "z"], body=STEP)]),
    "no body": ("GRAPH", "attribute 'body' is missing", [N("Loop", ["one", "", "x"], ["y"])]),
    "a later value": ("GRAPH", "input 0 'late' is not defined",
                      [N("Loop", ["one", "", "x"], ["y"], body=body("go2", "h2", nodes=[
                          N("Neg", ["late"], ["h2"]), N("Identity", ["go"], ["go2"])])),
                       N("Neg", ["x"], ["late"])]),
    "a list": ("GRAPH", "attribute 'scan_input_axes' is not a list of 1 integers",
               [N("Scan", ["x"], ["y"], num_scan_inputs=1, scan_input_axes=[0, 1],
                  body=body("h2", nodes=[N("Neg", ["h"], ["h2"])], inputs=[info("h")]))]),
    "lengths": ("GRAPH", "scan input 1 has 1 steps, others 2",
                [N("Scan", ["x", "row"], ["y"], num_scan_inputs=2, body=body(
                    "h2", nodes=[N("Add", ["h", "k"], ["h2"])], inputs=[info("h"), info("k")]))]),
    "no sequence": ("GRAPH", "input 0 is no sequence", [N("SequenceAt", ["x", "one"], ["y"])]),
    "no tensor": ("GRAPH", "input 0 is a sequence", [ROWS, N("Neg", ["rows"], ["y"])]),
    "in a sequence": ("GRAPH", "input 1 is a sequence",
                      [ROWS, N("SequenceConstruct", ["x", "rows"], ["y"])]),
    "a result": ("UNSUPPORTED", "output 'y' is a sequence", [N("SplitToSequence", ["x"], ["y"])]),
    "a position": ("GRAPH", "position 2 in a sequence of 2 tensors",
                   [ROWS, N("SequenceAt", ["rows", "two"], ["y"])]),
    "a position by data": ("UNSUPPORTED", "input 1 depends on data",
                           [ROWS, N("ArgMax", ["x"], ["at"], keepdims=0),
                            N("SequenceAt", ["rows", "at"], ["y"])]),
    "parts": ("GRAPH", "part 1 has 2 elements of 1",
              [N("SplitToSequence", ["x", "sizes"], ["s"]), N("SequenceAt", ["s", "one"], ["y"])]),
    "parts of nothing": ("GRAPH", "parts of 0 elements",
                         [N("SplitToSequence", ["x", "none"], ["s"]),
                          N("SequenceAt", ["s", "one"], ["y"])]),
    "an empty one": ("UNSUPPORTED", "the sequence is empty",
                     [N("SequenceEmpty", [], ["s"]),
                      N("ConcatFromSequence", ["s"], ["y"], axis=0)]),
    "nothing to erase": ("GRAPH", "the sequence is empty",
                         [N("SequenceEmpty", [], ["s"]), N("SequenceErase", ["s"], ["t"]),
                          N("SequenceAt", ["t", "one"], ["y"])]),
    "an attribute": ("GRAPH", "attribute 'axis' is no integer",
                     [N("SplitToSequence", ["x"], ["s"], axis=0.5),
                      N("SequenceAt", ["s", "one"], ["y"])]),
    "steps": ("GRAPH", "result 0 of a step is a sequence",
              [N("Loop", ["one", "", "x"], ["h", "y"], body=body("go2", "h2", "s", nodes=[
                  N("SplitToSequence", ["h"], ["s"]), N("Identity", ["h"], ["h2"]),
                  N("Identity", ["go"], ["go2"])]))]),
    "a condition": ("GRAPH", "the condition is a sequence",
                    [ROWS, N("If", ["rows"], ["y"], then_branch=BRANCH, else_branch=BRANCH)]),
    "scanned": ("GRAPH", "scan input 0 is a sequence",
                [ROWS, N("Scan", ["rows"], ["y"], num_scan_inputs=1, body=body(
                    "h2", nodes=[N("Neg", ["h"], ["h2"])], inputs=[info("h")]))]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    code, text, nodes = REFUSED[name]
    known = (const("none", np.int64(0)), const("one", np.int64(1)), const("row", [[1.0]]))
    known += (const("two", np.int64(2)), const("sizes", np.int64([1, 2])))
    with pytest.raises(E.EngineError, match=code) as caught:
        E.Plan(E.Model(model(nodes, {"x": (2, 1)}, ["y"], known)), {"x": np.zeros((2, 1))})
    assert text in str(caught.value)
