"""Translations of products of matrices: of groups of rows, with an added tensor, and their inverse.

torch skips operands that it multiplies by 0: with beta=0 the added tensor may hold anything; with
alpha=0 some of these operators do not read the product, except for halves. Gradients are multiplied
by that 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    cast,
    ints,
    is_float,
    narrow,
    op,
    own,
    scalar,
    times,
    typed,
    wide,
    with_slope,
)
from gradd.graph.translation.doubles import DOUBLE, is_exact
from gradd.spec import CaptureError

_aten = torch.ops.aten
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _is(factor: Any, number: float) -> bool:
    """Factors may be computed from sizes, and then they are values of the graph."""
    return isinstance(factor, (int, float)) and factor == number


def _times(value: Any, factor: Any) -> Any:
    if _is(factor, 1):
        return value
    if isinstance(factor, (int, float)):
        return typed(times(value, factor), value.dtype)
    return op.Mul(value, op.Cast(factor, to=int(value.dtype)))


def _sum(added: Any, product: Any, beta: Any, alpha: Any, drops: bool) -> Any:
    """beta added + alpha product; `drops` is whether torch leaves out a product for alpha=0."""
    dtype = added.dtype
    product = typed(product, dtype)
    drops = drops and _is(alpha, 0) and dtype not in _HALVES
    if not (_is(beta, 0) or drops):
        return op.Add(_times(added, beta), _times(product, alpha))
    value = _times(product, alpha)
    if drops:
        rest = scalar(0, dtype) if _is(beta, 0) else _times(added, beta)
        value = op.Expand(rest, op.Shape(product))
    if not is_float(added):
        return value
    slopes = [v if not isinstance(v, (int, float)) else scalar(v, dtype) for v in (beta, alpha)]
    slopes = [op.Cast(v, to=int(dtype)) for v in slopes]
    return with_slope(value, added, slopes[0], product, slopes[1])


def addmm(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """addmm(); one Gemm where nothing is left out and its attributes, floats, hold the factors."""
    usual = all(isinstance(v, (int, float)) and v != 0 for v in (beta, alpha))
    if usual and (added.dtype != DOUBLE or all(map(is_exact, (beta, alpha)))):
        return op.Gemm(x, y, added, alpha=float(alpha), beta=float(beta))
    return _sum(added, op.MatMul(x, y), beta, alpha, True)


def addmv(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    return _sum(added, op.MatMul(x, y), beta, alpha, True)


def addbmm(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """addbmm(): the sum of the products of a batch."""
    total = op.ReduceSum(op.MatMul(x, y), ints(0), keepdims=0)
    return _sum(added, total, beta, alpha, True)


def baddbmm(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    """baddbmm(); the product in front, as attention is recognised."""
    if not _is(beta, 0):
        return op.Add(_times(typed(op.MatMul(x, y), added.dtype), alpha), _times(added, beta))
    return _sum(added, op.MatMul(x, y), beta, alpha, False)


def addr(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    outer = op.Mul(op.Unsqueeze(x, ints(1)), op.Unsqueeze(y, ints(0)))
    return _sum(added, outer, beta, alpha, False)


def _rounded_once(formula: Callable) -> Callable:
    """In halves a factor on the product comes before it is rounded, which may keep it finite."""

    def translate(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        if added.dtype not in _HALVES or _is(alpha, 0) or _is(alpha, 1):
            return formula(added, x, y, beta, alpha)
        return narrow(formula(wide(added), wide(x), wide(y), beta, alpha), added)

    return translate


def grouped_mm(
    x: Any, y: Any, offs: Any = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Any:
    """_grouped_mm() of groups of rows, [S, K] by [E, K, N]; without groups None: the stock one.

    Rows behind the last group, which torch leaves as they were, are 0.
    """
    if offs is None:
        return None
    if len(x.shape) != 2 or len(y.shape) != 3 or bias is not None:
        raise CaptureError("unsupported_operator", "grouped_mm is known for groups of rows alone")
    result = own("GroupedMatMul", x, y, offs)
    result = typed(result, x.dtype, [x.shape[0], y.shape[2]])
    return result if out_dtype is None else cast(result, out_dtype)


def solve_triangular(
    a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """linalg_solve_triangular(); from the right, X A = B, it solves the transposed system."""
    if not left:
        b = _turned(b)
    if list(a.shape)[:-2] != list(b.shape)[:-2]:
        a, b = _with_axes_of(a, b), _with_axes_of(b, a)
    given = {"upper": int(upper), "unit": int(unitriangular), "transposed": int(not left)}
    x = typed(own("SolveTriangular", a, b, **given), b.dtype, list(b.shape))
    return x if left else _turned(x)


def _turned(x: Any) -> Any:
    n = len(x.shape)
    sizes = [*list(x.shape)[:-2], x.shape[-1], x.shape[-2]]
    return typed(op.Transpose(x, perm=[*range(n - 2), n - 1, n - 2]), x.dtype, sizes)


def _with_axes_of(x: Any, other: Any) -> Any:
    """x with the leading axes of both, of which axes of size 1 grow."""
    sizes = op.Concat(op.Shape(other, end=-2), ints(1, 1), axis=0)
    rank = max(len(x.shape), len(other.shape))
    return typed(op.Expand(x, sizes), x.dtype, [*[None] * (rank - 2), *list(x.shape)[-2:]])


def by_operands() -> dict[Any, Callable]:
    """aten overload -> a translation that is None: then the stock one does it."""
    return {_aten._grouped_mm.default: grouped_mm}


def table() -> dict[Any, Callable]:
    return {
        _aten.addmm.default: addmm,
        _aten.addmv.default: _rounded_once(addmv),
        _aten.addbmm.default: _rounded_once(addbmm),
        _aten.baddbmm.default: _rounded_once(baddbmm),
        _aten.addr.default: _rounded_once(addr),
        _aten.linalg_solve_triangular.default: solve_triangular,
        # Of transformers, for experts that torch.compile compiles and that are not in bf16.
        "transformers::grouped_mm_fallback": grouped_mm,
    }
