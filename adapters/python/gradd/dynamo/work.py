"""Counts the work of the nodes of a graph of Dynamo, and finds the pieces that are worth a request.

Numbers are operations of a forward for the sizes of the first call: products count two per
multiplication, also those inside of an LSTM, everything else one per element of the result. The
cost of some operators cannot be seen from outside: those of extensions, functions with a backward
of their own, linear algebra.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from gradd import private
from gradd.dynamo.lower import name_of, readable_name, value_of

_PRODUCTS = frozenset({"matmul", "bmm", "mm", "addmm", "baddbmm", "addbmm", "mv", "einsum", "dot"})
_WITH_SUMMAND = frozenset({"addmm", "baddbmm", "addbmm"})  # before the factors
_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")  # the last one is transformers'
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_CELLS = frozenset({"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"})
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
_TORCHS = ("aten", "prims", "prim")  # namespaces of operators
_OPERATORS = ("_ops", "ops", "_higher_order_ops")  # modules of torch that have them
_PLAIN = ("torch", "builtins", "operator", "_operator", "math")
_ALGEBRA = frozenset(
    ("inverse", "pinverse", "svd", "qr", "cholesky", "cholesky_inverse", "cholesky_solve", "logdet")
    + ("det", "slogdet", "triangular_solve", "lu_solve", "matrix_exp", "matrix_power", "lobpcg")
)


class Amounts(NamedTuple):
    """Operations of a forward."""

    daemon: int = 0  # the daemon's
    torch: int = 0  # PyTorch's, without those of unknown cost
    unknown: str = ""  # the name of an operator of unknown cost that PyTorch runs; "" = none

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(
            self.daemon + other.daemon, self.torch + other.torch, self.unknown or other.unknown
        )

    def said(self, whole: str) -> str:
        """The daemon's share, as a sentence about a whole of which PyTorch runs a part."""
        if self.unknown:
            return f"The cost of {self.unknown}, and with it the daemon's share, is not known"
        share = 100 * self.daemon / max(self.daemon + self.torch, 1)
        text = f"About {share:.0f} %" if 1 <= share <= 99 else "More than 99 %"
        return f"{'Less than 1 %' if share < 1 else text} of the work of {whole} is in the daemon"


def amounts(nodes: Iterable[torch.fx.Node], daemon: bool) -> Amounts:
    nodes = list(nodes)
    count = sum(map(work, nodes))
    if daemon:
        return Amounts(count)
    return Amounts(0, count, next((readable_name(n) for n in nodes if is_opaque(n.target)), ""))


def is_opaque(target: Any) -> bool:
    """Whether the cost of an operator, a function or a method cannot be seen from outside."""
    if isinstance(target, str):
        return target in _ALGEBRA
    name = str(getattr(target, "__name__", target)).partition(".")[0]
    if name in _GROUPED:
        return False
    if name in _ALGEBRA or name.strip("_").startswith("linalg") or "mkldnn_rnn" in name:
        return True
    module, _, rest = str(getattr(target, "__module__", None) or "torch").partition(".")
    if rest.startswith(_OPERATORS):
        return getattr(target, "namespace", rest.rpartition(".")[2]) not in _TORCHS
    return module not in _PLAIN


def _size(tensor: Any) -> int:
    return math.prod(_number(n) for n in tensor.shape)


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def work(node: torch.fx.Node) -> int:
    """Operations of one node; of one of unknown cost those that its results need at least."""
    out = [x for x in private.pytree.tree_leaves(value_of(node)) if isinstance(x, torch.Tensor)]
    operands: list[Any] = []  # one of them may occur twice
    torch.fx.map_arg((node.args, node.kwargs), lambda n: operands.append(value_of(n)))
    given = [x for x in operands if isinstance(x, torch.Tensor)]
    count = sum(map(_size, out))
    name = name_of(node).partition(".")[0]
    if name == "einsum" and given:
        return _einsum(node.args[0], given) or count
    if name in ("linear", *_PRODUCTS, "__matmul__") and given:
        factor = given[1] if name in _WITH_SUMMAND and len(given) > 2 else given[0]
        terms = _number(factor.shape[0]) if name == "addbmm" else 1
        return 2 * count * _last(factor) * terms
    if name in _GROUPED and len(given) > 1:
        a, b = given[:2]
        if a.dim() == b.dim() == 2:  # groups of columns by groups of rows
            return 2 * _size(a) * _last(b)
        return 2 * count * _last(a)
    if name in _CONVOLUTIONS and len(given) > 1:
        return 2 * count * _size(given[1]) // max(_number(given[1].shape[0]), 1)
    if name == "scaled_dot_product_attention" and len(given) > 2:
        return 4 * _size(given[0]) * _number(given[1].shape[-2])
    if name in _RECURRENT and given:
        return count + _steps(given[0], given[1:])
    if name in _CELLS and given:
        return count + _steps(given[0], [x for x in given[1:] if x.dim() == 2][-2:])
    return count


def _last(tensor: torch.Tensor) -> int:
    return _number(tensor.shape[-1]) if tensor.dim() else 1


def _steps(data: torch.Tensor, others: Sequence[torch.Tensor]) -> int:
    """Operations of recurrent layers on sequences: each step multiplies with every matrix."""
    steps = _size(data) // max(_last(data), 1)
    return 2 * steps * sum(_size(x) for x in others if x.dim() == 2)


def _einsum(equation: Any, given: Sequence[torch.Tensor]) -> int:
    """Operations of a product by letters; 0 = it cannot be told."""
    if not isinstance(equation, str) or "." in equation:
        return 0
    letters: dict[str, int] = {}
    for term, tensor in zip(equation.partition("->")[0].split(","), given, strict=False):
        letters.update(zip(term.strip(), map(_number, tensor.shape), strict=False))
    return 2 * math.prod(letters.values())


def is_glue(nodes: Iterable[torch.fx.Node]) -> bool:
    """Whether nodes between two others in PyTorch cost less than a request would."""
    nodes = list(nodes)
    heavy = any(name_of(n) in _HEAVY or name_of(n) == "__matmul__" for n in nodes)
    return not heavy and sum(map(work, nodes)) < _GLUE
