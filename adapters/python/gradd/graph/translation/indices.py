"""Makes the graph refuse indices that torch refuses, and translates masks that are indices.

ONNX counts negative indices from the end, in Gather, GatherElements and the Scatters, and its
OneHot ignores classes out of range. torch raises for both, except in advanced indexing, take() and
index_fill(), so gradd::check_index, which becomes com.gradd::CheckIndex, goes in front of the
indices of the operators that raise. This is done in the exported program, before any decomposition:
several of these operators decompose into advanced indexing, which hides the original operator.

An assignment under a mask (`x[x > 0] = 0`) is an index_put() with the mask as its index, whose
number of elements depends on the data; if every element gets the same value, it is a where().
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
import torch.fx

from gradd import private
from gradd.graph.nodes import Operator, argument, own
from gradd.graph.translation.build import check_index, ints, op, scalar

_aten = torch.ops.aten
_ALONG_DIM = {
    *("aten::gather", "aten::index_add", "aten::index_copy", "aten::index_select", "aten::scatter"),
    *("aten::scatter_add", "aten::scatter_reduce"),
}


def check(graph: torch.fx.Graph) -> None:
    """Inserts the checks, in place.

    Args:
        graph: Of an exported program.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, Operator):
            continue
        name = node.target.name().partition(".")[0].removesuffix("_")
        if name in _ALONG_DIM:
            _check(graph, node, "index", node.args[0], argument(node, "dim"))
        elif name == "aten::embedding":
            _check(graph, node, "indices", node.args[0], 0)
        elif name == "aten::take_along_dim" and argument(node, "dim") is None:
            _check(graph, node, "indices", node.args[0], None)
        elif name == "aten::one_hot" and argument(node, "num_classes") not in (None, -1):
            _check(graph, node, "self", argument(node, "num_classes"))


def _check(graph: torch.fx.Graph, node: torch.fx.Node, name: str, limit: Any, *dim: Any) -> None:
    """The argument `name` goes through a check; the limit is a number, or a size of a tensor."""
    index = argument(node, name)
    if not isinstance(index, torch.fx.Node):
        return
    with graph.inserting_before(node):
        if dim:
            limit = _size(graph, limit, *dim)
        checked = _expanded(graph, index, limit) or _checked(graph, index, limit, node)
    position = [a.name for a in private.schema(node.target).arguments].index(name)
    if name in node.kwargs:
        node.update_kwarg(name, checked)
    else:
        node.update_arg(position, checked)


def _checked(graph: torch.fx.Graph, index: Any, limit: Any, reader: torch.fx.Node) -> torch.fx.Node:
    checked = graph.call_function(torch.ops.gradd.check_index.default, (index, limit))
    checked.meta = {**reader.meta, "val": own(index.meta["val"])}
    return checked


def _expanded(graph: torch.fx.Graph, index: torch.fx.Node, limit: Any) -> torch.fx.Node | None:
    """Indices that were expanded are checked before that: the same numbers, and fewer of them."""
    if index.target is not _aten.expand.default or 0 in index.meta["val"].shape:
        return None
    few = _checked(graph, index.args[0], limit, index)
    many = graph.call_function(index.target, (few, *index.args[1:]), index.kwargs)
    many.meta = {**index.meta, "val": own(index.meta["val"])}
    return many


def _size(graph: torch.fx.Graph, source: torch.fx.Node, dim: int | None) -> Any:
    """The size along `dim`, or of all elements: a number, or a node that computes it."""
    value = source.meta["val"]
    if value.dim() == 0:
        return 1
    if dim is not None:
        axis = dim % value.dim()  # the translation takes the last one, -1, for none
        return _known(graph, value.shape[axis], _aten.sym_size.int, (source, axis))
    return _known(graph, value.numel(), _aten.sym_numel.default, (source,))


def _known(graph: torch.fx.Graph, size: Any, function: Any, args: tuple) -> Any:
    if isinstance(size, int):
        return size
    node = graph.call_function(function, args)
    node.meta = {"val": size}
    return node


def put_masked(x: Any, indices: list, values: Any, accumulate: bool = False) -> Any:
    """index_put() under one mask, of values that are the same for all its elements.

    Returns:
        None where it is another one.
    """
    given = [index for index in indices if index is not None]
    if len(given) != 1 or given[0].dtype != ir.DataType.BOOL:
        return None
    behind = len(x.shape) - (len(indices) - 1) - len(given[0].shape)  # axes that are not masked
    if len(values.shape) > behind:
        if any(size != 1 for size in values.shape):
            return None
        values = op.Reshape(values, ints())
    mask = op.Unsqueeze(given[0], ints(*range(-behind, 0))) if behind else given[0]
    if accumulate:
        return op.Add(x, op.Where(mask, values, scalar(0, x.dtype)))
    return op.Where(mask, values, x)


def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """aten::masked_scatter: the n-th element under the mask becomes the n-th of the source.

    Returns:
        None where the source is empty.
    """
    if 0 in source.shape:
        return None
    mask = op.Expand(mask, op.Shape(x))  # to the shape of both
    flat = op.Reshape(mask, ints(-1))
    zero, one = (scalar(n, ir.DataType.INT64) for n in (0, 1))
    count = op.CumSum(op.Cast(flat, to=ir.DataType.INT64), zero)
    at = check_index(op.Where(flat, op.Sub(count, one), zero), op.Size(source))
    values = op.Gather(op.Reshape(source, ints(-1)), at, axis=0)
    return op.Where(mask, op.Reshape(values, op.Shape(mask)), x)


def by_masks() -> dict[Any, Callable]:
    """aten overload -> a translation that may be None: then the stock one does it."""
    return {
        _aten.index_put.default: put_masked,
        _aten._unsafe_index_put.default: put_masked,
        _aten.masked_scatter.default: masked_scatter,
    }
