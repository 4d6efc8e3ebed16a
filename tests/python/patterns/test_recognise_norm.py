"""Norms beyond the plain RMS pattern: without weight, by division, centred, with bias."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, arrays, compare

LAST = [-1]


def mean(w: Writer, x: str) -> str:
    """Mean over the last axis."""
    return w("ReduceMean", x, w.constant(LAST, np.int64), keepdims=1)


def normalised(w: Writer, x: str, form: str) -> str:
    """x / sqrt(mean(x^2) + eps)"""
    square = w("Mul", x, x) if form == "div" else w("Pow", x, w.constant(2))
    under = w("Add", w.constant(1e-5), mean(w, square))
    if form == "power":
        return w("Mul", w("Pow", under, w.constant(-0.5)), x)
    root = w("Pow", under, w.constant(0.5)) if form == "half" else w("Sqrt", under)
    if form in ("div", "half"):
        return w("Div", x, root)
    return w("Mul", w("Reciprocal", root), x)


@pytest.mark.quick
@pytest.mark.parametrize("form", ["div", "reciprocal", "power", "half"])
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
@pytest.mark.parametrize("form", ["div", "reciprocal", "power", "half"])
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


def mean_by(w: Writer, x: str, form: str, width: int, kept: list[int]) -> str:
    """As torch.var and torch.var_mean are exported."""
    axes = w.constant(LAST if form == "kept" else [len(kept) - 1], np.int64)
    if form == "kept":
        return w("ReduceMean", x, axes, keepdims=1)
    shape = w.constant(kept, np.int64)
    if form == "sum":
        y = w("Reshape", w("ReduceSum", x, axes, keepdims=0), shape)
        return w("Div", w("Expand", y, shape), w.constant(width))
    return w("Expand", w("Reshape", w("ReduceMean", x, axes, keepdims=0), shape), shape)


@pytest.mark.parametrize("first", ["kept", "put back", "sum"])
@pytest.mark.parametrize("second", ["kept", "put back", "sum"])
@pytest.mark.parametrize("inverse", [False, True])
def test_layer_norm_with_the_weight_in_front_of_the_variance(first, second, inverse):
    """w * (x - x.mean()) / sqrt(x.var() + eps) + b: the variance centres x once more."""
    w = Writer()
    shapes, kept = {"x": (2, 5, 64), "w": (64,), "b": (64,)}, [2, 5, 1]
    centred = w("Sub", "x", mean_by(w, "x", first, 64, kept))
    again = w("Sub", "x", mean_by(w, "x", second, 64, kept))
    variance = mean_by(w, w("Mul", again, again), second, 64, kept)
    root = w("Sqrt", w("Add", variance, w.constant(1e-5)))
    y = w("Mul", "w", centred)
    y = w("Mul", y, w("Reciprocal", root)) if inverse else w("Div", y, root)
    y = w("Add", y, "b")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast == (1, 1) and plain.forward > 5


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_layer_norm_by_a_variance_that_is_centred_again(times, stopped):
    """As gradd translates torch.var: means without gradients, and the mean of what is left."""
    w = Writer()
    left, shapes = "x", {"x": (2, 5, 64), "w": (64,), "b": (64,)}
    for _ in range(times):
        middle = mean(w, left)
        middle = w("StopGradient", middle, domain="com.gradd") if stopped else middle
        left = w("Sub", left, middle)
    root = w("Sqrt", w("Add", mean(w, w("Mul", left, left)), w.constant(1e-5)))
    y = w("Add", w("Mul", "w", w("Div", w("Sub", "x", mean(w, "x")), root)), "b")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast == (1, 1) and plain.forward > 5


@pytest.mark.parametrize("form", ["div", "reciprocal", "power", "half"])
def test_rms_norm_with_the_weight_on_x(form):
    w = Writer()
    shapes = {"x": (2, 5, 64), "w": (64,)}
    under = w("Add", mean(w, w("Mul", "x", "x")), w.constant(1e-5))
    y = w("Mul", "x", "w")
    if form in ("div", "half"):
        y = w("Div", y, w("Sqrt", under) if form == "div" else w("Pow", under, w.constant(0.5)))
    else:
        power = w("Pow", under, w.constant(-0.5))
        y = w("Mul", w("Reciprocal", w("Sqrt", under)) if form == "reciprocal" else power, y)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast == (1, 1) and plain.forward > 3


@pytest.mark.parametrize("change", ["width", "axis", "source", "order"])
def test_what_only_looks_like_a_variance(change):
    w = Writer()
    shapes = {"x": (4, 4, 4), "z": (4, 4, 4)}
    other = "z" if change == "source" else "x"
    axis = w.constant([1 if change == "axis" else 2], np.int64)
    width = w.constant(5 if change == "width" else 4)
    centred = w("Sub", "x", mean(w, "x"))
    again = w("Sub", other, w("Div", w("ReduceSum", other, axis, keepdims=1), width))
    root = w("Sqrt", w("Add", mean(w, w("Mul", again, again)), w.constant(1e-5)))
    y = w("Div", root, centred) if change == "order" else w("Div", centred, root)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast == plain


@pytest.mark.parametrize("back", ["Unsqueeze", "Reshape"])
@pytest.mark.parametrize("centred", [False, True])
def test_a_mean_over_another_axis_of_the_same_size(back, centred):
    """Put back behind the last axis, it has the shape of a mean over that one."""
    w = Writer()
    shapes = {"x": (2, 4, 4), "w": (4,)}

    def other_mean(x: str) -> str:
        m = w("ReduceMean", x, w.constant([1], np.int64), keepdims=0)
        return w(back, m, w.constant([2] if back == "Unsqueeze" else [2, 4, 1], np.int64))

    x = w("Sub", "x", other_mean("x")) if centred else "x"
    under = (mean if centred else lambda w, v: other_mean(v))(w, w("Mul", x, x))
    root = w("Sqrt", w("Add", under, w.constant(1e-5)))
    y = w("Neg", w("Mul", w("Div", x, root), "w"))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    # centred by another mean it is an RMS norm of the difference
    assert fast.forward == (4 if centred else plain.forward)


@pytest.mark.parametrize("power", [-0.25, 0.5, -1.0])
def test_other_powers_are_no_norm(power):
    w = Writer()
    under = w("Add", w.constant(1e-5), mean(w, w("Mul", "x", "x")))
    y = w("Mul", "x", w("Pow", under, w.constant(power)))
    fast, plain = compare(w.model({"x": (3, 7)}, [y]), arrays({"x": (3, 7)}), [y])
    assert fast == plain


def test_residual_after_layer_norm_is_no_bias():
    w = Writer()
    shapes = {"x": (4, 8), "w": (8,), "r": (4, 8)}
    y = w("Mul", "w", normalised(w, w("Sub", "x", mean(w, "x")), "reciprocal"))
    z = w("Add", y, "r")
    fast, _ = compare(w.model(shapes, [z]), arrays(shapes), [z])
    assert fast.forward == 2
