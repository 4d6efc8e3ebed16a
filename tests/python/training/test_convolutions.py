"""Networks of convolutions train in the daemon as in PyTorch: alone, in halves, at any size."""

from __future__ import annotations

import logging
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
# The second of another height is a capture, no further one.
PICTURES = ("convnext", "mobile", "decoder")


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


def test_groups_by_the_size_of_the_batch_are_cut_out_by_name(caplog, shared_daemon) -> None:
    """Filters of their own for each sample, as in StyleGAN2."""

    class Dynamic(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.last = torch.nn.Linear(4, 4 * 4 * 3), torch.nn.Conv1d(4, 2, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, filters = x.shape[0], self.make(x.mean(-1)).reshape(-1, 4, 3)
            y = torch.nn.functional.conv1d(x.reshape(1, -1, x.shape[-1]), filters, groups=rows)
            return self.last(y.reshape(rows, 4, -1))

    torch.manual_seed(0)
    ours, theirs = Dynamic(), Dynamic()
    theirs.load_state_dict(ours.state_dict())
    wrapped = ORTModule(ours)
    with caplog.at_level(logging.WARNING, "gradd"):
        for rows in (3, 5):
            x = torch.randn(rows, 4, 8)
            for model in (wrapped, theirs):
                model.zero_grad()
                model(x).square().sum().backward()
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    said = " ".join(caplog.messages)
    assert "groups has to be a constant, and is a number that changes" in said
