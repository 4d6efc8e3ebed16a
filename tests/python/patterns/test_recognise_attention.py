"""Attention as one operator: every mask, bias and layout, with the numbers of the plain plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from onnx import TensorProto, helper

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer

KINDS = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
KINDS |= {E.BF16.type: TensorProto.BFLOAT16, np.float16: TensorProto.FLOAT16}
SMALLEST = {np.float32: -3.4028234663852886e38, np.float64: -1.7976931348623157e308}
SMALLEST |= {E.BF16.type: -3.3895313892515355e38, np.float16: -65504}


@dataclass
class Case:
    """One attention; the defaults are plain self-attention without a mask."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    n_q: int = 9
    n_k: int = 9
    d: int = 8
    d_v: int = 8
    dtype: type = np.float32
    mask: str = ""  # causal, left, right, window, holes, empty
    form: str = "where"  # where, hide (the mask names what is hidden), add, whole (one node)
    bias: tuple = ()
    softcap: float = 0.0
    dropout: float = 0.0
    turned: bool = False  # q, k, v and the result are [B, S, H, D]
    scale: float = 0.3
    scale_on: str = "scores"  # scores, div, query, key, masked

    @property
    def shapes(self):
        q = (self.batch, self.heads, self.n_q, self.d)
        k = (self.batch, self.kv_heads, self.n_k, self.d)
        v = (self.batch, self.kv_heads, self.n_k, self.d_v)
        out = {"q": q, "k": k, "v": v}
        if self.turned:
            out = {n: (s[0], s[2], s[1], s[3]) for n, s in out.items()}
        if self.bias:
            out["bias"] = self.bias
        return out


def mask_of(case):
    rows, columns = np.arange(case.n_q)[:, None], np.arange(case.n_k)[None, :]
    shift = case.n_k - case.n_q
    b = np.arange(case.batch)[:, None, None, None]
    ones = np.ones((case.batch, 1, case.n_q, case.n_k), bool)
    causal = columns <= rows + max(shift, 0)
    rng = np.random.default_rng(5)
    kinds = {
        "causal": causal,
        "left": (causal & (columns >= 2 + b)) & ones,
        "right": ones & (columns < case.n_k - b * (case.n_k // 3)),
        "window": causal & (columns > rows + shift - 4) & ones,
        "holes": ones & (rng.random((case.batch, case.heads, case.n_q, case.n_k)) < 0.5),
        "empty": ones & ((rows % 3 != 1) & (columns != 2)),
        "keys": rng.random((case.batch, 1, 1, case.n_k)) < 0.6,
    }
    return kinds[case.mask]


def scaled(w, case, q, k):
    def constant(x):
        return w.constant(x, case.dtype)

    if case.scale_on == "query":
        q = w("Mul", q, constant(case.scale))
    if case.scale_on == "key":
        k = w("Mul", constant(case.scale), k)
    scores = w("MatMul", q, k)
    if case.scale_on == "scores":
        scores = w("Mul", scores, constant(case.scale))
    if case.scale_on == "div":
        scores = w("Div", scores, constant(1 / case.scale))
    if case.softcap:
        scores = w("Tanh", w("Div", scores, constant(case.softcap)))
        scores = w("Mul", scores, constant(case.softcap))
    return scores


def masked(w, case, scores):
    fill, zero = w.constant(SMALLEST[case.dtype], case.dtype), w.constant(0, case.dtype)
    if case.bias:
        scores = w("Add", scores, "bias")
    if not case.mask:
        return scores
    if case.form == "add":
        scores = w("Add", w("Where", "mask", zero, fill), scores)
        return w("Mul", scores, w.constant(case.scale)) if case.scale_on == "masked" else scores
    if case.form == "hide":
        return w("Where", w("Not", "mask"), fill, scores)
    return w("Where", "mask", scores, fill)


def repeated(w, case, x, width):
    group = case.heads // case.kv_heads
    if group == 1:
        return x
    wide = w.constant([case.batch, case.kv_heads, group, case.n_k, width], np.int64)
    flat = w.constant([case.batch, case.heads, case.n_k, width], np.int64)
    x = w("Unsqueeze", x, w.constant([2], np.int64))
    return w("Reshape", w("Expand", x, wide), flat)


def attention(w, case, q, k, v):
    if case.form == "whole":
        given = {"scale": case.scale, "softcap": case.softcap}
        if case.dropout:
            given |= {"dropout": case.dropout, "domain": "com.gradd"}
        return w("Attention", q, k, v, *(["mask"] if case.mask else []), **given)
    k = w("Transpose", k, perm=[0, 1, 3, 2])
    weights = w("Softmax", masked(w, case, scaled(w, case, q, k)), axis=-1)
    if case.dropout:
        ratio, training = w.constant(case.dropout), w.constant(True, np.bool_)
        weights = w("Dropout", weights, ratio, training)
    return w("MatMul", weights, v)


def build(case):
    """The model and the name of its output."""
    w = Writer()
    q, k, v = "q", "k", "v"
    if case.turned:
        q, k, v = (w("Transpose", x, perm=[0, 2, 1, 3]) for x in (q, k, v))
    k, v = repeated(w, case, k, case.d), repeated(w, case, v, case.d_v)
    y = attention(w, case, q, k, v)
    if case.turned:
        y = w("Transpose", y, perm=[0, 2, 1, 3])
    y = w("Neg", y)  # the attention's own result is saved for backward: an output would be a copy
    kind = KINDS[case.dtype]
    inputs = [helper.make_tensor_value_info(n, kind, s) for n, s in case.shapes.items()]
    if case.mask:
        shape = mask_of(case).shape
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, shape))
    outputs = [helper.make_tensor_value_info(y, kind, None)]
    graph = helper.make_graph(w.nodes, "g", inputs, outputs, w.constants)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.gradd", 1)]
    return E.Model(helper.make_model(graph, opset_imports=opsets).SerializeToString()), y


