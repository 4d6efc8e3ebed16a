"""Translations of interpolate(): com.gradd::Resample, by torch's rules of places and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import first_of, is_float, joined, op
from gradd.spec import CaptureError

_aten = torch.ops.aten


def _sizes(x: Any, sizes: Sequence[Any] | None, factors: Sequence[float] | None) -> Any:
    """Of the result, int64: those given, or those of the input times factors, cut."""
    if sizes is not None:
        return joined(sizes)
    assert factors is not None
    wide = op.Cast(op.Shape(x, start=2), to=int(ir.DataType.DOUBLE))
    return op.Cast(op.Mul(wide, _doubles(factors)), to=int(ir.DataType.INT64))


def _doubles(numbers: Sequence[float]) -> Any:
    return op.Constant(value=ir.tensor(list(numbers), dtype=ir.DataType.DOUBLE))


def _resampled(x: Any, sizes: Any, factors: Sequence[float | None] | None, **how: Any) -> Any:
    """Factors that are not known count as 0: the sizes decide."""
    if not is_float(x):
        raise CaptureError("unsupported_operator", "interpolation of integers; cast them first")
    known = [0.0 if f is None else f for f in factors or ()]
    if not all(isinstance(f, (int, float)) for f in known):
        raise CaptureError("unsupported_operator", "scale factors must not depend on sizes")
    given = _sizes(x, sizes, known)
    scales = [_doubles(known)] if any(known) else []
    return first_of("com.gradd", "Resample", x, given, *scales, **how)


def _nearest(exact: bool, vectors: bool) -> Callable:
    def translate(x: Any, output_size: Any, *factors: Any) -> Any:
        """upsample_nearest(), _upsample_nearest_exact()."""
        given = factors[0] if vectors and factors else None if vectors else factors
        return _resampled(x, output_size, given, mode="nearest", exact=int(exact))

    return translate


def _smooth(mode: str, antialias: bool, vectors: bool) -> Callable:
    def translate(x: Any, output_size: Any, align_corners: bool, *factors: Any) -> Any:
        """upsample_linear() and its kind."""
        given = factors[0] if vectors and factors else None if vectors else factors
        how = {"mode": mode, "align_corners": int(align_corners), "antialias": int(antialias)}
        return _resampled(x, output_size, given, **how)

    return translate


def table() -> dict[Any, Callable]:
    rows: dict[Any, Callable] = {}
    for vectors, overload in ((False, "default"), (True, "vec")):
        for axes, name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
            nearest = getattr(_aten, f"upsample_nearest{axes}d")
            exact = getattr(_aten, f"_upsample_nearest_exact{axes}d")
            rows[getattr(nearest, overload)] = _nearest(False, vectors)
            rows[getattr(exact, overload)] = _nearest(True, vectors)
            line = getattr(_aten, f"upsample_{name}")
            rows[getattr(line, overload)] = _smooth("linear", False, vectors)
        for mode, name in (("linear", "bilinear"), ("cubic", "bicubic")):
            filtered = getattr(_aten, f"_upsample_{name}2d_aa")
            rows[getattr(filtered, overload)] = _smooth(mode, True, vectors)
        rows[getattr(_aten.upsample_bicubic2d, overload)] = _smooth("cubic", False, vectors)
    return rows
