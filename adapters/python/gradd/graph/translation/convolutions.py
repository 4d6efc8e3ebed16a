"""Translations of convolutions: Conv and ConvTranspose, of any padding that torch has.

Modules with another padding mode than zeros pad first, which is Pad. torch's `same`, of strides of
1, is SAME_UPPER: an odd zero lies behind. An input without a batch gets one of 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from gradd.graph.translation.build import each, of_batch, op

_aten = torch.ops.aten
_OF = "the {} of a convolution"


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
        each(v, rank - 2, _OF.format(name))
        for v, name in ((stride, "stride"), (dilation, "dilation"))
    )
    if padding == "same":  # for strides of 1: the kernel's size may be known at a call only
        pads = {"auto_pad": "SAME_UPPER"}
    else:
        pads = {
            "pads": each(0 if padding == "valid" else padding, rank - 2, _OF.format("padding")) * 2
        }
    node = functools.partial(
        op.Conv,
        strides=strides,
        dilations=dilations,
        group=each(groups, 1, _OF.format("number of groups"))[0],
        **pads,
    )
    return of_batch(x, rank - 2, lambda x: node(x, weight, bias))


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
    rank = len(weight.shape)
    node = functools.partial(
        op.ConvTranspose,
        strides=each(stride, rank - 2, _OF.format("stride")),
        pads=each(padding, rank - 2, _OF.format("padding")) * 2,
        dilations=each(dilation, rank - 2, _OF.format("dilation")),
        output_padding=each(output_padding, rank - 2, _OF.format("output padding")),
        group=each(groups, 1, _OF.format("number of groups"))[0],
    )
    return of_batch(x, rank - 2, lambda x: node(x, weight, bias))


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
    return {
        **dict.fromkeys((_aten.conv1d.default, _aten.conv2d.default, _aten.conv3d.default), conv),
        **dict.fromkeys((_aten.conv1d.padding, _aten.conv2d.padding, _aten.conv3d.padding), conv),
        _aten.conv_transpose1d.default: conv_transpose,
        _aten.conv_transpose2d.input: conv_transpose,
        _aten.conv_transpose3d.input: conv_transpose,
        _aten.convolution.default: convolution,
    }
