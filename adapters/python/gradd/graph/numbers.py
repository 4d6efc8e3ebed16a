"""Python numbers that became inputs of the graph, as operands of operators that take numbers.

ONNX has most of these in attributes, which are constants. An operator with such a number becomes
one of tensors: the overload that takes a tensor in the number's place, or a formula. The number is
a scalar of the type in which torch computes, which is f32 for halves. A write in place becomes a
copy of its result. Sums, products and comparisons, of which ONNX has operators of tensors, are
left to types.py. What has neither overload nor formula is refused by name, as the p of a norm:
its derivative at 0 is another one for each p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from gradd import private
from gradd.graph import decompose, functional, rules, types
from gradd.graph.nodes import Operator, targets

_aten = torch.ops.aten
Node = torch.fx.Node
_HALVES = (torch.bfloat16, torch.float16)
_NUMBERS = ("number", "float", "Optional[number]", "Optional[float]")  # types in schemas


def make_explicit(graph: torch.fx.Graph, signature: Any) -> None:
    """Replaces the operators, in place.

    Args:
        graph: Of an exported program.
        signature: The program's; names of outputs may change.
    """
    for node in list(graph.nodes):
        if isinstance(node.target, Operator) and changing(node):
            one = _copied(graph, node) if targets(node) else node
            rule = _rule(one) if one is not None else None
            if rule is not None:
                decompose.replace(graph, one, _of_tensors(one, rule), signature)  # type: ignore


def changing(node: Node) -> list[str]:
    """Names of the operands of an operator that are Python numbers, and change between calls."""
    given = [a.name for a in private.schema(node.target).arguments]
    operands = dict(zip(given, node.args, strict=False)) | node.kwargs
    return [name for name, operand in operands.items() if _is_number(operand)]


def _is_number(operand: Any) -> bool:
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    return isinstance(value, (torch.SymFloat, torch.SymInt))


def _copied(graph: torch.fx.Graph, node: Node) -> Node | None:
    """A write in place becomes a copy_() of the result, which is returned."""
    target = functional.counterpart(node.target)  # type: ignore[arg-type]
    value = node.meta.get("val")
    if target is None or targets(node) != [node.args[0]] or not isinstance(value, torch.Tensor):
        return None
    with graph.inserting_before(node):
        made = graph.call_function(target, node.args, node.kwargs)
    made.meta = {**node.meta, "val": functional.result_of(made)}
    node.target, node.args, node.kwargs = _aten.copy_.default, (node.args[0], made), {}
    return made


def _rule(node: Node) -> Callable[..., Any] | None:
    """The operator's formula of tensors; None = it stays as it is."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return None
    return _FORMULAS.get(node.target) or _overload(node.target)  # type: ignore[arg-type]


def _overload(target: Operator) -> Operator | None:
    """The overload that takes tensors in place of numbers."""
    wanted = [(a.name, _kind(a)) for a in private.schema(target).arguments]
    if target in types.WITH_NUMBERS:
        return None
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        pointwise = torch.Tag.pointwise in {*target.tags, *other.tags}
        if (
            other is not target
            and pointwise
            and wanted == [(a.name, str(a.type)) for a in private.schema(other).arguments]
        ):
            return other
    return None


def _kind(argument: Any) -> str:
    kind = str(argument.type)
    if kind in _NUMBERS:
        return "Optional[Tensor]" if kind.startswith("Optional") else "Tensor"
    return kind


def _of_tensors(node: Node, rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule for the operator's own operands, computed in the type in which torch does."""
    given = private.schema(node.target).arguments
    numbers = changing(node)
    if isinstance(rule, Operator):  # it takes no others
        numbers = [a.name for a in given if str(a.type) in _NUMBERS]
    pointwise = torch.Tag.pointwise in node.target.tags
    result = node.meta["val"].dtype
    wide = torch.float32 if result in _HALVES else result
    rounded = node.target in _ROUNDED

    def one(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            kept = value.dtype in (wide, torch.bool) or not (value.is_floating_point() or pointwise)
            return value if kept else value.to(wide)
        if name not in numbers or value is None:
            return value
        made = torch.scalar_tensor(value, dtype=wide, device=node.meta["val"].device)
        return made.to(result).to(wide) if rounded and wide is not result else made

    def computed(*args: Any, **kwargs: Any) -> Any:
        positional = [one(a.name, value) for a, value in zip(given, args, strict=False)]
        return rule(*positional, **{k: one(k, v) for k, v in kwargs.items()}).to(result)

    return computed


def _added(to: Any, product: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """addmm() and its like: a beta of 0 leaves out what would be added, NaN as well."""
    if isinstance(beta, torch.Tensor):
        to = torch.where(beta == 0, torch.zeros_like(to), to)
    elif beta == 0:
        return product * alpha
    return to * beta + product * alpha


def _leaky_relu(self: Any, negative_slope: Any) -> Any:
    right = self > 0
    low = torch.where(right, torch.zeros_like(self), self)  # no infinity times a gradient of zeros
    return torch.where(right, self, low * negative_slope)


def _elu(self: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Any:
    right = self > 0
    low = torch.where(right, torch.zeros_like(self), self)  # no infinity on the other side
    return torch.where(right, self * scale, torch.expm1(low * input_scale) * (alpha * scale))


def _hardtanh(self: Any, min_val: Any = -1.0, max_val: Any = 1.0) -> Any:
    inside = (self > min_val) & (self < max_val)  # the bounds have no gradient
    cut = self.detach().clamp(min_val, max_val)
    return torch.ops.gradd.straight_through(cut, torch.where(inside, self, 0.0))


def _full(size: Any, fill_value: Any, **unused: Any) -> Any:
    return fill_value.expand(size).clone()


# Those of numbers that change are tensors.
_FORMULAS: dict[Any, Callable[..., Any]] = {
    _aten.addcmul.default: lambda self, a, b, value: self + value * a * b,
    _aten.addcdiv.default: lambda self, a, b, value: self + value * a / b,
    _aten.addmm.default: lambda self, a, b, **x: _added(self, a @ b, **x),
    _aten.addmv.default: lambda self, a, b, **x: _added(self, a @ b, **x),
    _aten.addr.default: lambda self, a, b, **x: _added(self, a[:, None] * b, **x),
    _aten.baddbmm.default: lambda self, a, b, **x: _added(self, a @ b, **x),
    _aten.addbmm.default: lambda self, a, b, **x: _added(self, (a @ b).sum(0), **x),
    _aten.leaky_relu.default: _leaky_relu,
    _aten.elu.default: _elu,
    _aten.celu.default: lambda self, alpha: _elu(self, alpha, 1.0, 1.0 / alpha),
    _aten.threshold.default: lambda self, threshold, value: torch.where(
        self <= threshold, value, self
    ),
    _aten.hardtanh.default: _hardtanh,
    _aten.hardshrink.default: rules.LOST[_aten.hardshrink.default],
    _aten.softshrink.default: rules.LOST[_aten.softshrink.default],
    _aten.scatter.value: lambda self, dim, index, value: self.scatter(
        dim, index, value.expand_as(index)
    ),
    _aten.full.default: _full,
    _aten.new_full.default: lambda self, size, fill_value, **unused: _full(size, fill_value),
    _aten.full_like.default: lambda self, fill_value, **unused: fill_value.expand_as(self).clone(),
}
# Of halves torch rounds the number first.
_ROUNDED = frozenset(
    {_aten.pow.Tensor_Scalar, _aten.pow.Scalar, _aten.threshold.default, _aten.hardshrink.default}
)
