"""Recognised embeddings: sums of one to nine tables, with and without padding rows.

Between a table's rows and the sum may stand a known factor, an Expand, a view that keeps the last
axis and a StopGradient.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer, arrays, compare, run

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


@pytest.mark.parametrize("swap", range(4))
@pytest.mark.parametrize("padding", [None, 1])
def test_rows_behind_a_layer(swap, padding):
    """Tokens go through a layer; positions and types are added up before they are added to it."""
    w = Writer()
    tokens = w("Tanh", "x")
    places, types = lookup(w, "p", "k"), lookup(w, "t", "j", padding)
    inner = w("Add", places, tokens) if swap & 1 else w("Add", tokens, places)
    y = w("Add", types, inner) if swap & 2 else w("Add", inner, types)
    ids = {"k": ((1, 5), 6), "j": ((3, 5), 2)}
    tables = {"x": (3, 5, D), "p": (6, D), "t": (2, D)}
    check(w, tables, ids, [y], nodes=3)  # tanh, rows, sum


def test_three_rows_behind_a_layer():
    w = Writer()
    y = w("Tanh", "x")
    ids = {"i": ((3, 5), 7), "k": ((1, 5), 6), "j": ((3, 5), 2)}
    for table, index in zip("wpt", ids, strict=True):
        y = w("Add", y, lookup(w, table, index))
    check(w, {"x": (3, 5, D), "w": (7, D), "p": (6, D), "t": (2, D)}, ids, [y], nodes=3)


def test_rows_behind_a_sum_that_is_read_elsewhere_stay():
    w = Writer()
    inner = w("Add", "x", lookup(w, "p", "k"))
    y, z = w("Add", inner, lookup(w, "t", "j")), w("Tanh", inner)
    ids = {"k": ((1, 5), 6), "j": ((3, 5), 2)}
    tables = {"x": (3, 5, D), "p": (6, D), "t": (2, D)}
    fast, plain = compare_sizes(w, tables, ids, [y, z])
    assert fast == plain


def test_one_table_with_padding():
    w = Writer()
    y = lookup(w, "w", "i", 3)
    fast, plain = check(w, {"w": (5, D)}, {"i": ((4, 6), 5)}, [y])
    assert fast.backward == 1 and plain.forward == 3


def test_one_table_twice():
    w = Writer()
    y = w("Add", lookup(w, "w", "i"), lookup(w, "w", "k"))
    fast, _ = check(w, {"w": (9, D)}, {"i": ((4, 6), 9), "k": ((4, 6), 9)}, [y])
    assert fast.backward == 2  # the second gradient is added to the first


@pytest.mark.parametrize("n", [4, 5, 8, 9])
@pytest.mark.parametrize("nesting", ["left", "right"])
def test_many_tables(n, nesting):
    w = Writer()
    names = "abcdefghi"[:n]
    parts = [
        lookup(w, name, f"i{k % 3}", 2 if k % 4 == 0 else None) for k, name in enumerate(names)
    ]
    y = parts[0]
    for part in parts[1:]:
        y = w("Add", y, part) if nesting == "left" else w("Add", part, y)
    ids = {"i0": ((2, 6), 5), "i1": ((1, 6), 5), "i2": ((6,), 5)}
    fast, _ = check(w, dict.fromkeys(names, (5, D)), ids, [y])
    assert fast.backward == n


def test_a_tenth_table_is_added_by_itself():
    w = Writer()
    y = lookup(w, "a", "ids")
    for name in "bcdefghij":
        y = w("Add", y, lookup(w, name, "ids"))
    check(w, dict.fromkeys("abcdefghij", (5, D)), {"ids": ((2, 3), 5)}, [y], nodes=3)


def test_the_order_of_additions_is_kept():
    w = Writer()
    a, b, c, d = (lookup(w, name, "i") for name in "abcd")
    y = w("Add", w("Add", a, b), w("Add", c, d))
    check(w, dict.fromkeys("abcd", (5, D)), {"i": ((2, 3), 5)}, [y], nodes=3)


@pytest.mark.quick
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("scaled", ["w", "p", "wp"])
def test_scaled_tables(scaled, padding, swap):
    """The factor is the square root of the width in BART, Pegasus, M2M100 and their kin."""
    w = Writer()
    words, places = lookup(w, "w", "i", padding), lookup(w, "p", "k")
    if "w" in scaled:
        words = w("Mul", words, w.constant(np.sqrt(D)))
    if "p" in scaled:
        places = w("Mul", w.constant([-0.3]), places)
    y = w("Add", places, words) if swap else w("Add", words, places)
    ids = {"i": ((3, 5), 7), "k": ((1, 5), 6)}
    fast, _ = check(w, {"w": (7, D), "p": (6, D)}, ids, [y])
    assert fast.backward == 2


def test_a_scaled_table_among_many():
    w = Writer()
    y = w("Mul", lookup(w, "a", "i", 1), w.constant(3.7))
    for k, name in enumerate("bcdef"):
        part = lookup(w, name, "i")
        y = w("Add", y, part if k % 2 else w("Mul", part, w.constant(k - 1.5)))
    fast, _ = check(w, dict.fromkeys("abcdef", (5, 700)), {"i": ((2, 3), 5)}, [y])
    assert fast.backward == 6


@pytest.mark.parametrize("scale", [0.0, np.inf, 1.0])
def test_unusual_scales(scale):
    w = Writer()
    y = w("Add", w("Mul", lookup(w, "w", "i"), w.constant(scale)), lookup(w, "p", "k"))
    model = w.model({"w": (7, D), "p": (6, D), "i": (3, 5), "k": (5,)}, [y], ints=["i", "k"])
    feed = feed_of({"w": (7, D), "p": (6, D)}, {"i": ((3, 5), 7), "k": ((5,), 6)})
    with np.errstate(all="ignore"):
        fast, plain = (run(model, feed, [y], p) for p in (False, True))
    assert fast[2].forward == 1
    np.testing.assert_array_equal(fast[0][y], plain[0][y])


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("positions", [(1, 5), (5,), (3, 1), ()])
@pytest.mark.parametrize("after", ["Mul", "Expand"])
def test_expanded_rows(positions, padding, after):
    """As in XLM: position_embeddings(ids).expand_as(tensor)."""
    w = Writer()
    places = lookup(w, "p", "k", padding if positions else None)
    steps = {
        "Expand": lambda v: w("Expand", v, w.constant((3, 5, D), np.int64)),
        "Mul": lambda v: w("Mul", v, w.constant(0.7)),
    }
    for name in ("Mul", "Expand") if after == "Expand" else ("Expand", "Mul"):
        places = steps[name](places)
    y = w("Add", lookup(w, "w", "i"), places)
    ids = {"i": ((3, 5), 7), "k": (positions, 6)}
    fast, _ = check(w, {"w": (7, D), "p": (6, D)}, ids, [y])
    assert fast.backward == 2


def reshaped(w, rows, shape):
    return w("Reshape", rows, w.constant(shape, np.int64), allowzero=1)


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("flat, shape", [((15,), (3, 5)), ((5, 3), (3, 5)), ((5,), (1, 5))])
def test_reshaped_rows(flat, shape, expand, padding):
    """As in M2M100: weights.index_select(0, positions.view(-1)).view(batch, length, -1)."""
    w = Writer()
    places = reshaped(w, lookup(w, "p", "k", padding), (*shape, D))
    if expand:
        places = w("Expand", places, w.constant((3, 5, D), np.int64))
    y = w("Add", lookup(w, "w", "i"), places)
    fast, _ = check(w, {"w": (7, D), "p": (6, D)}, {"i": ((3, 5), 7), "k": (flat, 6)}, [y])
    assert fast.backward == 2


def test_rows_with_another_axis():
    w = Writer()
    places = w("Unsqueeze", lookup(w, "p", "k"), w.constant([0], np.int64))
    y = w("Add", lookup(w, "w", "i"), places)
    check(w, {"w": (7, D), "p": (6, D)}, {"i": ((3, 5), 7), "k": ((5,), 6)}, [y])


def test_reshaped_rows_at_known_positions():
    w = Writer()
    places = w("Gather", "p", w.constant(np.arange(5)[None] + 1, np.int64))
    y = w("Add", lookup(w, "w", "i"), reshaped(w, places, (5, D)))
    fast, _ = check(w, {"w": (7, D), "p": (6, D)}, {"i": ((3, 5), 7)}, [y])
    assert fast.backward == 2


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_tables_behind_a_stopped_gradient(view, twice):
    """Sinusoidal positions: scale * embed_tokens(ids) + embed_positions(ids).detach()."""
    w = Writer()
    places = lookup(w, "p", "k")
    if view:
        places = reshaped(w, places, (1, 5, D))
    places = stopped(w, places)
    if twice:
        places = stopped(w, places)
    y = w("Add", w("Mul", lookup(w, "w", "i", 1), w.constant(8.0)), places)
    tables, ids = {"w": (7, D), "p": (6, D)}, {"i": ((3, 5), 7), "k": ((5,), 6)}
    fast, _ = check(w, tables, ids, [y])
    assert fast.backward == 1


def test_a_stopped_gradient_of_a_sum():
    w = Writer()
    both = stopped(w, w("Add", lookup(w, "w", "i"), lookup(w, "p", "k")))
    y = w("Add", both, lookup(w, "t", "i"))
    tables, ids = {"w": (7, D), "p": (6, D), "t": (7, D)}, {"i": ((3, 5), 7), "k": ((5,), 6)}
    fast, _ = check(w, tables, ids, [y])
    assert fast.backward == 1


def between(w, form):
    """Rows of table p with something in front of the sum that is not understood, and its inputs."""
    rows = lookup(w, "p", "k")
    if form == "unknown scale":
        return w("Mul", rows, "s"), {"s": ()}
    if form == "scale per column":
        return w("Mul", rows, w.constant(np.arange(D, dtype=np.float32))), {}
    if form == "two scales":
        return w("Mul", w("Mul", rows, w.constant(0.7)), w.constant(0.3)), {}
    if form == "scaled sum":
        return w("Mul", w("Add", rows, lookup(w, "q", "k")), w.constant(0.7)), {"q": (15, D)}
    if form == "another last axis":  # the rows of two positions are mixed
        rows = w("Transpose", rows, perm=[1, 0])
        return reshaped(w, rows, (3, 5, D)), {}
    if form == "split last axis":
        halves = reshaped(w, rows, (3, 5, 2, D // 2))
        return reshaped(w, w("Tanh", halves), (3, 5, D)), {}
    wide = w("Expand", rows, w.constant((2, 15, D), np.int64))
    return w("ReduceSum", wide, w.constant([0], np.int64), keepdims=0), {}


@pytest.mark.parametrize(
    "form",
    [
        "unknown scale",
        "scale per column",
        "two scales",
        "scaled sum",
        "another last axis",
        "split last axis",
        "summed expand",
    ],
)
def test_what_is_not_understood_stays(form):
    w = Writer()
    places, more = between(w, form)
    flat = form not in ("another last axis", "split last axis")
    y = w("Add", lookup(w, "w", "i"), places)
    tables, ids = {"w": (7, D), "p": (15, D), **more}, {"i": ((3, 5), 7), "k": ((15,), 15)}
    if flat:
        ids["i"] = ((15,), 7)
    feed = feed_of(tables, ids)
    shapes = {n: v.shape for n, v in feed.items()}
    fast, plain = compare(w.model(shapes, [y], ints=["i", "k"]), feed, [y])
    if form == "scaled sum":
        assert fast.forward == plain.forward - 2  # of two tables, one operator; times 0.7; plus w
    else:
        assert fast == plain


def test_a_reshape_of_the_last_axis_stays():
    w = Writer()
    places = reshaped(w, lookup(w, "p", "k"), (3, 5, D))
    y = w("Add", lookup(w, "w", "i"), places)
    ids = {"i": ((3, 5), 7), "k": ((3, 5, 2), 6)}
    fast, plain = check(w, {"w": (7, D), "p": (6, D // 2)}, ids, [y], nodes=3)
    assert fast == plain


@pytest.mark.parametrize("both", [False, True])
def test_an_expand_along_the_last_axis_stays(both):
    w = Writer()
    words = lookup(w, "w", "i")
    if both:
        words = w("Expand", words, w.constant((3, 5, D), np.int64))
    places = w("Expand", lookup(w, "p", "k"), w.constant((3, 5, D), np.int64))
    y = w("Add", words, places)
    ids = {"i": ((3, 5), 7), "k": ((3, 5), 6)}
    tables = {"w": (7, 1 if both else D), "p": (6, 1)}
    fast, plain = check(w, tables, ids, [y], nodes=5 if both else 4)
    assert fast == plain


def test_a_sum_that_is_wider_than_all_ids_stays():
    w = Writer()
    sizes = w.constant((3, 5, D), np.int64)
    y = w("Add", *(w("Expand", lookup(w, t, i), sizes) for t, i in ("wi", "pk")))
    ids = {"i": ((1, 5), 7), "k": ((5,), 6)}
    fast, plain = check(w, {"w": (7, D), "p": (6, D)}, ids, [y], nodes=5)
    assert fast == plain


def test_an_expand_under_a_reshape_stays():
    w = Writer()
    places = w("Expand", lookup(w, "p", "k"), w.constant((3, 5, D), np.int64))
    y = w("Add", lookup(w, "w", "i"), reshaped(w, places, (5, 3, D)))
    ids = {"i": ((5, 3), 7), "k": ((1, 5), 6)}
    fast, plain = compare_sizes(w, {"w": (7, D), "p": (6, D)}, ids, [y])
    assert fast == plain


@pytest.mark.parametrize("step", ["Mul", "Expand", "Reshape"])
@pytest.mark.parametrize("read", ["rows", "step"])
def test_what_is_read_elsewhere_stays(step, read):
    w = Writer()
    rows = lookup(w, "p", "k")
    if step == "Mul":
        places = w("Mul", rows, w.constant(0.7))
    elif step == "Expand":
        places = w("Expand", rows, w.constant((3, 5, D), np.int64))
    else:
        places = reshaped(w, rows, (1, 5, D))
    y = w("Add", lookup(w, "w", "i"), places)
    z = w("Tanh", rows if read == "rows" else places)
    ids = {"i": ((3, 5), 7), "k": ((5,), 6)}
    fast, plain = compare_sizes(w, {"w": (7, D), "p": (6, D)}, ids, [y, z])
    assert fast == plain


def compare_sizes(w, tables, ids, outputs, seed=0):
    feed = feed_of(tables, ids, seed)
    shapes = {n: v.shape for n, v in feed.items()}
    return compare(w.model(shapes, outputs, ints=list(ids)), feed, outputs)


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


def random_part(w, rng, name, ids_name, sizes, extent):
    """One random lookup that broadcasts to `sizes`; its ids' shape."""
    b, s, d = sizes
    shape = [(b, s), (1, s), (s,), (b, 1)][rng.integers(4)]
    given, view = shape, rng.random() < 0.4
    if view:
        given = [(int(np.prod(shape)),), (1, *shape), shape[::-1]][rng.integers(3)]
    v = lookup(w, name, ids_name, int(rng.integers(extent)) if rng.random() < 0.3 else None)
    scaled = rng.random() < 0.4
    if scaled and rng.random() < 0.5:
        v, scaled = w("Mul", v, w.constant(rng.standard_normal())), False
    if view:
        v = reshaped(w, v, (*shape, d))
    if rng.random() < 0.2:
        v = stopped(w, v)
    if rng.random() < 0.3:
        v = w("Expand", v, w.constant((b, s, d), np.int64))
    return (w("Mul", v, w.constant(rng.standard_normal())) if scaled else v), given


