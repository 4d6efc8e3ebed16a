"""Learned attention sinks: one more score per head, whose probability is lost (gpt-oss)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_recognise_readers import operators

from helpers.graphs.onnx_writer import Writer, arrays, check_output

B, H, S, T, D = 2, 3, 70, 70, 8
SHAPES = {"q": (B, H, S, D), "k": (B, H, T, D), "v": (B, H, T, D), "sinks": (H,)}
MIN = float(np.finfo(np.float32).min)


def ints(w: Writer, *values: int) -> str:
    return w.constant(values, np.int64)


def column(w: Writer, sinks: str = "sinks") -> str:
    """[H] as [B, H, S, 1]."""
    return w("Expand", w("Reshape", sinks, ints(w, 1, H, 1, 1)), ints(w, B, H, S, 1))


def masked_scores(w: Writer, mask: str) -> str:
    scores = w("Mul", w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2])), w.constant(0.3))
    if mask == "bias":
        return w("Add", scores, "mask")
    if mask == "where":
        return w("Where", w("Greater", "mask", w.constant(-1.0)), scores, w.constant(MIN))
    return scores


def weights_of(w: Writer, logits: str) -> str:
    return w("Slice", w("Softmax", logits), ints(w, 0), ints(w, -1), ints(w, 3))


def feed_of(mask: str, size: float = 1.0) -> dict[str, np.ndarray]:
    feed = arrays(SHAPES)
    feed["sinks"] = (size * feed["sinks"]).astype(np.float32)
    if mask:
        seen = np.tril(np.ones((S, T), bool))
        seen[3::5] = False  # rows that see nothing: all goes to the sink
        feed["mask"] = np.where(seen, 0, MIN).astype(np.float32)[None, None]
    return feed


def check(w: Writer, y: str, feed: dict, folder: Path, fused: bool = True) -> None:
    shapes = {n: v.shape for n, v in feed.items()}
    check_output(w.model(shapes, [y]), feed, y, seed=5, least=1e-6)
    ops = operators(w, shapes, [y], folder)
    assert (ops["FusedAttention"], ops["Softmax"]) == ((1, 0) if fused else (0, 1))


@pytest.mark.quick
@pytest.mark.parametrize("mask", ["", "bias", "where"])
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_sinks(mask, stable, dropout, tmp_path):
    w = Writer()
    logits = w("Concat", masked_scores(w, mask), column(w), axis=-1)
    if stable:
        logits = w("Sub", logits, w("ReduceMax", logits, ints(w, -1), keepdims=1))
    p = weights_of(w, logits)
    if dropout:
        p = w("Dropout", p, w.constant(dropout), w.constant(True, np.bool_))
    check(w, w("Neg", w("MatMul", p, "v")), feed_of(mask), tmp_path)


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4, 1e38])
@pytest.mark.parametrize("fill", [-1e4, MIN])
def test_sinks_of_every_size(size, fill, tmp_path):
    """Far above and below the scores, and near a fill: a masked key and a sink share a row then."""
    w = Writer()
    seen = w("Greater", "mask", w.constant(-1.0))
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    scores = w("Where", seen, scores, w.constant(fill))
    p = weights_of(w, w("Concat", scores, column(w), axis=-1))
    check(w, w("Neg", w("MatMul", p, "v")), feed_of("where", size), tmp_path)


def test_positions_in_front_of_heads(tmp_path):
    w = Writer()
    feed = feed_of("")
    for name in "qkv":
        feed[name] = np.ascontiguousarray(feed[name].swapaxes(1, 2))
    q, k, v = (w("Transpose", n, perm=[0, 2, 1, 3]) for n in "qkv")
    scores = w("MatMul", q, w("Transpose", k, perm=[0, 1, 3, 2]))
    p = weights_of(w, w("Concat", scores, column(w), axis=3))
    y = w("Transpose", w("MatMul", p, v), perm=[0, 2, 1, 3])
    check(w, w("Neg", y), feed, tmp_path)


def test_rows_of_nothing_that_are_cleared_afterwards(tmp_path):
    """With a sink that overflows exp() as well."""
    w = Writer()
    feed = feed_of("where", 100.0)
    seen = w("Greater", "mask", w.constant(-1.0))
    p = weights_of(w, w("Concat", masked_scores(w, "where"), column(w), axis=-1))
    share = w("ReduceMean", w("Cast", seen, to=1), ints(w, -1), keepdims=1)
    some = w("Greater", share, w.constant(0))
    check(w, w("Neg", w("Where", some, w("MatMul", p, "v"), w.constant(0))), feed, tmp_path)


@pytest.mark.parametrize("change", ["front", "rows", "whole", "two", "leak", "split"])
def test_what_is_no_sink(change, tmp_path):
    w = Writer()
    feed = feed_of("")
    scores = masked_scores(w, "")
    if change == "rows":  # one for each row
        feed["sinks"] = arrays({"x": (B, H, S, 1)})["x"]
    extra = "sinks" if change == "rows" else column(w)
    if change == "two":
        extra = w("Concat", extra, extra, axis=-1)
    both = (extra, scores) if change == "front" else (scores, extra)
    logits = w("Concat", *both, axis=-1)
    if change == "whole":  # the last key is a key
        feed["v"] = np.concatenate([feed["v"], feed["v"][:, :, :1]], axis=2)
        p = w("Softmax", logits)
    elif change == "leak":
        every = w("Softmax", logits)
        p = w("Slice", every, ints(w, 0), ints(w, -1), ints(w, 3))
    elif change == "split":  # the sink's own share is read
        p, share = w("Split", w("Softmax", logits), ints(w, T, 1), outs=2, axis=-1)
    else:
        first = 1 if change == "front" else 0
        p = w("Slice", w("Softmax", logits), ints(w, first), ints(w, first + T), ints(w, 3))
    y = w("Neg", w("MatMul", p, "v"))
    if change == "split":
        y = w("Mul", y, share)
    if change == "leak":
        y = w("Add", y, w("ReduceSum", every, keepdims=1))
    check(w, y, feed, tmp_path, fused=False)
