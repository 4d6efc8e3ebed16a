"""Writes in place: their values and gradients are PyTorch's, without taking the program apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradd import ORTModule


class Written(nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("queue", torch.linspace(-1, 1, 64).view(8, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def whole(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x)
    h += x
    before = h.sum()
    h.mul_(2)
    return h.sum(-1) * before


def part(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x).clone()
    h[1:] = x[:-1]
    h[:, 0] = 3.0
    h[..., -2:, 1::2].sub_(x[..., -2:, ::2])
    return (h * h).sum()


def earlier_views(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x) * 1
    left, column, right = h[:, :4], h[:, 1], h[:, 4:]
    kept = left.clone()
    h[:, 1:3] *= 2
    right.add_(1)
    return left.exp().sum() + column.sum() + h.prod(-1) + kept.sum()


def turned(s: Written, x: Tensor) -> Tensor:
    h = F.relu(s.layer(x), inplace=True) * 1
    h.t()[0] = 1
    total = h.sum()
    h.unsqueeze(1).transpose(0, 2).mul_(3)
    return h * h + total


def fresh_memory(s: Written, x: Tensor) -> Tensor:
    out = torch.empty(x.shape[0], 8)
    out[:] = s.layer(x)
    out[0].fill_(2.0)
    out[-1].zero_()
    out.masked_fill_(x > 1, 0.5).scatter_(1, (x > 0).long() * 3, x)
    return out.sigmoid_()


def other_types(s: Written, x: Tensor) -> Tensor:
    mask = x > 0
    mask &= x < 1
    mask |= x > 1.5
    places = torch.arange(x.shape[0])
    places *= 2
    places += (x[:, 0] > 0).long()
    rows = places.float()
    rows[places > 2] = 0
    rows.add_(x[:, 0].double())
    return s.layer(x).masked_fill(mask, 0) * rows[:, None]


def without_history(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x)
    with torch.no_grad():
        h[:, :2] = 0
    h = h * 1
    h.clamp_(min=0.1)
    before = h.detach()
    h.add_(1)
    return h * before


def of_another_view(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x) * 1
    h[1:].add_(h[:-1].clone())
    h[:, 2] = h[:, 3]
    return h


def other_shapes(s: Written, x: Tensor) -> Tensor:
    h = (s.layer(x) * 1).contiguous()
    h.view(-1, 2, 4)[:, 1].mul_(3)
    h.flatten()[1::3] = 0.5
    h.unflatten(1, (4, 2)).permute(2, 0, 1)[0].add_(1)
    h[None].squeeze(0).squeeze().sub_(x)
    h.view(h.shape[0] * 2, 4)[:, 1:].exp_()
    return h * h


def counts(s: Written, x: Tensor) -> Tensor:
    s.seen += x.shape[0]
    h = s.layer(x)
    h += s.seen
    return h


def averages(s: Written, x: Tensor) -> Tensor:
    s.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    first = s.average * 2
    with torch.no_grad():
        s.average[2:4] = s.layer(x)[0, :2]
        s.seen.copy_(s.average.sum())
    return s.layer(x) * s.average + first


def queues(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x)
    s.queue[: x.shape[0]] = h.detach()
    similar = h @ s.queue.clone().t()
    s.queue.copy_(s.queue.roll(x.shape[0], 0))
    return similar


def normalised(s: Written, x: Tensor) -> Tensor:
    h = F.relu_(s.norm(s.layer(x)))
    h = s.norm(h) * s.norm.running_mean.clone()
    h.add_(s.norm.num_batches_tracked)
    with torch.no_grad():
        normed = s.norm(x)
    return h + normed


def normalised_otherwise(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x)
    given = s.norm.running_mean, s.norm.running_var
    h = F.batch_norm(h * x, *given, training=True, momentum=1.0)
    return F.batch_norm(h, *given, s.norm.weight) + F.batch_norm(h * x, None, None, training=True)


def norms_of_instances(s: Written, x: Tensor) -> Tensor:
    h = s.norm(s.layer(x))
    inner = F.instance_norm(h[:, :, None] + x[:, None], s.average, s.queue[0])
    return h + inner.sum(-1) * 0.1


def norms_without_statistics(s: Written, x: Tensor) -> Tensor:
    s.seen += 1
    h = F.relu_(s.norm(s.layer(x)))
    return h + F.instance_norm(h[:, :, None] + x[:, None]).sum(-1) * s.norm.running_mean


def norms_and_draws(s: Written, x: Tensor) -> Tensor:
    h = s.norm(s.layer(x))
    s.seen += h.detach().mean()
    return h + torch.empty_like(x).bernoulli_(1.0)


def draws(s: Written, x: Tensor) -> Tensor:
    h = s.layer(x)
    kept = x.new_empty(len(x), 1).bernoulli_(1.0)
    h[1:].normal_(2.0, 0.0)
    s.seen.uniform_(3.0, 3.0)
    return h * kept * torch.empty_like(x).bernoulli_(torch.ones_like(x)) + s.seen


ALONE = {f.__name__: f for f in (
    whole, part, earlier_views, turned, fresh_memory, other_types, without_history, of_another_view,
    other_shapes, counts, averages, queues, normalised, normalised_otherwise,
    norms_of_instances, norms_without_statistics, norms_and_draws, draws
)}  # fmt: skip


def diagonal(s: Written, x: Tensor) -> Tensor:
    h = (s.layer(x).t() @ x).clone()
    h.fill_diagonal_(1.0)
    return h


def views_of_several(s: Written, x: Tensor) -> Tensor:
    a, b = s.layer(x) * 1, x[:1] * 2
    one, other = torch.broadcast_tensors(a, b)
    a.add_(1)
    b.mul_(3)
    return one + other


def statistics_of_the_call(s: Written, x: Tensor) -> Tensor:
    mean, spread = s.average * 1, s.average + 1
    h = F.batch_norm(s.layer(x), mean, spread, training=True)
    return h + mean + spread


WITH_TORCH = {f.__name__: f for f in (
    diagonal, views_of_several, statistics_of_the_call
)}  # fmt: skip


@pytest.mark.parametrize("name", [*ALONE, *WITH_TORCH])
def test_writes_are_those_of_pytorch(
    shared_daemon: object, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    apart = []
    inner = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda *args, **kwargs: (apart.append(name), inner(*args, **kwargs))[1],
    )
    torch.manual_seed(0)
    eager = Written((ALONE | WITH_TORCH)[name])
    ours = Written(eager.function)
    ours.load_state_dict(eager.state_dict())
    model = ORTModule(ours)
    for rows in (4, 6):
        x = torch.randn(rows, 8)
        results = []
        for module in (model, eager):
            module.zero_grad()
            y = module(x)
            (y * torch.linspace(1, 2, y.numel()).view_as(y)).sum().backward()
            results.append((y, [p.grad for p in module.parameters()], [*module.buffers()]))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert model.gradd_stats()["fallbacks"] == {}
    assert bool(apart) == (name in WITH_TORCH)
