"""The importer's errors for models written by the `onnx` package itself.

tests/c/test_import*.c breaks every rule by hand; here the official serializer, its helpers and its
newer fields meet our own subset of the schema, and every refusal reads as a user will see it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers.graphs.engine import EngineError, Model

pytestmark = pytest.mark.quick

FLOAT = TensorProto.FLOAT


def value(name: str, shape: list | None = None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    """A tensor value_info."""
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto],
    initializers: list[onnx.TensorProto] | None = None,
    inputs: list[onnx.ValueInfoProto] | None = None,
    opset: int = 20,
) -> onnx.ModelProto:
    """A model whose input is x f32[N,3] and whose output is y."""
    graph = helper.make_graph(
        nodes, "g", inputs or [value("x", ["N", 3])], [value("y")], initializers or []
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def turn(**attributes) -> onnx.NodeProto:
    """The node that makes y."""
    return helper.make_node("Transpose", ["x"], ["y"], name="turn", **attributes)


def load(proto: onnx.ModelProto | bytes) -> Model:
    """Loads the serialized model."""
    return Model(proto if isinstance(proto, bytes) else proto.SerializeToString())


def refused(code: str, part: str, proto: onnx.ModelProto | bytes) -> None:
    """The model must be refused with this code and a sentence that contains `part`."""
    with pytest.raises(EngineError) as caught:
        load(proto)
    assert caught.value.code == code, str(caught.value)
    assert part in str(caught.value)


def test_a_decorated_model_loads():
    """Doc strings, metadata, value_info and producer fields are skipped."""
    proto = model([turn(perm=[1, 0])])
    proto.doc_string = "a line\nand another \N{SNOWMAN}"
    proto.producer_name = "test"
    helper.set_model_props(proto, {"key": "value"})
    proto.graph.doc_string = "graph"
    proto.graph.node[0].doc_string = "node"
    proto.graph.node[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value="a\nb")
    proto.graph.value_info.append(value("y", [3, "N"]))
    loaded = load(proto)
    assert loaded.inputs == ["x"]
    assert loaded.outputs == ["y"]


@pytest.mark.parametrize("opset", [13, 17, 18, 20, 21, 23])
def test_opsets(opset: int):
    load(model([turn()], opset=opset))


@pytest.mark.parametrize("opset", [9, 12, 26])
def test_other_opsets_are_refused(opset: int):
    refused(
        "UNSUPPORTED", f"opset {opset} of 'ai.onnx' is not supported", model([turn()], opset=opset)
    )


ARRAYS = [
    np.array([1.5, -2], np.float32),
    np.array(3.0, np.float64),
    np.array([[1, 2], [3, 4]], np.int64),
    np.array([-1], np.int32),
    np.array([True, False]),
    np.array([1, 255], np.uint8),
    np.array([0.5], np.float16),
    np.zeros((0, 3), np.float32),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{list(a.shape)}")
def test_both_ways_to_store_elements(array: np.ndarray):
    raw = numpy_helper.from_array(array, "w")
    typed = helper.make_tensor("w", raw.data_type, array.shape, array.flatten().tolist())
    assert raw.HasField("raw_data") and not typed.HasField("raw_data")
    load(model([turn()], [raw]))
    load(model([turn()], [typed]))
    if array.size:
        raw.raw_data += b"x"
        refused("GRAPH", "initializer 0 'w': raw_data has", model([turn()], [raw]))


def test_strings_are_refused():
    names = helper.make_tensor("names", TensorProto.STRING, [1], [b"a"])
    refused("UNSUPPORTED", "initializer 0 'names': element type 8", model([turn()], [names]))
    inputs = [value("x", [2], TensorProto.STRING)]
    refused("UNSUPPORTED", "graph input 0 'x': element type 8", model([turn()], inputs=inputs))


def test_sequences_and_optionals_are_refused():
    sequence = helper.make_tensor_sequence_value_info("x", FLOAT, None)
    refused("UNSUPPORTED", "graph input 0 'x': is a sequence", model([turn()], inputs=[sequence]))
    tensor = helper.make_tensor_type_proto(FLOAT, [2])
    optional = helper.make_value_info("x", helper.make_optional_type_proto(tensor))
    refused("UNSUPPORTED", "graph input 0 'x': is an optional", model([turn()], inputs=[optional]))


def test_external_data_is_refused(tmp_path):
    """As onnx.save writes it: the file exists and is still not opened."""
    big = numpy_helper.from_array(np.arange(1024, dtype=np.float32), "big")
    path = tmp_path / "model.onnx"
    onnx.save(model([turn()], [big]), path, save_as_external_data=True, location="w.bin")
    assert (tmp_path / "w.bin").stat().st_size == 4096
    refused("EXTDATA", "initializer 0 'big'", path.read_bytes())
    refused("EXTDATA", "('w.bin')", path.read_bytes())


def test_a_missing_branch():
    body = helper.make_graph([turn()], "body", [], [value("y")])
    branch = helper.make_node("If", ["c"], ["y"], name="choose", then_branch=body)
    inputs = [value("c", [], TensorProto.BOOL), value("x", [2, 3])]
    text = "node 0 'choose' (If): attribute 'else_branch' is missing"
    refused("GRAPH", text, model([branch], inputs=inputs))


def test_functions_are_refused():
    proto = model([turn()])
    proto.functions.append(
        helper.make_function("local", "f", ["x"], ["y"], [turn()], [helper.make_opsetid("", 20)])
    )
    refused("UNSUPPORTED", "1 functions", proto)


def test_sparse_initializers_are_refused():
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("w", FLOAT, [1], [1.0]), helper.make_tensor("i", 7, [1], [2]), [4]
    )
    proto = model([turn()])
    proto.graph.sparse_initializer.append(sparse)
    refused("UNSUPPORTED", "1 sparse initializers", proto)


BROKEN: dict[str, tuple[str, str, Callable[[], onnx.ModelProto]]] = {
    "dangling": (
        "GRAPH",
        "node 0 'turn' (Transpose): input 0 'gone' is not defined",
        lambda: model([helper.make_node("Transpose", ["gone"], ["y"], name="turn")]),
    ),
    "unsorted": (
        "GRAPH",
        "node 0 'late' (Transpose): input 0 'm' is produced by node 1, which comes later",
        lambda: model(
            [
                helper.make_node("Transpose", ["m"], ["y"], name="late"),
                helper.make_node("Transpose", ["x"], ["m"]),
            ]
        ),
    ),
    "twice": (
        "GRAPH",
        "node 1 'turn' (Transpose): output 0 'y' is already an output of node 0",
        lambda: model([turn(), turn()]),
    ),
    "attribute kind": (
        "GRAPH",
        "node 0 'turn' (Transpose): attribute 'perm': is FLOATS, expected INTS",
        lambda: model([turn(perm=[1.0, 0.0])]),
    ),
    "attribute name": (
        "UNSUPPORTED",
        "node 0 'turn' (Transpose): attribute 'order': Transpose takes no such attribute",
        lambda: model([turn(order=1)]),
    ),
    "arity": (
        "GRAPH",
        "node 0 '' (Transpose): 2 inputs, expected 1",
        lambda: model([helper.make_node("Transpose", ["x", "x"], ["y"])]),
    ),
    "missing attribute": (
        "GRAPH",
        "node 0 '' (Concat): attribute 'axis' is missing",
        lambda: model([helper.make_node("Concat", ["x"], ["y"])]),
    ),
    "no output": (
        "GRAPH",
        "graph output 0 'y' is not produced",
        lambda: model([helper.make_node("Transpose", ["x"], ["z"])]),
    ),
    "domain": (
        "GRAPH",
        "domain 'com.example' is not among the model's opset imports",
        lambda: model([helper.make_node("Foo", ["x"], ["y"], domain="com.example")]),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_graphs(case: str):
    code, part, build = BROKEN[case]
    refused(code, part, build())


def test_truncated_and_foreign_bytes():
    good = model([turn(perm=[1, 0])]).SerializeToString()
    refused("MODEL", "at graph", good[: len(good) // 2])
    refused("MODEL", "empty", b"")
    refused("MODEL", "at ", b"\x89PNG\r\n\x1a\n" + bytes(64))
    refused("MODEL", "at ", b"PK\x03\x04" + bytes(64))  # a torch checkpoint


def test_a_bomb_of_nested_subgraphs():
    """30 KB that overflow the stack of a recursive decoder; built inside out, as bytes."""
    data = b""
    for _ in range(3000):
        for tag in (0x32, 0x2A, 0x0A):  # g, attribute, node
            size = len(data)
            length = bytearray()
            while size > 127:
                length.append(size & 127 | 128)
                size >>= 7
            data = bytes([tag, *length, size]) + data
    length = bytearray()
    size = len(data)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    refused("LIMIT", "nesting 65 is deeper than", bytes([0x3A, *length, size]) + data)
