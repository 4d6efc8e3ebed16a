"""Attention whose operands or result lie in an unusual order: read as the model has it."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, run

MIN = float(np.finfo(np.float32).min)


@pytest.mark.parametrize("s", [8, 6])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_key_cut_out_of_channels_first_tokens(s, grouped):
    """[B, D, H, S], the key turned twice: not the one turn of [B, S, H, D], even where S = D."""
    b, d, h = 2, 8, 3
    w = Writer()

    def repeated(x: str) -> str:
        if not grouped:
            return x
        x = w("Unsqueeze", x, w.constant([2], np.int64))
        x = w("Expand", x, w.constant([b, h, 2, s, d], np.int64))
        return w("Reshape", x, w.constant([b, 2 * h, s, d], np.int64))

    k = repeated(w("Transpose", "x", perm=[0, 2, 3, 1]))
    scores = w("MatMul", "q", w("Transpose", k, perm=[0, 1, 3, 2]))
    y = w("Neg", w("MatMul", w("Softmax", scores, axis=-1), repeated("v")))
    shapes = {"x": (b, d, h, s), "q": (b, 2 * h if grouped else h, s, d), "v": (b, h, s, d)}
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(v).astype(np.float32) for n, v in shapes.items()}
    model = w.model(shapes, [y])
    fast, plain = (run(model, feed, [y], p) for p in (False, True))
    assert fast[2].forward < plain[2].forward
    np.testing.assert_allclose(fast[0][y], plain[0][y], atol=2e-6)
    for name, right in plain[1].items():
        np.testing.assert_allclose(fast[1][name], right, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("constant", [False, True])
def test_a_question_about_heads_is_none_about_positions(constant):
    """Where(some[1, 1, S, 1], attention as [B, S, H, D], 0) with S = H picks heads."""
    n, d = 4, 8
    keep = np.tril(np.ones((1, 1, n, n), bool), -1)
    w = Writer()
    mask = w.constant(keep, np.bool_) if constant else w("Greater", "mask", w.constant(0.5))
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    scores = w("Where", mask, scores, w.constant(MIN))
    y = w("Transpose", w("MatMul", w("Softmax", scores, axis=-1), "v"), perm=[0, 2, 1, 3])
    share = w("Cast", mask, to=1)
    share = w("ReduceMean", share, w.constant([-1], np.int64), keepdims=1)
    y = w("Neg", w("Where", w("Greater", share, w.constant(0)), y, w.constant(0)))
    rng = np.random.default_rng(0)
    feed = {x: rng.standard_normal((2, n, n, d)).astype(np.float32) for x in "qkv"}
    if not constant:
        feed["mask"] = keep.astype(np.float32)
    model = w.model({x: v.shape for x, v in feed.items()}, [y])
    fast, plain = (run(model, feed, [y], p) for p in (False, True))
    assert fast[2].forward < plain[2].forward
    np.testing.assert_allclose(fast[0][y], plain[0][y], atol=2e-6)
