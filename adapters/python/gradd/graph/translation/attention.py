"""Translation of scaled_dot_product_attention.

It becomes one node if an operator fits: ONNX's Attention (opset 23), or com.gradd::Attention, which
also has dropout. Other forms (operands of more than four dimensions or that broadcast to each
other, a mask with one entry for all keys, a scale of doubles) are written out by definition: two
products and a softmax. Their masks are `Where`s with the smallest finite number, never infinity, so
that a row without a key gives zeros (as torch does) and no NaN can reach a gradient.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from gradd.graph.translation.build import (
    SMALLEST,
    dropped,
    first_of,
    ints,
    op,
    scalar,
    size,
    times,
    typed,
)
from gradd.graph.translation.doubles import DOUBLE, is_exact


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """scaled_dot_product_attention()."""
    operands = query, key, value
    if _has_word(operands, attn_mask, dropout_p, scale, enable_gqa):
        return _whole(operands, attn_mask, dropout_p, is_causal, scale)
    return _composed(operands, attn_mask, dropout_p, is_causal, scale, enable_gqa)


# --- in one node -------------------------------------------------------------------------------


def _has_word(operands: tuple, mask: Any, dropout: Any, scale: Any, grouped: bool) -> bool:
    query, key, value = operands
    rank, numbers = len(query.shape), [n for n in (dropout, scale) if n is not None]
    if rank not in (3, 4) or not all(isinstance(n, (int, float)) for n in numbers):
        return False
    if any(len(x.shape) != rank or x.dtype != query.dtype for x in operands):
        return False
    if not 0 <= dropout < 1 or (query.dtype == DOUBLE and not all(map(is_exact, numbers))):
        return False
    if any(x.shape[:-3] != query.shape[:-3] for x in operands) or key.shape[-3] != value.shape[-3]:
        return False
    return _heads_fit(query.shape[-3], key.shape[-3], grouped) and _mask_fits(mask, query, key)


def _heads_fit(heads: Any, few: Any, grouped: bool) -> bool:
    if heads == few or few == 1:  # one for all broadcasts
        return True
    return grouped and isinstance(heads, int) and isinstance(few, int) and heads % few == 0


def _mask_fits(mask: Any, query: Any, key: Any) -> bool:
    if mask is None:
        return True
    if mask.dtype not in (ir.DataType.BOOL, query.dtype):
        return False
    rank = len(mask.shape)
    return 1 <= rank <= len(query.shape) and (mask.shape[-1] != 1 or key.shape[-2] == 1)


def _whole(operands: tuple, mask: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    lifted = len(operands[0].shape) == 3
    if lifted:  # three dimensions mean something else to ONNX
        operands = tuple(typed(op.Unsqueeze(x, ints(0)), x.dtype, [1, *x.shape]) for x in operands)
    given = [*operands] if mask is None else [*operands, mask]
    known: dict[str, Any] = {"is_causal": int(causal)} if causal else {}
    if scale is not None:
        known["scale"] = float(scale)
    domain = ""
    if dropout > 0:
        domain, known["dropout"] = "com.gradd", float(dropout)
    result = first_of(domain, "Attention", *given, **known)
    return op.Squeeze(result, ints(0)) if lifted else result


# --- as it is defined --------------------------------------------------------------------------


def _composed(
    operands: tuple, mask: Any, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> Any:
    """MatMul, Mul, Where or Add, Softmax, [Dropout], MatMul."""
    query, key, value = operands
    rank = len(query.shape)
    if grouped:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    order = [*range(rank - 2), rank - 1, rank - 2]
    scores = op.MatMul(query, op.Transpose(key, perm=order))
    factor = _scale(query, scale)
    scores = typed(scores, query.dtype, [*query.shape[:-1], key.shape[-2]])
    scores = times(scores, factor) if isinstance(factor, float) else op.Mul(scores, factor)
    some = None
    least = scalar(SMALLEST[query.dtype], query.dtype)
    if causal:
        scores = op.Where(_causal(query, key), scores, least)
    elif mask is not None and mask.dtype == ir.DataType.BOOL:
        scores = op.Where(mask, scores, least)
        some = _row_has_any(mask)
    elif mask is not None:
        # Rows without a key give 0 in torch: the softmax must not see infinities alone.
        masked = op.Equal(mask, scalar(-math.inf, mask.dtype))
        scores = op.Add(scores, op.Where(masked, scalar(SMALLEST[mask.dtype], mask.dtype), mask))
        some = _row_has_any(op.Not(masked))
    weights = dropped(op.Softmax(scores, axis=-1), dropout)
    result = op.MatMul(weights, value)
    return result if some is None else op.Where(some, result, scalar(0.0, query.dtype))


def _scale(query: Any, scale: float | None) -> Any:
    width = query.shape[-1]
    if scale is not None:
        known = isinstance(scale, (int, float))
        return float(scale) if known else op.Cast(scale, to=int(query.dtype))
    if isinstance(width, int):
        return 1.0 / math.sqrt(width)
    return op.Reciprocal(op.Sqrt(op.Cast(size(query, -1), to=int(query.dtype))))


def _repeat_heads(value: Any, query: Any) -> Any:
    """[B, few, S, D] to [B, heads, S, D], each head repeated in place."""
    have, heads, width = value.shape[-3], query.shape[-3], value.shape[-1]
    if have == heads:
        return value
    one = ints(1)
    if all(isinstance(n, int) for n in (have, heads, width)):
        times, shape = ints(1, 1, heads // have, 1, 1), ints(0, heads, -1, width)
    else:
        wanted = op.Shape(query, start=1, end=2)
        factor = op.Div(wanted, op.Shape(value, start=1, end=2))
        times = op.Concat(one, one, factor, one, one, axis=0)
        shape = op.Concat(ints(0), wanted, ints(-1), op.Shape(value, start=3, end=4), axis=0)
    return op.Reshape(op.Expand(op.Unsqueeze(value, ints(2)), times), shape)


def _causal(query: Any, key: Any) -> Any:
    """[L, S] boolean: column <= row (aligned at the first row, as torch defines is_causal)."""
    zero, one = scalar(0, ir.DataType.INT64), scalar(1, ir.DataType.INT64)
    rows = op.Range(zero, size(query, -2), one)
    columns = op.Range(zero, size(key, -2), one)
    return op.LessOrEqual(columns, op.Unsqueeze(rows, ints(1)))


def _row_has_any(mask: Any) -> Any:
    """[..., L, 1] boolean: the row may attend to something."""
    share = op.ReduceMean(op.Cast(mask, to=ir.DataType.FLOAT), ints(-1), keepdims=1)
    return op.Greater(share, scalar(0.0, ir.DataType.FLOAT))
