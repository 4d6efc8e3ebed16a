"""Functions whose backward is known to be the derivative of their forward run in the daemon."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo import known_functions


def _draw(*shape: int, gradient: bool = True) -> torch.Tensor:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64), requires_grad=gradient)


OPERANDS: dict[str, Callable[[], tuple]] = {
    "GeLUFunction": lambda: (_draw(6, 5),),
    "XSoftmax": lambda: (_draw(2, 3, 5), torch.arange(30).reshape(2, 3, 5) % 4 > 0, -1),
    "HadaWeight": lambda: (
        *(_draw(6, 2), _draw(2, 5), _draw(6, 2), _draw(2, 5)),
        torch.tensor(0.7, dtype=torch.float64),
    ),
    "UniqueBaseGrad": lambda: (_draw(4, 1, 5, gradient=False), _draw(4, 3), _draw(3, 5)),
}


class Applied(nn.Module):
    """A function of parameters, between two other operators."""

    def __init__(self, function: type[torch.autograd.Function], operands: tuple) -> None:
        super().__init__()
        self.function = function
        self.operands = nn.ParameterList(x for x in operands if isinstance(x, nn.Parameter))
        self.others = [x for x in operands if not isinstance(x, nn.Parameter)]

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """Of the parameters times a factor, so that they come from other operators."""
        scaled = [p * factor if p.requires_grad else p for p in self.operands]
        return self.function.apply(*scaled, *self.others).tanh()


@pytest.mark.parametrize("place", known_functions.DECLARED, ids=lambda place: place[1])
def test_its_backward_is_the_derivative_of_its_forward(
    place: tuple[str, str], shared_daemon: None
) -> None:
    """PyTorch runs the backward of its own."""
    module, name = place
    torch.manual_seed(3)
    function = getattr(importlib.import_module(module), name)
    theirs = Applied(function, OPERANDS[name]())
    ours = ORTModule(copy.deepcopy(theirs), strict=True)
    factor = torch.tensor(1.3, dtype=torch.float64)
    results = []
    for net in (theirs, ours):
        y = net(factor)
        y.backward(torch.linspace(-1, 2, y.numel(), dtype=torch.float64).reshape(y.shape))
        results.append((y, [p.grad for p in net.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert ours.gradd_stats()["parts_in_torch"] == {} and ours.gradd_stats()["captures"] == 1


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


def test_others_keep_their_backward(shared_daemon: None) -> None:
    net = ORTModule(Applied(_Doubled, (_draw(3),)))
    net(torch.ones((), dtype=torch.float64)).sum().backward()
    (p,) = net.parameters()
    torch.testing.assert_close(p.grad, 7 / (2 * p).cosh() ** 2)
    assert net.gradd_stats()["parts_in_torch"]


def test_what_the_backward_leaves_out_gets_no_gradient(shared_daemon: None) -> None:
    """A scale that is trained: the function's own backward gives it none, in PyTorch."""
    function = importlib.import_module("peft.tuners.loha.layer").HadaWeight
    weights = OPERANDS["HadaWeight"]()[:4]
    theirs = Applied(function, (*weights, _draw()))
    ours = ORTModule(copy.deepcopy(theirs))
    results = []
    for net in (theirs, ours):
        net(torch.tensor(1.3, dtype=torch.float64)).sum().backward()
        results.append([p.grad for p in net.parameters()])
    assert results[0][4] is None
    torch.testing.assert_close(results[1][:4], results[0][:4])
    assert results[1][4] is None or not results[1][4].any()
