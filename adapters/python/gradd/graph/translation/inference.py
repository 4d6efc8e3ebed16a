"""Constant folding that also compares: the inferred type of a node must be that of the trace.

The translation gives every value the element type and sizes of the trace, and translations rely on
them: the sum of a value of rank 0 is the value itself. If the trace has them wrong, or a
translation computes something other than its operator, ONNX infers another type from the node's
operands. The pass infers each kind of node anyway; here a difference is an error with a place in
the user's code instead of a log line and a wrong graph.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnxscript.optimizer import _constant_folding

from gradd.graph import locations
from gradd.graph.translation import doubles
from gradd.graph.translation.build import wide_type
from gradd.graph.translation.translate import OPSET
from gradd.spec import CaptureError

_OTHER_SIZES = {
    *("Attention", "CrossEntropy", "SumPool", "AdaptiveAveragePool", "AdaptiveMaxPool", "Resample"),
    *("Atan2", "GroupedMatMul", "PairDistance", "SolveTriangular", "ShiftLeft", "ShiftRight"),
}  # of our domain: the trace's sizes count

_TENSORS = (ir.TensorType, type(None))
_SMALL = 20  # elements: the pass gives inference the values of such constants
_PLAIN = {  # attributes without tensors and graphs
    *(ir.AttributeType.INT, ir.AttributeType.FLOAT, ir.AttributeType.STRING),
    *(ir.AttributeType.INTS, ir.AttributeType.FLOATS, ir.AttributeType.STRINGS),
}
_RANDOM = {"Bernoulli", "Dropout"}  # those of ONNX that the pass does not know as such


class Folding(_constant_folding.FoldConstantsPass):
    """FoldConstantsPass with shape inference whose results are compared with the known types."""

    def __init__(self) -> None:
        super().__init__(
            shape_inference=True,
            input_size_limit=_constant_folding.DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
            output_size_limit=_constant_folding.DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
        )
        self._inferred: dict[Any, list[tuple[Any, Any]]] = {}  # by kind: layers are alike

    def process_node(self, node: ir.Node, is_function: bool) -> Any:
        """As the pass does it, but for casts of numbers that are doubles, and for chance.

        A draw from known numbers is repeated in every step.
        """
        if node.op_type in _RANDOM:
            self._do_inference(node)
            return None
        done = super().process_node(node, is_function)
        exact = doubles.exact_constant(node) if node.op_type in ("Cast", "CastLike") else None
        if exact is None:
            return done
        return _constant_folding.Replacement(exact.outputs, [exact])

    def _do_inference(self, node: ir.Node) -> None:
        said = [(value.shape, value.type) for value in node.outputs]
        for value in node.outputs:
            value.shape = value.type = None
        if node.domain == "com.gradd":
            _infer_own(node)
        else:
            self._infer_once(node)
        for value, (shape, kind) in zip(node.outputs, said, strict=True):
            if not value.uses() and not value.is_graph_output():
                continue  # what PyTorch leaves empty where nothing reads it
            _compare(node, (shape, _traced(node, value) or kind), (value.shape, value.type))
            value.shape = _constant_folding._merge_shapes(shape, value.shape)
            value.type = value.type or kind

    def _infer_once(self, node: ir.Node) -> None:
        """Sets the types and sizes of results that ONNX infers for a node of this kind."""
        kind = _kind(node)
        known = self._inferred.get(kind) if kind is not None else None
        if known is not None:
            for value, (shape, dtype) in zip(node.outputs, known, strict=True):
                value.shape = None if shape is None else shape.copy()
                value.type = None if dtype is None else ir.TensorType(dtype)
            return
        self._infer(node)
        if kind is not None and all(type(v.type) in _TENSORS for v in node.outputs):
            copies = [v.shape if v.shape is None else v.shape.copy() for v in node.outputs]
            dtypes = [v.dtype for v in node.outputs]
            self._inferred[kind] = list(zip(copies, dtypes, strict=True))

    def _infer(self, node: ir.Node) -> None:
        """As the opset of the nodes; the exporter's model says 18."""
        given = self._opset_imports
        self._opset_imports = {**given, "": OPSET}
        try:
            super()._do_inference(node)
        finally:
            self._opset_imports = given


