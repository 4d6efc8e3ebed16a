"""Recognised embeddings: sums of one to three tables, with and without padding rows."""

from __future__ import annotations

import engine as E
import numpy as np
import pytest
from onnx import helper
from recognise import Writer, arrays, compare

D = 12


def lookup(w, table, ids, padding=None):
    rows = w("Gather", table, ids, axis=0)
    if padding is None:
        return rows
    mask = w("Equal", ids, w.constant(padding, np.int64))
    mask = w("Unsqueeze", mask, w.constant([-1], np.int64))
    return w("Where", mask, stopped(w, rows), rows)


def stopped(w, value):
    out = f"t{len(w.nodes)}"
    w.nodes.append(helper.make_node("StopGradient", [value], [out], domain="com.gradd"))
    return out


def feed_of(tables, ids, seed=0):
    rng = np.random.default_rng(seed)
    out = arrays(tables, seed)
    for name, (shape, extent) in ids.items():
        out[name] = rng.integers(0, extent, shape)
    return out


def check(w, tables, ids, outputs, nodes=1, seed=0):
    feed = feed_of(tables, ids, seed)
    shapes = {n: v.shape for n, v in feed.items()}
    return check_nodes(*compare(w.model(shapes, outputs, ints=list(ids)), feed, outputs), nodes)


def check_nodes(fast, plain, nodes):
    assert fast.forward == nodes, f"{fast.forward} nodes, {plain.forward} in the plain plan"
    return fast, plain


@pytest.mark.quick
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("padded", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("positions", [(1, 5), (5,), (3, 5), (3, 1)])
def test_words_and_positions(swap, padded, positions):
    w = Writer()
    words = lookup(w, "w", "i", 2 if 0 in padded else None)
    places = lookup(w, "p", "k", 1 if 1 in padded else None)
    y = w("Add", places, words) if swap else w("Add", words, places)
    ids = {"i": ((3, 5), 7), "k": (positions, 6)}
    fast, _ = check(w, {"w": (7, D), "p": (6, D)}, ids, [y])
    assert fast.backward == 2  # one gradient per table


@pytest.mark.parametrize("nesting", ["left", "right"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_three_tables_in_any_order(nesting, first):
    w = Writer()
    parts = [lookup(w, "w", "i", 0), lookup(w, "t", "j"), lookup(w, "p", "k")]
    a, b, c = parts[first:] + parts[:first]
    y = w("Add", w("Add", a, b), c) if nesting == "left" else w("Add", a, w("Add", b, c))
    ids = {"i": ((3, 5), 7), "j": ((3, 5), 2), "k": ((1, 5), 6)}
    tables = {"w": (7, D), "t": (2, D), "p": (6, D)}
    fast, _ = check(w, tables, ids, [y])
    assert fast.backward == 3


def test_one_table_with_padding():
    w = Writer()
    y = lookup(w, "w", "i", 3)
    fast, plain = check(w, {"w": (5, D)}, {"i": ((4, 6), 5)}, [y])
    assert fast.backward == 1 and plain.forward == 3


def test_one_table_twice():
    w = Writer()
    y = w("Add", lookup(w, "w", "i"), lookup(w, "w", "k"))
    fast, _ = check(w, {"w": (9, D)}, {"i": ((4, 6), 9), "k": ((4, 6), 9)}, [y])
    assert fast.backward == 3  # two gradients and their sum


def test_a_fourth_table_is_added_by_itself():
    w = Writer()
    y = lookup(w, "a", "i")
    for name in "bcd":
        y = w("Add", y, lookup(w, name, "i"))
    check(w, dict.fromkeys("abcd", (5, D)), {"i": ((2, 3), 5)}, [y], nodes=3)


def test_rows_that_are_read_elsewhere_stay():
    w = Writer()
    words = lookup(w, "w", "i")
    y, z = w("Add", words, lookup(w, "p", "k")), w("Tanh", words)
    ids = {"i": ((3, 5), 7), "k": ((3, 5), 6)}
    fast, plain = check(w, {"w": (7, D), "p": (6, D)}, ids, [y, z], nodes=5)
    assert fast == plain


def test_other_axes_and_ranks_stay():
    w = Writer()
    y = w("Add", w("Gather", "w", "i", axis=1), w("Gather", "w", "k", axis=1))
    fast, plain = check(w, {"w": (7, 4)}, {"i": ((6,), 4), "k": ((6,), 4)}, [y], nodes=3)
    assert fast == plain


def test_random_shapes():
    rng = np.random.default_rng(4)
    for k in range(25):
        w = Writer()
        b, s, v, d = (int(n) for n in rng.integers(1, [5, 9, 40, 600]))
        padding = int(rng.integers(0, v)) if k % 2 else None
        y = w("Add", lookup(w, "w", "i", padding), lookup(w, "p", "k"))
        ids = {"i": ((b, s), v), "k": ((1, s), s)}
        check(w, {"w": (v, d), "p": (s, d)}, ids, [y], seed=k)


@pytest.mark.parametrize("table", [0, 1])
@pytest.mark.parametrize("bad", [7, -8, 10**12])
def test_an_index_out_of_range_is_named(table, bad):
    w = Writer()
    y = w("Add", lookup(w, "w", "i"), lookup(w, "p", "k"))
    feed = feed_of({"w": (7, D), "p": (7, D)}, {"i": ((3, 5), 7), "k": ((3, 5), 7)})
    shapes = {n: v.shape for n, v in feed.items()}
    feed["ik"[table]][1, 2] = bad
    run = E.Run(E.Plan(w.model(shapes, [y], ints=["i", "k"]), feed, ["w"], [y], [y]))
    with pytest.raises(E.EngineError, match=f"table {table}: index {bad} of 7, position 7"):
        run.forward(feed)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(threads):
    w = Writer()
    y = w("Add", lookup(w, "w", "i"), lookup(w, "p", "k"))
    feed = feed_of({"w": (300, 130), "p": (64, 130)}, {"i": ((8, 64), 300), "k": ((1, 64), 64)})
    model = w.model({n: v.shape for n, v in feed.items()}, [y], ints=["i", "k"])
    bits = []
    for n in (1, threads):
        run = E.Run(E.Plan(model, feed, ["w", "p"], [y], [y], threads=n))
        out = run.forward(feed)[y]
        grads = run.backward({y: np.sin(np.arange(out.size, dtype=np.float32)).reshape(out.shape)})
        bits.append((out.tobytes(), grads["w"].tobytes(), grads["p"].tobytes()))
    assert bits[0] == bits[1]
