"""Assertions on tensors in a forward raise in every call, not only in those that are compared.

PYTEST_DONT_REWRITE: the assertions are Dynamo's to read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
GOOD = torch.linspace(-1, 1, 24).reshape(4, 6)
BAD = GOOD.clone()
BAD[2, 3] = torch.inf


class Net(nn.Module):
    def __init__(self, forward: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(2000))
        self.steps = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(self, x)


def _input(net: Net, x: torch.Tensor) -> torch.Tensor:
    assert x.isfinite().all(), "bad"
    return net.lin(x).square().mean()


def _hidden(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = net.lin(x)
    assert (h.abs() < 50).all(), "bad"
    return net.lin(h.relu()).mean()


def _named(net: Net, x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x < 5).all(), "bad")
    return net.lin(x).mean()


def _result(net: Net, x: torch.Tensor) -> torch.Tensor:
    loss = net.lin(x).square().mean()
    assert loss < 1e6, "bad"
    return loss


def _between_writes(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.seen[:1000] += 1
    assert x.isfinite().all(), "bad"
    net.seen[1000:] += 1
    return net.lin(x).mean()


def _in_a_checkpoint(net: Net, x: torch.Tensor) -> torch.Tensor:
    def body(h: torch.Tensor) -> torch.Tensor:
        assert (h < 50).all(), "bad"
        return net.lin(h).relu()

    return checkpoint(body, net.lin(x), use_reentrant=False).mean()


def _convolved(net: Net, x: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.avg_pool1d(net.lin(x), 2)
    assert h.isfinite().all(), "bad"
    return net.lin(h.repeat(1, 2)).mean()


KINDS = (_input, _hidden, _named, _result, _between_writes, _in_a_checkpoint, _convolved)


@pytest.mark.parametrize("forward", KINDS, ids=lambda f: f.__name__.strip("_"))
def test_an_assertion_raises_in_a_late_call(forward: Callable) -> None:
    ours, theirs = ORTModule(Net(forward)), Net(forward)
    for _ in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(GOOD).backward()
    torch.testing.assert_close(ours.module.lin.weight.grad, theirs.lin.weight.grad)
    with pytest.raises(RuntimeError, match="bad"):
        ours(BAD)
    with pytest.raises((AssertionError, RuntimeError), match="bad"):
        theirs(BAD)
    assert torch.equal(ours.module.seen, theirs.seen)
    ours(GOOD).backward()
    stats = ours.gradd_stats()
    assert not stats["fallbacks"] and not stats["self_check_failures"]


@pytest.mark.parametrize("forward", KINDS[:4], ids=lambda f: f.__name__.strip("_"))
def test_an_assertion_cuts_nothing(forward: Callable) -> None:
    ours = ORTModule(Net(forward), strict=True)
    with pytest.raises(RuntimeError, match="^bad"):
        ours(BAD)
    for _ in range(3):
        ours(GOOD).backward()
    stats = ours.gradd_stats()
    assert stats["captures"] == 1 and not stats["parts_in_torch"]


def test_an_assertion_about_a_vmap_has_its_place() -> None:
    def steps(net: Net, x: torch.Tensor) -> torch.Tensor:
        h = torch.vmap(lambda row: row * row.sum())(net.lin(x))
        assert h.isfinite().all(), "bad"
        return net.lin(h).mean()

    ours, theirs = ORTModule(Net(steps)), Net(steps)
    for _ in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            model(GOOD).backward()
    torch.testing.assert_close(ours.module.lin.weight.grad, theirs.lin.weight.grad)
    with pytest.raises(RuntimeError, match="bad"):
        ours(BAD)
