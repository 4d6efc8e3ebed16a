"""Stochastic depth (DropPath) in the ways that libraries write it, and training with dropout.

A whole sample skips a residual branch with probability p; the rest is scaled by 1 / (1 - p). torch
draws it with bernoulli_, with rand and floor, or by comparing; all must come from the seed of the
forward, one draw for both passes, another for every layer and call.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from helpers import sessions
from helpers.nets import batch

pytestmark = [pytest.mark.one_in(4), pytest.mark.usefixtures("shared_daemon")]

SIGMAS = 5.0  # of a binomial count: a right implementation leaves them once in 1.7 million
KEEP = 0.7
WAYS = ["timm", "torchvision", "transformers", "bernoulli", "rand_like"]


def skip_factor(way: str, z: torch.Tensor) -> torch.Tensor:
    """One factor per sample: 0, or 1 / KEEP."""
    shape = (z.shape[0],) + (1,) * (z.ndim - 1)
    if way == "timm":
        return z.new_empty(shape).bernoulli_(KEEP).div_(KEEP)
    if way == "torchvision":
        noise = torch.empty(shape, dtype=z.dtype, device=z.device)
        return noise.bernoulli_(KEEP).div_(KEEP)
    if way == "transformers":
        return (KEEP + torch.rand(shape, dtype=z.dtype, device=z.device)).floor_() / KEEP
    if way == "bernoulli":
        return torch.bernoulli(torch.full(shape, KEEP)) / KEEP
    return (torch.rand_like(z[..., :1]) < KEEP).to(z.dtype) / KEEP


class Block(nn.Module):
    """x + DropPath(layer(norm(x))), as in ViT and ConvNeXt."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, width)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.layer(F.gelu(self.norm(x)))
        return x + (z * skip_factor(self.way, z) if self.training else z)


