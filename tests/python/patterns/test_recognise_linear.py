"""Recognised linear layers: MatMul and Add, and Gemm, with the bias in the product."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, arrays, compare


@pytest.mark.quick
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 24), (1, 2, 3, 33), (2, 1, 1)])
def test_product_and_bias(transposed, swap, shape):
    w, n = Writer(), 6
    k = shape[-1]
    shapes = {"x": shape, "w": (n, k) if transposed else (k, n), "b": (n,)}
    weight = w("Transpose", "w", perm=[1, 0]) if transposed else "w"
    product = w("MatMul", "x", weight)
    y = w("Add", "b", product) if swap else w("Add", product, "b")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 1 and plain.forward == 2
    assert fast.backward == 3  # dx, dw, db


def test_expanded_bias():
    """GPT-NeoX Japanese: the bias of the attention's last layer, expanded to the residual."""
    w = Writer()
    shapes = {"x": (2, 5, 8), "w": (8, 6), "b": (6,)}
    bias = w("Expand", "b", w.constant([2, 5, 6], np.int64))
    y = w("Add", w("MatMul", "x", "w"), bias)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert (fast.forward, plain.forward) == (1, 3)


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_between_views(transposed):
    w = Writer()
    shapes = {"x": (2, 5, 8), "w": (6, 8) if transposed else (8, 6), "b": (6,)}
    rows = w("Reshape", "x", w.constant([-1, 8], np.int64))
    y = w("Gemm", rows, "w", "b", transB=transposed)
    y = w("Reshape", y, w.constant([2, 5, 6], np.int64))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast == plain  # one product either way: its name changes


def test_layers_in_a_row():
    w = Writer()
    shapes = {"x": (4, 9), "u": (16, 9), "a": (16,), "v": (16, 5), "b": (5,)}
    hidden = w("Add", w("MatMul", "x", w("Transpose", "u", perm=[1, 0])), "a")
    y = w("Add", w("MatMul", w("Tanh", hidden), "v"), "b")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 3 and plain.forward == 5


def test_a_product_that_is_read_elsewhere_is_computed_once():
    w = Writer()
    shapes = {"x": (4, 8), "w": (8, 5), "b": (5,)}
    product = w("MatMul", "x", "w")
    y, z = w("Add", product, "b"), w("Tanh", product)
    fast, plain = compare(w.model(shapes, [y, z]), arrays(shapes), [y, z])
    assert fast == plain
    fast, plain = compare(w.model(shapes, [y, product]), arrays(shapes), [y, product])
    assert fast == plain
    fast, plain = compare(w.model(shapes, [y, z]), arrays(shapes), [y])
    assert fast.forward == 1  # the other reader is not wanted


@pytest.mark.parametrize("case", ["batch", "row", "column", "scaled"])
def test_what_only_looks_like_a_linear_layer_stays(case):
    w = Writer()
    shapes = {"x": (2, 4, 6), "w": (6, 6), "b": (6,)}
    if case == "batch":
        shapes["w"] = (2, 6, 6)
    elif case == "row":
        shapes["b"] = (4, 6)
    elif case == "column":
        shapes["b"] = (4, 1)
    if case == "scaled":
        shapes["x"] = (4, 6)
        y = w("Gemm", "x", "w", "b", alpha=0.5)
    else:
        y = w("Add", w("MatMul", "x", "w"), "b")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast == plain


def test_random_shapes():
    rng = np.random.default_rng(5)
    for _ in range(25):
        w = Writer()
        lead = [int(v) for v in rng.integers(1, 6, rng.integers(1, 4))]
        k, n = (int(v) for v in rng.integers(1, 70, 2))
        shapes = {"x": (*lead, k), "w": (n, k), "b": (n,)}
        y = w("Add", w("MatMul", "x", w("Transpose", "w")), "b")
        fast, _ = compare(w.model(shapes, [y]), arrays(shapes, int(n)), [y])
        assert fast.forward == 1
