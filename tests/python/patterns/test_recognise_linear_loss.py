"""Heads fused with their loss: recognised if only the loss reads the logits, equal to the plain
plan, with gradients that the forward forms in memory of the caller."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer, arrays

EARLY, DENSE = 4, 2  # GRADD_PLAN_EARLY, GRADD_PLAN_DENSE_LOSS
B, S, K, V = 8, 16, 8, 521  # 260 KiB of logits: with less it is not worth while
END = np.iinfo(np.int64).max
SHAPES = {"x": (B, S, K), "w": (V, K), "y": (B, S)}


def feed_of(shapes, seed=0, ignored=0.3, dtype=np.float32):
    out = {n: a.astype(dtype) for n, a in arrays(shapes, seed).items() if n != "y"}
    rng = np.random.default_rng(seed + 1)
    labels = rng.integers(0, V, shapes["y"])
    out["y"] = np.where(rng.random(shapes["y"]) < ignored, -100, labels)
    return {n: out[n] for n in shapes}


def product(w, x="x", weight="w", bias=None):
    """x W^T + b, as nn.Linear is exported."""
    z = w("MatMul", x, w("Transpose", weight, perm=[1, 0]))
    return z if bias is None else w("Add", z, bias)


def loss_of(w, logits, labels="y", shift=None, reduction="mean"):
    """The loss of a next-token model, or of one label per row."""
    if shift == "pad":
        labels = w("Pad", labels, w.constant([0, 0, 0, 1], np.int64), w.constant(-100, np.int64))
    if shift == "cut":
        ends = [w.constant([v], np.int64) for v in (0, -1, 1, 1)]
        logits = w("Slice", logits, *ends)
    if shift:
        labels = w("Slice", labels, *[w.constant([v], np.int64) for v in (1, END, 1, 1)])
    rows = w("Reshape", logits, w.constant([-1, V], np.int64))
    labels = w("Reshape", labels, w.constant([-1], np.int64))
    return w("SoftmaxCrossEntropyLoss", rows, labels, ignore_index=-100, reduction=reduction)


class Trained:
    """Loss and gradients of one plan for a gradient `dy` of the loss, and its sizes."""

    def __init__(self, model, feed, wanted, outputs, *, flags=EARLY, dy=0.37, parameters=("w",)):
        self.feed, self.outputs = feed, outputs
        parameters = [p for p in parameters if p in feed]
        self.plan = E.Plan(
            model, feed, wanted, outputs, outputs[:1], flags=flags, parameters=parameters
        )
        self.run = E.Run(self.plan)
        self.early = self.run.give()
        self.out = self.run.forward(feed)
        self.dy = {outputs[0]: np.full((), dy, self.out[outputs[0]].dtype)}
        self.grads = self.run.backward(self.dy, into=self.early)
        self.launches = self.plan.info.n_launches_forward


def check(w, shapes, loss, wanted=("x", "w"), *, feed=None, tol=2e-6, **kwargs):
    """The recognised plan against the plain one; returns both."""
    feed = feed or feed_of(shapes)
    model = w.model(shapes, [loss], ints=("y", "n"))
    fast = Trained(model, feed, wanted, [loss], **kwargs)
    plain = Trained(model, feed, wanted, [loss], flags=1)
    assert not plain.early
    np.testing.assert_allclose(fast.out[loss], plain.out[loss], rtol=tol)
    for name, want in plain.grads.items():
        scale = max(1e-6, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(fast.grads[name] / scale, want / scale, atol=3 * tol)
    return fast, plain


@pytest.mark.quick
@pytest.mark.parametrize("shift", [None, "pad", "cut"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_shift(shift, reduction):
    w = Writer()
    loss = loss_of(w, product(w), shift=shift, reduction=reduction)
    fast, _ = check(w, SHAPES, loss)
    assert fast.launches == 1
    assert set(fast.early) == {"w"}, "dX lies in the arena"
    assert fast.plan.info.saved_bytes == B * S * K * 4


def test_scores_made_flat_before_the_product():
    w = Writer()
    rows = w("Reshape", "x", w.constant([-1, K], np.int64))
    logits = w("Reshape", product(w, rows), w.constant([B, S, V], np.int64))
    fast, _ = check(w, SHAPES, loss_of(w, logits, shift="pad"))
    assert fast.launches == 1


@pytest.mark.parametrize("trained", [("x",), ("w",), ("b",), ("x", "w", "b")])
def test_bias_and_what_is_frozen(trained):
    w = Writer()
    loss = loss_of(w, product(w, bias="b"))
    shapes = SHAPES | {"b": (V,)}
    fast, _ = check(w, shapes, loss, trained, parameters=("w", "b"))
    assert fast.launches == 1
    assert set(fast.early) == set(trained) - {"x"}


@pytest.mark.parametrize("how", ["cap", "scale", "quotient", "both"])
def test_soft_cap_and_scale(how):
    w = Writer()
    z = product(w)
    if how in ("scale", "both"):
        z = w("Mul", z, w.constant(0.3))
    if how == "quotient":
        z = w("Div", z, w.constant(4.0))
    if how in ("cap", "both"):
        z = w("Mul", w("Tanh", w("Div", z, w.constant(2.5))), w.constant(2.5))
    fast, _ = check(w, SHAPES, loss_of(w, z))
    assert fast.launches == 1


def test_division_by_a_number_of_items():
    w = Writer()
    loss = loss_of(w, product(w), shift="pad", reduction="sum")
    loss = w("Div", loss, w("Cast", "n", to=TensorProto.FLOAT))
    feed = feed_of(SHAPES) | {"n": np.array(13, np.int64)}
    fast, _ = check(w, SHAPES | {"n": ()}, loss, feed=feed)
    assert fast.launches == 1


def test_tied_weight():
    """The gradient of the embedding is added to the one that the forward has formed."""
    w = Writer()
    shapes = {"w": (V, K), "y": (B, S), "n": (B, S)}
    hidden = w("Gather", "w", "n")
    loss = loss_of(w, product(w, w("Tanh", hidden)))
    rng = np.random.default_rng(4)
    feed = feed_of({k: shapes[k] for k in ("w", "y")}) | {"n": rng.integers(0, V, (B, S))}
    fast, _ = check(w, shapes, loss, ("w",), feed=feed)
    assert set(fast.early) == {"w"}


def test_two_losses_of_one_head_weight():
    """Only one of them is formed where the gradient will be."""
    w = Writer()
    shapes = SHAPES | {"z": (B, S, K)}
    loss = w("Add", loss_of(w, product(w)), loss_of(w, product(w, "z")))
    fast, _ = check(w, shapes, loss, ("x", "z", "w"))
    assert set(fast.early) == {"w"} and fast.launches == 3


@pytest.mark.parametrize("kept", ["logits", "reader", "folded", "none", "switch", "inference"])
def test_logits_that_stay(kept):
    w = Writer()
    z = product(w, weight=w.constant(arrays({"w": (V, K)})["w"]) if kept == "folded" else "w")
    loss = loss_of(w, z, reduction="none" if kept == "none" else "mean")
    if kept == "reader":
        loss = w("Add", loss, w("ReduceMax", z, keepdims=0))
    outputs = [loss, z] if kept == "logits" else [loss]
    model = w.model(SHAPES, outputs, ints=("y",))
    grad_outputs = [] if kept in ("inference", "none") else [loss]
    flags = EARLY | (DENSE if kept == "switch" else 0)
    plan = E.Plan(
        model, feed_of(SHAPES), ["x", "w"], outputs, grad_outputs, flags=flags, parameters=["w"]
    )
    assert plan.info.n_launches_forward > 1
    assert not plan.info.early[1]


def test_memory_is_weighed_where_the_weight_s_gradient_is_in_the_arena():
    """Without memory of the caller the logits of a wide model's small batch are less than the
    gradient."""
    for rows, width, launches in ((64, 8, 1), (64, 300, 2), (500, 300, 1)):
        shapes = {"x": (rows, 4, width), "w": (V, width), "y": (rows, 4)}
        w = Writer()
        model = w.model(shapes, [loss := loss_of(w, product(w))], ints=("y",))
        plan = E.Plan(model, feed_of(shapes), ["x", "w"], [loss], [loss])
        assert plan.info.n_launches_forward == launches, (rows, width)


@pytest.mark.parametrize("rows", [127, 300])
def test_nothing_is_labelled(rows):
    """torch: the mean of nothing is no number, and gradients are zero."""
    w = Writer()
    shapes = {"x": (rows, K), "w": (V, K), "y": (rows,)}
    loss = loss_of(w, product(w))
    feed = feed_of(shapes, ignored=2)
    fast = Trained(w.model(shapes, [loss], ints=("y",)), feed, ["x", "w"], [loss], dy=1)
    assert np.isnan(fast.out[loss])
    assert not any(g.any() for g in fast.grads.values())


def test_gradients_where_they_were_formed_and_elsewhere():
    """Backwards that keep the run write elsewhere; the last one may write where the forward did,
    and does nothing there for a gradient of 1."""
    w = Writer()
    model = w.model(SHAPES, [loss := loss_of(w, product(w))], ints=("y",))
    trained = Trained(model, feed_of(SHAPES), ["x", "w"], [loss], dy=1)
    want = {n: g.copy() for n, g in trained.grads.items()}
    run, plan = trained.run, trained.plan
    run.give()
    run.forward(trained.feed)
    np.testing.assert_array_equal(run.early["w"], want["w"])
    with pytest.raises(E.EngineError, match="gradient 1 is to be written where the forward has"):
        run.backward({loss: np.full((), 2, np.float32)}, keep=True, into=run.early)
    twice = run.backward({loss: np.full((), 2, np.float32)}, keep=True)
    last = run.backward({loss: np.full((), 0.5, np.float32)}, into=run.early)
    assert last["w"] is run.early["w"]
    for name, grad in want.items():
        np.testing.assert_array_equal(twice[name], 2 * grad)
        np.testing.assert_array_equal(last[name], grad / 2)
    missing = E.Run(plan)
    with pytest.raises(E.EngineError, match="no memory was given for gradient 1, which a forward"):
        missing.forward(trained.feed)


def test_bf16():
    """Beside f64 computed from the same bf16 values, and the same bits twice."""
    w = Writer()
    shapes = {"x": (260, K), "w": (V, K), "y": (260,)}
    loss = loss_of(w, w("Cast", product(w), to=TensorProto.FLOAT))
    proto = w.proto(shapes, [loss], ints=("y",), kind=TensorProto.BFLOAT16)
    feed = feed_of(shapes, dtype=E.BF16)
    runs = [Trained(E.Model(proto), feed, ["x", "w"], [loss], dy=1) for _ in range(2)]
    assert runs[0].launches == 1
    x, weight = feed["x"].astype(float), feed["w"].astype(float)
    z, used = x @ weight.T, feed["y"] >= 0
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    y = np.where(used, feed["y"], 0)
    np.testing.assert_allclose(
        runs[0].out[loss], -np.log(p[np.arange(260), y])[used].mean(), rtol=5e-3
    )
    p[np.arange(260), y] -= 1
    p *= used[:, None] / used.sum()
    for name, want in (("x", p @ weight), ("w", p.T @ x)):
        got = runs[0].grads[name]
        assert np.linalg.norm(got.astype(float) - want) < 8e-3 * np.linalg.norm(want)
        assert got.tobytes() == runs[1].grads[name].tobytes()
