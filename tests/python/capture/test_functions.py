"""Autograd Functions are found in PyTorch's own graph, however they were reached."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from nets import Net, batch

from gradd import ORTModule
from gradd.export import CaptureError, refuse
from gradd.export.functions import custom_functions

pytestmark = pytest.mark.quick


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 5


class Pair(torch.autograd.Function):
    """Two inputs, two outputs, in the style with setup_context."""

    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads


KEPT = Double.apply
WAYS = {
    "apply": Double.apply,
    "kept": lambda x: KEPT(x),
    "partial": functools.partial(Double.apply),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(KEPT, x, use_reentrant=False),
}
NAME = f"{__name__}.Double"


@pytest.mark.parametrize("way", WAYS)
def test_a_function_is_found(way: str) -> None:
    x = torch.ones(3, requires_grad=True)
    inner = WAYS[way](x * 3)
    assert custom_functions([(inner.relu() + x).sum(), x.exp()]) == [NAME]


def test_every_function_is_named_once() -> None:
    x = torch.ones(3, requires_grad=True)
    a, b = Pair.apply(KEPT(x), KEPT(x))
    assert custom_functions([a.sum() + b.sum()]) == [NAME, f"{__name__}.Pair"]


def test_torchs_own_nodes_are_no_functions() -> None:
    net = Net(dropout=0.5)
    assert custom_functions(net(*batch())) == []
    x = torch.ones(3, requires_grad=True)
    plain = torch.ones(3)
    assert custom_functions([x, plain, KEPT(plain), KEPT(x).detach()]) == []


def test_the_self_check_refuses_what_the_capture_did_not_see(
    shared_daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return KEPT(self.layer(x)).sum()

    monkeypatch.setattr(refuse, "_no_custom_backward", contextlib.nullcontext)
    with pytest.raises(CaptureError, match=r"autograd_function.*Double"):
        ORTModule(Hidden(), strict=True)(batch()[0])
