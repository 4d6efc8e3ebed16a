"""Masks beside biases: rows that the mask, the bias or both together leave without a key.

A masked key has no share beside an allowed one, unless a bias takes that away as well: left padding
under a causal mask, where the first rows see nothing but padding. What such a row gives, and which
gradients it passes, depends on how the model nests mask and bias; recognition changes neither.
"""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, check_output, run

MIN = float(np.finfo(np.float32).min)
FORMS = ["over", "under", "inside", "plus", "plus_first", "plus_last", "two_masks"]


def masked(w: Writer, form: str, scores: str, fill: float) -> str:
    """Scores with mask and bias, nested in one of the ways of models."""
    low, zero = w.constant(fill), w.constant(0)
    mask = w("Greater", "mask", w.constant(0.5))
    if form == "over":
        return w("Where", mask, w("Add", scores, "bias"), low)
    if form == "under":
        return w("Add", w("Where", mask, scores, low), "bias")
    if form == "inside":
        return w("Add", scores, w("Where", mask, "bias", low))
    if form == "two_masks":  # GPT-Neo: causal, then padding
        other = w("Where", w("Greater", "bias", w.constant(-1e30)), zero, low)
        return w("Add", w("Where", mask, scores, low), other)
    added = w("Where", mask, zero, low)
    if form == "plus":
        return w("Add", scores, w("Add", "bias", added))
    if form == "plus_first":
        return w("Add", w("Add", scores, added), "bias")
    return w("Add", added, w("Add", scores, "bias"))


def build(form: str, shapes: dict, fill: float = MIN, softcap: float = 0, zero_rows: bool = False):
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    if softcap:
        cap = w.constant(softcap)
        scores = w("Mul", w("Tanh", w("Div", scores, cap)), cap)
    weights = w("Softmax", masked(w, form, scores, fill), axis=-1)
    y = w("MatMul", weights, "v")
    if zero_rows:
        share = w("Cast", w("Greater", "mask", w.constant(0.5)), to=1)
        share = w("ReduceMean", share, w.constant([-1], np.int64), keepdims=1)
        y = w("Where", w("Greater", share, w.constant(0)), y, w.constant(0))
    y = w("Neg", y)
    return w.model(shapes, [y]), y


def feed_of(bias: str, n_q: int = 5, n_k: int = 5, dead: bool = False) -> dict:
    """Causal mask; the bias is what its name says."""
    rng = np.random.default_rng(2)
    shape = (2, 3, n_q, 8)
    feed = {n: rng.standard_normal(shape).astype(np.float32) for n in "qkv"}
    feed["k"], feed["v"] = (rng.standard_normal((2, 3, n_k, 8)).astype(np.float32) for _ in "kv")
    mask = np.tril(np.ones((1, 1, n_q, n_k), np.float32), max(n_k - n_q, 0))
    if dead:  # every third row may look at nothing
        mask[:, :, 1::3] = 0
    feed["mask"] = mask
    values = rng.standard_normal((2, 1, 1, n_k) if bias != "full" else (1, 3, n_q, n_k))
    values = values.astype(np.float32)
    first = n_k - n_q + 2  # the first two queries see nothing but padding
    if bias == "padding":
        values[0] = 0
        values[0, ..., :first] = MIN
    if bias == "infinite":
        values[0, ..., :first] = -np.inf
    if bias == "everything":  # and a batch of nothing but padding
        values[1] = MIN
    if bias == "everything_infinite":
        values[1] = -np.inf
    feed["bias"] = values
    return feed


def check(form: str, feed: dict, fused: bool = True, **how) -> None:
    model, y = build(form, {n: v.shape for n, v in feed.items()}, **how)
    sizes, plain = check_output(model, feed, y)
    assert (sizes.forward < plain.forward) == fused


BIASES = ["random", "full", "padding", "infinite", "everything", "everything_infinite"]


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dead", [False, True])
def test_every_nesting(form, bias, dead):
    check(form, feed_of(bias, dead=dead))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", ["full", "padding", "infinite"])
@pytest.mark.parametrize("n_q, n_k", [(70, 130), (130, 130), (64, 64)])
def test_more_than_one_tile(form, bias, n_q, n_k):
    check(form, feed_of(bias, n_q, n_k, dead=True))


