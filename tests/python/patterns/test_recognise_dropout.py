"""Recognised dropout with a residual: one operator, the mask of the plain plan bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer, arrays, compare, run


def drop(w, x, ratio=0.3, training=True):
    return w("Dropout", x, w.constant(ratio), w.constant(training, np.bool_))


def same_bits(model, feed, outputs, seed, threads=0):
    """Recognised and plain plans of one seed agree to the bit; returns the recognised results."""
    fast, plain = (run(model, feed, outputs, p, threads, seed) for p in (False, True))
    for name in outputs:
        assert fast[0][name].tobytes() == plain[0][name].tobytes(), name
    for name, want in plain[1].items():
        assert fast[1][name].tobytes() == want.tobytes(), f"gradient of {name}"
    return fast, plain


@pytest.mark.quick
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 33), (2, 1, 129)])
def test_dropout_and_residual(swap, ratio, shape):
    w = Writer()
    shapes = {"x": shape, "r": shape}
    dropped = drop(w, "x", ratio)
    y = w("Add", "r", dropped) if swap else w("Add", dropped, "r")
    fast, plain = same_bits(w.model(shapes, [y]), arrays(shapes), [y], seed=11)
    assert fast[2].forward == 1 and plain[2].forward == 2
    np.testing.assert_array_equal(fast[1]["r"], plain[1]["r"])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_and_threaded(threads):
    w = Writer()
    shapes = {"x": (40, 1000), "r": (40, 1000)}
    y = w("Add", drop(w, "x"), "r")
    model, feed = w.model(shapes, [y]), arrays(shapes)
    fast, _ = same_bits(model, feed, [y], seed=5, threads=threads)
    one, _ = same_bits(model, feed, [y], seed=5, threads=1)
    assert fast[0][y].tobytes() == one[0][y].tobytes()
    other, _ = same_bits(model, feed, [y], seed=6, threads=threads)
    differ = (other[0][y] != fast[0][y]).mean()
    assert abs(differ - 2 * 0.3 * 0.7) < 5 * np.sqrt(0.42 * 0.58 / 40000)


def test_with_a_linear_layer_and_two_blocks():
    w = Writer()
    shapes = {"x": (6, 8), "u": (8, 8), "a": (8,), "v": (8, 8), "b": (8,)}
    one = w("Add", drop(w, w("Add", w("MatMul", "x", "u"), "a")), "x")
    two = w("Add", one, drop(w, w("Add", w("MatMul", w("Tanh", one), "v"), "b"), 0.6))
    model, feed = w.model(shapes, [two]), arrays(shapes)
    fast, plain = compare(model, feed, [two])
    assert fast.forward == 5  # two layers, two sums with dropout, tanh
    assert plain.forward == 9


def test_dropped_in_evaluation_mode_or_read_twice_stays():
    w = Writer()
    shapes = {"x": (4, 6), "r": (4, 6)}
    quiet = drop(w, "x", training=False)
    y = w("Add", quiet, "r")
    fast, plain = same_bits(w.model(shapes, [y]), arrays(shapes), [y], seed=2)
    assert fast[2] == plain[2]
    w = Writer()
    twice = drop(w, "x")
    y, z = w("Add", twice, "r"), w("Tanh", twice)
    fast, plain = same_bits(w.model(shapes, [y, z]), arrays(shapes), [y, z], seed=2)
    assert fast[2] == plain[2]


def test_a_broadcast_residual_stays():
    w = Writer()
    shapes = {"x": (4, 6), "r": (6,)}
    y = w("Add", drop(w, "x"), "r")
    fast, plain = same_bits(w.model(shapes, [y]), arrays(shapes), [y], seed=2)
    assert fast[2] == plain[2]


def test_the_sum_of_two_dropouts():
    w = Writer()
    shapes = {"x": (50, 60), "r": (50, 60)}
    y = w("Add", drop(w, "x", 0.2), drop(w, "r", 0.7))
    fast, plain = same_bits(w.model(shapes, [y]), arrays(shapes), [y], seed=3)
    assert fast[2].forward == 2 and plain[2].forward == 3


@pytest.mark.parametrize("swap", range(4))
def test_two_dropouts_and_a_residual(swap):
    """The sum is taken in another order; the masks, and so the gradients, are the same bits."""
    w = Writer()
    shapes = dict.fromkeys("abr", (50, 60))
    first, second = drop(w, "a", 0.2), drop(w, "b", 0.7)
    both = w("Add", second, first) if swap & 1 else w("Add", first, second)
    y = w("Add", "r", both) if swap & 2 else w("Add", both, "r")
    model, feed = w.model(shapes, [y]), arrays(shapes)
    fast, plain = (run(model, feed, [y], p, seed=3) for p in (False, True))
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-6, atol=1e-6)
    for name, want in plain[1].items():
        assert fast[1][name].tobytes() == want.tobytes(), name
    assert fast[2].forward == 2 and plain[2].forward == 4


@pytest.mark.parametrize("read", ["second", "both"])
def test_two_dropouts_of_which_one_or_the_sum_is_read_elsewhere(read):
    w = Writer()
    shapes = dict.fromkeys("abr", (5, 6))
    second = drop(w, "b", 0.7)
    both = w("Add", drop(w, "a", 0.2), second)
    y, z = w("Add", both, "r"), w("Tanh", second if read == "second" else both)
    fast, plain = same_bits(w.model(shapes, [y, z]), arrays(shapes), [y, z], seed=3)
    assert fast[2].forward == plain[2].forward - 1  # the inner sum takes one dropout


def test_two_dropouts_and_a_broadcast_residual():
    w = Writer()
    shapes = {"a": (5, 6), "b": (5, 6), "r": (6,)}
    y = w("Add", w("Add", drop(w, "a", 0.2), drop(w, "b", 0.7)), "r")
    fast, plain = same_bits(w.model(shapes, [y]), arrays(shapes), [y], seed=3)
    assert fast[2].forward == plain[2].forward - 1


def test_without_dropout_the_sum_remains():
    w = Writer()
    shapes = {"x": (5, 7), "r": (5, 7)}
    y = w("Add", drop(w, "x"), "r")
    model, feed = w.model(shapes, [y]), arrays(shapes)
    off = 1  # run flag: masking off
    got = E.Run(E.Plan(model, feed, outputs=[y])).forward(feed, seed=1, flags=off)[y]
    np.testing.assert_array_equal(got, feed["x"] + feed["r"])


def test_the_gradient_has_the_ratio_of_the_forward_in_f64():
    """0.1 rounded to f32 gives another scale, and another mask."""
    w = Writer()
    y = w("Add", w("Dropout", "x", w.constant(0.1, np.float64), w.constant(True, np.bool_)), "r")
    model = E.Model(w.proto({"x": (400,), "r": (400,)}, [y], kind=TensorProto.DOUBLE))
    feed = {"x": np.ones(400), "r": np.zeros(400)}
    one = E.Run(E.Plan(model, feed, ["x"], [y], [y]))
    out = one.forward(feed, seed=3)[y]
    gradient = one.backward({y: np.ones(400)})["x"]
    assert set(out) == {0.0, 1 / 0.9}
    np.testing.assert_array_equal(gradient, out)
