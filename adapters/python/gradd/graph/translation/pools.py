"""Translations of pooling: windows of one to three axes, of a batch or of one sample.

Windows are those of ONNX's MaxPool and AveragePool; com.gradd has sums in place of averages, and
pooling into a number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from gradd.graph.translation.build import (
    each,
    first_of,
    is_float,
    joined,
    narrow,
    of_batch,
    op,
    scalar,
    several,
    typed,
    wide,
)
from gradd.spec import CaptureError

_aten = torch.ops.aten


def _windows(axes: int, kernel: Any, stride: Any, padding: Any, ceil_mode: Any) -> dict[str, Any]:
    sizes = each(kernel, axes, "a window")
    strides = sizes if stride is None or stride == [] else each(stride, axes, "a window")
    pads = each(padding, axes, "a window") * 2
    return {
        "kernel_shape": sizes,
        "strides": strides,
        "pads": pads,
        "ceil_mode": int(bool(ceil_mode)),
    }


def _max_pool(axes: int, places: bool) -> Callable:
    def translate(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        """Of places: those of the largest elements within their plane."""
        _only_floats(x)
        given = _windows(axes, kernel_size, stride, padding, ceil_mode)
        given["dilations"] = each(dilation, axes, "a window")

        def make(batch: Any) -> Any:
            if not places:
                return first_of("", "MaxPool", batch, **given)
            values, found = several("", "MaxPool", 2, batch, **given)
            return values, op.Mod(typed(found, ir.DataType.INT64), _plane(batch, axes))

        return of_batch(x, axes, make)

    return translate


def _only_floats(x: Any) -> None:
    if not is_float(x):
        raise CaptureError("unsupported_operator", "pooling of integers; cast them first")


def _plane(x: Any, axes: int) -> Any:
    """How many elements the last axes have."""
    return op.ReduceProd(op.Shape(x, start=-axes), keepdims=0)


def _avg_pool(axes: int) -> Callable:
    def translate(
        x: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        _only_floats(x)
        given = _windows(axes, kernel_size, stride, padding, ceil_mode)

        def make(batch: Any) -> Any:
            if divisor_override is None:
                counted = int(bool(count_include_pad))
                return first_of("", "AveragePool", batch, count_include_pad=counted, **given)
            z = wide(batch)
            sums = typed(first_of("com.gradd", "SumPool", z, **given), z.dtype)
            return narrow(op.Div(sums, scalar(float(divisor_override), z.dtype)), batch)

        return of_batch(x, axes, make)

    return translate


def _parts(axes: int, sizes: Any) -> Any:
    """Sizes of a result, int64: numbers or values; torch keeps a size for None."""
    return joined(sizes if isinstance(sizes, Sequence) else [sizes] * axes)


def _adaptive_pool(axes: int, name: str, outputs: int) -> Callable:
    def translate(x: Any, output_size: Any) -> Any:
        _only_floats(x)
        sizes = _parts(axes, output_size)

        def make(batch: Any) -> Any:
            found = several("com.gradd", name, outputs, batch, sizes)
            return found[0] if outputs == 1 else tuple(found)

        return of_batch(x, axes, make)

    return translate


def _adaptive_avg_pool(axes: int) -> Callable:
    return _adaptive_pool(axes, "AdaptiveAveragePool", 1)


def table() -> dict[Any, Callable]:
    rows: dict[Any, Callable] = {}
    for axes in (1, 2, 3):
        rows |= {
            getattr(_aten, f"max_pool{axes}d").default: _max_pool(axes, False),
            getattr(_aten, f"avg_pool{axes}d").default: _avg_pool(axes),
            getattr(_aten, f"adaptive_avg_pool{axes}d").default: _adaptive_avg_pool(axes),
            getattr(_aten, f"adaptive_max_pool{axes}d").default: _adaptive_pool(
                axes, "AdaptiveMaxPool", 2
            ),
        }
    for axes in (2, 3):
        rows |= {
            getattr(_aten, f"max_pool{axes}d_with_indices").default: _max_pool(axes, True),
            getattr(_aten, f"_adaptive_avg_pool{axes}d").default: _adaptive_avg_pool(axes),
        }
    rows[_aten.max_pool1d_with_indices.default] = _max_pool(1, True)
    return rows
