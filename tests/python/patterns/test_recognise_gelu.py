"""GELU, SiLU and their gated forms as models write them, against the plain plan."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, arrays, compare

LAST = 9223372036854775807


def erf_plain(w: Writer, x: str) -> str:
    """0.5 x (1 + erf(x / sqrt 2))"""
    bend = w("Add", w("Erf", w("Div", x, w.constant(math.sqrt(2)))), w.constant(1))
    return w("Mul", w("Mul", w.constant(0.5), x), bend)


def erf_late_half(w: Writer, x: str) -> str:
    """(1 + erf(x 0.7071)) x / 2"""
    bend = w("Add", w.constant([1]), w("Erf", w("Mul", w.constant(0.70710678), x)))
    return w("Div", w("Mul", bend, x), w.constant(2))


def new_pow(w: Writer, x: str) -> str:
    """GPT-2: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))"""
    inner = w("Add", x, w("Mul", w.constant(0.044715), w("Pow", x, w.constant(3))))
    bend = w("Tanh", w("Mul", w.constant(math.sqrt(2 / math.pi)), inner))
    return w("Mul", w("Mul", w.constant(0.5), x), w("Add", w.constant(1), bend))


def new_mul(w: Writer, x: str) -> str:
    """The cube as products, the half at the end."""
    cube = w("Mul", w("Mul", x, x), x)
    inner = w("Add", w("Mul", cube, w.constant(0.044715)), x)
    bend = w("Tanh", w("Mul", inner, w.constant(0.7978845608)))
    return w("Mul", w("Mul", x, w("Add", bend, w.constant(1))), w.constant(0.5))


def bloom(w: Writer, x: str) -> str:
    """0.5 x (1 + tanh(0.79788456 x (1 + 0.044715 x x)))"""
    square = w("Mul", w("Mul", w.constant(0.044715), x), x)
    inner = w("Mul", w("Mul", w.constant(0.79788456), x), w("Add", w.constant(1), square))
    return w("Mul", w("Mul", x, w.constant(0.5)), w("Add", w.constant(1), w("Tanh", inner)))


def silu(w: Writer, x: str) -> str:
    """x sigmoid(x)"""
    return w("Mul", x, w("Sigmoid", x))


def quick(w: Writer, x: str) -> str:
    """x sigmoid(1.702 x)"""
    return w("Mul", w("Sigmoid", w("Mul", w.constant(1.702), x)), x)


def silu_by_tanh(w: Writer, x: str) -> str:
    """x (1 + tanh(x / 2)) / 2"""
    bend = w("Tanh", w("Mul", x, w.constant(0.5)))
    return w("Mul", w("Mul", x, w.constant(0.5)), w("Add", bend, w.constant(1)))


def gelu(w: Writer, x: str) -> str:
    """The operator itself."""
    return w("Gelu", x)


def relu(w: Writer, x: str) -> str:
    """The operator itself."""
    return w("Relu", x)


def sigmoid(w: Writer, x: str) -> str:
    """The operator itself: GLU when it is a gate."""
    return w("Sigmoid", x)


SMOOTH = [erf_plain, erf_late_half, new_pow, new_mul, bloom, silu, quick, silu_by_tanh]
Form = Callable[[Writer, str], str]


@pytest.mark.quick
@pytest.mark.parametrize("form", SMOOTH)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (1,)])
@pytest.mark.parametrize("made", [False, True])
def test_activation(form: Form, shape, made):
    w = Writer()
    x = w("Mul", w("Add", "x", w.constant(0.25)), w.constant(1.5)) if made else "x"
    y = form(w, x)
    shapes = {"x": shape}
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == (3 if made else 1)
    assert fast.backward < plain.backward


@pytest.mark.parametrize("form", [*SMOOTH, gelu, relu, sigmoid])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("shape", [(3, 7), (2, 4, 5, 33)])
def test_gated(form: Form, swap, shape):
    w = Writer()
    shapes = {"g": shape, "u": shape}
    a = form(w, "g")
    y = w("Mul", "u", a) if swap else w("Mul", a, "u")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert (fast.forward, fast.backward) == (1, 1) < (plain.forward, plain.backward)


@pytest.mark.parametrize("form", [silu, new_pow, gelu, sigmoid])
@pytest.mark.parametrize("cut", ["split", "slice"])
@pytest.mark.parametrize("gate", [0, 1])
def test_gated_halves_of_one_projection(form: Form, cut, gate):
    w = Writer()
    shapes = {"x": (2, 5, 22)}
    if cut == "split":
        halves = w("Split", "x", axis=2, num_outputs=2, outs=2)
    else:
        last = w.constant([-1], np.int64)
        bounds = [w.constant([v], np.int64) for v in (0, 11, LAST)]
        halves = [w("Slice", "x", bounds[i], bounds[i + 1], last) for i in range(2)]
    y = w("Mul", form(w, halves[gate]), halves[1 - gate])
    fast, _ = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert (fast.forward, fast.backward) == (1, 1)


def test_one_operand_without_gradient():
    from helpers.graphs import engine as E

    shapes = {"g": (3, 8), "u": (3, 8)}
    feed = arrays(shapes)
    for name in shapes:
        w = Writer()
        y = w("Mul", silu(w, "g"), "u")
        model, got = w.model(shapes, [y]), {}
        for plain in (False, True):
            one = E.Run(E.Plan(model, feed, [name], [y], [y], plain=plain))
            one.forward(feed)
            got[plain] = one.backward({y: np.ones((3, 8), np.float32)})[name]
        np.testing.assert_allclose(got[False], got[True], rtol=1e-5, atol=1e-6)


def test_gate_of_another_shape_stays():
    w = Writer()
    shapes = {"g": (1, 8), "u": (3, 8)}
    y = w("Mul", w("Sigmoid", "g"), "u")
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == plain.forward == 2


@pytest.mark.parametrize("change", ["factor", "offset", "power", "two_variables"])
def test_what_only_looks_like_gelu_stays(change):
    w = Writer()
    shapes = {"x": (4, 8), "z": (4, 8)}
    cube = w("Pow", "x", w.constant(2.9 if change == "power" else 3))
    if change == "power":
        cube = w("Mul", "x", w("Mul", "x", w("Abs", "x")))
    inner = w("Add", "x", w("Mul", w.constant(0.05 if change == "factor" else 0.044715), cube))
    bend = w("Tanh", w("Mul", w.constant(math.sqrt(2 / math.pi)), inner))
    one = w.constant(1.01 if change == "offset" else 1)
    half = w("Mul", w.constant(0.5), "z" if change == "two_variables" else "x")
    y = w("Mul", half, w("Add", one, bend))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == plain.forward


def test_softcap_stays():
    w = Writer()
    shapes = {"x": (4, 8)}
    y = w("Mul", w.constant(30), w("Tanh", w("Div", "x", w.constant(30))))
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == plain.forward == 3