@pytest.mark.parametrize("form", ["over", "under", "two_masks"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("fill", [-1e9, -1e4, -1e3])
@pytest.mark.parametrize("n", [5, 70])
def test_a_fill_that_is_not_the_smallest_number(form, bias, fill, n):
    """Rows of padding see what the mask hides, if the fill is above the padding's bias."""
    check(form, feed_of(bias, n, n, dead=True), fill=fill)


@pytest.mark.parametrize("form", ["over", "under"])
@pytest.mark.parametrize("far", [-900.0, -1200.0, 900.0])
def test_scores_as_low_as_the_fill(form, far):
    """Keys that the mask hides have a share where allowed scores, or their own bias, are near."""
    feed = feed_of("full", 70, 70)
    causal = feed["mask"] > 0
    feed["bias"] = np.where(causal if far < 0 else ~causal, far, 0) + feed["bias"]
    feed["bias"] = feed["bias"].astype(np.float32)
    check(form, feed, fill=-1e3)


def gated(w: Writer, form: str, scores: str) -> str:
    """scores * m + (1 - m) * fill with m of zeros and ones."""
    m = w("Cast", w("Greater", "mask", w.constant(0.5)), to=1)
    if form == "known":
        m = w.constant(np.tril(np.ones((1, 1, 5, 5))))
    if form == "cut":
        m = w("Slice", w("Unsqueeze", m, w.constant([0], np.int64)), *gate_cut(w))
        m = w("Squeeze", m, w.constant([0], np.int64))
    if form == "numbers":
        m = "mask"
    fill = w.constant(-1e4)
    if form == "minus":
        hidden = w("Mul", w.constant(1e4), w("Sub", w.constant(1), m))
        return w("Sub", w("Mul", m, scores), hidden)
    hidden = w("Mul", w("Sub", w.constant(1), m), fill)
    kept = w("Mul", scores, m)
    return w("Add", hidden, kept) if form == "swapped" else w("Add", kept, hidden)


def gate_cut(w: Writer) -> list[str]:
    return [w.constant([v], np.int64) for v in (0, 5, 3)]  # all rows of the third axis


@pytest.mark.parametrize("form", ["plain", "swapped", "minus", "known", "cut", "numbers"])
@pytest.mark.parametrize("bias", ["none", *BIASES])
def test_a_mask_as_a_product(form, bias):
    """The first GPT's. A mask of numbers that are not known to be zeros and ones is none."""
    feed = feed_of("random" if bias == "none" else bias)
    w = Writer()
    scores = gated(w, form, w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2])))
    if bias == "none":
        feed.pop("bias")
    else:
        scores = w("Add", scores, "bias")
    y = w("Neg", w("MatMul", w("Softmax", scores, axis=-1), "v"))
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    with np.errstate(all="ignore"):
        fast, plain = (run(model, feed, [y], p) for p in (False, True))
    assert (fast[2].forward < plain[2].forward) == (form != "numbers")
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-5, atol=1e-5)
    for name, right in plain[1].items():
        if right is not None and (form == "numbers" or name != "mask"):
            scale = max(1e-3, float(np.abs(right[np.isfinite(right)]).max(initial=0)))
            np.testing.assert_allclose(fast[1][name] / scale, right / scale, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dead", [False, True])
def test_below_a_soft_cap(form, dead):
    check(form, feed_of("padding", dead=dead), softcap=1.5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", ["random", "padding"])
def test_a_fill_of_minus_infinity(form, bias):
    """Rows of nothing are no numbers, as the model has it."""
    check(form, feed_of(bias, dead=True), fill=-np.inf)
    check(form, feed_of(bias), fill=-np.inf)


@pytest.mark.parametrize("fill", [MIN, -np.inf])
@pytest.mark.parametrize("bias", ["random", "padding"])
def test_rows_of_nothing_that_are_cleared_afterwards(bias, fill):
    """A finite fill has finite gradients; -inf has what the plain plan has: NaN, as in PyTorch."""
    feed = feed_of(bias, dead=True)
    model, y = build("over", {n: v.shape for n, v in feed.items()}, fill, zero_rows=True)
    out, grads, _ = run(model, feed, [y], False)
    _, plain, _ = run(model, feed, [y], True)
    assert not out[y][:, :, 1::3].any() and np.isfinite(out[y]).all()
    for name, wanted in plain.items():
        if wanted is None:
            continue
        assert np.array_equal(np.isfinite(grads[name]), np.isfinite(wanted)), name
        assert np.isfinite(wanted).all() or fill == -np.inf


def test_a_mask_of_floats_that_hides_whole_rows():
    """No boolean mask at all: scores that are large lose no digits on the way to the gradient."""
    for low in (MIN, -1e9, -1e4):
        feed = feed_of("random")
        feed["bias"][1] = low
        w = Writer()
        scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
        y = w("Neg", w("MatMul", w("Softmax", w("Add", scores, "bias"), axis=-1), "v"))
        feed.pop("mask")
        model = w.model({n: v.shape for n, v in feed.items()}, [y])
        fast, plain = (run(model, feed, [y], p) for p in (False, True))
        assert fast[2].forward == 2 < plain[2].forward
        for name, right in plain[1].items():
            scale = float(np.abs(right).max())
            np.testing.assert_allclose(fast[1][name] / scale, right / scale, atol=1e-5)


def test_a_factor_behind_the_mask_makes_the_fill_infinite():
    feed = feed_of("random", dead=True)
    feed.pop("bias")
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    mask = w("Greater", "mask", w.constant(0.5))
    scores = w("Mul", w("Where", mask, scores, w.constant(MIN)), w.constant(2))
    y = w("Neg", w("MatMul", w("Softmax", scores, axis=-1), "v"))
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    fast, plain = (run(model, feed, [y], p) for p in (False, True))
    assert fast[2].forward < plain[2].forward
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_dropout_in_rows_without_a_key(threads):
    feed = feed_of("padding", 70, 130, dead=True)
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    weights = w("Softmax", masked(w, "under", scores, MIN), axis=-1)
    weights = w("Dropout", weights, w.constant(0.3), w.constant(True, np.bool_))
    y = w("Neg", w("MatMul", weights, "v"))
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    fast, plain = (run(model, feed, [y], p, threads, seed=4) for p in (False, True))
    np.testing.assert_allclose(fast[0][y], plain[0][y], rtol=1e-5, atol=1e-5)
    for name, right in plain[1].items():
        if right is not None:
            np.testing.assert_allclose(fast[1][name], right, atol=5e-5, err_msg=name)


@pytest.mark.parametrize("form", ["bias", "mask", "both"])
@pytest.mark.parametrize("low", [MIN, -np.inf])
@pytest.mark.parametrize("n", [5, 70])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_floor_under_the_scores(form, low, n, dropout):
    """XGLM: Max(scores, smallest number). Rows of nothing are uniform, gradients those of Max."""
    feed = feed_of("random", n, n, dead=True)
    if form == "bias":
        feed["bias"] = np.where(feed.pop("mask") > 0, feed["bias"], np.float32(low))
    if form == "mask":
        feed.pop("bias")
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    if form != "bias":
        hidden = w("Where", w("Greater", "mask", w.constant(0.5)), w.constant(0), w.constant(MIN))
        scores = w("Add", scores, hidden)
    if form != "mask":
        scores = w("Add", scores, "bias")
    weights = w("Softmax", w("Max", scores, w.constant(MIN)), axis=-1)
    if dropout:
        weights = w("Dropout", weights, w.constant(dropout), w.constant(True, np.bool_))
    y = w("Neg", w("MatMul", weights, "v"))
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    fast, plain = check_output(model, feed, y, seed=3)
    # what a bias makes of a floor beside a mask depends on both
    assert (fast.forward < plain.forward) == (form != "both")


@pytest.mark.parametrize("form", ["bias in the mask", "soft cap"])
def test_what_a_floor_does_not_mix_with(form):
    """Hidden biases get no gradient, capped scores one at their product: left to the chain."""
    feed = feed_of("random", 8, 8, dead=True)
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    mask, low = w("Greater", "mask", w.constant(0.5)), w.constant(MIN)
    if form == "soft cap":
        feed.pop("bias")
        scores = w("Mul", w("Tanh", w("Div", scores, w.constant(2))), w.constant(2))
        hidden = w("Where", mask, w.constant(0), low)
    else:
        hidden = w("Where", mask, "bias", low)
    weights = w("Softmax", w("Max", w("Add", scores, hidden), low), axis=-1)
    y = w("Neg", w("MatMul", weights, "v"))
    model = w.model({n: v.shape for n, v in feed.items()}, [y])
    fast, plain = (run(model, feed, [y], p) for p in (False, True))
    assert fast[2].forward == plain[2].forward
    for name, right in plain[1].items():
        if right is not None:
            np.testing.assert_allclose(fast[1][name], right, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("form", ["filled", "added", "gate", "floor"])
def test_a_mask_without_axes_is_none(form):
    """One truth value for all scores: the chain stays as it is, and compiles."""
    feed = feed_of("random")
    feed.pop("mask")
    feed["bias"] = np.array(0.7, np.float32)
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    one, zero, low = w.constant(1), w.constant(0), w.constant(MIN)
    hidden = w("Greater", "bias", w.constant(0.5))
    if form == "filled":
        scores = w("Where", hidden, low, scores)
    if form == "added":
        scores = w("Add", scores, w("Where", hidden, low, zero))
    if form == "gate":
        gate = w("Cast", hidden, to=1)
        scores = w("Add", w("Mul", scores, gate), w("Mul", w("Sub", one, gate), w.constant(-1e4)))
    if form == "floor":
        scores = w("Max", w("Add", scores, "bias"), low)
    y = w("Neg", w("MatMul", w("Softmax", scores, axis=-1), "v"))
    check_output(w.model({n: v.shape for n, v in feed.items()}, [y]), feed, y)


def test_a_known_mask_without_axes():
    feed = feed_of("random")
    feed.pop("mask"), feed.pop("bias")
    w = Writer()
    scores = w("MatMul", "q", w("Transpose", "k", perm=[0, 1, 3, 2]))
    y = w("Softmax", w("Add", scores, w.constant(np.float32(-2e30))), axis=-1)
    y = w("Neg", w("MatMul", y, "v"))
    check_output(w.model({n: v.shape for n, v in feed.items()}, [y]), feed, y)
