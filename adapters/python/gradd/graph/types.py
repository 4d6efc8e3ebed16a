"""Makes explicit the element types that torch's operators mix and their ONNX translations do not.

softmax(x, dtype=float32) converts x first, its translation converts the result; the same holds for
sums and means. stack() and its like take tensors of several types, and ONNX wants one. A
normalisation takes bf16 values with f32 weights (autocast), computes in f32 and rounds once; ONNX
wants one type here too. A number that is computed from sizes (`x * x.shape[1] ** 0.5`) takes part
in the type of the tensors beside it, and for halves in f32; so does a number that no half
represents, as in `x / 301`. Integers beside floats become floats where torch's own pass leaves them
(`1.0 - mask`, `torch.pow(ints, floats)`, `torch.where(mask, 0.5, ints)`). If torch computes an
operator of halves in f32 and rounds once, and its translation takes several steps, values would be
rounded, or overflow, between the steps. The daemon has no operators of 8-bit integers, other than
casts and moves: i32 computes the same, and a cast back wraps as torch does. All of these become
casts around the operator in the exported program, which neither decomposition nor translation can
get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from gradd.graph import refused_types
from gradd.graph.nodes import argument, replace

_aten = torch.ops.aten
_WITH_DTYPE = frozenset(
    {
        *(_aten.softmax.int, _aten.log_softmax.int),
        *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
        *(_aten.prod.default, _aten.prod.dim_int),
    }
)
# Their operands get the type of the result: torch's exporter converts those of cat() alone.
_AS_RESULT = frozenset(
    {
        *(_aten.stack.default, _aten.concat.default, _aten.concatenate.default),
        *(_aten.hstack.default, _aten.vstack.default, _aten.dstack.default),
        *(_aten.column_stack.default, _aten.row_stack.default),
        *(_aten.slice_scatter.default, _aten.select_scatter.default),
        *(_aten.diagonal_scatter.default, _aten.binary_cross_entropy_with_logits.default),
        *(_aten.pow.Tensor_Tensor, _aten.special_xlog1py.default),
        # At an integer and a float as bounds of integers torch's pass fails.
        *(getattr(_aten, n).default for n in ("clamp", "clip", "clamp_min", "clamp_max")),
    }
)
# torch rounds numbers beside halves to their type here; elsewhere it computes with them in f32.
_ROUNDED = frozenset(
    {
        *(_aten.remainder.Scalar, _aten.remainder.Scalar_Tensor, _aten.fmod.Scalar),
        *(getattr(_aten, n).Scalar for n in ("eq", "ne", "lt", "le", "gt", "ge")),
        *(getattr(_aten, n).Tensor for n in ("eq", "ne", "lt", "le", "gt", "ge")),
    }
)
# Pointwise, of tensors and numbers.
WITH_NUMBERS = frozenset(
    getattr(getattr(_aten, name), kind)
    for name in (
        *("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "rsub"),
        *("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor"),
    )
    for kind in ("Tensor", "Scalar")
    if kind in getattr(_aten, name).overloads()
)
_UNROUNDED = WITH_NUMBERS - _ROUNDED
# Formulas that are one kernel of torch's, and several operators of ONNX.
_FORMULAS = frozenset(
    {
        *(_aten.rsqrt.default, _aten.round.decimals),
        *(_aten.addcmul.default, _aten.addcdiv.default, _aten.lerp.Scalar, _aten.lerp.Tensor),
    }
)
# Of these torch's pass leaves integers beside floats as they are, or fails at them.
_LEFT_MIXED = frozenset(
    {
        *(_aten.rsub.Scalar, _aten.rsub.Tensor),
        *(_aten.where.Scalar, _aten.where.ScalarSelf, _aten.where.ScalarOther),
    }
)
_WITH_ALPHA = frozenset({"add", "sub", "rsub"})
# Of integers of 8 and 16 bits. In 32 bits they give the same, if the cast back takes the lowest.
_SMALL = {
    torch.uint8: range(256),
    torch.int8: range(-128, 128),
    torch.int16: range(-(1 << 15), 1 << 15),
}
_REDUCED = frozenset({"argmax", "argmin", "amax", "amin", "max", "min"})
_OF_SMALL = _REDUCED | {
    *("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "clamp", "clamp_min", "clamp_max"),
    *("add", "sub", "rsub", "mul", "neg", "abs", "floor_divide", "remainder"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "__and__", "__or__", "__xor__"),
    *("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"),
}
_HALVES = (torch.bfloat16, torch.float16)
_NORMS = frozenset({_aten.layer_norm.default, _aten.group_norm.default, _aten.rms_norm.default})


def make_explicit(graph: torch.fx.Graph, signature: Any) -> None:
    """Inserts the casts, in place.

    Args:
        graph: Of an exported program.
        signature: The program's; names of outputs may change.

    Raises:
        CaptureError: PyTorch refuses the types of an operator's operands.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        refused_types.check(node)
        _round_numbers(node)
        if _is_of_small(node):
            _compute_wide(graph, node, signature, torch.int32)
            continue
        if node.target in _LEFT_MIXED:
            _convert_whole_numbers(graph, node)
        if node.target in _WITH_DTYPE:
            _convert(graph, node, node.args[:1], argument(node, "dtype"))
        elif node.target in _AS_RESULT or _takes_probabilities(node):
            _convert(graph, node, node.all_input_nodes, _type(node))
        elif node.target in _NORMS:
            _compute_in_one_type(graph, node, signature)
        elif node.target in WITH_NUMBERS and _takes_number(node):
            _number_in_type(graph, node, signature)
        elif _rounds_between(node):
            _compute_wide(graph, node, signature)


