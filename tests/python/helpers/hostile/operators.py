"""Bad operators: operands that do not fit, axes out of range, sizes that explode.

Every refusal must name the node. Some of the errors appear only at run time: indices, ratios,
values that are not finite, more memory than there is. See raw_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from helpers.hostile.graphs import N, bad, graph, info
from helpers.hostile.raw_client import F32, Row

i64 = np.int64


def op(name: str, code: str, parts: str, kind: str, consts: Sequence[Any] = (),
       *, outs: int = 1, opset: int = 20, **attributes: Any) -> Row:  # fmt: skip
    """One operator on x f32[2,3] and constants (None = absent)."""

    def build() -> Any:
        names = ["" if c is None else f"c{i}" for i, c in enumerate(consts)]
        inits = {f"c{i}": c for i, c in enumerate(consts) if c is not None}
        outputs = ["y", *(f"y{i}" for i in range(1, outs))]
        node = N(kind, ["x", *names], outputs, name="n", **attributes)
        return graph([node], inits, opset=opset)

    return bad(f"{kind}: {name}", code, f"node 0 'n' ({kind})|{parts}", build)


def ints(*values: int) -> np.ndarray:
    return np.array(values, i64)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


SHAPES = [
    op("two entries -1", "GRAPH", "two entries -1", "Reshape", [ints(-1, -1)]),
    op("no divisor", "GRAPH", "cannot be reshaped", "Reshape", [ints(4, -1)]),
    op("another size", "GRAPH", "f32[2,3]|cannot be reshaped", "Reshape", [ints(7)]),
    op("entry -2", "GRAPH", "entry 0 is -2", "Reshape", [ints(-2)]),
    op("a zero beyond the rank", "GRAPH", "entry 2 is 0", "Reshape", [ints(2, 3, 0)]),
    op("a product that overflows", "LIMIT", "overflows", "Reshape", [ints(1 << 32, 1 << 32, 4)]),
    op("nine entries", "LIMIT", "9", "Reshape", [ints(*[1] * 9)]),
    op("a shape of rank 2", "GRAPH", "rank", "Reshape", [ones(1, 2).astype(i64)]),
    op("a shape of floats", "UNSUPPORTED", "input 1", "Reshape", [ones(2)]),
    op("axis repeated", "GRAPH", "repeated", "Transpose", perm=[0, 0]),
    op("axis out of range", "GRAPH", "out of range", "Transpose", perm=[0, 2]),
    op("axis below zero", "GRAPH", "perm", "Transpose", perm=[0, -9]),
    op("too short", "GRAPH", "perm|1 entries", "Transpose", perm=[0]),
    op("too long", "GRAPH", "perm|3 entries", "Transpose", perm=[0, 1, 2]),
    op("axis of size 2", "GRAPH", "axis 0 has size 2", "Squeeze", [ints(0)]),
    op("axis out of range", "GRAPH", "axis 5", "Squeeze", [ints(5)]),
    op("axis repeated", "GRAPH", "repeated", "Unsqueeze", [ints(0, 0)]),
    op("axis -2^63", "GRAPH", "-9223372036854775808", "Unsqueeze", [ints(-(1 << 63))]),
    op("rank 9", "LIMIT", "rank 9", "Unsqueeze", [ints(0, 1, 2, 3, 4, 5, 6)]),
    op("axis out of range", "GRAPH", "axis", "Flatten", axis=3),
    op("does not broadcast", "GRAPH", "f32[2,3]", "Expand", [ints(4, 3)]),
    op("entry -1", "GRAPH", "entry 0 is -1", "Expand", [ints(-1, 3)]),
    op("overflow", "LIMIT", "overflows", "Expand", [ints(1 << 40, 1 << 40, 2, 3)]),
    op("rank 9", "LIMIT", "9", "Expand", [ints(*[1] * 9)]),
    op("wrong count", "GRAPH", "rank 2", "Tile", [ints(2)]),
    op("below zero", "GRAPH", "repeated", "Tile", [ints(-1, 1)]),
    op("overflow", "GRAPH", "repeated", "Tile", [ints((1 << 63) - 1, 1)]),
]  # fmt: skip

PIECES = [
    op("axis 2", "GRAPH", "axis 2", "Concat", [ones(2, 3)], axis=2),
    op("axis -3", "GRAPH", "axis -3", "Concat", [ones(2, 3)], axis=-3),
    op("another size", "GRAPH", "outside axis 1", "Concat", [ones(3, 3)], axis=1),
    op("another rank", "GRAPH", "rank", "Concat", [ones(2)], axis=0),
    op("another type", "GRAPH", "element type", "Concat", [ones(2, 3).astype(i64)], axis=0),
    op("parts that leave one", "GRAPH", "leave 1 of 3", "Split", [ints(1, 1)], outs=2, axis=1),
    op("parts that exceed", "GRAPH", "part", "Split", [ints(2, 2)], outs=2, axis=1),
    op("a part below zero", "GRAPH", "part", "Split", [ints(-1, 4)], outs=2, axis=1),
    op("parts that wrap", "GRAPH", "part", "Split", [ints((1 << 63) - 1, 4)], outs=2, axis=1),
    op("as many parts as outputs", "GRAPH", "", "Split", [ints(1, 1, 1)], outs=2, axis=1),
    op("does not divide", "GRAPH", "does not divide", "Split", [], outs=2, axis=1, opset=17),
    op("num_outputs 3 of 2", "GRAPH", "num_outputs is 3", "Split", [], outs=2, num_outputs=3),
    op("axis out of range", "GRAPH", "axis 4", "Split", [], outs=2, axis=4, num_outputs=2),
    op("step 0", "GRAPH", "step of axis", "Slice", [ints(0), ints(2), ints(0), ints(0)]),
    op("axis repeated", "GRAPH", "repeated", "Slice", [ints(0, 0), ints(2, 2), ints(0, -2)]),
    op("axis out of range", "GRAPH", "axis 7", "Slice", [ints(0), ints(2), ints(7)]),
    op("lengths differ", "GRAPH", "differ in length", "Slice", [ints(0), ints(2, 2)]),
    op("more axes than there are", "GRAPH", "", "Slice", [ints(0, 0, 0), ints(1, 1, 1)]),
    op("starts of floats", "UNSUPPORTED", "input 1", "Slice", [ones(1), ones(1)]),
    op("below nothing", "GRAPH", "cannot be padded", "Pad", [ints(-2, 0, -2, 0)]),
    op("2^63", "LIMIT", "padded by", "Pad", [ints(-(1 << 63) + 1, 0, (1 << 63) - 2, 0)]),
    op("a giant", "LIMIT", "", "Pad", [ints(1 << 61, 0, 1 << 61, 0)]),
    op("three of four", "GRAPH", "3 entries, expected 4", "Pad", [ints(1, 1, 1)]),
    op("unknown mode", "UNSUPPORTED", "mirror", "Pad", [ints(0, 0, 0, 0)], mode="mirror"),
    op("axis out of range", "GRAPH", "axis", "Gather", [ints(0)], axis=2),
    op("indices of floats", "UNSUPPORTED", "input 1", "Gather", [ones(1)]),
    op("rank of the indices", "GRAPH", "rank 1", "GatherElements", [ints(0)]),
    op("indices too long", "GRAPH", "longer", "GatherElements", [np.zeros((1, 9), i64)]),
    op("last dimension too long", "GRAPH", "do not fit", "GatherND", [np.zeros((1, 3), i64)]),
    op("batch_dims too many", "GRAPH", "batch_dims", "GatherND", [np.zeros((2, 1), i64)],
        batch_dims=2),
    op("updates of another shape", "GRAPH", "expected f32[1,3]", "ScatterND", [np.zeros((1, 1),
        i64), ones(3)]),
    op("reduction unknown", "UNSUPPORTED", "xor", "ScatterND", [np.zeros((1, 1), i64), ones(1, 3)],
       reduction="xor"),
    op("updates of another shape", "GRAPH", "one shape", "ScatterElements", [np.zeros((1, 2), i64),
        ones(1, 3)]),
    op("depth below zero", "GRAPH", "depth is -1", "OneHot", [np.array(-1), ones(2)]),
    op("K too large", "GRAPH", "K does not fit", "TopK", [ints(4)], outs=2),
    op("K below zero", "GRAPH", "K", "TopK", [ints(-1)], outs=2),
    op("axis out of range", "GRAPH", "axis", "TopK", [ints(1)], outs=2, axis=5),
]  # fmt: skip

NUMBERS = [
    op("axis -3", "GRAPH", "axis -3 is out of range for rank 2", "Flatten", axis=-3),
    op("no broadcast", "GRAPH", "f32[2,3] and f32[2,2] do not broadcast", "Add", [ones(2, 2)]),
    op("another type", "GRAPH", "", "Add", [ones(2, 3).astype(i64)]),
    op("truth values of floats", "UNSUPPORTED", "input 0", "And", [ones(2, 3)]),
    op("inner sizes differ", "GRAPH", "f32[2,3]|f32[2,3]", "MatMul", [ones(2, 3)]),
    op("a scalar", "GRAPH", "", "MatMul", [np.float32(1)]),
    bad("MatMul: batch sizes differ", "GRAPH", "node 0 'n' (MatMul)|do not broadcast",
        lambda: graph([N("MatMul", ["x", "c"], ["y"], name="n")], {"c": ones(5, 3, 2)},
                      [info("x", [2, 2, 3])]), [[F32, [2, 2, 3]]]),
    op("rank 3", "GRAPH", "", "Gemm", [ones(1, 3, 2)]),
    op("sizes differ", "GRAPH", "", "Gemm", [ones(2, 3)]),
    op("bias does not broadcast", "GRAPH", "", "Gemm", [ones(3, 2), ones(5)]),
    op("axis 2", "GRAPH", "axis 2", "Softmax", axis=2),
    op("axis -2^63", "GRAPH", "axis -9223372036854775808", "Softmax", axis=-(1 << 63)),
    op("axes out of range", "GRAPH", "axis 3", "ReduceSum", [ints(3)]),
    op("axes repeated", "GRAPH", "repeated", "ReduceSum", [ints(1, -1)]),
    op("axes of floats", "UNSUPPORTED", "input 1", "ReduceSum", [ones(1)]),
    op("axis 2", "GRAPH", "axis 2", "LayerNormalization", [ones(3)], axis=2),
    op("scale of another shape", "UNSUPPORTED", "expected f32[3]", "LayerNormalization", [ones(2)]),
    op("scale of another shape", "UNSUPPORTED", "f32[3]", "RMSNormalization", [ones(2)], opset=23),
    op("rank 2", "GRAPH", "Q of type f32[2,3]", "Attention", [ones(2, 3), ones(2, 3)], opset=23),
    bad("Attention: heads that do not divide", "GRAPH", "node 0 'n' (Attention)|Q of type",
        lambda: graph([N("Attention", ["x", "x", "x"], ["y"], name="n", q_num_heads=1 << 62,
                         kv_num_heads=-(1 << 63))], {}, [info("x", [1, 2, 6])], opset=23),
        [[F32, [1, 2, 6]]]),
    bad("Attention: a mask for other keys", "GRAPH", "node 0 'n' (Attention)|attn_mask of type",
        lambda: graph([N("Attention", ["x", "x", "x", "c"], ["y"], name="n")], {"c": ones(5)},
                      [info("x", [1, 1, 2, 6])], opset=23), [[F32, [1, 1, 2, 6]]]),
    op("rank 2", "GRAPH", "X of type f32[2,3]", "RotaryEmbedding", [ones(2, 3), ones(2, 3)],
        opset=23),
    bad("RotaryEmbedding: heads below zero", "GRAPH", "node 0 'n' (RotaryEmbedding)|-4 heads",
        lambda: graph([N("RotaryEmbedding", ["x", "c", "c"], ["y"], name="n", num_heads=-4)],
                      {"c": ones(1, 2, 3)}, [info("x", [1, 2, 6])], opset=23),
        [[F32, [1, 2, 6]]]),
    op("groups that do not divide", "GRAPH", "divide", "GroupNormalization", [ones(3), ones(3)],
        num_groups=2, opset=21),
    op("groups below zero", "GRAPH", "do not divide into -1 groups", "GroupNormalization",
        [ones(3), ones(3)],
        num_groups=-1, opset=21),
    op("axis of size 0", "GRAPH", "axis", "ArgMax", axis=9),
    op("axis is no scalar", "GRAPH", "", "CumSum", [ints(0, 1)]),
    op("axis out of range", "GRAPH", "axis", "CumSum", [np.array(5)]),
    op("to text", "UNSUPPORTED", "element type 8", "Cast", to=8),
    op("to type 99", "UNSUPPORTED", "element type 99", "Cast", to=99),
    op("approximation unknown", "GRAPH", "cubic", "Gelu", approximate="cubic"),
    op("ratio of rank 1", "GRAPH", "", "Dropout", [ones(2), np.array(True)]),
    op("reduction unknown", "GRAPH", "median", "SoftmaxCrossEntropyLoss", [ints(0, 1)],
        reduction="median"),
    op("labels of another shape", "GRAPH", "", "SoftmaxCrossEntropyLoss", [ints(0, 1, 2)]),
    op("labels of floats", "UNSUPPORTED", "input 1", "SoftmaxCrossEntropyLoss", [ones(2)]),
    op("weights of another shape", "GRAPH", "", "SoftmaxCrossEntropyLoss", [ints(0, 1), ones(2)]),
    op("a shape that depends on data", "UNSUPPORTED", "depends on data", "NonZero"),
]  # fmt: skip


def made(kind: str, consts: Sequence[Any], **attributes: Any) -> Callable[[], Any]:
    """An operator on constants alone, added to x."""
    names = [f"c{i}" for i in range(len(consts))]
    nodes = [N(kind, names, ["s"], name="n", **attributes), N("Size", ["s"], ["y"])]
    return lambda: graph(nodes, {f"c{i}": c for i, c in enumerate(consts)})


def bomb(name: str, code: str, parts: str, build: Callable[[], Any], **more: Any) -> Row:
    return bad(f"bomb: {name}", code, parts, build, **more)


GIANTS = [
    bomb("Range of 2^60", "LIMIT", "node 0 'n' (Range)", made("Range", [i64(0), i64(1 << 60),
        i64(1)])),
    bomb("Range to infinity", "LIMIT", "node 0 'n' (Range)|entries",
         made("Range", [np.float32(0), np.float32("inf"), np.float32(1)])),
    bomb("Range from NaN", "LIMIT", "node 0 'n' (Range)",
         made("Range", [np.float32("nan"), np.float32(1), np.float32(1)])),
    bomb("Range with delta 0", "GRAPH", "delta is 0", made("Range", [i64(0), i64(5), i64(0)])),
    bomb("Range with tiny delta", "LIMIT", "node 0 'n' (Range)",
         made("Range", [np.float32(0), np.float32(1), np.float32(1e-38)])),
    bomb("ConstantOfShape below zero", "LIMIT", "node 0 'n' (ConstantOfShape)",
        made("ConstantOfShape", [ints(-1)])),
    bomb("ConstantOfShape of 2^80", "LIMIT", "node 0 'n' (ConstantOfShape)|overflows",
         made("ConstantOfShape", [ints(1 << 40, 1 << 40)])),
    bomb("ConstantOfShape of rank 2", "GRAPH", "node 0 'n' (ConstantOfShape)",
         made("ConstantOfShape", [np.ones((1, 1), i64)])),
    bomb("OneHot of depth 2^62", "LIMIT", "node 0 'n' (OneHot)", made("OneHot", [ints(0),
        np.array(1 << 62), ones(2)])),
    bomb("Tile of 2^62", "LIMIT", "node 0 'n' (Tile)", made("Tile", [ones(2), ints(1 << 60)])),
    bomb("Pad of 2^62", "LIMIT", "node 0 'n' (Pad)", made("Pad", [ones(1), ints(0, 1 << 62)])),
]  # fmt: skip

TABLES = {
    "shapes": SHAPES,
    "pieces and indices": PIECES,
    "arithmetic and norms": NUMBERS,
    "size bombs": GIANTS,
}
