"""Every test case of every ONNX operator against onnx.reference: the meaning is ONNX's, not ours.

The cases come from the operator table itself, through libgradd.so, so there is no second list.
SKIPPED names the cases that the reference evaluator cannot judge, with the reason. Composites,
which have no kernel, run as a plan; of operators with an expansion the plain plan, which is that,
is compared. ONNX's own tests of nodes follow, for operators whose attributes have many forms.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase
from onnx.reference import ReferenceEvaluator

from helpers import BUILD
from helpers.graphs import engine as E

pytestmark = pytest.mark.quick

LIBRARY = BUILD / "lib" / "libgradd.so"
RANDOM = 1 << 2  # GRADD_OP_RANDOM of kernels/contract/op.h

DTYPES: dict[str, tuple[Any, int]] = {
    "f32": (np.float32, TensorProto.FLOAT),
    "f64": (np.float64, TensorProto.DOUBLE),
    "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
    "f16": (np.float16, TensorProto.FLOAT16),
    "i32": (np.int32, TensorProto.INT32),
    "i64": (np.int64, TensorProto.INT64),
    "i8": (np.int8, TensorProto.INT8),
    "u8": (np.uint8, TensorProto.UINT8),
    "i16": (np.int16, TensorProto.INT16),
    "u16": (np.uint16, TensorProto.UINT16),
    "bool": (np.bool_, TensorProto.BOOL),
}

# (operator, part of the case's text or "" for all): why the reference cannot judge it
_EMPTY = "the reference cannot reshape or write empty arrays"
_OURS = "statistics are outputs of ours"
_NEGATIVE_PAD = "the reference pads with numpy, which refuses negative pads"
_OLD_FORM = "axes as an attribute are of before opset 13; the row takes both forms"
SKIPPED: dict[tuple[str, str], str] = {
    ("Cast", "nan"): "out-of-range conversions are undefined in ONNX; ours saturate",
    ("Cast", "1e30"): "out-of-range conversions are undefined in ONNX; ours saturate",
    ("OneHot", "i64[1]={5}"): "the reference takes the depth as a scalar only",
    ("CumSum", "i64[1]"): "the reference takes the axis as a scalar only",
    ("Pow", "={-1}"): "numpy refuses negative powers of integers",
    ("GatherND", "i64[2,0]"): _EMPTY,
    ("GatherElements", "i64[1,4,2]"): "the reference wants equal sizes, ONNX only not larger ones",
    ("SoftmaxCrossEntropyLoss", "f32[0,3]"): _EMPTY,
    (
        "SoftmaxCrossEntropyLoss",
        "1000",
    ): "the reference overflows where ours takes the maximum away",
    ("NegativeLogLikelihoodLoss", "f32[0,3]"): _EMPTY,
    ("NegativeLogLikelihoodLoss", "={-1,-1}"): "no row counts: 0 / 0 is NaN, as in torch",
    ("MaxPool", "SAME_LOWER"): "the reference's windows are not those of ONNX's node tests",
    ("MaxPool", '"VALID" -> 2'): "the reference gives places of other elements",
    ("GlobalMaxPool", "f32[2,3]"): "the reference takes the maximum of all without spatial axes",
    ("Resize", ""): "sizes must be known when a plan is made; test_onnx_nodes.py compares",
    ("ReduceL1", "i64["): "axes must be known when a plan is made; test_engine.py compares",
    ("Col2Im", ""): "sizes must be known when a plan is made; test_onnx_nodes.py compares",
    ("GridSample", "bicubic"): "the reference calls this mode cubic",
    ("GridSample", "f32[1,2,1,1]"): "the reference divides by zero to reflect within one element",
    ("GridSample", "f32[0,2,3,4]"): _EMPTY,
    ("GridSample", "f32[1,0,2,2]"): _EMPTY,
    ("Attention", "f32[1,2,0,4]"): _EMPTY,
    ("Attention", "f32[1,0,2,4]"): _EMPTY,
    ("Pad", "={1,-1,0,2}"): _NEGATIVE_PAD,
    ("Pad", "={0,-2,0,-1}"): _NEGATIVE_PAD,
    ("Pad", "={2,-1,1,5}"): _NEGATIVE_PAD,
    ("ReduceSumSquare", "i32"): "the reference answers in i64",
    ("ReduceLogSumExp", "f32[] "): "the reference cannot write into a scalar",
    ("Squeeze", "axes="): _OLD_FORM,
    ("Unsqueeze", "axes="): _OLD_FORM,
    ("LogSoftmax", "f32[0,4]"): _EMPTY,
    ("LogSoftmax", "={90,1000}"): "the reference takes the logarithm of an underflown softmax",
    ("GroupNormalization", "f32[2] f32[2]"): "the reference fails on the form of opset 18",
    ("GroupNormalization", "f32[2,0,5]"): "the reference fails on the form of opset 18",
    ("TopK", "i64[]"): "the reference takes k as a vector only",
    ("ArgMax", "nan,nan"): "which of several NaN counts is not said",
    ("ArgMin", "nan,nan"): "which of several NaN counts is not said",
    ("Cast", "(-300,300) | to=3"): "out-of-range conversions are undefined in ONNX; ours saturate",
    ("OneHot", "bool[2]"): "the reference knows no booleans here",
    ("Trilu", "-9223372036854775807"): "the reference cannot hold the number",
    ("CumSum", "f32[3,2500]"): "the reference sums in f32, ours in f64",
    ("BatchNormalization", "f32[5,3,2]"): "before opset 14 the reference normalises by a mixture",
    ("GroupNormalization", "-> 3"): _OURS,
    ("RMSNormalization", "-> 2"): _OURS,
    ("Pad", "={0,-3,2,0,70,4}"): _NEGATIVE_PAD,
    ("Pad", "={-2,11,8,-1}"): _NEGATIVE_PAD,
    ("Pad", "i64[0]"): _EMPTY,
    ("Conv", "pads=[-1,2,"): _NEGATIVE_PAD,
    ("ConvTranspose", "group=2"): "the reference takes groups over two axes only",
    ("ConvTranspose", "f32[0,2,3]"): _EMPTY,
    ("QuantizeLinear", "={-inf,inf"): "the reference converts infinities before it clips",
    ("ReduceLogSumExp", "-inf,-inf"): "of -inf alone the reference says NaN, torch and ours -inf",
}

# Rows that take the form of a later opset as well, which is what their cases show.
NEWER_FORM = {"GroupNormalization": 21, "DequantizeLinear": 21, "QuantizeLinear": 21}


class Case:
    """One executed case: its node, inputs and our outputs."""

    def __init__(self, answer: bytes) -> None:
        head, _, rest = answer.partition(b"\0")
        self.meta: dict[str, Any] = json.loads(head)
        self._rest, self._at = rest, 0
        self.inputs = [self._take(v) for v in self.meta["in"]]
        self.outputs = [self._take(v) for v in self.meta["out"]]
        self.kernel = any(view for view in self.meta["out"])

    def _take(self, view: dict[str, Any] | None) -> np.ndarray | None:
        if view is None:
            return None
        dtype = np.dtype(DTYPES[view["dtype"]][0])
        count = int(np.prod(view["shape"], dtype=np.int64))
        array = np.frombuffer(self._rest, dtype, count, self._at).reshape(view["shape"])
        self._at += count * dtype.itemsize
        return array

    def _kind(self, view: dict[str, Any] | None) -> int:
        """Element type of an output; those of composites are of the type of the first input."""
        return DTYPES[(view or self.meta["in"][0])["dtype"]][1]

    def model(self) -> onnx.ModelProto:
        """A model that holds only this node."""
        names = [f"x{i}" if x is not None else "" for i, x in enumerate(self.inputs)]
        outs = [f"y{j}" for j in range(len(self.outputs))]
        attrs = {a["name"]: a["value"] for a in self.meta["attrs"]}
        node = helper.make_node(self.meta["op"], names, outs, **attrs)
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node],
            "case",
            [
                value(name, DTYPES[view["dtype"]][1], view["shape"])
                for name, view in zip(names, self.meta["in"], strict=True)
                if name
            ],
            [value(name, self._kind(view), None) for name, view in zip(outs, self.meta["out"])],
        )
        opset = max(self.meta["opset"], NEWER_FORM.get(self.meta["op"], 0))
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10
        )

    def planned(self, plain: bool) -> list[np.ndarray]:
        """What a plan of this node alone computes; the plain one is its expansion."""
        feeds = {f"x{i}": x for i, x in enumerate(self.inputs) if x is not None}
        plan = E.Plan(E.Model(self.model().SerializeToString()), feeds, plain=plain)
        return list(E.Run(plan).forward(feeds).values())

    def expected(self) -> list[np.ndarray]:
        """What the reference evaluator computes."""
        feeds = {f"x{i}": x for i, x in enumerate(self.inputs) if x is not None}
        return ReferenceEvaluator(self.model()).run(None, feeds)


def cases() -> Iterator[Case]:
    """All cases, run by the library."""
    library = ctypes.CDLL(str(LIBRARY))
    export = library.gradd_case_export
    export.restype = ctypes.c_int64
    export.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    message = library.gradd_error_message
    message.restype = ctypes.c_char_p
    buffer = ctypes.create_string_buffer(1 << 24)
    index = 0
    while size := export(index, buffer, len(buffer)):
        assert size > 0, f"case {index}: {message().decode()}"
        assert size <= len(buffer), f"case {index} needs {size} bytes"
        yield Case(buffer.raw[:size])
        index += 1
    assert index > 300, f"only {index} cases: is the operator table linked?"


def skip_reason(case: Case) -> str | None:
    """Why a case is not compared; None if it is."""
    meta = case.meta
    if meta["domain"]:
        return "ours, not ONNX's"
    if meta["flags"] & RANDOM:
        return "random numbers"
    for (op, part), reason in SKIPPED.items():
        if meta["op"] == op and part in meta["text"]:
            return reason
    return None


def difference(case: Case, outputs: list[np.ndarray]) -> str | None:
    """The first disagreement of outputs of a case with the reference, or None."""
    with np.errstate(all="ignore"):
        expected = case.expected()
    tolerance = max(case.meta["tol"], 1e-5)
    for j, (got, want) in enumerate(zip(outputs, expected, strict=False)):
        if got is None:
            continue
        want = np.asarray(want)
        if got.shape != want.shape:
            return f"output {j} has shape {got.shape}, reference {want.shape}"
        if got.dtype != want.dtype:
            return f"output {j} is {got.dtype}, reference {want.dtype}"
        if got.dtype.kind == "f":
            ok = np.allclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            ok = np.array_equal(got, want)
        if not ok:
            return f"output {j} differs: {got.ravel()[:8]}, reference {want.ravel()[:8]}"
    return None


def check_all(outputs: Callable[[Case], list[np.ndarray] | None]) -> dict[str, int]:
    """Compares all cases that `outputs` answers for; how many there were of each operator."""
    wrong: list[str] = []
    compared: dict[str, int] = {}
    for case in cases():
        name = case.meta["op"]
        if skip_reason(case):
            continue
        try:
            got = outputs(case)
            problem = difference(case, got) if got is not None else None
        except Exception as error:  # the reference's own failure is a finding too
            got, problem = [], f"fails: {type(error).__name__}: {error}"
        if got is not None:
            compared[name] = compared.get(name, 0) + 1
        if problem:
            wrong.append(f'{name} "{case.meta["text"]}" (opset {case.meta["opset"]}): {problem}')
    assert not wrong, "\n" + "\n".join(wrong)
    return compared


@pytest.mark.slow
def test_every_case_means_what_onnx_says() -> None:
    """Compares all cases and lists every disagreement."""
    compared = check_all(lambda case: case.outputs if case.kernel else case.planned(False))
    assert len(compared) > 40, sorted(compared)
    assert {"Attention", "RotaryEmbedding", "RMSNormalization"} <= compared.keys()


@pytest.mark.slow
def test_every_expansion_means_what_onnx_says() -> None:
    """The same with the plain plan, of all that has an expansion."""
    compared = check_all(lambda case: case.planned(True) if case.meta["expands"] else None)
    assert compared.keys() >= {"Attention", "RotaryEmbedding", "RMSNormalization", "Gelu", "Swish"}
    assert compared["LayerNormalization"] > 3


def test_comparison_notices_a_wrong_result() -> None:
    """A changed output must be reported, or the test above could not fail."""
    case = next(c for c in cases() if c.meta["op"] == "Add" and c.outputs[0].size > 1)
    assert difference(case, case.outputs) is None
    wrong = [case.outputs[0] + np.float32(0.5)]
    assert "differs" in (difference(case, wrong) or "")


# Operator, and how many tests of it there are at least.
TESTED_BY_ONNX = {"Conv": 6, "ConvTranspose": 11}


@functools.lru_cache(maxsize=1)
def node_tests() -> dict[str, list[TestCase]]:
    """Those of single nodes, by operator; the package makes all, in 5 s."""
    found: dict[str, list[TestCase]] = {name: [] for name in TESTED_BY_ONNX}
    for case in collect_testcases(None):
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type in found:
            found[nodes[0].op_type].append(case)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of making values
@pytest.mark.parametrize("name", TESTED_BY_ONNX)
@pytest.mark.parametrize("plain", [False, True])
def test_nodes_have_the_values_of_onnx_s_tests(name: str, plain: bool) -> None:
    """Plain plans compute expansions."""
    assert len(node_tests()[name]) >= TESTED_BY_ONNX[name]
    for case in node_tests()[name]:
        for inputs, expected in case.data_sets:
            names = [i.name for i in case.model.graph.input]
            feeds = dict(zip(names, inputs, strict=True))
            plan = E.Plan(E.Model(case.model.SerializeToString()), feeds, plain=plain)
            found = E.Run(plan).forward(feeds).values()
            for got, want in zip(found, expected, strict=True):
                assert got.shape == want.shape, case.name
                np.testing.assert_allclose(got, want, 1e-5, 1e-5, err_msg=case.name)
