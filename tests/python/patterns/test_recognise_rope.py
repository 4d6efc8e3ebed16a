"""Rotary position embedding in the forms that models write, against the plain plan."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.graphs.onnx_writer import Writer, arrays, compare

LAST = 9223372036854775807


def cut(w: Writer, x: str, start: int, end: int, step: int = 1, axis: int = -1) -> str:
    """x[..., start:end:step]"""
    window = [w.constant([v], np.int64) for v in (start, end, axis, step)]
    return w("Slice", x, *window)


def halves(w: Writer, x: str, width: int, split: bool) -> tuple[str, str]:
    """The two halves of the last axis, by two Slices or one Split."""
    if split:
        return tuple(w("Split", x, axis=-1, num_outputs=2, outs=2))
    return cut(w, x, 0, width // 2), cut(w, x, width // 2, LAST)


def quarter(w: Writer, x: str, shape: tuple[int, ...], form: str) -> str:
    """(a, b) -> (-b, a) in one of the forms of exported models; inverse: (b, -a)."""
    if form in ("slice", "split"):
        low, high = halves(w, x, shape[-1], form == "split")
        return w("Concat", w("Neg", high), low, axis=len(shape) - 1)
    if form == "inverse":
        low, high = halves(w, x, shape[-1], False)
        return w("Concat", high, w("Neg", low), axis=-1)
    axis = w.constant([-1], np.int64)
    odd, even = cut(w, x, 1, LAST, 2), cut(w, x, 0, LAST, 2)
    if form == "pairs":
        odd = w("Unsqueeze", w("Neg", odd), axis)
    else:
        odd = w("Neg", w("Unsqueeze", odd, axis))
    joined = w("Concat", odd, w("Unsqueeze", even, axis), axis=-1)
    return w("Reshape", joined, w.constant(list(shape), np.int64))


def rope(w: Writer, x: str, shape: tuple[int, ...], form: str, swap: bool = False) -> str:
    """x cos + quarter(x) sin; the tables are inputs of the model."""
    turn = quarter(w, x, shape, form)
    a = w("Mul", "cos", x) if swap else w("Mul", x, "cos")
    b = w("Mul", "sin", turn) if swap else w("Mul", turn, "sin")
    return w("Add", b, a) if swap else w("Add", a, b)


FORMS = ["slice", "split", "inverse", "pairs", "pairs_negated_late"]


def members(w: Writer, x: str, shape: tuple[int, ...], order: str) -> tuple[str, str]:
    """a and b of the pairs of x, which are halves or neighbours."""
    if order == "halves":
        return halves(w, x, shape[-1], True)
    if order == "strides":
        return cut(w, x, 0, LAST, 2), cut(w, x, 1, LAST, 2)
    pairs = w("Reshape", x, w.constant([*shape[:-1], shape[-1] // 2, 2], np.int64))
    if order == "reshaped":
        return tuple(w("Gather", pairs, w.constant(k, np.int64), axis=-1) for k in (0, -1))
    last = w.constant([-1], np.int64)
    return tuple(w("Squeeze", cut(w, pairs, k, k + 1), last) for k in (0, 1))


def rope_by_members(
    w: Writer, x: str, shape: tuple[int, ...], order: str, result: str, *, swap=False, inverse=False
) -> str:
    """(a cos - b sin, b cos + a sin) with one column of the tables for each pair."""
    a, b = members(w, x, shape, order)

    def times(v: str, table: str) -> str:
        return w("Mul", table, v) if swap else w("Mul", v, table)

    left, right = [times(a, "cos"), times(b, "sin")], [times(b, "cos"), times(a, "sin")]
    if swap:
        (left if inverse else right).reverse()
    first, second = w("Add" if inverse else "Sub", *left), w("Sub" if inverse else "Add", *right)
    if result == "halves":
        return w("Concat", first, second, axis=-1)
    axis = w.constant([-1], np.int64)
    woven = w("Concat", w("Unsqueeze", first, axis), w("Unsqueeze", second, axis), axis=-1)
    return w("Reshape", woven, w.constant(list(shape), np.int64))


ORDERS = ["halves", "strides", "reshaped", "squeezed"]


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ((2, 3, 5, 8), (1, 1, 5, 8)),
        ((2, 3, 5, 8), (2, 1, 5, 8)),
        ((2, 5, 3, 12), (1, 5, 1, 12)),
        ((3, 2), (2,)),
        ((2, 2, 70, 64), (70, 64)),
    ],
)
def test_rope(form, swap, shape, table):
    w = Writer()
    shapes = {"x": shape, "cos": table, "sin": table}
    y = rope(w, "x", shape, form, swap)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 1 < plain.forward


@pytest.mark.quick
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("result", ["halves", "pairs"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "table"),
    [((2, 3, 5, 8), (1, 1, 5, 4)), ((2, 5, 3, 12), (2, 5, 1, 6)), ((2, 2, 70, 64), (70, 32))],
)
def test_rope_by_members(order, result, swap, inverse, shape, table):
    w = Writer()
    shapes = {"x": shape, "cos": table, "sin": table}
    y = rope_by_members(w, "x", shape, order, result, swap=swap, inverse=inverse)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    if order == "halves" and result == "pairs":  # no model is written like that
        assert fast.forward == plain.forward
    else:
        assert fast.forward == 1 < plain.forward


@pytest.mark.parametrize("order", ["halves", "strides"])
@pytest.mark.parametrize(("width", "turned"), [(10, 4), (64, 32)])
def test_only_the_first_members_are_turned(order, width, turned):
    w = Writer()
    shapes = {"x": (2, 4, 3, width), "cos": (4, 1, turned // 2), "sin": (2, 4, 1, turned // 2)}
    first = cut(w, "x", 0, turned, axis=3)
    y = rope_by_members(w, first, (2, 4, 3, turned), order, "halves")
    y = w("Concat", y, cut(w, "x", turned, LAST), axis=-1)
    fast, _ = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 1


@pytest.mark.parametrize(
    "change", ["sin", "sign", "members", "other_x", "broadcast_table", "full_table"]
)
def test_what_only_looks_like_rope_by_members_stays(change):
    w = Writer()
    shape, half = (2, 3, 4, 6), {"broadcast_table": 1, "full_table": 6}.get(change, 3)
    shapes = {"x": shape, "x2": shape, "cos": (4, half), "sin": (4, half), "other": (4, 3)}
    if change == "full_table":
        shapes |= {"x": (*shape[:-1], 2), "x2": shape, "cos": (4, 6), "sin": (4, 6)}
    width = shapes["x"][-1]
    a, b = cut(w, "x", 0, width // 2), cut(w, "x", width // 2, LAST)
    if change == "other_x":
        b = cut(w, "x2", 3, LAST)
    if change == "members":
        a, b = cut(w, "x", 0, LAST, 2), cut(w, "x", 3, LAST)
    sin = "other" if change == "sin" else "sin"
    first = w("Sub", w("Mul", a, "cos"), w("Mul", b, "sin"))
    second = w("Sub" if change == "sign" else "Add", w("Mul", b, "cos"), w("Mul", a, sin))
    y = w("Concat", first, second, axis=-1)
    z = w("Mul", w("Abs", "x2"), w("ReduceSum", "other"))
    fast, plain = compare(w.model(shapes, [y, z]), arrays(shapes), [y, z])
    assert fast.forward == plain.forward


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("turned", [8, 4])
def test_shared_tables_in_f32_of_a_bf16_tensor_have_a_gradient(order, turned):
    w = Writer()
    shapes = {"x": (2, 3, 5, 8), "cos": (5, turned // 2), "sin": (2, 1, 5, turned // 2)}
    wide = w("Cast", w("Neg", w("Cast", "x", to=16)), to=1)
    part = wide if turned == 8 else cut(w, wide, 0, turned)
    y = rope_by_members(w, part, (2, 3, 5, turned), order, "halves")
    if turned < 8:
        y = w("Concat", y, cut(w, wide, turned, LAST), axis=-1)
    y = w("Cast", w("Cast", y, to=16), to=1)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 4 < plain.forward


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("width", "turned"), [(10, 4), (16, 2), (64, 32)])
def test_only_the_first_elements_are_turned(form, width, turned):
    w = Writer()
    shape = (2, 4, 3, width)
    shapes = {"x": shape, "cos": (4, 1, turned), "sin": (2, 4, 1, turned)}
    first = cut(w, "x", 0, turned, axis=3)
    y = rope(w, first, (2, 4, 3, turned), form)
    y = w("Concat", y, cut(w, "x", turned, LAST), axis=-1)
    fast, _ = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 1


def test_gradient_of_x_alone_is_one_node():
    from helpers.graphs import engine as E

    w = Writer()
    shapes = {"x": (2, 3, 5, 8), "cos": (5, 8), "sin": (5, 8)}
    y = rope(w, "x", shapes["x"], "slice")
    plan = E.Plan(w.model(shapes, [y]), arrays(shapes), ["x"], [y], [y])
    assert (plan.info.n_launches_forward, plan.info.n_launches_backward) == (1, 1)


def test_quarter_turn_that_is_read_elsewhere():
    w = Writer()
    shapes = {"x": (2, 3, 5, 8), "cos": (5, 8), "sin": (5, 8)}
    y = rope(w, "x", shapes["x"], "slice")
    z = w("Tanh", next(n.output[0] for n in w.nodes if n.op_type == "Concat"))
    compare(w.model(shapes, [y, z]), arrays(shapes), [y, z])


@pytest.mark.parametrize("change", ["not_negated", "order", "other_x", "uneven"])
def test_what_only_looks_like_rope_stays(change):
    w = Writer()
    shape = (2, 3, 4, 6)
    shapes = {"x": shape, "x2": shape, "cos": (4, 6), "sin": (4, 6)}
    low, high = cut(w, "x", 0, 2 if change == "uneven" else 3), cut(w, "x", 3, LAST)
    if change == "uneven":
        high = cut(w, "x", 2, LAST)
    parts = [w("Abs" if change == "not_negated" else "Neg", high), low]
    turn = w("Concat", *(parts[::-1] if change == "order" else parts), axis=-1)
    x = "x2" if change == "other_x" else "x"
    y = w("Add", w("Mul", x, "cos"), w("Mul", turn, "sin"))
    z = w("Abs", "x2")
    fast, plain = compare(w.model(shapes, [y, z]), arrays(shapes), [y, z])
    assert fast.forward == plain.forward


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("turned", [8, 4])
def test_tables_in_f32_of_a_bf16_tensor_have_a_gradient(form, turned):
    """Learned frequencies: cos and sin are f32, x and the result bf16."""
    w = Writer()
    shapes = {"x": (2, 3, 5, 8), "cos": (5, turned), "sin": (2, 1, 5, turned)}
    wide = w("Cast", w("Neg", w("Cast", "x", to=16)), to=1)
    part = wide if turned == 8 else cut(w, wide, 0, turned)
    y = rope(w, part, (2, 3, 5, turned), form)
    if turned < 8:
        y = w("Concat", y, cut(w, wide, turned, LAST), axis=-1)
    y = w("Cast", w("Cast", y, to=16), to=1)
    fast, plain = compare(w.model(shapes, [y]), arrays(shapes), [y])
    assert fast.forward == 4 < plain.forward  # Rope of bf16 between Neg and the casts


@pytest.mark.parametrize("table", [(1, 1, 0, 8), (0, 8)])
def test_tables_of_no_positions_under_attention(table):
    w = Writer()
    shapes = {"q": (2, 0, 3, 8), "k": (2, 3, 5, 8), "v": (2, 3, 5, 8), "cos": table, "sin": table}
    q = rope(w, w("Transpose", "q", perm=[0, 2, 1, 3]), (2, 3, 0, 8), FORMS[0])
    scores = w("MatMul", q, w("Transpose", "k", perm=[0, 1, 3, 2]))
    y = w("MatMul", w("Softmax", scores, axis=-1), "v")
    compare(w.model(shapes, [y]), arrays(shapes), [y])
