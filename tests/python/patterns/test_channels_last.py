"""Graphs whose convolutions read channels-last tensors: the same numbers, few transpositions."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Sizes, Writer, arrays, run
from helpers.models import spatial_graphs
from helpers.selection import one_in

WHOLE = 200
TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
SHAPES = {"x": (2, 16, 6, 5), "w": (16, 16, 3, 3), "v": (16, 16, 3, 3)}
SAME = {"pads": [1, 1, 1, 1]}


def compared(w: Writer, shapes: dict, y: str) -> Sizes:
    """The output and all gradients beside those of the plain plan; the recognised plan's sizes."""
    feed = {n: 0.4 * a for n, a in arrays(shapes).items()}
    model = w.model(shapes, [y])
    fast, plain = (run(model, feed, [y], p) for p in (False, True))
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-3, atol=1e-3)
    most = max(float(np.abs(g).max(initial=0)) for g in plain[1].values() if g is not None)
    for name, want in plain[1].items():
        assert (want is None) == (fast[1][name] is None), name
        if want is not None:  # one that is zero but for rounding is measured by the others
            scale = max(float(np.abs(want).max(initial=0)), 1e-2 * most, 1e-6)
            np.testing.assert_allclose(fast[1][name] / scale, want / scale, atol=1e-3, err_msg=name)
    return fast[2]


@pytest.mark.parametrize("seed", one_in(12, range(WHOLE)))
def test_random_graphs(seed: int) -> None:
    compared(*spatial_graphs.build(seed))


def test_two_convolutions_have_a_transposition_at_either_end() -> None:
    """None at all where there is no library."""
    w = Writer()
    hidden = w("Relu", w("Conv", w("Neg", "x"), "w", **SAME))
    y = w("Abs", w("Relu", w("Conv", hidden, "v", **SAME)))
    sizes = compared(w, SHAPES, y)
    assert sizes.forward in (6, 8)


def test_transpositions_of_the_model_vanish() -> None:
    w = Writer()
    hidden = w("Conv", w("Transpose", "x", perm=TO_FIRST), "w", **SAME)
    y = w("Neg", w("Transpose", w("Relu", hidden), perm=TO_LAST))
    sizes = compared(w, {**SHAPES, "x": (2, 6, 5, 16), "v": (1,)}, y)
    assert sizes == Sizes(3, 4) or sizes.backward == 6  # the two of the model, without a library


def test_a_transposition_of_the_model_serves_a_convolution() -> None:
    w = Writer()
    hidden = w("Softmax", "x", axis=1)
    turned = w("Softmax", w("Transpose", hidden, perm=TO_LAST), axis=1)
    y = w("Transpose", w("Relu", w("Conv", hidden, "w", **SAME)), perm=TO_LAST)
    sizes = compared(w, {**SHAPES, "v": (1,)}, w("Add", y, turned))
    assert sizes.forward in (6, 7)


def test_one_transposition_serves_all_readers() -> None:
    w = Writer()
    hidden = w("Neg", "x")
    pair = [w("Conv", hidden, name, **SAME) for name in ("w", "v")]
    sizes = compared(w, SHAPES, w("Add", *pair))
    assert sizes.forward in (4, 6)


def test_a_sum_over_positions_needs_none() -> None:
    w = Writer()
    hidden = w("Conv", w("Transpose", "x", perm=TO_FIRST), "w", **SAME)
    y = w("Neg", w("ReduceMean", w("Relu", hidden), w.constant([2, 3], np.int64), keepdims=0))
    sizes = compared(w, {**SHAPES, "x": (2, 6, 5, 16), "v": (1,)}, y)
    assert sizes.forward in (4, 5)


def test_an_order_that_mixes_channels_and_positions() -> None:
    """What joins axes 1 and 2, or takes them apart, reads the tensor as the model has it."""
    w = Writer()
    hidden = w("Relu", w("Conv", "x", "w", **SAME))
    joined = w("Reshape", hidden, w.constant([2, 96, 5], np.int64))
    folded = w("ReduceMean", hidden, w.constant([2], np.int64), keepdims=0)
    y = w("Add", w("Softmax", joined, axis=1), w("ReduceSum", folded, keepdims=1))
    compared(w, {**SHAPES, "v": (1,)}, y)


def test_a_weight_that_is_computed() -> None:
    """Standardised filters keep the form that they have."""
    w = Writer()
    mean = w("ReduceMean", "w", w.constant([1, 2, 3], np.int64))
    filters = w("Mul", w("Sub", "w", mean), "v")
    compared(w, SHAPES, w("Relu", w("Conv", "x", filters, **SAME)))
