"""Explicit casts inside a pattern of f32 are part of it: rounding to bf16 in the middle, or a part
in f64, is computed as written."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, arrays, compare

F32, F64, BF16 = 1, 11, 16
pytestmark = pytest.mark.quick


class Casting(Writer):
    """Counts the places where a cast may stand, and puts one pair of casts there."""

    def __init__(self, place: int, to: int) -> None:
        super().__init__()
        self.place, self.to, self.seen = place, to, 0

    def here(self, v: str) -> str:
        """v, or at the place that was asked for v through the other type and back."""
        self.seen += 1
        if self.seen - 1 != self.place:
            return v
        return self("Cast", self("Cast", v, to=self.to), to=F32)


def attention(w: Casting) -> tuple[str, dict]:
    scores = w("MatMul", w.here("q"), w("Transpose", w.here("k"), perm=[0, 1, 3, 2]))
    scores = w.here(w("Mul", w.here(scores), w.constant(0.25)))
    weights = w.here(w("Softmax", scores, axis=-1))
    y = w("MatMul", weights, w.here("v"))
    return y, {"q": (1, 2, 4, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 8)}


def rms_norm(w: Casting) -> tuple[str, dict]:
    x = w.here("x")
    mean = w("ReduceMean", w.here(w("Mul", x, x)), w.constant([-1], np.int64), keepdims=1)
    root = w("Sqrt", w("Add", w.here(mean), w.constant(1e-6)))
    y = w.here(w("Mul", w.here(w("Reciprocal", root)), x))
    return w("Mul", "w", y), {"x": (4, 16), "w": (16,)}


def layer_norm(w: Casting) -> tuple[str, dict]:
    axis = w.constant([-1], np.int64)
    x = w.here("x")
    centred = w.here(w("Sub", x, w.here(w("ReduceMean", x, axis, keepdims=1))))
    square = w("ReduceMean", w("Mul", centred, centred), axis, keepdims=1)
    y = w("Div", centred, w("Sqrt", w("Add", w.here(square), w.constant(1e-5))))
    return w("Add", w("Mul", w.here(y), "w"), "b"), {"x": (4, 16), "w": (16,), "b": (16,)}


def gelu(w: Casting) -> tuple[str, dict]:
    cube = w("Mul", w.here(w("Pow", "x", w.constant(3))), w.constant(0.044715))
    inner = w("Mul", w.here(w("Add", "x", cube)), w.constant(0.7978845608028654))
    y = w("Add", w.here(w("Tanh", inner)), w.constant(1))
    return w("Mul", w("Mul", "x", w.constant(0.5)), w.here(y)), {"x": (4, 16)}


def silu(w: Casting) -> tuple[str, dict]:
    return w("Mul", "x", w.here(w("Sigmoid", w.here("x")))), {"x": (4, 16)}


def rope(w: Casting) -> tuple[str, dict]:
    parts = w("Split", "x", outs=2, axis=-1, num_outputs=2)
    turned = w.here(w("Concat", w("Neg", parts[1]), parts[0], axis=-1))
    y = w("Add", w("Mul", w.here("x"), "cos"), w("Mul", turned, "sin"))
    return y, {"x": (1, 2, 5, 8), "cos": (5, 8), "sin": (5, 8)}


PATTERNS = {f.__name__: f for f in (attention, rms_norm, layer_norm, gelu, silu, rope)}


def positions(name: str) -> int:
    """The number of positions in a pattern at which a cast may stand."""
    w = Casting(-1, F32)
    PATTERNS[name](w)
    return w.seen


@pytest.mark.parametrize("to", [BF16, F64])
@pytest.mark.parametrize(
    ("name", "position"), [(name, at) for name in PATTERNS for at in range(positions(name))]
)
def test_a_cast_in_the_middle_counts(name: str, position: int, to: int) -> None:
    w = Casting(position, to)
    y, shapes = PATTERNS[name](w)
    compare(w.model(shapes, [y]), arrays(shapes), [y])


def through(w: Writer, names: list[str], to: int) -> list[str]:
    return [w("Cast", name, to=to) for name in names]


@pytest.mark.parametrize("to", [BF16, F64])
def test_scores_of_another_type_are_no_attention(to: int) -> None:
    """Operands and product in the other type, the rest in f32."""
    w = Writer()
    q, k = through(w, ["q", "k"], to)
    scores = w("Cast", w("MatMul", q, w("Transpose", k, perm=[0, 1, 3, 2])), to=F32)
    y = w("MatMul", w("Softmax", scores, axis=-1), "v")
    shapes = {"q": (1, 2, 4, 8), "k": (1, 2, 5, 8), "v": (1, 2, 5, 8)}
    feed = arrays(shapes)
    for name in ("q", "k"):
        feed[name] += np.float32(300)  # differences of the scores drown in f32
    fast, plain = compare(w.model(shapes, [y]), feed, [y])
    assert fast.forward >= plain.forward - 2, "the product absorbs a transposition at most"


def test_a_norm_in_f64_stays_in_f64() -> None:
    w = Writer()
    x = w("Cast", "x", to=F64)
    square = w("ReduceMean", w("Mul", x, x), w.constant([-1], np.int64), keepdims=1)
    root = w("Sqrt", w("Add", square, w.constant(1e-60, np.float64)))
    y = w("Mul", w("Cast", w("Div", x, root), to=F32), "w")
    shapes = {"x": (4, 16), "w": (16,)}
    feed = arrays(shapes)
    feed["x"] *= np.float32(1e25)
    compare(w.model(shapes, [y]), feed, [y])


@pytest.mark.parametrize("name", list(PATTERNS))
def test_without_casts_they_are_recognised(name: str) -> None:
    w = Casting(-1, F32)
    y, shapes = PATTERNS[name](w)
    fast, _ = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward <= 2
