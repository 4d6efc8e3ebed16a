"""Gradients of tables that others read as well: rows are added to the rest of the sum in place."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer, arrays, compare, run

WORDS, D, N = 40, 12, 21


def _head(w, h, table="w"):
    return w("MatMul", h, w("Transpose", table, perm=[1, 0]))


def _feed(*, ids=1, more=None):
    rng = np.random.default_rng(7)
    feed = arrays({"w": (WORDS, D), **(more or {})})
    for k in range(ids):
        feed[f"i{k}"] = rng.integers(-WORDS, WORDS // 2, (3, N // 3))
    return feed


def _model(w, feed, y):
    ints = [n for n in feed if n.startswith("i")]
    return w.model({n: v.shape for n, v in feed.items()}, [y], ints=ints)


def _tied(w):
    return _head(w, w("Tanh", w("Gather", "w", "i0", axis=0)))


@pytest.mark.quick
def test_a_tied_head():
    w = Writer()
    y = _tied(w)
    fast, plain = compare(_model(w, _feed(), y), _feed(), [y])
    assert fast.backward == plain.backward - 1  # the sum


def test_the_product_is_made_where_the_gradient_lies():
    """No table stands in the arena, neither of the product nor of the rows."""
    w = Writer()
    y = w("ReduceSum", _tied(w), keepdims=0)
    sizes = {}
    for extent in (WORDS, 100 * WORDS):
        feed = {**_feed(), "w": np.zeros((extent, D), np.float32)}
        info = E.Plan(_model(w, feed, y), feed, ["w"], [y], [y]).info
        # logits and their gradient grow with the table as well
        sizes[extent] = info.arena_bytes - 2 * 4 * N * extent
    assert sizes[100 * WORDS] - sizes[WORDS] < 4 * WORDS * D * 10, sizes


@pytest.mark.parametrize("heads", [0, 1, 2])
@pytest.mark.parametrize("lookups", [2, 3])
def test_several_lookups_of_one_table(lookups, heads):
    w = Writer()
    feed = _feed(ids=lookups)
    h = w("Gather", "w", "i0", axis=0)
    for k in range(1, lookups):
        h = w("Mul", w("Sigmoid", h), w("Gather", "w", f"i{k}", axis=-2))
    parts = [w("ReduceSum", h, keepdims=0)]
    for k in range(heads):
        parts.append(w("ReduceSum", w("Tanh", _head(w, w("Exp", h) if k else h)), keepdims=0))
    y = parts[0]
    for part in parts[1:]:
        y = w("Add", y, part)
    compare(_model(w, feed, y), feed, [y])


def test_words_and_positions_with_a_head():
    """EmbeddingSum's gradient, with a padding row."""
    w = Writer()
    feed = _feed(ids=2, more={"p": (WORDS, D)})
    y = _head(w, w("Add", w("Gather", "w", "i0", axis=0), w("Gather", "p", "i1", axis=0)))
    fast, plain = compare(_model(w, feed, y), feed, [y])
    assert fast.backward < plain.backward


def test_a_gradient_with_another_reader_stays():
    """The table is made of an input, so its gradient goes on."""
    w = Writer()
    table = w("Tanh", "w")
    y = _head(w, w("Gather", table, "i0", axis=0), table)
    compare(_model(w, _feed(), y), _feed(), [y])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    w = Writer()
    y = _tied(w)
    feed = _feed()
    feed["w"] = np.random.default_rng(1).standard_normal((4000, 130)).astype(np.float32)
    feed["i0"] = np.random.default_rng(2).integers(0, 50, (40, 16))
    bits = [run(_model(w, feed, y), feed, [y], False, threads=n)[1]["w"] for n in (1, threads, 1)]
    assert bits[0].tobytes() == bits[2].tobytes()
    np.testing.assert_allclose(bits[0], bits[1], rtol=1e-4, atol=1e-4)  # products may differ