def _kind(node: ir.Node) -> Any:
    """Equal for nodes of which ONNX infers the same; None = a tensor or a graph may decide."""
    attributes = node.attributes.values()
    if any(a.is_ref() or a.type not in _PLAIN for a in attributes):
        return None
    given = tuple([(a.name, a.type, repr(a.value)) for a in attributes])
    operands = tuple([None if value is None else _known(value) for value in node.inputs])
    return node.domain, node.op_type, given, operands, len(node.outputs)


def _known(value: ir.Value) -> Any:
    """The part of a value that inference reads."""
    shape = None if value.shape is None else value.shape.dims
    number = value.const_value
    if number is None or number.size > _SMALL:
        return repr(value.type), shape, None
    array = number.numpy()
    return repr(value.type), shape, (number.dtype, array.shape, array.tobytes())


def _infer_own(node: ir.Node) -> None:
    """Operators of our domain have the sizes of their first operand, most its type too."""
    (result, *places), first = node.outputs, node.inputs[0]
    if node.op_type in _OTHER_SIZES:
        return
    result.shape = first.shape
    if node.op_type == "TorchTopK" and first.shape is not None:
        sizes = list(first.shape)
        sizes[node.attributes["axis"].as_int()] = None
        result.shape = ir.Shape(sizes)
    result.type = ir.TensorType(ir.DataType.BOOL) if node.op_type == "SignBit" else first.type
    if node.op_type == "BatchNorm":
        _infer_statistics(first, places)
        return
    if node.op_type == "Recurrence":
        _infer_states(node)
        return
    for value in places:
        value.shape, value.type = result.shape, ir.TensorType(ir.DataType.INT64)


def _infer_statistics(x: ir.Value, statistics: list[ir.Value]) -> None:
    """One number for each channel of x, of which halves have floats."""
    for value in statistics:
        value.shape = None if x.shape is None else ir.Shape(list(x.shape)[1:2])
        value.type = None if x.dtype is None else ir.TensorType(wide_type(x))


def _infer_states(node: ir.Node) -> None:
    """Of all steps, and those behind the last one, which look like those of the beginning."""
    first, state, *lasts = node.inputs[0], *node.inputs[2:4]
    y, *rest = node.outputs
    for value, like in zip(rest, (state, *lasts), strict=False):
        value.shape, value.type = like.shape, first.type
    y.shape, y.type = None, first.type
    if first.shape is not None and state.shape is not None:
        y.shape = ir.Shape([*list(first.shape)[:2], *list(state.shape)[1:]])


def _traced(node: ir.Node, value: ir.Value) -> ir.TensorType | None:
    """The type of an operator's result in the trace; a Cast at its end has named its own."""
    made_by = node.meta.get("node")
    name, _, number = (value.name or "").partition("__")
    if made_by is None or made_by.name not in (name, value.name):
        return None
    if node.op_type == "BatchNorm" and value is not node.outputs[0]:
        return None  # saved statistics, whose type depends on the device: nothing reads them
    result = made_by.meta.get("val")
    if isinstance(result, (list, tuple)):
        result = result[int(number)] if number.isdigit() and int(number) < len(result) else None
    if not isinstance(result, torch.Tensor) or result.is_complex():
        return None
    return ir.TensorType(ir.tensor_adapters.from_torch_dtype(result.dtype))


def _compare(node: ir.Node, said: tuple[Any, Any], found: tuple[Any, Any]) -> None:
    (shape, kind), (inferred, type_found) = said, found
    if kind is not None and type_found is not None and kind != type_found:
        raise _difference(node, f"elements of {kind.dtype}", f"{type_found.dtype}")
    if shape is None or inferred is None:
        return
    if len(shape) != len(inferred):
        raise _difference(node, f"rank {len(shape)}", f"{len(inferred)}")
    for axis, (a, b) in enumerate(zip(shape, inferred, strict=True)):
        if isinstance(a, int) and isinstance(b, int) and a != b:
            raise _difference(node, f"size {a} along axis {axis}", f"{b}")


def _difference(node: ir.Node, expected: str, found: str) -> CaptureError:
    where, name = locations.translated(node)
    return CaptureError(
        "unsupported_operator",
        f"{where}: the result of {name} has {expected} in PyTorch, its translation to ONNX has "
        f"{found} ({node.op_type})",
    )
