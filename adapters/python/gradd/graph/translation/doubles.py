"""Python numbers beside doubles: kept as they are, not rounded to floats.

A Python float is a double, and torch computes with it as one. The exporter makes a float constant
of it if it knows no type, and casts that; attributes of ONNX operators are floats on the wire.
During the translation of an operator that takes or gives doubles, constants are doubles
(translating). Functions of the exporter's library get their numbers as attributes and cast them
inside: such a cast takes the exact number (exact_constant). Operators with attributes have
translations of their own for doubles (table), and check() refuses all others by name. Sizes become
floats in the same way: where they meet doubles, or integers again, each step is computed in
doubles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from gradd import private
from gradd.graph import locations
from gradd.spec import CaptureError

DOUBLE, FLOAT = ir.DataType.DOUBLE, ir.DataType.FLOAT
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
# Their attributes describe the draws, which are rounded in any case.
_DRAWS = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})


def as_float(number: float) -> float:
    """The number, rounded to a float."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def is_exact(number: float) -> bool:
    """True if a float holds the number as a double does."""
    return number != number or as_float(number) == number


# --- which operators of a program meet doubles -----------------------------------------------


def _types(values: Any) -> set[torch.dtype]:
    kinds = {v.dtype for v in private.pytree.tree_leaves(values) if isinstance(v, torch.Tensor)}
    return {k.to_real() for k in kinds if k.is_floating_point or k.is_complex}


def _values(node: torch.fx.Node) -> list[Any]:
    return [n.meta.get("val") for n in (node, *node.all_input_nodes)]


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymFloat)


def _counts(node: torch.fx.Node) -> bool:
    """A whole number, or a decision, of a number that is none: 28.999999999999996 is below 29."""
    whole = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool))
    whole = whole or getattr(node.target, "overloadpacket", None) is torch.ops.aten.arange
    return whole and any(_is_number(n) for n in node.all_input_nodes)


def _meets_doubles(nodes: list[torch.fx.Node]) -> set[torch.fx.Node]:
    """Operators on doubles, and those on sizes whose results such an operator takes."""
    found: set[torch.fx.Node] = set()
    for node in reversed(nodes):
        if node.op != "call_function":
            continue
        meets = torch.float64 in _types(_values(node)) or _counts(node)
        if meets or (_is_number(node) and any(user in found for user in node.users)):
            found.add(node)
    return found


# --- while a program is translated -----------------------------------------------------------


@contextlib.contextmanager
def translating(program: Any) -> Iterator[None]:
    """Constants beside doubles are doubles; patches the exporter, one capture at a time."""
    handle, choose = private.handle_node, private.input_type
    found = _meets_doubles(list(program.graph_module.graph.nodes))
    inside: list[torch.fx.Node] = []

    def choose_wide(param: Any, arg: Any, binding: Any) -> Any:
        chosen = choose(param, arg, binding)
        known = param.type_constraint in binding or len(param.type_constraint.allowed_types) == 1
        return DOUBLE if inside and chosen == FLOAT and not known else chosen

    def handle_wide(model: Any, node: torch.fx.Node, values: dict, **options: Any) -> None:
        inside[:] = [node] if node in found else []
        handle(model, node, values, **options)
        if inside:
            _widen_casts(node, values, options["graph_like"])

    private.replace("handle_node", handle_wide)
    private.replace("input_type", choose_wide)
    try:
        yield
    finally:
        private.replace("handle_node", handle)
        private.replace("input_type", choose)


def _widen_casts(node: torch.fx.Node, values: dict[str, Any], graph: Any) -> None:
    """The library computes some operators in floats, whatever they are given."""
    of_sizes = not any(
        isinstance(v, torch.Tensor) for v in private.pytree.tree_leaves(_values(node))
    )
    taken = node.target is torch.ops.aten._local_scalar_dense.default  # a double, as item() gives
    if _types(_values(node)) & set(_NARROW):
        return  # the operator itself may be a cast
    for made in reversed(graph):
        if made.meta.get("node") is not node:
            break
        if made.op_type != "Cast" or made.attributes["to"].as_int() != FLOAT:
            continue
        if of_sizes or taken or made.inputs[0].dtype == DOUBLE:
            made.attributes["to"] = ir.AttrInt64("to", int(DOUBLE))
    if (of_sizes or taken) and _is_number(node):
        values[node.name].dtype = DOUBLE


# --- in the translated graph -----------------------------------------------------------------


def exact_constant(node: ir.Node) -> ir.Node | None:
    """For a cast to double of a number that was an attribute: a constant of that double."""
    source = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if source is None or source.op_type != "Constant" or node.outputs[0].dtype != DOUBLE:
        return None
    (given,) = source.attributes.values()
    if given.type == ir.AttributeType.FLOAT:
        number: Any = given.as_float()
    elif given.type == ir.AttributeType.FLOATS:
        number = list(given.as_floats())
    else:
        return None
    if all(map(is_exact, np.atleast_1d(number).tolist())):
        return None
    constant = ir.Node(
        "", "Constant", [], [ir.AttrTensor("value", ir.tensor(number, dtype=DOUBLE))]
    )
    constant.outputs[0].name = node.outputs[0].name
    return constant


def check(graph: ir.Graph) -> None:
    """Refuses attributes that are no floats of operators on doubles.

    Raises:
        CaptureError: With the operator, its location and the number.
    """
    for node in graph:
        if node.op_type in _DRAWS or node.op_type == "Constant":
            continue
        if not any(v is not None and v.dtype == DOUBLE for v in (*node.inputs, *node.outputs)):
            continue
        for name, given in node.attributes.items():
            numbers = []
            if given.type == ir.AttributeType.FLOAT:
                numbers = [given.as_float()]
            elif given.type == ir.AttributeType.FLOATS:
                numbers = list(given.as_floats())
            rounded = [n for n in numbers if not is_exact(n)]
            if rounded:
                raise _refusal(node, name, rounded[0])


def _refusal(node: ir.Node, name: str, number: float) -> CaptureError:
    where, what = locations.translated(node)
    return CaptureError(
        "unsupported_operator",
        f"{where}: {what} of doubles with {number!r}, which ONNX holds as a float only ({name} of "
        f"{node.op_type})",
    )
