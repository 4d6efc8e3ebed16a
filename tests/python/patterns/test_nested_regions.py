"""Layers that torch.compiler.nested_compile_region marks: torch may trace one of them for all."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")


def _plain(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(layer.lin(layer.norm(x))) * 0.5


def _views(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    heads = layer.lin(x).view(*x.shape[:-1], 2, -1).transpose(-2, -1)
    heads[..., 0].mul_(2)
    return x + heads.flatten(-2)


def _in_place(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    h = layer.lin(x)
    h += 1
    return h.mul_(2).sub_(x)


def _frozen_part(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = layer.norm(x).sigmoid()
    return layer.lin(x) * scale


def _checkpointed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: F.gelu(layer.lin(t)) + t, x, use_reentrant=False)


BODIES = [_plain, _views, _in_place, _frozen_part, _checkpointed]


class Layer(nn.Module):
    def __init__(self, body: Callable) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.body = torch.compiler.nested_compile_region(body)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


class Net(nn.Module):
    def __init__(self, body: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(body) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES)
def test_every_layer_learns(body: Callable) -> None:
    theirs = Net(body)
    ours = ORTModule(copy.deepcopy(theirs))
    for rows in (3, 3, 5):
        x = torch.randn(rows, 6, 8)
        losses = [net(x).square().mean() for net in (theirs, ours)]
        torch.testing.assert_close(losses[1], losses[0])
        for net, loss in zip((theirs, ours), losses, strict=True):
            net.zero_grad()
            loss.backward()
        for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad)
    assert ours.gradd_stats()["in_torch"] == {}
