"""Translations of convolutions: Conv and ConvTranspose, of any padding that torch has.

Modules with another padding mode than zeros pad first, which is Pad. torch's `same`, of strides of
1, is SAME_UPPER: an odd zero lies behind. An input without a batch gets one of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gradd.graph.translation.build import each, of_batch, op

_aten = torch.ops.aten
_OF = "the {} of a convolution"


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
    """convolution(), of which torch's others are cases; a padding may also have a name."""
    axes = len(weight.shape) - 2
    known = {
        "strides": each(stride, axes, _OF.format("stride")),
        "dilations": each(dilation, axes, _OF.format("dilation")),
        "group": each(groups, 1, _OF.format("number of groups"))[0],
    }
    if padding == "same":  # for strides of 1: the kernel's size may be known at a call only
        known["auto_pad"] = "SAME_UPPER"
    else:
        given = 0 if padding == "valid" else padding
        known["pads"] = each(given, axes, _OF.format("padding")) * 2
    if transposed:
        known["output_padding"] = each(output_padding, axes, _OF.format("output padding"))
    node = op.ConvTranspose if transposed else op.Conv
    return of_batch(x, axes, lambda x: node(x, weight, bias, **known))


def conv(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """conv1d(), conv2d() and conv3d()."""
    return convolution(x, weight, bias, stride, padding, dilation, False, 0, groups)


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
    return convolution(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


def table() -> dict[Any, Callable]:
    return {
        **dict.fromkeys((_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default), conv),
        **dict.fromkeys((_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding), conv),
        _aten.conv_transpose1d.default: conv_transpose,
        _aten.conv_transpose2d.input: conv_transpose,
        _aten.conv_transpose3d.input: conv_transpose,
        _aten.convolution.default: convolution,
    }
