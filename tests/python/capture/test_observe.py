"""The forward beside a capture: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn

from gradd.export import naming, observe

pytestmark = pytest.mark.quick


class Busy(nn.Module):
    """Writes wherever a forward can write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("swapped", torch.zeros(4))
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict]:
        self.calls.append(random.randint(0, 9))
        self.kept.data.mul_(1.0)
        self.swapped = self.swapped + 1
        x += torch.rand(4)
        return self.norm(x), {"more": x}


def _observe(module: nn.Module, *args: torch.Tensor) -> observe.Observation:
    return observe.observe(naming.Call(module, args, {}, module.forward), None)


def test_nothing_is_left_behind() -> None:
    module, x = Busy(), torch.ones(3, 4)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    buffers = [id(b) for b in module.buffers()]
    numbers, coins = torch.get_rng_state(), random.getstate()
    seen = _observe(module, x)
    assert seen.error is None and len(seen.outputs) == 2
    assert module.calls == [] and torch.equal(x, torch.ones(3, 4))
    assert buffers == [id(b) for b in module.buffers()]
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers) and random.getstate() == coins
    changed = {name for name, b in seen.buffers.items() if b.changed()}
    assert changed == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
        "swapped",
    }
    assert [name for name, b in seen.buffers.items() if b.replaced] == ["swapped"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.f = Doubled.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self.lin(x))


def test_the_graph_of_gradients_can_be_walked_and_holds_no_activations() -> None:
    with torch.no_grad():
        (out,) = _observe(Custom(), torch.ones(3, 4)).outputs
    assert "Doubled" in type(out.grad_fn).__name__
    with pytest.raises(RuntimeError, match="nothing was kept"):
        _observe(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(3, 4)).outputs[
            0
        ].sum().backward()


def test_what_forward_raises_is_kept() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("here")

    seen = _observe(Broken(), torch.ones(3))
    assert isinstance(seen.error, KeyError) and not seen.outputs


def test_nothing_of_it_stays_alive() -> None:
    """The graph of its outputs would keep what autograd knows of the parameters."""
    gc.collect()
    gc.disable()
    try:
        seen = _observe(nn.Linear(4, 4), torch.ones(3, 4))
        refs = [weakref.ref(seen), *map(weakref.ref, seen.outputs)]
        del seen
        assert [ref() for ref in refs] == [None] * 2
    finally:
        gc.enable()
