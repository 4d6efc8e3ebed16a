"""Several biases beside a mask, masks that are known when the plan is made, and other k^T."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, arrays, check_output, run

B, H, S, D = 2, 3, 70, 8
MIN = float(np.finfo(np.float32).min)
SHAPES = {"q": (B, H, S, D), "k": (B, H, S, D), "v": (B, H, S, D)}


def combined(w: Writer, form: str, scores: str, fill: float) -> str:
    """Scores with the biases a and b, and a mask over, under or between them."""
    low = w.constant(fill)
    if form == "no mask":
        return w("Add", w("Add", scores, "a"), "b")
    if form == "outer factor":
        first = w("Mul", w("Add", scores, "a"), w.constant(3))
        return w("Div", w("Add", first, "b"), w.constant(5))
    mask = w("Greater", "mask", w.constant(0.5))
    if form == "shown":
        return w("Add", w("Add", w("Where", mask, scores, low), "a"), "b")
    first = w("Add", scores, "a")
    if form == "hidden":
        return w("Where", mask, w("Add", first, "b"), low)
    if form == "between":
        return w("Add", "b", w("Where", mask, first, low))
    if form == "added":
        return w("Add", w("Add", first, "b"), w("Where", mask, w.constant(0), low))
    if form == "factor":  # Falcon with ALiBi
        first = w("Mul", first, w.constant(0.25))
    return w("Add", first, w("Where", mask, "b", low))


FORMS = ["no mask", "hidden", "shown", "between", "added", "in the mask", "factor", "outer factor"]


def feed_of() -> dict[str, np.ndarray]:
    feed = arrays({**SHAPES, "a": (1, H, S, S), "b": (B, 1, 1, S)})
    mask = np.tril(np.ones((1, 1, S, S), np.float32))
    mask[:, :, 1::3] = 0  # rows without a key
    return {**feed, "mask": mask}


def check(w: Writer, y: str, feed: dict) -> int:
    """Recognised against plain; returns the nodes of the recognised plan."""
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    fast, plain = check_output(model, feed, y)
    assert fast.forward < plain.forward
    return fast.forward


def attend(w: Writer, scores: str) -> str:
    return w("Neg", w("MatMul", w("Softmax", scores, axis=-1), "v"))


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fill", [MIN, -1e9])
def test_two_biases(form, fill):
    w = Writer()
    feed = feed_of()
    if form in ("no mask", "outer factor"):
        feed.pop("mask")
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    check(w, attend(w, combined(w, form, scores, fill)), feed)


def test_as_many_biases_as_fit_and_one_more():
    for count in (4, 5):
        w = Writer()
        names = "abcde"[:count]
        scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
        for name in names:
            scores = w("Add", scores, name)
        y = attend(w, scores)
        feed = arrays({**SHAPES, **dict.fromkeys(names, (H, S, S))})
        model = w.model({n: v.shape for n, v in feed.items()}, [y])
        fast, plain = (run(model, feed, [y], p) for p in (False, True))
        np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-5, atol=1e-5)
        assert (fast[2].forward < plain[2].forward) == (count == 4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("low", [MIN, -np.inf])
def test_a_mask_of_numbers_that_is_known(bias, low):
    """Causal without padding: keys behind the query are skipped, which costs no operator."""
    w = Writer()
    known = np.triu(np.full((1, 1, S, S), low, np.float32), 1)
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    feed = arrays(SHAPES)
    if bias:
        feed |= arrays({"a": (1, H, S, S)})
        scores = w("Add", scores, "a")
    y = attend(w, w("Add", scores, w.constant(known)))
    assert check(w, y, feed) == 2


@pytest.mark.parametrize("form", ["as it comes", "batch and heads", "width first"])
def test_keys_that_are_turned_in_other_ways(form):
    w = Writer()
    feed = arrays(SHAPES)
    if form == "as it comes":
        feed["k"] = np.ascontiguousarray(feed["k"].swapaxes(2, 3))
        turned = "k"
    if form == "batch and heads":
        feed["k"] = np.ascontiguousarray(feed["k"].swapaxes(0, 1))
        turned = w("Transpose", "k", perm=[1, 0, 3, 2])
    if form == "width first":
        feed["k"] = np.ascontiguousarray(feed["k"].transpose(3, 0, 1, 2))
        turned = w("Transpose", "k", perm=[1, 2, 0, 3])
    check(w, attend(w, w("MatMul", "q", turned)), feed)


def test_one_head_of_keys_for_all_queries():
    """Broadcast by the products, as in multi-query attention."""
    w = Writer()
    feed = arrays({"q": (B, H, S, D), "k": (B, 1, S, D), "v": (B, 1, S, D)})
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    assert check(w, attend(w, scores), feed) == 2


@pytest.mark.parametrize("types", [(1, 11), (11, 1), (16, 11)])
def test_biases_of_different_types(types):
    """Scores that change their type half way are left to the chain, with either type's biases."""
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    for name, kind in zip("ab", types, strict=True):
        scores = w("Add", w("Cast", scores, to=kind), w("Cast", name, to=kind))
    weights = w("Softmax", scores, axis=-1)
    y = w("Neg", w("Cast", w("MatMul", weights, w("Cast", "v", to=types[1])), to=1))
    feed = arrays({**SHAPES, "a": (1, H, S, S), "b": (B, 1, 1, S)})
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    fast, plain = (run(model, feed, [y], p) for p in (False, True))
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("alpha", [32.0, 3.0])
@pytest.mark.parametrize("kept", [0, 1])
def test_scores_that_are_shrunk_before_their_largest_is_taken_off(mask, alpha, kept):
    """CogView's, in LayoutLMv3: softmax(alpha (s / alpha - max(s / alpha)))."""
    w = Writer()
    feed = feed_of()
    feed.pop("b")
    scores = w("Add", w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2])), "a")
    if mask:
        low = w("Where", w("Greater", "mask", w.constant(0.5)), w.constant(0), w.constant(MIN))
        scores = w("Add", scores, low)
    else:
        feed.pop("mask")
    small = w("Div", scores, w.constant(alpha))
    largest = w("ReduceMax", small, w.constant([-1], np.int64), keepdims=kept)
    if not kept:
        largest = w("Unsqueeze", largest, w.constant([-1], np.int64))
    check(w, attend(w, w("Mul", w("Sub", small, largest), w.constant(alpha))), feed)
