"""Reductions of infinities and what is not a number, against PyTorch."""

from __future__ import annotations

import engine as E
import numpy as np
import pytest
import torch
from onnx import TensorProto
from recognise import Writer

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
