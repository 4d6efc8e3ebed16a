"""Attention over products of three dimensions, as models with bmm write it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_recognise_readers import operators

from helpers.graphs.onnx_writer import Writer, arrays, check_output, compare

B, H, S, T, D = 2, 3, 7, 9, 8
MIN = float(np.finfo(np.float32).min)


def ints(w: Writer, *values: int) -> str:
    return w.constant(values, np.int64)


def flat(w: Writer, x: str, rows: int) -> str:
    """[B, S, H * D] as [B * H, S, D]."""
    x = w("Reshape", x, ints(w, B, rows, H, D))
    x = w("Transpose", x, perm=[0, 2, 1, 3])
    return w("Reshape", x, ints(w, B * H, rows, D))


def operands(w: Writer) -> tuple[str, str, str]:
    q, k, v = flat(w, "q", S), flat(w, "k", T), flat(w, "v", T)
    return q, w("Transpose", k, perm=[0, 2, 1]), v


def merged(w: Writer, y: str) -> str:
    """[B * H, S, D] as [B, S, H * D]."""
    y = w("Transpose", w("Reshape", y, ints(w, B, H, S, D)), perm=[0, 2, 1, 3])
    return w("Neg", w("Reshape", y, ints(w, B, S, H * D)))


SHAPES = {"q": (B, S, H * D), "k": (B, T, H * D), "v": (B, T, H * D)}


def planned(w: Writer, shapes: dict, y: str, folder: Path) -> Counter:
    """Operators of the forward; the numbers are those of the plain plan."""
    check_output(w.model(shapes, [y]), arrays(shapes), y, seed=5)
    return operators(w, shapes, [y], folder)


@pytest.mark.quick
@pytest.mark.parametrize("softmax", [3, 4])
@pytest.mark.parametrize("mask", ["none", "flat", "split", "where"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_reshapes_around_mask_and_softmax(softmax, mask, dropout, tmp_path):
    """BART and DeBERTa of their first years."""
    w = Writer()
    q, k, v = operands(w)
    scores = w("Div", w("MatMul", q, k), w.constant(2.5))
    shapes = dict(SHAPES)
    if mask == "flat":
        shapes["bias"] = (B * H, S, T)
        scores = w("Add", scores, "bias")
    scores = w("Reshape", scores, ints(w, B, H, S, T))
    if mask == "split":
        shapes["bias"] = (B, 1, S, T)
        scores = w("Add", "bias", scores)
    if mask == "where":
        shapes["mask"] = (1, 1, S, T)
        hidden = w("Not", w("Greater", "mask", w.constant(-0.5)))
        scores = w("Where", hidden, w.constant(MIN), scores)
    if softmax == 3:
        scores = w("Reshape", scores, ints(w, B * H, S, T))
    p = w("Softmax", scores, axis=-1)
    if dropout:
        p = w("Dropout", p, w.constant(dropout), w.constant(True, np.bool_))
    if softmax == 4:
        p = w("Reshape", p, ints(w, B * H, S, T))
    ops = planned(w, shapes, merged(w, w("MatMul", p, v)), tmp_path)
    extra = {"Greater": 1, "Not": 1, "MaskRanges": 1} if mask == "where" else {}
    if mask == "where":
        extra.pop("Not")  # hidden by a Not that the operator does not need
    assert ops == {"FusedAttention": 1, "Neg": 1, **extra}


def test_one_head(tmp_path):
    """The batch is the first axis, and nothing is ever reshaped."""
    w = Writer()
    shapes = {"q": (B, S, D), "k": (B, T, D), "v": (B, T, 5), "mask": (S, T)}
    scores = w("Mul", w("MatMul", "q", w("Transpose", "k", perm=[0, 2, 1])), w.constant(0.4))
    seen = w("Greater", "mask", w.constant(-0.5))
    p = w("Softmax", w("Where", seen, scores, w.constant(-np.inf)), axis=2)
    ops = planned(w, shapes, w("Neg", w("MatMul", p, "v")), tmp_path)
    assert ops == {"Greater": 1, "MaskRanges": 1, "FusedAttention": 1, "Neg": 1}


def test_positions_in_front_of_batch_and_heads(tmp_path):
    """torch.nn.MultiheadAttention: [S, B * H, D] transposed; the operator reads it as it lies."""
    w = Writer()
    shapes = {"q": (S, B * H, D), "k": (T, B * H, D), "v": (T, B * H, D), "bias": (B * H, 1, T)}
    q, k, v = (w("Transpose", n, perm=[1, 0, 2]) for n in "qkv")
    scores = w("Add", "bias", w("MatMul", q, w("Transpose", k, perm=[0, 2, 1])))
    ops = planned(w, shapes, w("Neg", w("MatMul", w("Softmax", scores), v)), tmp_path)
    assert ops == {"FusedAttention": 1, "Neg": 1}


def test_two_products_over_one_softmax(tmp_path):
    w = Writer()
    q, k, v = operands(w)
    p = w("Softmax", w("MatMul", q, k))
    y = w("Mul", w("MatMul", p, v), w("Exp", w("MatMul", p, flat(w, "u", T))))
    ops = planned(w, {**SHAPES, "u": SHAPES["v"]}, y, tmp_path)
    assert ops["FusedAttention"] == 1 and "Softmax" not in ops


@pytest.mark.parametrize("reader", ["scores", "weights"])
def test_what_others_read_is_not_computed_twice(reader, tmp_path):
    w = Writer()
    q, k, v = operands(w)
    scores = w("MatMul", q, k)
    p = w("Softmax", scores)
    outputs = [merged(w, w("MatMul", p, v)), w("Neg", scores if reader == "scores" else p)]
    feed = arrays(SHAPES)
    fast, plain = (compare_sizes(w, feed, outputs, o) for o in (outputs, outputs[:1]))
    assert fast.forward > plain.forward
    ops = operators(w, SHAPES, outputs, tmp_path)
    assert ops["Softmax"] == 1 and ops["FusedAttention"] == 0
    assert ops["MatMul"] + ops["FusedMatMul"] == 2


def compare_sizes(w: Writer, feed: dict, every: list[str], outputs: list[str]):
    model = w.model({n: v.shape for n, v in feed.items()}, every)
    return compare(model, feed, outputs)[0]


def test_a_softmax_that_pools_is_left_alone(tmp_path):
    """Weights from a linear layer: no attention, and the layer keeps its bias."""
    w = Writer()
    shapes = {"x": (B, T, D), "w": (D, S), "b": (S,)}
    scores = w("Transpose", w("Add", w("MatMul", "x", "w"), "b"), perm=[0, 2, 1])
    ops = planned(w, shapes, w("Neg", w("MatMul", w("Softmax", scores), "x")), tmp_path)
    assert ops["Linear"] == 1 and ops["Softmax"] == 1 and ops["FusedAttention"] == 0


def test_attentions_that_split_their_batch_in_different_ways(tmp_path):
    """Six matrices as 2 x 3, then without any split, then as 2 x 3 again, over the same keys."""
    w = Writer()
    k = w("Transpose", "k", perm=[0, 2, 1])
    y = "q"
    for split in (True, False, True):
        scores = w("MatMul", y, k)
        if split:
            scores = w("Reshape", scores, ints(w, B, H, T, T))
        p = w("Softmax", scores)
        if split:
            p = w("Reshape", p, ints(w, B * H, T, T))
        y = w("MatMul", p, "v")
        # weights from elsewhere: no attention, whatever the split
        y = w("Add", y, w("MatMul", w("Softmax", "z"), "v"))
    shapes = dict.fromkeys("qkv", (B * H, T, D)) | {"z": (B * H, T, T)}
    ops = planned(w, shapes, w("Neg", y), tmp_path)
    assert ops["FusedAttention"] == 3
