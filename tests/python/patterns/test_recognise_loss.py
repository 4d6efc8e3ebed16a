"""Recognised losses: cross-entropy over logits and labels as they come, however they shift."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer, arrays, compare

V = 11
END = np.iinfo(np.int64).max


def feed_of(shapes, seed=0, classes=V, ignored=0.3):
    """Arrays for the shapes; `y` holds labels, some of them ignored."""
    out = arrays({n: s for n, s in shapes.items() if n != "y"}, seed)
    rng = np.random.default_rng(seed + 1)
    labels = rng.integers(0, classes, shapes["y"])
    out["y"] = np.where(rng.random(shapes["y"]) < ignored, -100, labels)
    return {n: out[n] for n in shapes}


def flat(w, logits, labels, classes=V):
    rows = w("Reshape", logits, w.constant([-1, classes], np.int64))
    return rows, w("Reshape", labels, w.constant([-1], np.int64))


def cut(w, value, start, end, axis):
    bounds = [w.constant([v], np.int64) for v in (start, end, axis, 1)]
    return w("Slice", value, *bounds)


def shifted(w, logits, labels, how, axes=(1, 1)):
    """Scores [N, V] and labels [N] of a next-token loss."""
    if how == "pad":
        pads = [0] * (2 * axes[0] + 1) + [1]
        labels = w("Pad", labels, w.constant(pads, np.int64), w.constant(-100, np.int64))
    elif how == "cut":
        logits = cut(w, logits, 0, -1, axes[0])
    if how != "none":
        labels = cut(w, labels, 1, END, axes[1])
    return flat(w, logits, labels)


def softmax_loss(w, scores, labels, reduction="mean"):
    return w("SoftmaxCrossEntropyLoss", scores, labels, ignore_index=-100, reduction=reduction)


def check(w, shapes, outputs, nodes=1, feed=None):
    feed = feed or feed_of(shapes)
    fast, plain = compare(w.model(shapes, outputs, ints=("y", "n")), feed, outputs)
    assert fast.forward == nodes, f"{fast.forward} nodes, {plain.forward} in the plain plan"
    return fast, plain


@pytest.mark.quick
@pytest.mark.parametrize("how", ["pad", "cut", "none"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["softmax", "likelihood"])
def test_shift(how, reduction, kind):
    w = Writer()
    shapes = {"x": (3, 5, V), "y": (3, 5)}
    scores, labels = shifted(w, "x", "y", how)
    if kind == "softmax":
        loss = softmax_loss(w, scores, labels, reduction)
    else:
        logs = w("LogSoftmax", scores, axis=-1)
        args = {"ignore_index": -100, "reduction": reduction}
        loss = w("NegativeLogLikelihoodLoss", logs, labels, **args)
    fast, plain = check(w, shapes, [loss])
    assert fast.backward == 1


@pytest.mark.parametrize("how", ["pad", "cut", "none"])
def test_division_by_a_number_of_items(how):
    w = Writer()
    shapes = {"x": (2, 4, V), "y": (2, 4), "n": ()}
    scores, labels = shifted(w, "x", "y", how)
    loss = w("Div", softmax_loss(w, scores, labels, "sum"), w("Cast", "n", to=1))
    feed = feed_of({"x": (2, 4, V), "y": (2, 4)}) | {"n": np.array(13, np.int64)}
    fast, _ = check(w, shapes, [loss], feed=feed)
    assert fast.backward == 1


@pytest.mark.parametrize("how", ["pad", "cut", "none"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_label_smoothing(how, reduction):
    w = Writer()
    shapes = {"x": (3, 5, V), "y": (3, 5)}
    scores, labels = shifted(w, "x", "y", how)
    args = {"ignore_index": -100, "reduction": reduction, "smoothing": 0.1}
    fast, _ = check(w, shapes, [w("CrossEntropy", scores, labels, domain="com.gradd", **args)])
    assert fast.backward == 1


def test_classes_on_the_second_axis():
    w = Writer()
    shapes = {"x": (3, 5, V), "y": (3, 5)}
    check(w, shapes, [softmax_loss(w, w("Transpose", "x", perm=[0, 2, 1]), "y")])


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_rows_of_losses(reduction):
    w = Writer()
    shapes = {"x": (3, 5, V), "y": (3, 5)}
    scores, labels = flat(w, "x", "y")
    check(w, shapes, [softmax_loss(w, scores, labels, reduction)])


def test_gradient_of_the_logits_as_well():
    w = Writer()
    shapes = {"x": (2, 4, V), "y": (2, 4)}
    logits = w("Mul", "x", w.constant(0.5))
    loss = softmax_loss(w, *shifted(w, logits, "y", "pad"))
    check(w, shapes, [loss, logits], nodes=3)  # the third copies what backward keeps


def test_probabilities_that_are_read_elsewhere():
    w = Writer()
    shapes = {"x": (4, V), "y": (4,)}
    logs = w("LogSoftmax", "x", axis=-1)
    loss = w("NegativeLogLikelihoodLoss", logs, "y", ignore_index=-100)
    check(w, shapes, [loss, logs], nodes=3)


@pytest.mark.parametrize("how", ["pad", "cut", "none"])
@pytest.mark.parametrize("kind", ["softmax", "likelihood", "smoothed", "items"])
def test_class_weights(how, kind):
    w = Writer()
    shapes = {"x": (3, 6, V), "y": (3, 6), "c": (V,)}
    feed = feed_of(shapes) | {"n": np.array(7, np.int64)}
    feed["c"] = np.abs(feed["c"])
    scores, labels = shifted(w, "x", "y", how)
    weights = w("StopGradient", "c", domain="com.gradd")  # they have none, as in torch
    if kind == "likelihood":
        logs = w("LogSoftmax", scores, axis=-1)
        loss = w("NegativeLogLikelihoodLoss", logs, labels, weights, ignore_index=-100)
    elif kind == "smoothed":
        args = {"ignore_index": -100, "reduction": "mean", "smoothing": 0.2}
        loss = w("CrossEntropy", scores, labels, "", weights, domain="com.gradd", **args)
    else:
        reduction = "sum" if kind == "items" else "mean"
        loss = w(
            "SoftmaxCrossEntropyLoss",
            scores,
            labels,
            weights,
            ignore_index=-100,
            reduction=reduction,
        )
    if kind == "items":
        shapes["n"] = ()
        loss = w("Div", loss, w("Cast", "n", to=1))
    else:
        del feed["n"]
    fast, _ = check(w, shapes, [loss], feed=feed)
    assert fast.backward == 1


def test_class_weights_that_need_a_gradient_are_refused():
    w = Writer()
    shapes = {"x": (4, V), "y": (4,), "c": (V,)}
    loss = w("SoftmaxCrossEntropyLoss", "x", "y", "c")
    with pytest.raises(E.EngineError, match="needs a gradient"):
        check(w, shapes, [loss])


@pytest.mark.parametrize("change", ["start", "fill", "step", "axis"])
def test_what_only_looks_like_a_shifted_loss(change):
    w = Writer()
    shapes = {"x": (3, 6, V), "y": (3, 6)}
    labels = "y"
    fill = 3 if change == "fill" else -100
    if change == "start":  # moved by two, and refilled by two
        pads = w.constant([0, 0, 0, 2], np.int64)
        labels = cut(w, w("Pad", "y", pads, w.constant(fill, np.int64)), 2, END, 1)
    elif change == "fill":
        pads = w.constant([0, 0, 0, 1], np.int64)
        labels = cut(w, w("Pad", "y", pads, w.constant(fill, np.int64)), 1, END, 1)
    elif change == "step":  # every second label
        pads = w.constant([0, 0, 0, 6], np.int64)
        labels = w("Pad", "y", pads, w.constant(fill, np.int64))
        bounds = [w.constant([v], np.int64) for v in (1, END, 1, 2)]
        labels = w("Slice", labels, *bounds)
    else:  # rows of the batch, not positions
        pads = w.constant([0, 0, 1, 0], np.int64)
        labels = cut(w, w("Pad", "y", pads, w.constant(fill, np.int64)), 1, END, 0)
    loss = softmax_loss(w, *flat(w, "x", labels))
    fast, plain = compare(w.model(shapes, [loss], ints=("y",)), feed_of(shapes), [loss])
    assert fast.forward >= 3  # the labels are still moved by the model's own nodes


def test_random_shapes():
    rng = np.random.default_rng(9)
    for k in range(30):
        w = Writer()
        b, s, v = (int(n) for n in rng.integers(1, [5, 9, 1500]))
        how = ("pad", "cut", "none")[k % 3]
        shapes = {"x": (b, s, v), "y": (b, s)}
        logits, labels = "x", "y"
        if how == "pad":
            pads = w.constant([0, 0, 0, 1], np.int64)
            labels = w("Pad", "y", pads, w.constant(-100, np.int64))
        elif how == "cut":
            logits = cut(w, "x", 0, -1, 1)
        labels = labels if how == "none" else cut(w, labels, 1, END, 1)
        rows = flat(w, logits, labels, v)
        loss = softmax_loss(w, *rows, "sum")
        check(w, shapes, [loss], feed=feed_of(shapes, k, v, 0.3))


def test_all_labels_ignored():
    w = Writer()
    shapes = {"x": (2, 3, V), "y": (2, 3)}
    loss = softmax_loss(w, *shifted(w, "x", "y", "pad"))
    model = w.model(shapes, [loss], ints=("y",))
    feed = feed_of(shapes, ignored=2.0)
    for plain in (False, True):
        run = E.Run(E.Plan(model, feed, ["x"], [loss], [loss], plain=plain))
        assert np.isnan(run.forward(feed)[loss])
        assert not run.backward({loss: np.ones((), np.float32)})["x"].any()


@pytest.mark.parametrize("how", ["pad", "cut", "none"])
def test_a_label_out_of_range_is_named(how):
    w = Writer()
    shapes = {"x": (2, 4, V), "y": (2, 4)}
    loss = softmax_loss(w, *shifted(w, "x", "y", how))
    model = w.model(shapes, [loss], ints=("y",))
    feed = feed_of(shapes)
    feed["y"][0, 3] = V
    run = E.Run(E.Plan(model, feed, ["x"], [loss], [loss]))
    row = 3 if how == "none" else 2
    with pytest.raises(
        E.EngineError, match=f"label {V} is out of range for {V} classes, at row {row}"
    ):
        run.forward(feed)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    w = Writer()
    shapes = {"x": (4, 16, 700), "y": (4, 16)}
    pads = w.constant([0, 0, 0, 1], np.int64)
    labels = cut(w, w("Pad", "y", pads, w.constant(-100, np.int64)), 1, END, 1)
    loss = softmax_loss(w, *flat(w, "x", labels, 700))
    model, feed = w.model(shapes, [loss], ints=("y",)), feed_of(shapes, classes=700)
    results = []
    for n in (1, threads):
        run = E.Run(E.Plan(model, feed, ["x"], [loss], [loss], threads=n))
        out = run.forward(feed)[loss]
        results.append(
            (out.tobytes(), run.backward({loss: np.ones((), np.float32)})["x"].tobytes())
        )
    assert results[0] == results[1]
