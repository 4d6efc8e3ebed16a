"""Large results that an observed forward leaves out, and when all are computed after all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradd.export import observe
from gradd.export.guards import uncomputed
from gradd.export.naming import Call

ROWS, WIDTH = 1024, 1 << 14  # 64 MiB in f32


class Wide(nn.Module):
    """A product with a large result, and whatever a test does with it."""

    def __init__(self, then) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 256))
        self.register_buffer("seen", torch.zeros(()))
        self.then = then

    def forward(self, x):
        """What `then` makes of the product."""
        return self.then(self, x @ self.weight.t())


@pytest.fixture
def forms(monkeypatch):
    """Of every observation whether large results were left out."""
    made: list[bool] = []
    before = uncomputed.Uncomputed.__init__

    def noted(self, allowed):
        made.append(allowed)
        before(self, allowed)

    monkeypatch.setattr(uncomputed.Uncomputed, "__init__", noted)
    return made


def observed(then):
    module = Wide(then)
    call = Call(module, (torch.ones(ROWS, 256),), {}, module.forward)
    return observe.observe(call, None), module


def write(module, y):
    module.seen.copy_(y.detach().sum())
    return y.sum()


def branch(module, y):
    return y.sum() if y.max() > 0 else y.mean()


def choose(module, y):
    return y[y > 0].sum()


def test_a_loss_is_left_out(forms) -> None:
    seen, _ = observed(lambda module, y: torch.log_softmax(y, 1).mean())
    assert forms == [True]
    assert seen.error is None
    assert seen.outputs[0].shape == ()
    assert seen.outputs[0].grad_fn is not None


@pytest.mark.parametrize("then", [write, branch, choose])
def test_values_that_count_are_computed(forms, then) -> None:
    seen, _ = observed(then)
    assert forms == [True, False]
    assert seen.error is None
    assert float(seen.outputs[0].detach()) == ROWS * WIDTH * 256


def test_a_buffer_has_its_values(forms) -> None:
    seen, module = observed(write)
    assert seen.buffers["seen"].changed()
    assert float(seen.buffers["seen"].after) == ROWS * WIDTH * 256
    assert float(module.seen) == 0


def test_results_of_usual_size_are_computed(forms) -> None:
    module = nn.Linear(256, 64)
    x = torch.ones(8, 256)
    seen = observe.observe(Call(module, (x,), {}, module.forward), None)
    assert forms == [True]
    assert torch.equal(seen.outputs[0], module(x))