@pytest.mark.parametrize("seed", range(60))
def test_random_forms(seed):
    rng = np.random.default_rng(seed)
    w = Writer()
    b, s, d, extent = (int(n) for n in rng.integers([2, 2, 1, 1], [5, 9, 600, 40]))
    n = int(rng.integers(2, 10))
    y = lookup(w, "w0", "i0")  # has all positions, so that every sum has its final shape
    tables, ids = {"w0": (extent, d)}, {"i0": ((b, s), extent)}
    for k in range(1, n):
        part, shape = random_part(w, rng, f"w{k}", f"i{k}", (b, s, d), extent)
        y = w("Add", y, part) if rng.random() < 0.5 else w("Add", part, y)
        tables[f"w{k}"], ids[f"i{k}"] = (extent, d), (shape, extent)
    check(w, tables, ids, [y], seed=seed)


KINDS = {E.BF16.type: TensorProto.BFLOAT16, np.float64: TensorProto.DOUBLE}


def typed(dtype, plain, padding):
    """All forms at once in another element type, with random gradients; forward nodes first."""
    w = Writer()
    words = w("Mul", lookup(w, "w", "i", padding), w.constant(11.25, dtype))
    places = stopped(w, reshaped(w, lookup(w, "p", "k"), (3, 5, 300)))
    kinds = w("Expand", lookup(w, "t", "j"), w.constant((3, 5, 300), np.int64))
    y = w("Add", w("Add", words, places), kinds)
    tables = {"w": (7, 300), "p": (16, 300), "t": (2, 300)}
    feed = feed_of(tables, {"i": ((3, 5), 7), "k": ((15,), 16), "j": ((1, 5), 2)})
    feed = {n: v.astype(E.BF16).astype(dtype) if n in tables else v for n, v in feed.items()}
    shapes = {n: v.shape for n, v in feed.items()}
    model = E.Model(w.proto(shapes, [y], ints="ikj", kind=KINDS[dtype]))
    plan = E.Plan(model, feed, list(tables), [y], [y], plain=plain)
    one = E.Run(plan)
    out = one.forward(feed)[y]
    dy = np.random.default_rng(5).standard_normal(out.shape).astype(E.BF16).astype(dtype)
    grads = one.backward({y: dy})
    assert grads["p"] is None
    return plan.info.n_launches_forward, out, grads["w"], grads["t"]


