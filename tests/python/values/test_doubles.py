"""Python numbers beside doubles are doubles: in the graph as in PyTorch (edges/doubles.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

from gradd import ORTModule
from helpers.edges import doubles, rows
from helpers.graphs.captures import Lambda, capture
from helpers.selection import drawn, every_run

ROWS = {row.name: row for row in doubles.ROWS}
# Those that gave no number, or quite another one, and one of each way a number takes.
KEPT = {
    *("masked row", "clamped logarithm", "beyond floats", "infinite as floats", "leaky_relu"),
    *("softplus", "layer_norm", "batch_norm statistics", "addmm", "full", "mul_"),
    "nearly silu",
}
SIZES = {"third", "root", "beside floats", "steps"}
SOME = KEPT | set(drawn(set(ROWS) - KEPT, 8))


@pytest.mark.parametrize("name", every_run(SOME, ROWS))
def test_numbers_are_not_rounded(name, shared_daemon):
    found = rows.compare(ROWS[name], torch.float64, ["ordinary", "ties", "inf", "zeros"])
    assert not found, "\n".join(found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_not_rounded_where_torch_takes_operators_apart(name, shared_daemon):
    found = rows.compare(ROWS[name], torch.float64, ["ordinary", "ties"], decomposed=True)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", every_run(SIZES, doubles.OF_SIZES))
def test_numbers_of_sizes_are_not_rounded(name, shared_daemon):
    function = doubles.OF_SIZES[name]
    net = Lambda(lambda self, x: function(self.lin(x), x.shape[0]), lin=nn.Linear(4, 4).double())
    mine = ORTModule(copy.deepcopy(net), strict=True)
    for n in (5, 7, 10, 29, 100):
        x = torch.randn(n, 4, dtype=torch.float64)
        results = []
        for module in (net, mine):
            module.zero_grad()
            result = module(x)
            result.square().sum().backward()
            results.append((result, module.lin.weight.grad))
        exact = 1e-5 if name == "steps of floats" else 1e-13
        torch.testing.assert_close(*results, rtol=exact, atol=exact)


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_what_dropout_keeps_is_scaled_in_doubles(rate, shared_daemon):
    net = ORTModule(
        Lambda(
            lambda self, x: F.dropout(x * self.one, rate),
            one=nn.Parameter(torch.ones((), dtype=torch.float64)),
        ),
        strict=True,
    )
    kept = net(torch.ones(100, dtype=torch.float64)).unique()
    torch.testing.assert_close(kept[-1].item(), 1 / (1 - rate), rtol=1e-15, atol=0)


def _constants(module: nn.Module, x: torch.Tensor) -> list[tuple[str, float]]:
    arrays = [numpy_helper.to_array(t) for t in capture(module, (x,)).graph.initializer]
    return [(str(a.dtype), a.item()) for a in arrays if a.size == 1 and a.dtype.kind == "f"]


@pytest.mark.quick
def test_each_number_has_the_type_of_what_it_meets():
    def forward(self, x):
        return self.lin(x).clamp(max=0.1), self.lin(x).double().clamp(max=0.1)

    found = _constants(Lambda(forward, lin=nn.Linear(3, 3)), torch.ones(2, 3))
    assert ("float64", 0.1) in found
    assert ("float32", torch.tensor(0.1).item()) in found