class Tower(nn.Module):
    """Two blocks; gives the inside as well, from which the draws can be read."""

    def __init__(self, way: str, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = Block(width, way), Block(width, way)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = self.one(x)
        return middle, self.two(middle)


def tower(way: str) -> tuple[ORTModule, Tower]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Tower(way).train()
    return ORTModule(net, strict=True), net


def kept(block: Block, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Which samples took the branch; the branch itself must be whole, and scaled."""
    with torch.no_grad():
        branch = block.layer(F.gelu(block.norm(before)))
    change = (after - before).detach()
    took = change.abs().amax(-1) > 0
    torch.testing.assert_close(change, branch * took[:, None] / KEEP, rtol=1e-4, atol=1e-5)
    return took


def is_binomial(count: int, n: int, p: float) -> bool:
    return abs(count - n * p) <= SIGMAS * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize("way", WAYS)
def test_rate_scale_and_independence(way: str) -> None:
    model, net = tower(way)
    torch.manual_seed(4)
    x, n = torch.randn(1500, 8), 1500
    draws = []
    for _ in range(2):
        middle, last = model(x)
        draws += [kept(net.one, x, middle), kept(net.two, middle.detach(), last)]
    for took in draws:
        assert is_binomial(int(took.sum()), n, KEEP)
    same = KEEP * KEEP + (1 - KEEP) * (1 - KEEP)
    for i, a in enumerate(draws):  # blocks of a call, and calls of a block
        for b in draws[:i]:
            assert is_binomial(int((a == b).sum()), n, same)
    torch.manual_seed(4)
    torch.randn(1500, 8)
    again = model(x)[0]
    assert torch.equal(kept(net.one, x, again), draws[0])
    model.eval()
    torch.testing.assert_close(model(x)[1], net.eval()(x)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_backward_has_the_draw_of_forward(way: str) -> None:
    model, net = tower(way)
    torch.manual_seed(6)
    x = torch.randn(40, 8)
    middle, last = model(x)
    last.square().sum().backward()
    took = [kept(net.one, x, middle), kept(net.two, middle.detach(), last)]
    want = Tower(way)
    want.load_state_dict(net.state_dict())
    value = x
    for block, mask in zip((want.one, want.two), took, strict=True):
        branch = block.layer(F.gelu(block.norm(value)))
        value = value + branch * mask[:, None] / KEEP
    value.square().sum().backward()
    for (name, a), b in zip(net.named_parameters(), want.parameters(), strict=True):
        scale = float(b.grad.abs().max())
        assert (a.grad - b.grad).abs().max() <= 1e-4 * scale + 1e-6, name


@pytest.mark.parametrize("way", ["timm", "transformers"])
def test_a_killed_daemon_draws_again_what_it_drew(way: str, shared_daemon: Any) -> None:
    results = []
    for kill in (False, True):
        model, _ = tower(way)
        torch.manual_seed(8)
        x = torch.randn(30, 8)
        last = model(x)[1]
        if kill:
            shared_daemon.kill()
        last.square().sum().backward()
        results.append([last.detach().clone(), *[p.grad.clone() for p in model.parameters()]])
    assert sessions.session().recoveries >= 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 4)
        self.tower = Tower("timm", 64)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tower(self.drop(self.first(x)))[1]
        return F.cross_entropy(self.last(hidden), y)


def train(seed: int, ours: bool) -> float:
    """Loss without dropout after a hundred steps on two hundred samples."""
    torch.manual_seed(seed)
    net = Classifier()
    model = ORTModule(net, strict=True) if ours else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    x, y = batch(200, seed=1)
    for step in range(100):
        part = slice(step % 4 * 50, step % 4 * 50 + 50)
        optimizer.zero_grad()
        model(x[part], y[part]).backward()
        optimizer.step()
    with torch.no_grad():
        return float(net.eval()(x, y))


@pytest.mark.nightly  # hundreds of steps
def test_training_converges_as_in_torch() -> None:
    ours, theirs = ([train(seed, side) for seed in range(4)] for side in (True, False))
    mean, want = sum(ours) / 4, sum(theirs) / 4
    spread = max(max(theirs) - min(theirs), 0.05)
    assert mean < 1.2, f"losses {ours}: a guess costs 1.39"
    assert abs(mean - want) <= 2 * spread, f"ours {ours}, torch {theirs}"


def alpha(x: torch.Tensor) -> torch.Tensor:
    return F.alpha_dropout(x, 0.3, True)


def channels(x: torch.Tensor) -> torch.Tensor:
    return F.dropout1d(x[None], 0.3)[0]


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x) + torch.rand(x.shape) + torch.empty_like(x).normal_(1.0, 2.0)


def sampled(x: torch.Tensor) -> torch.Tensor:
    return x * torch.bernoulli(torch.sigmoid(x))


def gumbel(x: torch.Tensor) -> torch.Tensor:
    return F.gumbel_softmax(x, tau=0.7)


def chosen(x: torch.Tensor) -> torch.Tensor:
    return F.gumbel_softmax(x, hard=True)


def waiting(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).exponential_(2.0) + torch.empty_like(x).log_normal_(0.1, 0.2)


def trials(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty_like(x).geometric_(0.3) + torch.normal(1.0, 2.0, (400, 8))


def numbers(x: torch.Tensor) -> torch.Tensor:
    ours = (
        torch.randint(7, (8,)) + torch.randint(2, 9, (8,)) + torch.randint(low=1, high=5, size=(8,))
    )
    return x * ours + torch.randint_like(x, 4) + torch.randint_like(x, 3, 8)


class Noisy(nn.Module):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.draw(self.layer(x))


DRAWS = [alpha, channels, noise, sampled, gumbel, chosen, waiting, trials, numbers]


@pytest.mark.parametrize("draw", DRAWS)
def test_other_draws_pass_the_self_check_and_have_torchs_moments(draw: Any) -> None:
    """Mean and deviation over many draws, at five standard errors."""
    torch.manual_seed(12)
    net = Noisy(draw)
    model = ORTModule(net, strict=True)
    x = torch.randn(400, 8)
    model(x).square().mean().backward()
    assert model.gradd_stats()["self_checks"] == 1
    with torch.no_grad():
        ours, theirs = (torch.stack([m(x) for _ in range(20)]) for m in (model, net))
    assert not torch.equal(ours[0], ours[1])
    for a, b in ((ours, theirs), ((ours - ours.mean()) ** 2, (theirs - theirs.mean()) ** 2)):
        a, b = a.mean((1, 2)), b.mean((1, 2))  # calls are independent of each other
        error = math.sqrt(float(a.var() + b.var()) / 20)
        assert abs(float(a.mean() - b.mean())) <= SIGMAS * error
    assert model.gradd_stats()["fallbacks"] == {}
