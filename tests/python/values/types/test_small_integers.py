"""Integers of 8 and 16 bits in models of ONNX: the values are those of onnx.reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from helpers.graphs import engine as E

pytestmark = pytest.mark.quick
KINDS = {"u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16}
OPSET = 21
Array = np.ndarray


def numbers(kind: Any, *shape: int, seed: int = 0) -> Array:
    """Of the whole range of a type, its ends among them."""
    limits = np.iinfo(kind)
    draw = np.random.default_rng(seed)
    found = draw.integers(limits.min, limits.max, shape, kind, endpoint=True)
    found.flat[:2] = limits.min, limits.max
    return found


def model(node: Any, feeds: dict[str, Array], more: dict[str, Array]) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    code = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in feeds.items()}
    graph = helper.make_graph(
        [node],
        "small",
        [value(name, code[name], x.shape) for name, x in feeds.items()],
        [helper.make_empty_tensor_value_info(name) for name in node.output],
        [numpy_helper.from_array(x, name) for name, x in more.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def both(
    name: str, feeds: dict[str, Array], more: dict[str, Array] | None = None, **attrs: Any
) -> tuple[list[Array], list[Array]]:
    """What the engine gives, and the reference."""
    outputs = ["y", "z"] if name == "TopK" else ["y"]
    node = helper.make_node(name, [*feeds, *(more or {})], outputs, **attrs)
    made = model(node, feeds, more or {})
    with np.errstate(all="ignore"):
        wanted = ReferenceEvaluator(made).run(None, feeds)
    for name, x in zip(outputs, wanted, strict=True):
        out = next(o for o in made.graph.output if o.name == name)
        kind = helper.np_dtype_to_tensor_dtype(np.asarray(x).dtype)
        out.CopyFrom(helper.make_tensor_value_info(name, kind, np.asarray(x).shape))
    plan = E.Plan(E.Model(made.SerializeToString()), feeds)
    return list(E.Run(plan).forward(feeds).values()), [np.asarray(x) for x in wanted]


def pair(kind: Any) -> dict[str, Array]:
    a, b = numbers(kind, 4, 6), numbers(kind, 6, seed=1)
    b[2] = a[3, 2]
    return {"a": a, "b": b}


def above(kind: Any) -> dict[str, Array]:
    """A divisor that is no 0, and no -1, whose quotient may not fit."""
    feeds = pair(kind)
    feeds["b"] = np.abs(feeds["b"] // 2) + np.asarray(1, kind)
    return feeds


def one(kind: Any) -> dict[str, Array]:
    return {"a": numbers(kind, 4, 6)}


INT = np.int64
Row = tuple[Callable[[Any], dict[str, Array]], dict[str, Array], dict[str, Any]]
OPERATORS: dict[str, Row] = {
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), (pair, {}, {})),
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min"), (pair, {}, {})),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor"), (pair, {}, {})),
    **dict.fromkeys(("Div", "Mod"), (above, {}, {})),
    **dict.fromkeys(("BitwiseNot", "Sign", "Abs", "Identity", "Shape"), (one, {}, {})),
    "Where": (lambda k: {"m": numbers(k, 4, 6) % 2 == 0, **pair(k)}, {}, {}),
    "ReduceMax": (one, {"axes": np.array([1], INT)}, {}),
    "ReduceMin": (one, {"axes": np.array([0], INT)}, {"keepdims": 0}),
    "ArgMax": (one, {}, {"axis": 1}),
    "TopK": (one, {"k": np.array([2], INT)}, {"axis": 0}),
    "Gather": (one, {"at": np.array([2, -1], INT)}, {"axis": 1}),
    "GatherElements": (one, {"at": np.array([[2, -1, 0, 1, 3, 2]], INT)}, {"axis": 0}),
    "Slice": (one, {"from": np.array([1], INT), "to": np.array([3], INT)}, {}),
    "Transpose": (one, {}, {}),
    "Reshape": (one, {"shape": np.array([3, 8], INT)}, {}),
    "Expand": (one, {"shape": np.array([2, 4, 6], INT)}, {}),
    "Tile": (one, {"times": np.array([2, 3], INT)}, {}),
    "Concat": (lambda k: {"a": numbers(k, 2, 3), "b": numbers(k, 2, 2)}, {}, {"axis": 1}),
    "Pad": (one, {"pads": np.array([0, 1, 2, 0], INT)}, {}),
    "Trilu": (one, {}, {"upper": 0}),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_operators(kind: Any) -> None:
    wrong = []
    for name, (feeds, more, attrs) in OPERATORS.items():
        found, wanted = both(name, feeds(kind), more, **attrs)
        for a, b in zip(found, wanted, strict=True):
            if a.dtype != b.dtype or not np.array_equal(a, b):
                wrong.append(f"{name}: {a.dtype} {a.ravel()[:6]}, {b.dtype} {b.ravel()[:6]}")
    assert not wrong, "\n".join(wrong)


def test_limits_of_clip_and_negation() -> None:
    for kind in KINDS.values():
        limits = {"lo": np.array(3, kind), "hi": np.array(100, kind)}
        found, wanted = both("Clip", one(kind), limits)
        assert found[0].dtype == wanted[0].dtype and np.array_equal(found[0], wanted[0])
    for kind in (np.int8, np.int16):
        found, wanted = both("Neg", one(kind))
        assert found[0].dtype == wanted[0].dtype and np.array_equal(found[0], wanted[0])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_casts(kind: Any) -> None:
    others = (*KINDS.values(), np.int32, np.int64, np.float32, np.float64, np.bool_, np.float16)
    for other in others:
        to = helper.np_dtype_to_tensor_dtype(np.dtype(other))
        found, wanted = both("Cast", {"a": numbers(kind, 40)}, to=to)
        assert found[0].dtype == wanted[0].dtype and np.array_equal(found[0], wanted[0])
        near = np.random.default_rng(2).integers(0, 100, 40).astype(other)
        code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        found, wanted = both("Cast", {"a": near}, to=code)
        assert found[0].dtype == wanted[0].dtype and np.array_equal(found[0], wanted[0])


def test_what_has_no_kernel_is_named() -> None:
    feeds = {"a": numbers(np.uint8, 4, 6)}
    made = model(helper.make_node("Softmax", ["a"], ["y"], name="s"), feeds, {})
    made.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", 2, [4, 6]))
    with pytest.raises(E.EngineError, match="s.*element type u8 is not supported"):
        E.Plan(E.Model(made.SerializeToString()), feeds)
