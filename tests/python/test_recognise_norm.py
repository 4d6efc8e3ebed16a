"""Norms beyond the plain RMS pattern: without weight, by division, centred, with bias."""

from __future__ import annotations

import numpy as np
import pytest
from recognise import Writer, arrays, compare

LAST = [-1]


def mean(w: Writer, x: str) -> str:
    """Mean over the last axis."""
    return w("ReduceMean", x, w.constant(LAST, np.int64), keepdims=1)


def normalised(w: Writer, x: str, form: str) -> str:
    """x / sqrt(mean(x^2) + eps)"""
    square = w("Mul", x, x) if form == "div" else w("Pow", x, w.constant(2))
    root = w("Sqrt", w("Add", w.constant(1e-5), mean(w, square)))
    if form == "div":
        return w("Div", x, root)
    return w("Mul", w("Reciprocal", root), x)


@pytest.mark.quick
@pytest.mark.parametrize("form", ["div", "reciprocal"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (4, 1, 129)])
def test_rms_norm_without_weight(form, shape):
    w = Writer()
    y = normalised(w, "x", form)
    fast, plain = compare(w.model({"x": shape}, [y]), arrays({"x": shape}), [y])
    assert fast.forward == 1 < plain.forward


def test_rms_norm_with_a_weight_of_another_shape():
    w = Writer()
    shapes = {"x": (5, 6, 6), "w": (6, 6)}
    y = w("Mul", normalised(w, "x", "reciprocal"), "w")
    fast, _ = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 2


@pytest.mark.quick
@pytest.mark.parametrize("form", ["div", "reciprocal"])
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64)])
def test_layer_norm(form, weight, bias, shape):
    w = Writer()
    shapes = {"x": shape}
    y = normalised(w, w("Sub", "x", mean(w, "x")), form)
    if weight:
        shapes["w"] = shape[-1:]
        y = w("Mul", "w", y)
    if bias:
        shapes["b"] = shape[-1:]
        y = w("Add", "b", y)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 1 < plain.forward
    assert fast.backward == 1


def test_centred_by_another_mean_is_rms_norm():
    w = Writer()
    shapes = {"x": (4, 8), "z": (4, 8), "w": (8,)}
    y = w("Mul", "w", normalised(w, w("Sub", "x", mean(w, "z")), "reciprocal"))
    fast, _ = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 3


def test_residual_after_layer_norm_is_no_bias():
    w = Writer()
    shapes = {"x": (4, 8), "w": (8,), "r": (4, 8)}
    y = w("Mul", "w", normalised(w, w("Sub", "x", mean(w, "x")), "reciprocal"))
    z = w("Add", y, "r")
    fast, _ = compare(w.model(shapes, [z]), arrays(shapes), [z])
    assert fast.forward == 2