def feed_of(case, seed=0):
    rng = np.random.default_rng(seed)
    feed = {n: rng.standard_normal(s).astype(case.dtype) for n, s in case.shapes.items()}
    if case.mask:
        feed["mask"] = mask_of(case)
    return feed


def run(model, y, feed, plain, threads=0, flags=0):
    wanted = [n for n in feed if n != "mask"]
    plan = E.Plan(model, feed, wanted, [y], [y], threads=threads, plain=plain)
    one = E.Run(plan)
    out = one.forward(feed, seed=11, flags=flags)[y]
    dy = np.random.default_rng(3).standard_normal(out.shape).astype(out.dtype)
    return out, one.backward({y: dy}), plan.info.n_launches_forward


def close(got, want, tolerance, floor=1e-6):
    got, want = got.astype(np.float64), want.astype(np.float64)
    scale = max(1e-6, floor, float(np.abs(want).max()))
    np.testing.assert_allclose(got / scale, want / scale, atol=tolerance, rtol=0)


TOLERANCE = {np.float32: 2e-5, np.float64: 1e-12, E.BF16.type: 3e-2, np.float16: 4e-3}


def check(case, nodes=None):
    """Recognised against plain; the recognised plan has `nodes` forward nodes."""
    model, y = build(case)
    feed = feed_of(case)
    fast, plain = run(model, y, feed, False), run(model, y, feed, True)
    expected = 1 + (nodes or (1 + bool(case.mask)))
    assert fast[2] == expected < plain[2]
    close(fast[0], plain[0], TOLERANCE[case.dtype])
    # a gradient that is zero but for rounding is measured by the others
    floor = 0.3 * max(float(np.abs(v.astype(np.float64)).max()) for v in plain[1].values())
    for name, want in plain[1].items():
        close(fast[1][name], want, TOLERANCE[case.dtype], floor)


MASKS = ["causal", "left", "right", "window", "holes", "empty", "keys"]


@pytest.mark.quick
@pytest.mark.parametrize("mask", ["", *MASKS])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("form", ["where", "whole"])
def test_masks(mask, turned, form):
    check(Case(mask=mask, turned=turned, kv_heads=2, form=form))


@pytest.mark.parametrize("form", ["where", "hide", "add", "whole"])
@pytest.mark.parametrize("mask", ["empty", "left"])
def test_rows_without_a_key_in_every_form(mask, form):
    check(Case(mask=mask, form=form))


@pytest.mark.parametrize("d", [8, 16, 17, 40, 63, 64, 80, 128])
@pytest.mark.parametrize("turned", [False, True])
def test_head_widths(d, turned):
    check(Case(d=d, d_v=d, mask="causal", n_q=70, n_k=70, turned=turned, kv_heads=2, batch=1))


@pytest.mark.parametrize("n_q, n_k", [(1, 70), (5, 129), (130, 64), (64, 64), (200, 200), (65, 2)])
@pytest.mark.parametrize("mask", ["", "causal", "right", "holes", "window"])
def test_lengths(n_q, n_k, mask):
    check(Case(n_q=n_q, n_k=n_k, mask=mask, d=24, d_v=16, kv_heads=1))


