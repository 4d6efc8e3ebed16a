"""Building blocks of translations: constants, casts, and the operators of gradd's own domain.

A translation takes onnx_ir values and emits nodes of opset 23 and com.gradd. If torch defines a
function's derivative at edges (ties, bounds, zeros, overflow) differently from the composition that
computes its value, the translation states both: with_slope(value, x, slope).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import onnxscript
from onnxscript import evaluator

from gradd.spec import CaptureError

op = onnxscript.values.Opset("", 23)
FLOATS = (
    ir.DataType.FLOAT16,
    ir.DataType.BFLOAT16,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
)
SMALLEST = {
    ir.DataType.FLOAT16: -65504.0,
    ir.DataType.BFLOAT16: -3.3895313892515355e38,
    ir.DataType.FLOAT: -3.4028234663852886e38,
    ir.DataType.DOUBLE: -1.7976931348623157e308,
}
SPARSE = "gradd_sparse"  # on nodes: the padding index of a lookup with a sparse gradient
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def scalar(value: float, dtype: Any) -> Any:
    """A constant of rank 0."""
    return op.Constant(value=ir.tensor(value, dtype=ir.DataType(dtype)))


def ints(*values: int) -> Any:
    """A constant list of int64."""
    return op.Constant(value=ir.tensor(list(values), dtype=ir.DataType.INT64))


def one(number: Any) -> Any:
    """A number, or a value of one element, as int64 of sizes [1]."""
    return ints(number) if isinstance(number, int) else op.Reshape(number, ints(1))


def joined(numbers: Sequence[Any]) -> Any:
    """Several of them as one list."""
    parts = [one(number) for number in numbers]
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)


def cast(value: Any, dtype: Any) -> Any:
    """The value in another type; itself where it is known to have that type."""
    return value if value.dtype == dtype else op.Cast(value, to=int(dtype))


def typed(value: Any, dtype: Any, shape: Any = None) -> Any:
    """Tells the type of a value that was just computed; the exporter only knows those of aten."""
    value.dtype, value.shape = dtype, value.shape if shape is None else ir.Shape(shape)
    return value


def each(value: Any, axes: int, what: str) -> list[int]:
    """One number for each axis, of a number, or of a list, which may have one for all.

    Raises:
        CaptureError: A number changes with the sizes of a call; `what` names it.
    """
    numbers = list(value) if isinstance(value, Sequence) else [value]
    if not all(isinstance(n, int) for n in numbers):
        text = f"{what} must not depend on the call's sizes"
        raise CaptureError("unsupported_operator", text)
    return numbers * axes if len(numbers) == 1 else numbers


def of_batch(x: Any, axes: int, make: Callable) -> Any:
    """Results for a batch of channels with so many axes, or for one sample, as a batch of one."""
    if len(x.shape) > axes + 1:
        return make(x)
    found = make(typed(op.Unsqueeze(x, ints(0)), x.dtype, [1, *x.shape]))
    if isinstance(found, tuple):
        return tuple(op.Squeeze(part, ints(0)) for part in found)
    return op.Squeeze(found, ints(0))


def wide(value: Any) -> Any:
    """Half floats as float, other values as they are: formulas of several steps round once."""
    if value.dtype not in _HALF:
        return value
    shape = None if value.shape is None else list(value.shape)
    return typed(op.Cast(value, to=int(ir.DataType.FLOAT)), ir.DataType.FLOAT, shape)


def wide_type(value: Any) -> Any:
    """The type that formulas over a value are computed in."""
    return ir.DataType.DOUBLE if value.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT


def narrow(value: Any, like: Any) -> Any:
    """Converts a result computed from wide(like) back to the type of `like`."""
    return op.Cast(value, to=int(like.dtype)) if like.dtype in _HALF else value


def times(value: Any, number: float) -> Any:
    """The product with a number, which is not rounded to a half."""
    wider = wide(value)
    return narrow(op.Mul(wider, scalar(number, wider.dtype)), value)


def is_float(value: Any) -> bool:
    """True for real floating point numbers, which alone have gradients."""
    return value.dtype in FLOATS


def own(name: str, value: Any, *others: Any, **attributes: Any) -> Any:
    """A node of our domain whose result has the type of its first operand."""
    result = first_of("com.gradd", name, value, *others, **attributes)
    if value.dtype is not None:
        result.dtype = value.dtype
    result.shape = value.shape
    return result


def own_order(name: str, value: Any, *others: Any, **attributes: Any) -> tuple[Any, Any]:
    """com.gradd::TorchTopK and TorchSort: values and indices, as torch chooses on the CPU."""
    values, indices = _node("com.gradd", name, [value, *others], attributes, 2).outputs
    if value.dtype is not None:
        values.dtype = value.dtype
    indices.dtype = ir.DataType.INT64
    return values, indices


def first_of(domain: str, name: str, *operands: Any, **attributes: Any) -> Any:
    """The first result of an operator, alone; its type and sizes are not known yet."""
    return _node(domain, name, list(operands), attributes).outputs[0]


def several(domain: str, name: str, outputs: int, *operands: Any, **attributes: Any) -> Any:
    """The results of an operator; their types and sizes are not known yet."""
    return _node(domain, name, list(operands), attributes, outputs).outputs


def _node(
    domain: str, name: str, operands: list[Any], attributes: dict[str, Any], outputs: int = 1
) -> ir.Node:
    given = ir.convenience.convert_attributes(attributes)
    version = 1 if domain else op.version
    node = ir.Node(domain, name, operands, given, num_outputs=outputs, version=version)
    evaluator.default().nodes.append(node)  # type: ignore[attr-defined]
    return node


def dropped(value: Any, p: float) -> Any:
    """Dropout in training, with one output, constant ratio and mode."""
    if p == 0:
        return value
    kept, _ = op.Dropout(value, scalar(p, wide_type(value)), op.Constant(value=ir.tensor(True)))
    return kept


def stop_gradient(value: Any) -> Any:
    """com.gradd::StopGradient: identity forward, no gradient backward."""
    return own("StopGradient", value)


def straight_through(value: Any, x: Any) -> Any:
    """com.gradd::StraightThrough: the first operand's values, the second's gradient."""
    return own("StraightThrough", value, x)


def check_index(indices: Any, limit: Any) -> Any:
    """com.gradd::CheckIndex: the indices, if all are within [0, limit), a number or a value."""
    if isinstance(limit, int):
        limit = scalar(limit, ir.DataType.INT64)
    return own("CheckIndex", indices, limit)


def with_slope(value: Any, *pairs: Any) -> Any:
    """com.gradd::WithSlope: `value`, and for each pair (x, slope) the gradient dy * slope to x.

    Args:
        value: The result.
        *pairs: x, slope, x, slope, ...; a boolean slope is a mask. Pairs whose x is no float (or
            None) are left out.
    """
    given = list(zip(pairs[::2], pairs[1::2], strict=True))
    kept = [part for x, slope in given if x is not None and is_float(x) for part in (x, slope)]
    return own("WithSlope", value, *kept) if kept else value


def without_slope(value: Any, *operands: Any) -> Any:
    """`value`, with gradients of zeros to the operands, where torch returns zeros and not None."""
    floats = [x for x in operands if not isinstance(x, (int, float)) and is_float(x)]
    return with_slope(value, *[part for x in floats for part in (x, op.Less(x, x))])


def all_axes(value: Any, dims: Any = None) -> list[int]:
    """Axes of a reduction: those given (a number or a list), or all."""
    if isinstance(dims, int):
        return [dims]
    return list(dims) if dims else list(range(len(value.shape)))


def size(value: Any, axis: int) -> Any:
    """One size of a value, int64 of rank 0, known when a plan is made."""
    axis %= max(len(value.shape), 1)
    return op.Squeeze(op.Shape(value, start=axis, end=axis + 1))


def count(value: Any, axes: list[int], dtype: Any) -> Any:
    """How many elements the axes hold together, of rank 0."""
    sizes = [value.shape[axis] for axis in axes]
    if all(isinstance(n, int) for n in sizes):
        total = 1
        for n in sizes:
            total *= n
        return scalar(float(total), dtype)
    result = size(value, axes[0])
    for axis in axes[1:]:
        result = op.Mul(result, size(value, axis))
    return op.Cast(result, to=int(dtype))


def reduced(loss: Any, reduction: int) -> Any:
    """The last operation of torch's losses: nothing (0), the mean (1) or the sum (2)."""
    if reduction == 0:
        return loss
    return (op.ReduceMean if reduction == 1 else op.ReduceSum)(loss, keepdims=0)


def refuse(name: str, why: str) -> Any:
    """A translation that raises an error with the reason why there is none; `refuses` marks it."""

    def translate(*unused: Any, **unused_kw: Any) -> Any:
        raise CaptureError("unsupported_operator", f"{name} {why}")

    translate.refuses = True  # type: ignore[attr-defined]
    return translate


def mark_sparse(rows: Any, padding: Any) -> None:
    """These rows of a table have a sparse gradient; see model_bytes.py."""
    if not isinstance(padding, int):
        raise CaptureError(
            "unsupported_operator",
            "Embedding(sparse=True) with a padding index that depends on the call's sizes is not "
            "supported",
        )
    rows.producer().meta[SPARSE] = padding