@pytest.mark.parametrize("padding", [None, 2])
def test_bf16_is_rounded_once(padding):
    exact = typed(np.float64, True, padding)
    fast, plain = (typed(E.BF16.type, p, padding) for p in (False, True))
    assert fast[0] == 1 < plain[0]
    for got, other, want in zip(fast[1:], plain[1:], exact[1:], strict=True):
        limit = np.abs(want) * 2.0**-8 + 1e-4  # half a step of bf16
        assert (np.abs(got.astype(np.float64) - want) <= limit).all()
        distances = [np.linalg.norm(v.astype(np.float64) - want) for v in (got, other)]
        assert distances[0] <= distances[1] * 1.01
    fast = typed(np.float64, False, padding)
    for got, want in zip(fast[1:], exact[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("table", [0, 1])
@pytest.mark.parametrize("bad", [7, -8, 10**12])
def test_an_index_out_of_range_is_named(table, bad, scaled):
    w = Writer()
    words = lookup(w, "w", "i")
    y = w("Add", w("Mul", words, w.constant(3.3)) if scaled else words, lookup(w, "p", "k"))
    feed = feed_of({"w": (7, D), "p": (7, D)}, {"i": ((3, 5), 7), "k": ((3, 5), 7)})
    shapes = {n: v.shape for n, v in feed.items()}
    feed["ik"[table]][1, 2] = bad
    plan = E.Plan(w.model(shapes, [y], ints=["i", "k"]), feed, ["w"], [y], [y])
    with pytest.raises(
        E.EngineError, match=f"table {table}: index {bad} is out of range for size 7, at position 7"
    ):
        E.Run(plan).forward(feed)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_bits_do_not_depend_on_threads(threads, scaled):
    w = Writer()
    words = lookup(w, "w", "i")
    y = w("Add", w("Mul", words, w.constant(3.3)) if scaled else words, lookup(w, "p", "k"))
    feed = feed_of({"w": (300, 130), "p": (64, 130)}, {"i": ((8, 64), 300), "k": ((1, 64), 64)})
    model = w.model({n: v.shape for n, v in feed.items()}, [y], ints=["i", "k"])
    bits = []
    for n in (1, threads):
        one = E.Run(E.Plan(model, feed, ["w", "p"], [y], [y], threads=n))
        out = one.forward(feed)[y]
        grads = one.backward({y: np.sin(np.arange(out.size, dtype=np.float32)).reshape(out.shape)})
        bits.append((out.tobytes(), grads["w"].tobytes(), grads["p"].tobytes()))
    assert bits[0] == bits[1]
