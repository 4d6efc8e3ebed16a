"""Counts the work of the nodes of a graph of Dynamo, and finds the pieces that are worth a request.

Numbers are operations of a forward for the sizes of the first call: products count two per
multiplication, everything else one per element of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx

from gradd import private
from gradd.dynamo.lower import name_of, value_of

_PRODUCTS = frozenset({"matmul", "bmm", "mm", "addmm", "baddbmm", "addbmm", "mv", "einsum", "dot"})
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
# Operators that cost at least as much as a request, however small their tensors are in a test.
_HEAVY = frozenset(
    {
        *_PRODUCTS,
        *("linear", "scaled_dot_product_attention", "multi_head_attention_forward", "embedding"),
        *("cross_entropy", "layer_norm", "rms_norm", "bilinear"),
    }
)
_GLUE = 1 << 16  # operations


def _size(tensor: Any) -> int:
    return math.prod(_number(n) for n in tensor.shape)


def _number(size: Any) -> int:
    """A size in the first call."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def work(node: torch.fx.Node) -> int:
    """Operations of one node."""
    out = [x for x in private.pytree.tree_leaves(value_of(node)) if isinstance(x, torch.Tensor)]
    given = [value_of(n) for n in node.all_input_nodes]
    given = [x for x in given if isinstance(x, torch.Tensor)]
    count = sum(map(_size, out))
    name = name_of(node)
    if name in ("linear", *_PRODUCTS, "__matmul__") and given:
        return 2 * count * _number(given[0].shape[-1] if given[0].dim() else 1)
    if name in _CONVOLUTIONS and len(given) > 1:
        return 2 * count * _size(given[1]) // max(_number(given[1].shape[0]), 1)
    if name == "scaled_dot_product_attention" and len(given) > 2:
        return 4 * _size(given[0]) * _number(given[1].shape[-2])
    return count


def is_glue(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether nodes between two others in PyTorch cost less than a request would."""
    nodes = list(nodes)
    heavy = any(name_of(n) in _HEAVY or name_of(n) == "__matmul__" for n in nodes)
    return not heavy and sum(map(work, nodes)) < _GLUE
