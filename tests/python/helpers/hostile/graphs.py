"""Bad graphs: bytes that are no model, models that break a rule of ONNX, bombs.

Built with the official helpers, or byte by byte where these refuse. Operators that do not accept
their operands are in operators.py. See raw_client.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from helpers.hostile.raw_client import F32, Raw, Row, compile_graph

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
N = helper.make_node
X_TYPE = [F32, [2, 3]]


def info(name: str, shape: Sequence[int | str] | None = (2, 3), dtype: int = FLOAT) -> Any:
    """A declared input or output."""
    return helper.make_tensor_value_info(name, dtype, shape)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inits: dict[str, Any] | None = None,
    inputs: Sequence[Any] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 20,
) -> onnx.ModelProto:
    """A model with input x f32[2,3] and output y."""
    made = [
        v if isinstance(v, onnx.TensorProto) else numpy_helper.from_array(np.asarray(v), k)
        for k, v in (inits or {}).items()
    ]
    body = helper.make_graph(
        list(nodes), "g", [info("x")] if inputs is None else list(inputs),
        [info(name, None) for name in outputs], made,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.gradd", 1)]
    return helper.make_model(body, opset_imports=opsets, ir_version=10)


def relu(**more: Any) -> onnx.NodeProto:
    """The node that makes y, named `last`."""
    return N("Relu", ["x"], ["y"], name="last", **more)


def changed(change: Callable[[onnx.ModelProto], None], model: Any = None) -> Callable[[], Any]:
    """A good model with something done to it."""

    def build() -> onnx.ModelProto:
        made = graph([relu()]) if model is None else model()
        change(made)
        return made

    return build


def bad(name: str, code: str, parts: str, build: Callable[[], Any], types: Any = None,
        **more: Any) -> Row:  # fmt: skip
    """A row; the model is built when it is sent."""

    def send(s: Raw) -> dict[str, Any]:
        return compile_graph(s, build(), [X_TYPE] if types is None else types)

    return Row(f"graph: {name}", code, tuple(parts.split("|")), send, **more)


# ---- bytes ----


def varint(n: int) -> bytes:
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


def field(number: int, payload: bytes) -> bytes:
    """A length-delimited field of a message."""
    return bytes([number << 3 | 2]) + varint(len(payload)) + payload


def nested(levels: int) -> bytes:
    """Subgraphs in subgraphs: graph.node.attribute.g, again and again."""
    data = b""
    for _ in range(levels):
        for number in (6, 5, 1):
            data = field(number, data)
    return field(7, data)


def dimensions(n: int) -> bytes:
    """A graph input with n dimensions of two bytes each."""
    return field(7, field(11, field(2, field(1, field(2, b"\n\0" * n)))))


GOOD = graph([relu()]).SerializeToString()
BYTES = [
    bad("a picture", "MODEL", "at ", lambda: b"\x89PNG\r\n\x1a\n" + bytes(64)),
    bad("a zip archive", "MODEL", "at ", lambda: b"PK\x03\x04" + bytes(64)),
    bad("zeros", "MODEL", "a field's tag is broken", lambda: bytes(1000)),
    bad("all ones", "MODEL", "a field's tag is broken", lambda: b"\xff" * 1000),
    bad("cut in half", "MODEL", "at graph|truncated?", lambda: GOOD[: len(GOOD) // 2]),
    bad("cut by one byte", "MODEL", "at ", lambda: GOOD[:-1]),
    bad("a byte too many", "MODEL", "at ", lambda: GOOD + b"\x08"),
    bad("two graphs", "MODEL", "at graph|the field occurs twice", lambda: GOOD + field(7, b"")),
    bad("a group", "MODEL", "wire type 3 of field 1000", lambda: GOOD + b"\xc3\x3e"),
    bad("a length of 2^35", "MODEL", "34359738367 bytes are announced",
        lambda: b"\x3a" + b"\xff" * 4 + b"\x7f\0"),
    bad("a length beyond the end", "MODEL", "bytes are announced", lambda: b"\x3a\x7f\0"),
    bad("graph is a number", "MODEL", "at graph|wire type 0, expected 2", lambda: b"\x38\x01"),
    bad("a name that is not UTF-8", "MODEL", "at graph.name|not UTF-8", lambda: field(7, field(2,
        b"\xc0\x80"))),
    bad("a name with a zero byte", "MODEL", "at graph.name|NUL byte", lambda: field(7, field(2,
        b"a\0b"))),
    bad("a name with a surrogate", "MODEL", "at graph.name|not UTF-8", lambda: field(7, field(2,
        b"\xed\xa0\x80"))),
    bad("3000 nested subgraphs", "LIMIT", "nesting 65 is deeper than the limit of 64|graph.node[0]",
        lambda: nested(3000)),
    bad("100000 nested subgraphs", "LIMIT", "nesting 65 is deeper than", lambda: nested(100000)),
    bad("7 million empty nodes", "LIMIT", "would need more than|graph.node[", lambda: field(7,
        b"\n\0" * 7_000_000)),
    bad("5 million empty dimensions", "LIMIT", "would need more than|graph.input[0]",
        lambda: dimensions(5_000_000)),
    bad("1.5 million empty dimensions", "MODEL", "IR version 0", lambda: dimensions(1_500_000)),
    bad("broken packed numbers", "MODEL", "packed number 0 is broken",
        lambda: field(7, field(5, field(1, b"\xff" * 11)))),
    bad("packed floats cut short", "MODEL", "7 packed bytes are no multiple of 4",
        lambda: field(7, field(5, field(4, bytes(7))))),
]  # fmt: skip

# ---- header ----


def opset(version: int) -> Callable[[], Any]:
    return lambda: graph([relu()], opset=version)


def drop_opsets(m: onnx.ModelProto) -> None:
    del m.opset_import[:]


def many_opsets(m: onnx.ModelProto) -> None:
    m.opset_import.extend(helper.make_opsetid(f"org.d{i}", 1) for i in range(63))


def a_function(m: onnx.ModelProto) -> None:
    ops = [helper.make_opsetid("", 20)]
    m.functions.append(helper.make_function("local", "f", ["x"], ["y"], [relu()], ops))


HEADERS = [
    bad("no IR version", "MODEL", "IR version 0", changed(lambda m: m.ClearField("ir_version"))),
    bad("IR version -1", "MODEL", "IR version -1", changed(lambda m: setattr(m, "ir_version", -1))),
    bad("no graph", "MODEL", "holds no graph", changed(lambda m: m.ClearField("graph"))),
    bad("no opsets", "GRAPH", "imports no opset of 'ai.onnx'", changed(drop_opsets)),
    bad("opset 12", "UNSUPPORTED", "opset 12 of 'ai.onnx'|13 to 25", opset(12)),
    bad("opset 26", "UNSUPPORTED", "opset 26 of 'ai.onnx'", opset(26)),
    bad("opset -1", "UNSUPPORTED", "opset -1", opset(-1)),
    bad("opset 2^63-1", "UNSUPPORTED", "opset 9223372036854775807", opset((1 << 63) - 1)),
    bad("opset twice", "GRAPH", "'ai.onnx' is imported twice",
        changed(lambda m: m.opset_import.append(helper.make_opsetid("ai.onnx", 21)))),
    bad("65 opsets", "LIMIT", "65 opset imports, the limit is 64", changed(many_opsets)),
    bad("a newer com.gradd", "UNSUPPORTED", "opset 2 of 'com.gradd'",
        changed(lambda m: setattr(m.opset_import[1], "version", 2))),
    bad("a function", "UNSUPPORTED", "1 functions", changed(a_function)),
    bad("training info", "UNSUPPORTED", "training_info", changed(lambda m: m.training_info.add())),
]  # fmt: skip

# ---- structure ----


def chain_of(n: int) -> Callable[[], Any]:
    return lambda: graph(
        [N("Neg", [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i in range(n)], outputs=[f"v{n}"]
    )


def many_inputs(n: int) -> Callable[[], Any]:
    return lambda: graph([relu()], inputs=[info("x"), *(info(f"x{i}") for i in range(n - 1))])


def branch() -> Any:
    body = helper.make_graph([relu()], "body", [], [info("y")])
    return graph([N("If", ["x"], ["y"], name="fork", then_branch=body)])


def loop() -> Any:
    body = helper.make_graph([relu()], "body", [], [info("y")])
    return graph([N("Loop", ["", ""], ["y"], name="round", body=body)])


STRUCTURE = [
    bad("a cycle", "GRAPH",
        "node 0 'a' (Relu): input 0 'q' is produced by node 1, which comes later",
        lambda: graph([N("Relu", ["q"], ["p"], name="a"), N("Relu", ["p"], ["q"]), relu()])),
    bad("a node that reads itself", "GRAPH",
        "node 0 'self' (Relu): input 0 'y' is the node's own output",
        lambda: graph([N("Relu", ["y"], ["y"], name="self")])),
    bad("an unknown name", "GRAPH", "node 0 'last' (Relu): input 0 'gone' is not defined",
        lambda: graph([N("Relu", ["gone"], ["y"], name="last")])),
    bad("an output defined twice", "GRAPH",
        "node 1 'b' (Abs): output 0 'y' is already an output of node 0",
        lambda: graph([N("Relu", ["x"], ["y"], name="a"), N("Abs", ["x"], ["y"], name="b")])),
    bad("one node, one name twice", "GRAPH", "node 0 'cut' (Split): output 1 'y' is already",
        lambda: graph([N("Split", ["x"], ["y", "y"], name="cut", num_outputs=2)])),
    bad("an output over an input", "GRAPH", "output 0 'x' is already a graph input",
        lambda: graph([N("Relu", ["x"], ["x"])], outputs=["x"])),
    bad("an output over a constant", "GRAPH", "output 0 'c' is already an initializer",
        lambda: graph([N("Relu", ["x"], ["c"])], {"c": np.float32(1)}, outputs=["c"])),
    bad("an input twice", "GRAPH", "graph input 'x' is listed twice (positions 0 and 1)",
        lambda: graph([relu()], inputs=[info("x"), info("x")])),
    bad("a constant twice", "GRAPH", "initializer 'c' is given twice",
        changed(lambda m: m.graph.initializer.extend([numpy_helper.from_array(np.float32(1),
            "c")] * 2))),
    bad("an output without a node", "GRAPH", "graph output 0 'z' is not produced",
        lambda: graph([relu()], outputs=["z"])),
    bad("no outputs", "GRAPH", "the graph has no outputs", lambda: graph([relu()], outputs=[])),
    bad("an unknown operator", "UNSUPPORTED",
        "node 0 'n' (Frobnicate)|operator Frobnicate of opset 20",
        lambda: graph([N("Frobnicate", ["x"], ["y"], name="n")])),
    bad("an unknown domain", "GRAPH", "node 0 'n' (Relu): domain 'org.example' is not among",
        lambda: graph([N("Relu", ["x"], ["y"], name="n", domain="org.example")])),
    bad("an operator in another domain", "UNSUPPORTED",
        "node 0 'n' (Relu): operator com.gradd::Relu",
        lambda: graph([N("Relu", ["x"], ["y"], name="n", domain="com.gradd")])),
    bad("an internal operator", "GRAPH", "node 0 'n' (ReluGrad): the operator is internal to gradd",
        lambda: graph([N("ReluGrad", ["x", "x"], ["y"], name="n", domain="com.gradd")])),
    bad("an overload", "UNSUPPORTED", "operator Relu",
        changed(lambda m: setattr(m.graph.node[0], "overload", "other"))),
    bad("an empty operator", "GRAPH", "the operator is empty", lambda: graph([N("", ["x"],
        ["y"])])),
    bad("too few inputs", "GRAPH", "node 0 '' (Add): 1 inputs, expected 2", lambda: graph([N("Add",
        ["x"], ["y"])])),
    bad("too many inputs", "GRAPH", "node 0 '' (Relu): 2 inputs, expected 1",
        lambda: graph([N("Relu", ["x", "x"], ["y"])])),
    bad("too many outputs", "GRAPH", "node 0 '' (Relu): 2 outputs, expected 1",
        lambda: graph([N("Relu", ["x"], ["y", "z"])])),
    bad("a required input without name", "GRAPH", "input 0 has no name, but Add requires it",
        lambda: graph([N("Add", ["", "x"], ["y"])])),
    bad("no outputs of a node", "GRAPH", "0 outputs, expected 1", lambda: graph([N("Relu", ["x"],
        [])], outputs=["x"])),
    bad("500 inputs of one node", "GRAPH", "node 0 'wide' (Concat)|500 inputs, expected 1 to 64",
        lambda: graph([N("Concat", ["x"] * 500, ["y"], name="wide", axis=0)])),
    bad("If", "GRAPH", "node 0 'fork' (If): ", branch),
    bad("Loop", "GRAPH", "node 0 'round' (Loop): the body has 0 inputs, expected 2", loop),
    bad("a name of 2000 bytes", "LIMIT", "has 2000 bytes, the limit is 1024",
        lambda: graph([N("Relu", ["x"], ["v" * 2000], name="n")], outputs=["v" * 2000])),
    bad("a name with a bell", "GRAPH", "control character (code 7 at byte 1)",
        lambda: graph([N("Relu", ["x"], ["y"], name="a\ab")])),
    bad("an operator with an escape", "GRAPH", "operator has a control character (code 27",
        lambda: graph([N("\x1b[31m", ["x"], ["y"])])),
    bad("200001 nodes", "LIMIT", "the graph has 200001 nodes, the limit is 200000",
        chain_of(200001),
        cpu_ms=600),
    bad("100000 inputs", "LIMIT", "message holds more than 262144 values",
        many_inputs(100000),
        [X_TYPE] * 100000, session=None, cpu_ms=600),
]  # fmt: skip

# ---- attributes ----


def attribute(change: Callable[[Any], None]) -> Callable[[], Any]:
    """Transpose with its attribute `perm` changed."""

    def build() -> Any:
        made = graph([N("Transpose", ["x"], ["y"], name="turn", perm=[1, 0])])
        change(made.graph.node[0].attribute[0])
        return made

    return build


def node_with(op: str, **attributes: Any) -> Callable[[], Any]:
    return lambda: graph([N(op, ["x"], ["y"], name="n", **attributes)])


def many_attributes() -> Any:
    return graph([N("Relu", ["x"], ["y"], name="n", **{f"a{i}": i for i in range(257)})])


TURN = "node 0 'turn' (Transpose): attribute 'perm'"
ATTRIBUTES = [
    bad("attribute unknown", "UNSUPPORTED", "attribute 'beta'|LeakyRelu takes no such attribute",
        node_with("LeakyRelu", beta=1.0)),
    bad("attribute missing", "GRAPH", "(Concat): attribute 'axis' is missing", node_with("Concat")),
    bad("attribute of another kind", "GRAPH", "attribute 'axis'|is FLOAT, expected INT",
        node_with("Softmax", axis=1.0)),
    bad("attribute: text for number", "GRAPH", "attribute 'alpha'|is STRING, expected FLOAT",
        node_with("LeakyRelu", alpha="x")),
    bad("attribute: number for list", "GRAPH", "attribute 'perm'|is INT, expected INTS",
        node_with("Transpose", perm=1)),
    bad("attribute twice", "GRAPH", f"{TURN}: is given twice",
        changed(lambda m: m.graph.node[0].attribute.append(m.graph.node[0].attribute[0]),
                attribute(lambda a: None))),
    bad("attribute without kind", "GRAPH", f"{TURN}: kind 0 is not",
        attribute(lambda a: a.ClearField("type"))),
    bad("attribute that lies about its kind", "GRAPH", f"{TURN}: is declared as INT but holds INTS",
        attribute(lambda a: setattr(a, "type", 2))),
    bad("attribute of two kinds", "GRAPH", f"{TURN}: is declared as INTS but holds FLOAT",
        attribute(lambda a: setattr(a, "f", 1.0))),
    bad("attribute without a name", "GRAPH", "attribute name is empty",
        attribute(lambda a: a.ClearField("name"))),
    bad("attribute of a function", "GRAPH", f"{TURN}: refers to a function's attribute 'p'",
        attribute(lambda a: setattr(a, "ref_attr_name", "p"))),
    bad("257 attributes", "LIMIT", "257 attributes, the limit is 256", many_attributes),
    bad("attribute NaN", "GRAPH", "node 0 'n' (LeakyRelu): attribute 'alpha'|is NaN",
        node_with("LeakyRelu", alpha=float("nan"))),
    bad("attribute with a control character", "GRAPH",
        "attribute 'approximate'|control character (code 10",
        node_with("Gelu", approximate="tanh\n")),
]  # fmt: skip

# ---- constants ----


def constant(change: Callable[[Any], None]) -> Callable[[], Any]:
    """A model with a good constant `c` f32[2,2], changed."""

    def build() -> Any:
        made = graph([relu()], {"c": np.ones((2, 2), np.float32)})
        change(made.graph.initializer[0])
        return made

    return build


def external(location: str, **more: str) -> Callable[[], Any]:
    def change(t: Any) -> None:
        t.ClearField("raw_data")
        t.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **more}.items():
            t.external_data.add(key=key, value=value)

    return constant(change)


def external_attribute() -> Any:
    made = graph(
        [
            N(
                "Constant",
                [],
                ["y"],
                name="k",
                value=numpy_helper.from_array(np.ones(2, np.float32), "v"),
            )
        ]
    )
    external("/etc/passwd")  # the helper is for initializers; here the attribute is changed
    value = made.graph.node[0].attribute[0].t
    value.ClearField("raw_data")
    value.data_location = TensorProto.EXTERNAL
    value.external_data.add(key="location", value="/etc/passwd")
    return made


def sparse(m: Any) -> None:
    values, where = (
        helper.make_tensor("s", FLOAT, [1], [1.0]),
        helper.make_tensor("i", INT64, [1], [2]),
    )
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(values, where, [4]))


def typed(dtype: int, **lists: Any) -> Callable[[], Any]:
    """A constant c of two elements in typed fields."""
    return constant(
        lambda t: (
            t.Clear(),
            t.MergeFrom(TensorProto(name="c", data_type=dtype, dims=[2], **lists)),
        )
    )


C = "initializer 0 'c'"
CONSTANTS = [
    bad("data in ../", "EXTDATA", f"{C}|external file ('../../etc/passwd')|opens no files",
        external("../../etc/passwd")),
    bad("data in a/../b", "EXTDATA", f"{C}|('a/../../b')", external("a/../../b")),
    bad("data in /etc/passwd", "EXTDATA", f"{C}|('/etc/passwd')", external("/etc/passwd")),
    bad("data in a harmless file", "EXTDATA", f"{C}|('weights.bin')", external("weights.bin",
        offset="0", length="16")),
    bad("data in a file of 2^60 bytes", "EXTDATA", f"{C}|external file", external("w",
        length=str(1 << 60))),
    bad("data at -1", "EXTDATA", f"{C}|external file", external("w", offset="-1")),
    bad("data in a pipe", "EXTDATA", "('/dev/stdin')", external("/dev/stdin")),
    bad("external data of an attribute", "EXTDATA",
        "node 0 'k' (Constant): attribute 'value'|('/etc/passwd')",
        external_attribute),
    bad("a sparse constant", "UNSUPPORTED", "1 sparse initializers", changed(sparse)),
    bad("a sparse attribute", "UNSUPPORTED", "attribute 'sparse_value'",
        lambda: graph([N("Constant", [], ["y"], name="k", sparse_value=helper.make_sparse_tensor(
            helper.make_tensor("s", FLOAT, [1], [1.0]), helper.make_tensor("i", INT64, [1], [2]),
                [4]))])),
    bad("constant too short", "GRAPH", f"{C}: raw_data has 15 bytes, expected 16 for f32[2,2]",
        constant(lambda t: setattr(t, "raw_data", b"x" * 15))),
    bad("constant too long", "GRAPH", f"{C}: raw_data has 17 bytes, expected 16",
        constant(lambda t: setattr(t, "raw_data", b"x" * 17))),
    bad("constant without data", "GRAPH", C, constant(lambda t: t.ClearField("raw_data"))),
    bad("constant in two fields", "GRAPH", f"{C}: data is in both raw_data and float_data",
        constant(lambda t: t.float_data.append(1.0))),
    bad("constant in the wrong field", "GRAPH",
        f"{C}: data is in int64_data, expected float_data or raw_data for f32",
        typed(FLOAT, int64_data=[1, 2])),
    bad("constant with a negative dimension", "GRAPH", f"{C}: dimension 0 is -2",
        constant(lambda t: t.dims.__setitem__(0, -2))),
    bad("constant of rank 9", "LIMIT", f"{C}: rank 9 is above the limit of 8",
        constant(lambda t: t.dims.extend([1] * 7))),
    bad("constant whose size overflows", "LIMIT", f"{C}: the size in bytes overflows 64 bits",
        constant(lambda t: t.dims.__setitem__(0, 1 << 62))),
    bad("constant that claims 2^40 elements", "GRAPH",
        f"{C}: raw_data has 16 bytes, expected 4398046511104",
        constant(lambda t: (t.dims.__setitem__(0, 1 << 39)))),
    bad("constant of texts", "UNSUPPORTED", f"{C}: element type 8", constant(lambda t: setattr(t,
        "data_type", 8))),
    bad("constant of no type", "UNSUPPORTED", f"{C}: element type 0", constant(lambda t: setattr(t,
        "data_type", 0))),
    bad("constant of type 99", "UNSUPPORTED", f"{C}: element type 99",
        constant(lambda t: setattr(t, "data_type", 99))),
    bad("truth value 2", "GRAPH", f"{C}: element 1 is 2, expected 0 to 1 for bool",
        typed(TensorProto.BOOL, int32_data=[1, 2])),
    bad("i8 of 300", "GRAPH", f"{C}: element 0 is 300, expected -128 to 127",
        typed(TensorProto.INT8, int32_data=[300, 0])),
    bad("segmented constant", "UNSUPPORTED", f"{C}: segmented tensors",
        constant(lambda t: setattr(t.segment, "begin", 1))),
    bad("a default of another shape", "GRAPH",
        "initializer 0 'x'|is f32[2]|but the graph input",
        lambda: graph([relu()], {"x": np.ones(2, np.float32)})),
]  # fmt: skip

# ---- inputs ----


def declared(value: Any) -> Callable[[], Any]:
    return lambda: graph([relu()], inputs=[value])


def emptied() -> Any:
    value = info("x")
    value.ClearField("type")
    return value


TENSOR_TYPE = helper.make_tensor_type_proto(FLOAT, [2])


def long_names() -> Any:
    names = [f"{k:x>1000}" for k in range(5000)]
    return graph([relu()], inputs=[info("x"), *(info(name) for name in names)])


def many_ends(n_in: int, n_out: int, nodes: int = 0) -> Callable[[], Any]:
    """Inputs and outputs by thousands, and nodes to walk over for each 64 of them."""
    names = [f"i{k}" for k in range(n_in)]
    chain = [N("Relu", ["x" if k == 0 else f"v{k - 1}"], [f"v{k}"]) for k in range(nodes)]
    return lambda: graph(
        [relu(), *chain], inputs=[info("x"), *map(info, names)], outputs=["y"] * n_out
    )


INPUTS = [
    bad("20000 outputs of 1000 inputs", "LIMIT",
        "graph.put: 20000 graph outputs of 1001 inputs and 1 nodes are too many",
        many_ends(1000, 20_000)),
    bad("120000 outputs of 60000 nodes", "LIMIT",
        "graph.put: 120000 graph outputs of 1 inputs and 60001 nodes are too many",
        many_ends(0, 120_000, 60_000)),
    bad("a dimension with a long name", "LIMIT", "graph input 0 'x': the name of a dimension",
        declared(info("x", ["n" * 2000]))),
    bad("a dimension with a bell in its name", "GRAPH", "input 0 'x': the name of a dimension",
        declared(info("x", ["a\ab"]))),
    bad("names for a reply of 5 MB", "LIMIT", "graph.put: the reply has|more than 4194304",
        long_names),
    bad("input of rank 9", "LIMIT", "graph input 0 'x': rank 9 is above the limit of 8",
        declared(info("x", [1] * 9))),
    bad("input with a negative dimension", "GRAPH", "graph input 0 'x': dimension 1 is -5",
        declared(info("x", [2, -5]))),
    bad("input whose size overflows", "LIMIT", "graph input 0 'x': the size in bytes overflows",
        declared(info("x", [1 << 40] * 2))),
    bad("input of texts", "UNSUPPORTED", "graph input 0 'x': element type 8", declared(info("x",
        [2], 8))),
    bad("input without element type", "UNSUPPORTED", "graph input 0 'x': element type 0",
        declared(info("x", [2], 0))),
    bad("input without type", "GRAPH", "graph input 0 'x': has no tensor type",
        declared(emptied())),
    bad("input that is a sequence", "UNSUPPORTED", "graph input 0 'x': is a sequence",
        declared(helper.make_tensor_sequence_value_info("x", FLOAT, None))),
    bad("input that may be absent", "UNSUPPORTED", "graph input 0 'x': is an optional",
        declared(helper.make_value_info("x", helper.make_optional_type_proto(TENSOR_TYPE)))),
    bad("input without a name", "GRAPH", "graph input", declared(info("", [2]))),
]  # fmt: skip

TABLES = {
    "bytes of a model": BYTES,
    "header of a model": HEADERS,
    "structure": STRUCTURE,
    "attributes": ATTRIBUTES,
    "constants": CONSTANTS,
    "graph inputs": INPUTS,
}