@pytest.mark.parametrize(
    "bias", [(2, 4, 70, 90), (1, 4, 70, 90), (4, 70, 90), (2, 1, 70, 90), (2, 1, 1, 90), (70, 1)]
)
@pytest.mark.parametrize("mask", ["", "causal", "empty"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_bias_has_a_gradient(bias, mask, softcap):
    check(Case(n_q=70, n_k=90, bias=bias, mask=mask, softcap=softcap, kv_heads=2))


@pytest.mark.parametrize("scale_on", ["scores", "div", "query", "key"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_where_the_scale_is(scale_on, softcap):
    nodes = 2 if scale_on == "query" else 1
    check(Case(scale_on=scale_on, softcap=softcap, scale=0.7), nodes=nodes)


def test_a_scale_behind_the_mask():
    check(Case(scale_on="masked", form="add", mask="left"))


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("n_q, n_k", [(9, 9), (70, 64), (70, 131)])
@pytest.mark.parametrize("mask", ["", "left", "holes"])
@pytest.mark.parametrize("form", ["where", "whole"])
def test_dropout_takes_the_bits_of_the_plain_plan(ratio, n_q, n_k, mask, form):
    check(Case(dropout=ratio, n_q=n_q, n_k=n_k, mask=mask, kv_heads=2, turned=True, form=form))


@pytest.mark.parametrize("dtype", [np.float64, E.BF16.type, np.float16])
@pytest.mark.parametrize("mask", ["", "causal", "empty"])
@pytest.mark.parametrize("d", [16, 20])
def test_types(dtype, mask, d):
    check(Case(dtype=dtype, mask=mask, d=d, d_v=d, n_q=70, n_k=70, turned=True, kv_heads=2))


@pytest.mark.parametrize("half", [E.BF16.type, np.float16])
def test_a_half_is_as_near_to_f64_as_the_plain_plan(half):
    case = Case(n_q=100, n_k=100, d=32, d_v=32, mask="left", batch=4, kv_heads=2)
    exact_case = Case(**{**case.__dict__, "dtype": np.float64})
    case.dtype = half
    feed = feed_of(case)
    wide = {n: v.astype(np.float64) if n != "mask" else v for n, v in feed.items()}
    exact = run(*build(exact_case), wide, True)

    def distances(result):
        pairs = [(result[0], exact[0]), *((result[1][n], exact[1][n]) for n in "qkv")]
        return [np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b) for a, b in pairs]

    fast, plain = (distances(run(*build(case), feed, p)) for p in (False, True))
    for got, limit in zip(fast, plain, strict=True):
        assert got <= limit * 1.05


@pytest.mark.parametrize("dtype", [np.float32, E.BF16.type, np.float16])
@pytest.mark.parametrize("mask, dropout", [("left", 0.0), ("holes", 0.2)])
def test_bits_are_those_of_any_number_of_threads(dtype, mask, dropout):
    case = Case(
        batch=1, heads=2, kv_heads=1, n_q=300, n_k=300, d=16, d_v=16, mask=mask, dropout=dropout
    )
    case.dtype = dtype
    model, y = build(case)
    feed = feed_of(case)
    first = run(model, y, feed, False, threads=1)
    for threads in (1, 2, 2):
        again = run(model, y, feed, False, threads=threads)
        assert first[0].tobytes() == again[0].tobytes()
        for name, gradient in first[1].items():
            assert gradient.tobytes() == again[1][name].tobytes()


def test_probabilities_with_another_reader_keep_the_chain():
    case = Case()
    w = Writer()
    k = w("Transpose", "k", perm=[0, 1, 3, 2])
    weights = w("Softmax", w("MatMul", "q", k), axis=-1)
    y = w("MatMul", weights, "v")
    y = w("Neg", y)
    model = w.model(case.shapes, [y, weights])
    feed = feed_of(case)
    assert E.Plan(model, feed, ["q"], [y], [y]).info.n_launches_forward == 2
    assert (
        E.Plan(model, feed, ["q"], [y, weights], [y]).info.n_launches_forward == 5
    )  # and a copy of the weights


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("others", ["products", "product on the right", "sum"])
def test_products_that_share_their_probabilities(others, dropout):
    """As in differential attention: one softmax, two halves of the values."""
    case = Case(n_q=8, n_k=8)  # square, so that the probabilities fit on both sides
    w = Writer()
    k = w("Transpose", "k", perm=[0, 1, 3, 2])
    weights = w("Softmax", w("MatMul", "q", k), axis=-1)
    if dropout:
        weights = w("Dropout", weights, w.constant(dropout), w.constant(True, np.bool_))
    first, second = w("MatMul", weights, "v"), w("MatMul", weights, w("Neg", "v"))
    if others == "product on the right":
        second = w("MatMul", "v", weights)
    if others == "sum":
        second = w("Add", second, w("ReduceSum", weights, keepdims=1))
    y = w("Mul", first, w("Exp", second))
    model, feed = w.model(case.shapes, [y]), feed_of(case)
    fast, plain = run(model, y, feed, False), run(model, y, feed, True)
    # fused: Neg, values side by side, one attention, its result in two, Exp and Mul
    assert fast[2] == (6 if others == "products" else plain[2])
    close(fast[0], plain[0], TOLERANCE[np.float32])
    for name, want in plain[1].items():
        close(fast[1][name], want, 5e-5)


@pytest.mark.parametrize("parts", ["in order", "swapped"])
@pytest.mark.parametrize("turned", [False, True])
def test_shared_probabilities_whose_results_lie_side_by_side(parts, turned):
    """Values of different widths; put back in the same order, they were never apart."""
    w = Writer()
    k = w("Transpose", "k", perm=[0, 1, 3, 2])
    weights = w("Softmax", w("MatMul", "q", k), axis=-1)
    both = [w("MatMul", weights, n) for n in ("v", "u")]
    if turned:
        both = [w("Transpose", y, perm=[0, 2, 1, 3]) for y in both]
    y = w("Neg", w("Concat", *(both if parts == "in order" else both[::-1]), axis=-1))
    shapes = {"q": (2, 3, 9, 8), "k": (2, 3, 7, 8), "v": (2, 3, 7, 8), "u": (2, 3, 7, 5)}
    rng = np.random.default_rng(1)
    feed = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    model = w.model(shapes, [y])
    fast, plain = run(model, y, feed, False), run(model, y, feed, True)
    # Concat, attention, Neg; out of order also Split and the other Concat
    assert fast[2] == (3 if parts == "in order" else 5)
    close(fast[0], plain[0], TOLERANCE[np.float32])
    for name, want in plain[1].items():
        close(fast[1][name], want, 5e-5)


@pytest.mark.parametrize("apart", ["scale", "mask", "dropout", "keys", "lengths"])
def test_attentions_with_probabilities_of_their_own_stay_apart(apart):
    w = Writer()
    shapes = dict.fromkeys("qkpvu", (2, 3, 8, 8))
    shapes |= {"m": (8, 8), "n": (8, 8)}

    def weights(second):
        other = second and apart
        k = w("Transpose", "p" if other == "keys" else "k", perm=[0, 1, 3, 2])
        scores = w("Mul", w("MatMul", "q", k), w.constant(0.5 if other == "scale" else 0.3))
        mask = w("Greater", "n" if other == "mask" else "m", w.constant(0))
        p = w("Softmax", w("Where", mask, scores, w.constant(-3e38)), axis=-1)
        if apart == "dropout":
            p = w("Dropout", p, w.constant(0.3), w.constant(True, np.bool_))
        return p

    if apart == "lengths":  # one value for all heads
        shapes["u"] = (2, 1, 8, 8)
    y = w("Mul", w("MatMul", weights(False), "v"), w("Exp", w("MatMul", weights(True), "u")))
    rng = np.random.default_rng(1)
    feed = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    feed |= {n: np.tril(np.ones((8, 8), np.float32), i) for i, n in enumerate("mn")}
    model = w.model(shapes, [y])
    fast, plain = run(model, y, feed, False), run(model, y, feed, True)
    # dropped twice, both read the softmax itself; broadcast, one of them stays a product
    assert (fast[2] < plain[2]) == (apart not in ("dropout", "lengths"))
    close(fast[0], plain[0], TOLERANCE[np.float32])
    for name in set(shapes) - set("mn"):
        if plain[1][name] is not None:
            close(fast[1][name], plain[1][name], 5e-5)


@pytest.mark.parametrize("change", ["axis", "fill"])
def test_what_only_looks_like_attention_stays(change):
    w = Writer()
    shape = (2, 3, 8, 8)
    k = w("Transpose", "k", perm=[0, 1, 3, 2])
    scores = w("MatMul", "q", k)
    if change == "fill":
        scores = w("Where", w("Greater", scores, w.constant(0)), scores, w.constant(-1.0))
    y = w("MatMul", w("Softmax", scores, axis=-2 if change == "axis" else -1), "v")
    model = w.model(dict.fromkeys("qkv", shape), [y])
    feed = {n: np.ones(shape, np.float32) for n in "qkv"}
    sizes = [E.Plan(model, feed, ["q"], None, [y], plain=p).info.n_launches_forward for p in (0, 1)]
    # the last product's own transposition is absorbed in either plan
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("mask, bias", [("keys", ()), ("right", (2, 1, 1, 3)), ("", (1, 4, 3, 3))])
def test_three_keys_are_not_special(mask, bias):
    check(Case(n_q=3, n_k=3, mask=mask, bias=bias))