def _type(node: Any) -> torch.dtype | None:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def _cast(graph: torch.fx.Graph, source: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    node = graph.call_function(_aten.to.dtype, (source, dtype))
    node.meta = dict(source.meta)
    with torch.no_grad():
        node.meta["val"] = source.meta["val"].to(dtype)
    return node


def _convert(
    graph: torch.fx.Graph, node: torch.fx.Node, operands: Sequence[Any], wanted: torch.dtype | None
) -> None:
    """Tensors among these operands get the wanted type; None = the one that they have."""
    for source in operands:
        if wanted is not None and _type(source) not in (None, wanted):
            with graph.inserting_before(node):
                node.replace_input_with(source, _cast(graph, source, wanted))


def _takes_probabilities(node: torch.fx.Node) -> bool:
    """Whether a cross-entropy has a distribution for each row, and no label."""
    target = node.args[1] if node.target is _aten.cross_entropy_loss.default else None
    kind = _type(target)
    return kind is not None and kind.is_floating_point


def _convert_whole_numbers(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Integers and booleans that are operands, not a condition, get the type of the result."""
    wanted = _type(node)
    condition = node.target.overloadpacket is _aten.where
    if wanted is None:
        return
    for place, source in enumerate(node.args[condition:], int(condition)):
        own = _type(source)
        if own not in (None, wanted) and not own.is_floating_point:
            with graph.inserting_before(node):
                node.update_arg(place, _cast(graph, source, wanted))


def _is_of_small(node: torch.fx.Node) -> bool:
    """Whether all operands are 8-bit integers of one type, or numbers that it can hold."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name not in _OF_SMALL:
        return False
    types = {_type(n) for n in node.all_input_nodes}
    (own, *others) = types or {None}
    if others or own not in _SMALL or _type(node) not in (own, torch.bool, torch.int64):
        return False
    numbers = (v for v in (*node.args, *node.kwargs.values()) if isinstance(v, (int, float)))
    return name in _REDUCED or all(v in _SMALL[own] for v in numbers)


def _round_numbers(node: torch.fx.Node) -> None:
    places = range(2) if node.target in _ROUNDED else ()
    if node.target is _aten.floor_divide.default:
        places = range(1)  # of x // 0.1 the number is as it is
    dtype = next((t for t in map(_type, node.args) if t is not None), None)
    for i in places if dtype in _HALVES else ():
        if isinstance(node.args[i], (int, float)):
            node.update_arg(i, torch.tensor(node.args[i], dtype=dtype, device="cpu").item())


def _rounds_between(node: torch.fx.Node) -> bool:
    """Whether halves alone go into a formula, or stand beside a number that is none of theirs."""
    if node.target not in _FORMULAS and node.target not in _UNROUNDED:
        return False
    types = {t for t in map(_type, node.all_input_nodes) if t is not None}
    if len(types) != 1 or not types <= set(_HALVES) or _type(node) not in types:
        return False
    (dtype,) = types
    numbers = (v for v in (*node.args, *node.kwargs.values()) if type(v) in (int, float))
    return node.target in _FORMULAS or any(
        torch.tensor(v, dtype=dtype, device="cpu").double() != v and v == v for v in numbers
    )


def _is_number(operand: Any) -> bool:
    value = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _takes_number(node: torch.fx.Node) -> bool:
    """Whether an operand is a number that is computed, or one in the code beside an alpha.

    The translations of add(x, 1, alpha=2) leave the 1 an integer, and in halves an f32.
    """
    if any(map(_is_number, node.args)):
        return True
    if node.target.overloadpacket.__name__ not in _WITH_ALPHA:
        return False
    return argument(node, "alpha") not in (None, 1) and any(map(_is_written, node.args[:2]))


def _is_written(operand: Any) -> bool:
    return type(operand) in (int, float)


def _number_in_type(graph: torch.fx.Graph, node: torch.fx.Node, signature: Any) -> None:
    tensor = next((n for n in node.all_input_nodes if _type(n) is not None), None)
    if tensor is None:
        return
    own = _type(tensor)
    if not own.is_floating_point and not _is_whole(node, own):
        return  # the result has another type than the tensor
    wide = torch.float32 if own in _HALVES else own
    for place, number in enumerate(node.args[:2]):
        if not _is_number(number) and not _is_written(number):
            continue
        with graph.inserting_before(node):
            made = graph.call_function(_aten.scalar_tensor.default, (number,), {"dtype": wide})
        made.meta["val"] = tensor.meta["val"].new_empty((), dtype=wide)
        node.update_arg(place, made)
    if node.args[2:]:  # rsub.Scalar takes it by its place, rsub.Tensor does not
        node.kwargs = {**node.kwargs, "alpha": node.args[2]}
        node.args = node.args[:2]
    node.target = node.target.overloadpacket.Tensor
    _compute_in_one_type(graph, node, signature, wide)


def _is_whole(node: torch.fx.Node, own: torch.dtype) -> bool:
    """Numbers beside a tensor of integers are integers, decisions beside one of booleans."""
    kinds = (torch.SymBool,) if own is torch.bool else (torch.SymInt, torch.SymBool)
    numbers = [n.meta["val"] for n in node.args if _is_number(n)]
    return all(isinstance(v, kinds) for v in numbers) and not node.meta["val"].is_floating_point()


def _compute_in_one_type(
    graph: torch.fx.Graph, node: torch.fx.Node, signature: Any, wide: torch.dtype = torch.float32
) -> None:
    own = next((t for t in map(_type, node.args) if t is not None), None)
    if own is None or all(_type(n) in (None, own) for n in node.all_input_nodes):
        return
    _compute_wide(graph, node, signature, own if own is torch.float64 else wide)


def _compute_wide(
    graph: torch.fx.Graph, node: torch.fx.Node, signature: Any, wide: torch.dtype = torch.float32
) -> None:
    _convert(graph, node, node.all_input_nodes, wide)
    result = node.meta["val"].dtype
    if result is wide or not (result.is_floating_point or result in _SMALL):
        return
    with torch.no_grad():
        node.meta["val"] = node.meta["val"].to(wide)
    with graph.inserting_after(node):
        back = _cast(graph, node, result)
    replace(node, back, signature)
