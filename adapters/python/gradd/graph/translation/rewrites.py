"""The rewrites that simplify a translated graph: the exporter's own, where they keep all values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter.rules.common import (
    _basic_rules,
    _cast_constant_of_shape,
    _collapse_slices,
    _no_op,
)

_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1}


class Rules:
    """Several rules as one rule, which looks at a node before they do.

    At its type, which saves most of the matcher's time, and at the constant of a sum or product:
    the matcher takes 1e-8 for 0 and 1.00001 for 1, and `x / (norm + 1e-8)` would lose its epsilon.
    """

    name, as_function = None, False  # of the result; the rules make no functions

    def __init__(self, rules: Sequence[Any]) -> None:
        self.all = rules
        self.remove_nodes = False  # that of the rule that has matched
        self._of: dict[str, list[Any]] = {}  # by type of node
        self._order: dict[ir.Node, int] = {}  # of a graph's nodes, before a pass has changed any

    def graph_pre_visitor(self) -> None:
        self._order = {}
        for rule in self.all:
            if rule.graph_pre_visitor:
                rule.graph_pre_visitor()

    def graph_post_visitor(self) -> None:
        self._order = {}
        for rule in self.all:
            if rule.graph_post_visitor:
                rule.graph_post_visitor()

    def try_rewrite(self, model: Any, scope: Any, node: ir.Node, **options: Any) -> Any:
        """The replacement of a node by the first rule that has one; else None."""
        rules = self._of.get(node.op_type)
        if rules is None:
            rules = [rule for rule in self.all if _is_about(rule, node.op_type)]
            self._of[node.op_type] = rules
        if not rules or _changes_value(node):
            return None
        for rule in rules:
            several = len(rule._target_pattern.output_nodes) > 1
            around = self._beside(scope, node) if several else scope
            done = rule.try_rewrite(model, around, node, **options)
            if done is not None:
                self.remove_nodes = rule.remove_nodes
                return done
        return None

    def _beside(self, scope: Any, node: ir.Node) -> Any:
        """The nodes that a pattern with several ends, all of one operand, may end at.

        The matcher would look at every node of the graph, for each node that may be one end.
        """
        if not self._order:
            self._order = {other: i for i, other in enumerate(scope)}
        operand = node.inputs[0]
        found = {node} if operand is None else {use.node for use in operand.uses()}
        if not found <= self._order.keys():
            return scope
        return _Part(scope, sorted(found, key=self._order.__getitem__))


class _Part:
    """Some nodes of a graph, in its order, as the matcher takes a function."""

    def __init__(self, graph: Any, nodes: list[ir.Node]) -> None:
        self.graph = graph if isinstance(graph, ir.Graph) else graph.graph
        self._nodes = nodes

    def __iter__(self) -> Iterator[ir.Node]:
        return iter(self._nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)


class _Constants:
    """What a rule makes nodes with; its initializers are constants of their own.

    The stock rules name them by the operand: of one that is reshaped twice, some sizes were lost.
    """

    def __init__(self, op: Any) -> None:
        self._op = op

    def initializer(self, tensor: ir.TensorProtocol, name: str | None = None) -> ir.Value:
        return self._op.Constant(value=tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)


class _FlattenToReshape(_basic_rules.Flatten2Reshape):
    def rewrite(self, op: Any, x: ir.Value) -> Any:
        return super().rewrite(_Constants(op), x)


class _ReshapeOfReshape(_basic_rules.ReshapeReshape):
    def rewrite(self, op: Any, x: ir.Value, shape_ignored: ir.Value, shape: ir.Value) -> Any:
        return super().rewrite(_Constants(op), x, shape_ignored, shape)


def _basic() -> list[Any]:
    ours = {
        _basic_rules.flatten_to_reshape_rule: _FlattenToReshape.rule(),
        _basic_rules.reshape_reshape_rule: _ReshapeOfReshape.rule(),
    }
    return [ours.get(rule, rule) for rule in _basic_rules.basic_optimization_rules()]


@functools.lru_cache(maxsize=1)
def rules() -> Rules:
    return Rules(
        [
            *_no_op.rules,
            *_cast_constant_of_shape.rules,
            *_collapse_slices.rules,
            *_basic(),
        ]
    )


def _is_about(rule: Any, kind: str) -> bool:
    return any(node.op.matches(kind) for node in rule._target_pattern.output_nodes)


def _changes_value(node: ir.Node) -> bool:
    """True for sums and products with a constant that is not exactly the neutral one."""
    neutral = _NEUTRAL.get(node.op_type)
    if neutral is None:
        return False
    constants = (v.const_value for v in node.inputs if v is not None)
    known = [c.numpy() for c in constants if c is not None and c.size == 1]
    return not any(c.item() == neutral for c in known)
