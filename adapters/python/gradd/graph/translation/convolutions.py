"""Translations of convolutions: Conv and ConvTranspose, of any padding that torch has.

Modules with another padding mode than zeros pad first, which is Pad. torch's `same`, of strides of
1, is SAME_UPPER: an odd zero lies behind. An input without a batch gets one of 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradd.graph.translation.build import ints, op
from gradd.spec import CaptureError

_aten = torch.ops.aten


def _each(value: Any, axes: int, what: str) -> list[int]:
    """One number for each axis; torch takes one for all."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(v, int) for v in values):
        raise CaptureError(
            "unsupported_operator",
            f"the {what} of a convolution changes with the sizes of a call",
        )
    return values * axes if len(values) == 1 else values


def _batched(x: Any, rank: int, result: Callable[[Any], Any]) -> Any:
    if len(x.shape) == rank:
        return result(x)
    return op.Squeeze(result(op.Unsqueeze(x, ints(0))), ints(0))


def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """conv1d(), conv2d() and conv3d(), their padding a number, one for each axis, or its name."""
    rank = len(weight.shape)
    strides, dilations = (
        _each(v, rank - 2, name) for v, name in ((stride, "stride"), (dilation, "dilation"))
    )
    if padding == "same":  # for strides of 1: the kernel's size may be known at a call only
        pads = {"auto_pad": "SAME_UPPER"}
    else:
        pads = {"pads": _each(0 if padding == "valid" else padding, rank - 2, "padding") * 2}
    node = functools.partial(
        op.Conv,
        strides=strides,
        dilations=dilations,
        group=_each(groups, 1, "number of groups")[0],
        **pads,
    )
    return _batched(x, rank, lambda x: node(x, weight, bias))


def conv_transpose(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """conv_transpose1d(), conv_transpose2d() and conv_transpose3d()."""
    rank = len(weight.shape)
    node = functools.partial(
        op.ConvTranspose,
        strides=_each(stride, rank - 2, "stride"),
        pads=_each(padding, rank - 2, "padding") * 2,
        dilations=_each(dilation, rank - 2, "dilation"),
        output_padding=_each(output_padding, rank - 2, "output padding"),
        group=_each(groups, 1, "number of groups")[0],
    )
    return _batched(x, rank, lambda x: node(x, weight, bias))


def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    """convolution(), into which torch decomposes the others."""
    if transposed:
        return conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(x, weight, bias, stride, padding, dilation, groups)


def table() -> dict[Any, Callable]:
    """aten overload -> translation."""
    return {
        **{o: conv for p in (_aten.conv1d, _aten.conv2d, _aten.conv3d) for o in _overloads(p)},
        _aten.conv_transpose1d.default: conv_transpose,
        _aten.conv_transpose2d.input: conv_transpose,
        _aten.conv_transpose3d.input: conv_transpose,
        _aten.convolution.default: convolution,
    }


def _overloads(packet: Any) -> tuple[Any, Any]:
    return packet.default, packet.padding
