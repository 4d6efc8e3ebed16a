"""Reductions of infinities and NaNs, and fills, against PyTorch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from onnx import TensorProto

from gradd import ORTModule
from helpers.graphs import engine as E
from helpers.graphs.onnx_writer import Writer

INF, NAN = float("inf"), float("nan")
ROWS = [
    [-INF, -INF, -INF],
    [INF, 0, 1],
    [INF, -INF, INF],
    [1, -INF, 2],
    [NAN, 1, INF],
    [800, 801, -800],
]


@pytest.mark.quick
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_sum_exp_of_infinities(axis, dtype):
    rows = np.array(ROWS if axis else np.array(ROWS).T, dtype)
    w = Writer()
    y = w("ReduceLogSumExp", "x", w.constant([axis], np.int64), keepdims=0)
    kind = TensorProto.FLOAT if dtype == np.float32 else TensorProto.DOUBLE
    model = E.Model(w.proto({"x": rows.shape}, [y], kind=kind))
    one = E.Run(E.Plan(model, {"x": rows}, ["x"], [y], [y]))
    out = one.forward({"x": rows})[y]
    x = torch.tensor(rows, requires_grad=True)
    right = x.logsumexp(axis)
    np.testing.assert_allclose(out, right.detach().numpy(), rtol=1e-6)
    right.backward(torch.ones_like(right))
    gradient = one.backward({y: np.ones(out.shape, dtype)})["x"]
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-4, atol=1e-12)


@pytest.mark.quick
def test_products_of_zeros_beside_infinities():
    """0 times what is no number is none, as in PyTorch."""
    rows = [r for r in itertools.product([0, 2, NAN, INF], repeat=4) if 0 in r]
    rows = np.array(rows, np.float32)
    w = Writer()
    y = w("ReduceProd", "x", w.constant([1], np.int64), keepdims=0)
    model = E.Model(w.proto({"x": rows.shape}, [y]))
    one = E.Run(E.Plan(model, {"x": rows}, ["x"], [y], [y]))
    out = one.forward({"x": rows})[y]
    x = torch.tensor(rows, requires_grad=True)
    right = x.prod(1)
    np.testing.assert_equal(out, right.detach().numpy())
    right.backward(torch.ones_like(right))
    np.testing.assert_equal(one.backward({y: np.ones_like(out)})["x"], x.grad.numpy())


@pytest.mark.parametrize("index", [[1, 1, 3], [0, 0, 0], [4, 0], []])
@pytest.mark.usefixtures("shared_daemon")
def test_what_two_indices_fill_counts_once(index):
    class Fill(torch.nn.Module):
        def forward(self, x, value):
            return torch.index_fill(x, 1, torch.tensor(index, dtype=torch.int64), value)

    results = []
    for module in (Fill(), ORTModule(Fill(), strict=True)):
        x, value = torch.ones(3, 5, requires_grad=True), torch.tensor(2.0, requires_grad=True)
        y = module(x, value)
        (y * torch.arange(15.0).view(3, 5)).sum().backward()
        results.append((y.detach(), x.grad, value.grad))
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.usefixtures("shared_daemon")
def test_no_difference_is_the_tensor_itself():
    class Plain(torch.nn.Module):
        def forward(self, x, before):
            return torch.diff(x, 0, 0, prepend=before)

    x, before = torch.randn(3, 2), torch.randn(1, 2)
    assert torch.equal(ORTModule(Plain(), strict=True)(x, before), Plain()(x, before))


@pytest.mark.usefixtures("shared_daemon")
def test_a_softmax_of_nothing_is_zeros():
    class Safe(torch.nn.Module):
        def forward(self, x):
            return torch.ops.aten._safe_softmax(x, -1)

    results = []
    for module in (Safe(), ORTModule(Safe(), strict=True)):
        x = torch.tensor(ROWS + [[-INF, -INF, -INF]], requires_grad=True)
        y = module(x)
        (y * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
        results.append((y.detach(), x.grad))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
