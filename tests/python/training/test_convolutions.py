"""Networks of convolutions train in the daemon as in PyTorch: alone, in halves, at any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradd import ORTModule
from helpers.models import convolutional
from helpers.parity import steps
from helpers.parity.half_precision import WAYS, Triple
from helpers.selection import every_run

STEPS = 4
SIZES = ((5, 3), (2, 4), (6, 6))
PICTURES = ("convnext", "decoder")  # the second of another height is a capture, no further one


@pytest.mark.parametrize("kind", every_run(("flat", "convnext"), convolutional.KINDS))
@pytest.mark.fake
def test_a_network_trains_as_in_torch(shared_daemon: Any, kind: str) -> None:
    model, make = convolutional.build(kind)
    batches = [make(3, 3, seed) for seed in range(STEPS)]
    others = [make(*size, 50) for size in SIZES]
    pair = steps.run(model, batches, others, constants=int(kind in PICTURES))
    assert pair.wrapped.gradd_stats()["in_torch"] == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", every_run(("convnext",), convolutional.KINDS))
def test_a_network_trains_in_bf16(shared_daemon: Any, kind: str, way: str) -> None:
    model, make = convolutional.build(kind)
    triple = Triple(model, way)
    try:
        triple.train([make(4, 3, seed) for seed in range(STEPS)])
    finally:
        print(f"{kind} {way}: {triple.report}")


def _gradients(before_backward: Any) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model, make = convolutional.build("convnext")
    wrapped = ORTModule(model, strict=True)
    loss = wrapped(**make(3, 3, 0))[0]
    before_backward()
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in wrapped.parameters())]


def test_the_same_bits_twice_and_after_a_kill(daemon: Any) -> None:
    first = _gradients(lambda: None)
    for again in (lambda: None, daemon.kill):
        for a, b in zip(first, _gradients(again), strict=True):
            assert torch.equal(a, b)


def test_without_images(shared_daemon: Any) -> None:
    """An empty batch has results, and gradients of zero."""
    model = ORTModule(torch.nn.Conv2d(3, 4, 3, padding=1), strict=True)
    model(torch.randn(2, 3, 5, 6)).sum().backward()
    model.zero_grad()
    y = model(torch.randn(0, 3, 5, 6))
    assert y.shape == (0, 4, 5, 6)
    y.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
