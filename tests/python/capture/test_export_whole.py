"""Functions of torch that travel as one operator each, and where they do not.

A norm, an activation or a loss that the capture has whole is sent whole, if the operator means the
same: what ONNX holds in an attribute is a float, so doubles are written out.
"""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
import torch
import torch.nn.functional as F
from captured import Lambda, assert_same
from torch import nn

from gradd import export

X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([1, 0, 5])


def norm(shape: tuple[int, ...], weight: bool, eps: float | None) -> nn.Module:
    """rms_norm() of a product, so that its operand has a gradient."""
    parts = {"w": nn.Parameter(1 + torch.rand(shape)), "v": nn.Parameter(torch.rand(6))}
    return Lambda(
        lambda m, x: (
            F.rms_norm(x * m.v, shape, m.w if weight else None, eps).pow(3).sum() + 0 * m.w.sum()
        ),
        **parts,
    )


def operators(module: nn.Module, *args: torch.Tensor) -> Counter:
    model = onnx.ModelProto.FromString(export.capture(module, args, {}).onnx)
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.quick
@pytest.mark.parametrize("shape", [(6,), (4, 6)])
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_is_one_operator(shape, weight, eps) -> None:
    module = norm(shape, weight, eps)
    found = operators(module, X)
    assert found["RMSNormalization"] == 1
    assert not found.keys() & {"Sqrt", "ReduceMean", "Reciprocal", "Cast"}
    assert_same(module, (X,))


@pytest.mark.quick
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("eps", [None, 0.1])
def test_rms_norm_of_doubles_is_written_out(weight, eps) -> None:
    module = norm((6,), weight, eps).double()
    assert not operators(module, X.double())["RMSNormalization"]
    assert_same(module, (X.double(),))


def test_rms_norm_of_halves_rounds_once() -> None:
    module = norm((6,), True, 1e-6).bfloat16()
    found = operators(module, X.bfloat16())
    assert found["RMSNormalization"] == 1 and not found["Cast"]


WHOLE = {
    "LayerNormalization": lambda m, x, y: F.layer_norm(x, (6,), m.v, None, 1e-3).sum(),
    "Gelu": lambda m, x, y: F.gelu(x * m.v, approximate="tanh").sum(),
    "SoftmaxCrossEntropyLoss": lambda m, x, y: F.cross_entropy(x[:, 0] * m.v, y),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_operator(name) -> None:
    module = Lambda(WHOLE[name], v=nn.Parameter(torch.rand(6)))
    assert operators(module, X, Y)[name] == 1
