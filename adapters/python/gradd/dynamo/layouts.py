"""Results that PyTorch lays out channels-last, as networks of images in that memory format have.

The daemon writes contiguous tensors. Where the trace has a result in channels-last memory, a piece
gives it with its channels behind, and PyTorch makes the result as a view of that: no byte is
copied, and the transposition at the end of such a network vanishes in the daemon. Graphs that have
a loss keep their results contiguous: those beside a loss may be lazy, and a view would read them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from gradd.dynamo.complex_pairs import VIEWED
from gradd.dynamo.lower import value_of

Node = torch.fx.Node


def keep(graph: torch.fx.Graph) -> int:
    """Puts the views at the end of a graph of Dynamo; returns how many there are."""
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    values = [value_of(n) for n in results if isinstance(n, Node)]
    if any(isinstance(v, torch.Tensor) and not v.ndim for v in values):
        return 0
    found = {n: _viewed(graph, n) for n in results if isinstance(n, Node) and _is_last(n)}
    output.args = (tuple(found.get(n, n) if isinstance(n, Node) else n for n in results),)
    return len(found)


def _is_last(node: Node) -> bool:
    """Whether the value of a node lies channels-last in memory, and not contiguous as well."""
    value = value_of(node)
    if node.op in ("placeholder", "get_attr") or not isinstance(value, torch.Tensor):
        return False
    if value.ndim not in (4, 5) or value.is_complex():
        return False
    sizes, strides = ([_known(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if 0 in sizes or sizes[1] == 1 or set(sizes[2:]) == {1}:
        return False
    expected = 1
    for axis in (1, *range(value.ndim - 1, 1, -1), 0):
        if sizes[axis] != 1 and strides[axis] != expected:
            return False
        expected *= sizes[axis]
    return True


def _known(number: Any) -> int:
    """A size of the trace; to evaluate it would make a guard of it."""
    return number.node.hint if isinstance(number, torch.SymInt) else number


def _viewed(graph: torch.fx.Graph, node: Node) -> Node:
    rank = value_of(node).ndim
    with graph.inserting_before(graph.output_node()):
        behind = _permuted(graph, node, (0, *range(2, rank), 1))
        made = _permuted(graph, behind, (0, rank - 1, *range(1, rank - 1)))
    made.meta[VIEWED] = True
    return made


def _permuted(graph: torch.fx.Graph, node: Node, order: tuple[int, ...]) -> Node:
    made = graph.call_method("permute", (node, *order))
    made.meta.update(node.meta, example_value=value_of(node).permute(order))
    return made
