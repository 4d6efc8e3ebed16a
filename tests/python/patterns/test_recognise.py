"""Recognised patterns: one operator in place of many, with the numbers of the plain plan."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import numpy_helper

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer, arrays, compare


def rms_norm(w, x, scale, *, axis=-1, eps=1e-6, square="pow", inverse="reciprocal", swap=False):
    """The pattern as models write it, in one of its forms."""
    squared = w("Pow", x, w.constant(2)) if square == "pow" else w("Mul", x, x)
    mean = w("ReduceMean", squared, w.constant([axis], np.int64), keepdims=1)
    root = w("Sqrt", w("Add", mean, w.constant(eps)))
    inv = w("Reciprocal", root) if inverse == "reciprocal" else w("Div", w.constant(1), root)
    normal = w("Mul", inv, x) if swap else w("Mul", x, inv)
    return w("Mul", normal, scale) if swap else w("Mul", scale, normal)


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


@pytest.mark.parametrize("change", ["axis", "power"])
def test_what_only_looks_like_rms_norm_stays(change):
    w = Writer()
    shapes = {"x": (5, 6, 6), "w": (6,)}
    y = rms_norm(w, "x", "w", axis=1 if change == "axis" else -1)
    if change == "power":
        w.constants[0].CopyFrom(numpy_helper.from_array(np.float32(4), "c0"))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == plain.forward


def test_one_switch_gives_the_plain_plan():
    w = Writer()
    shapes = {"x": (3, 8), "w": (8,)}
    y = rms_norm(w, "x", "w")
    model, feed = w.model(shapes, [y]), arrays(shapes)
    assert E.Plan(model, feed, ["w"], None, [y]).info.n_launches_forward == 1
    assert E.Plan(model, feed, ["w"], None, [y], plain=True).info.n_launches_forward == 7
