"""A value in the middle of a pattern that has other readers is not computed twice."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import BINARY

from helpers.graphs.onnx_writer import Writer, arrays, compare


def planned(w: Writer, shapes: dict, outputs: list[str], folder: Path) -> Counter:
    """Operators of the forward; the numbers are those of the plain plan."""
    compare(w.model(shapes, outputs), arrays(shapes), outputs)
    return operators(w, shapes, outputs, folder)


def operators(w: Writer, shapes: dict, outputs: list[str], folder: Path) -> Counter:
    path = folder / "model.onnx"
    path.write_bytes(w.proto(shapes, outputs))
    given = [f"{n}={'x'.join(map(str, s))}" for n, s in shapes.items()]
    command = [str(BINARY), "explain", str(path), *given, "--json"]
    plan = json.loads(subprocess.check_output(command, text=True, timeout=60))
    return Counter(r["op"] for r in plan["rows"] if r["phase"] == "forward" and r["launch"] >= 0)


def normalised(w: Writer, x: str) -> str:
    mean = w("ReduceMean", w("Mul", x, x), w.constant([-1], np.int64), keepdims=1)
    return w("Div", x, w("Sqrt", w("Add", mean, w.constant(1e-5))))


def centred(w: Writer, x: str) -> str:
    return w("Sub", x, w("ReduceMean", x, w.constant([-1], np.int64), keepdims=1))


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["Sigmoid", "Relu"])
def test_a_gate_that_is_read_elsewhere(kind, tmp_path):
    w = Writer()
    gate = w(kind, "g")
    outputs = [w("Mul", gate, "u"), w("Tanh", gate)]
    ops = planned(w, {"g": (4, 8), "u": (4, 8)}, outputs, tmp_path)
    assert ops == {kind: 1, "Mul": 1, "Tanh": 1}


def test_a_gate_for_two_products(tmp_path):
    """A highway: neither product takes the gate over."""
    w = Writer()
    gate = w("Sigmoid", "g")
    outputs = [w("Add", w("Mul", gate, "u"), w("Mul", w("Sub", w.constant(1), gate), "r"))]
    ops = planned(w, {"g": (4, 8), "u": (4, 8), "r": (4, 8)}, outputs, tmp_path)
    assert ops["Sigmoid"] == 1 and "GatedActivation" not in ops


def test_a_normalised_value_that_is_read_before_its_weight(tmp_path):
    w = Writer()
    normal = normalised(w, "x")
    outputs = [w("Mul", "w", normal), w("Tanh", normal)]
    ops = planned(w, {"x": (4, 8), "w": (8,)}, outputs, tmp_path)
    assert ops == {"RMSNormalization": 1, "Mul": 1, "Tanh": 1}


def test_a_layer_norm_that_is_read_before_its_bias(tmp_path):
    w = Writer()
    normal = w("Mul", "w", normalised(w, centred(w, "x")))
    outputs = [w("Add", normal, "b"), w("Tanh", normal)]
    ops = planned(w, {"x": (4, 8), "w": (8,), "b": (8,)}, outputs, tmp_path)
    assert ops == {"LayerNormalization": 1, "Add": 1, "Tanh": 1}


def test_a_norm_that_is_read_before_its_cast(tmp_path):
    w = Writer()
    narrow = w("Neg", w("Cast", "x", to=16))
    normal = w("Mul", "w", normalised(w, w("Cast", narrow, to=1)))
    outputs = [w("Cast", w("Tanh", w("Cast", normal, to=16)), to=1), w("Tanh", normal)]
    ops = planned(w, {"x": (4, 8), "w": (8,)}, outputs, tmp_path)
    assert ops["RMSNormalization"] == 1


@pytest.mark.parametrize("leak", ["softmax", "cast", ""])
def test_probabilities_that_are_read_keep_the_chain_in_bf16_as_well(leak, tmp_path):
    """They are read before the cast or after it: computing them twice gains nothing."""
    w = Writer()
    q, k, v = (w("Cast", n, to=16) for n in "qkv")
    scores = w("MatMul", q, w("Transpose", k, perm=[0, 1, 3, 2]))
    weights = w("Softmax", w("Cast", scores, to=1), axis=-1)
    narrow = w("Cast", weights, to=16)
    y = w("Cast", w("MatMul", narrow, v), to=1)
    outputs = [w("Neg", y)]
    if leak:
        outputs.append(w("Neg", w("Cast", narrow if leak == "cast" else weights, to=1)))
    ops = operators(w, dict.fromkeys("qkv", (2, 3, 8, 8)), outputs, tmp_path)
    assert (ops["FusedAttention"], ops["Softmax"]) == ((0, 1) if leak else (1, 0))
