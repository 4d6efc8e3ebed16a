"""Frozen weights in four bits, as bitsandbytes packs them, under adapters that train.

Its product is a torch.autograd.Function, which PyTorch runs, by name; the rest stays in the daemon.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from gradd import ORTModule
from gradd.spec import CaptureError
from helpers.graphs.engine import EngineError, Model, Plan


class _Product(torch.autograd.Function):
    """x times a weight that lies packed, two values in a byte."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
        """x [N, k], packed u8 [n, k / 2]."""
        ctx.save_for_backward(packed)
        return x @ _unpacked(packed).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The weight is frozen."""
        return grad @ _unpacked(*ctx.saved_tensors), None


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    pairs = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return (pairs.float() - 8) / 16


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        packed = torch.randint(256, (8, 4), dtype=torch.uint8)
        self.register_buffer("packed", packed)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.packed) + self.up(self.down(x))


def _net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 8), Packed(), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.usefixtures("shared_daemon")
def test_adapters_of_packed_weights_train() -> None:
    plain, model = _net(), ORTModule(_net())
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        for one in (plain, model):
            one.zero_grad()
            one(x).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    stats = model.gradd_stats()
    assert stats["in_torch"] == {"autograd_function": 2} and stats["forwards"] >= 4
    with pytest.raises(CaptureError, match="autograd_function"):
        ORTModule(_net(), strict=True)(x)


@pytest.mark.quick
def test_a_packed_product_of_a_model_is_refused_by_name() -> None:
    node = helper.make_node(
        "MatMulNBits",
        ["x", "w", "s"],
        ["y"],
        name="packed",
        domain="com.microsoft",
        K=32,
        N=4,
        bits=4,
        block_size=32,
    )
    value = helper.make_tensor_value_info
    inputs = [
        value("x", TensorProto.FLOAT, [2, 32]),
        value("w", TensorProto.INT64, [4, 1, 16]),
        value("s", TensorProto.FLOAT, [4]),
    ]
    graph = helper.make_graph([node], "g", inputs, [value("y", TensorProto.FLOAT, [2, 4])])
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    data = helper.make_model(graph, opset_imports=domains, ir_version=10).SerializeToString()
    feed = {
        "x": np.zeros((2, 32), np.float32),
        "w": np.zeros((4, 1, 16), np.int64),
        "s": np.zeros(4, np.float32),
    }
    with pytest.raises(EngineError, match="MatMulNBits") as caught:
        Plan(Model(data), feed)
    assert caught.value.code == "UNSUPPORTED", str(caught.value)
