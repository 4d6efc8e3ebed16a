"""Batch normalisation: results, gradients, running statistics and counters of PyTorch."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.dynamo import cumulative_norms

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


class Net(nn.Module):
    """Two norms of channels behind products, of rank 2 and more."""

    def __init__(self, norm: int = 1, **options) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.other = NORMS[norm](8, **options), NORMS[norm](8, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norm(self.first(x).movedim(-1, 1)))
        return self.other(self.second(h.movedim(1, -1)).movedim(-1, 1))


def _loss(result: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(float(result.numel())).reshape(result.shape) % 5 - 1
    return (result.float() * weights).square().sum() / 100


def _same(ours: nn.Module, theirs: nn.Module, **tolerance) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, msg=lambda t, n=name: f"{n}: {t}", **tolerance
            )
    for (name, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        tight = {} if tolerance else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(p, q, msg=lambda t, n=name: f"{n}: {t}", **(tight or tolerance))


def _pair(net: nn.Module, **options) -> tuple[nn.Module, ORTModule, nn.Module]:
    theirs = copy.deepcopy(net)
    return net, ORTModule(net, strict=True, **options), theirs


@pytest.mark.parametrize(
    ("norm", "sizes", "options"),
    [
        (1, (5,), {}),
        (1, (3, 7), {"momentum": 0.3, "eps": 1e-2}),
        (2, (3, 4, 5), {}),
        (3, (2, 2, 3, 2), {"affine": False}),
        (2, (3, 4, 5), {"track_running_stats": False}),
    ],
)
def test_training_and_evaluation(norm, sizes, options, shared_daemon):
    torch.manual_seed(0)
    ours, wrapped, theirs = _pair(Net(norm, **options))
    for training in (True, True, False, True):
        for net in (wrapped, theirs):
            net.train(training)
        x = torch.randn(*sizes, 6) + 1
        results = wrapped(x), theirs(x)
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        for result in results:
            _loss(result).backward()
        _same(ours, theirs, rtol=1e-4, atol=1e-4)
    assert wrapped.gradd_stats()["in_torch"] == {}


@pytest.mark.parametrize("how", ["doubles", "bf16", "f16", "autocast"])
def test_types(how, shared_daemon):
    torch.manual_seed(0)
    dtype = {"doubles": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
    ours, wrapped, theirs = _pair(Net(2).to(dtype.get(how, torch.float32)))
    near = {"rtol": 3e-2, "atol": 6e-2}
    if how == "doubles":
        near = {"rtol": 1e-10, "atol": 1e-10}
    cast = torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext()
    for training in (True, False, True):
        for net in (wrapped, theirs):
            net.train(training)
        x = torch.randn(3, 4, 5, 6).to(dtype.get(how, torch.float32))
        with cast:
            results = wrapped(x), theirs(x)
        assert results[0].dtype is results[1].dtype
        torch.testing.assert_close(*results, **near)
        for p, q in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(p, q, **near)
        for net, result in zip((ours, theirs), results, strict=True):
            net.zero_grad()
            result.float().square().mean().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **near)


def _steps(ours, wrapped, theirs, count: int, between=lambda step: None) -> None:
    optimizers = [torch.optim.SGD(net.parameters(), 0.01) for net in (ours, theirs)]
    for step in range(count):
        between(step)
        x = torch.randn(5, 6) * 2 + 1
        for net in (wrapped, theirs):
            _loss(net(x)).backward()
        if step % 2:  # gradients of two batches
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    _same_statistics(ours, theirs)


def _same_statistics(ours, theirs) -> None:
    for (name, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


def test_statistics_after_twenty_steps(shared_daemon):
    """With gradients of two batches each, evaluations between, and a norm that is frozen."""
    torch.manual_seed(0)
    ours, wrapped, theirs = _pair(Net())

    def between(step: int) -> None:
        if step % 5 == 4:
            for net in (wrapped, theirs):
                net.eval()
                with torch.no_grad():
                    net(torch.ones(3, 6))
                net.train()
        if step >= 10:
            for net in (ours, theirs):
                net.other.eval()

    _steps(ours, wrapped, theirs, 20, between)
    counts = ours.norm.num_batches_tracked, ours.other.num_batches_tracked
    assert [int(n) for n in counts] == [20, 10]


def test_what_is_recomputed_moves_no_statistic_twice(shared_daemon):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()]
    deep = nn.Sequential(*[copy.deepcopy(layer) for _ in range(4) for layer in layers])
    ours, wrapped, theirs = _pair(deep, memory_budget=60000)
    for _ in range(3):
        x = torch.randn(400, 6)
        results = wrapped(x), theirs(x)
        for result in results:
            _loss(result).backward()
        _same_statistics(ours, theirs)
    _same(ours, theirs, rtol=1e-4, atol=1e-4)
    assert wrapped.gradd_explain().recomputed_bytes > 0


def test_a_killed_daemon_moves_no_statistic_twice(daemon):
    torch.manual_seed(0)
    ours, wrapped, theirs = _pair(Net())
    for step in range(4):
        x = torch.randn(5, 6)
        results = [net(x) for net in (wrapped, theirs)]
        if step == 2:
            daemon.kill()
        for result in results:
            _loss(result).backward()
        _same_statistics(ours, theirs)
        if step == 1:
            daemon.kill()
    _same(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_empty_batch_moves_no_statistic(shared_daemon):
    ours, wrapped, theirs = _pair(Net())
    for rows in (4, 0):
        x = torch.randn(rows, 6)
        for net in (wrapped, theirs):
            net(x).sum().backward()
    _same(ours, theirs)
    assert int(ours.norm.num_batches_tracked) == 2


def test_one_value_for_each_channel_is_torchs_error(shared_daemon):
    wrapped = ORTModule(Net(), strict=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        wrapped(torch.randn(1, 6))


def test_infinities_and_nan_spread_within_their_channel(shared_daemon):
    ours, wrapped, theirs = _pair(nn.BatchNorm1d(4))
    x = torch.randn(5, 4)
    x[0, 1], x[2, 3] = float("inf"), float("nan")
    torch.testing.assert_close(wrapped(x), theirs(x), equal_nan=True)
    del ours


def test_a_synchronised_norm_of_one_process_is_a_batch_norm(shared_daemon):
    ours, wrapped, theirs = _pair(nn.SyncBatchNorm.convert_sync_batchnorm(Net()))
    for training in (True, False):
        for net in (wrapped, theirs):
            net.train(training)
        x = torch.randn(5, 6)
        torch.testing.assert_close(wrapped(x), theirs(x))
    _same_statistics(ours, theirs)
    assert wrapped.gradd_stats()["in_torch"] == {}


class Chunked(nn.Module):
    """A norm of parts of a batch, which share its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.norm(part) for part in x.chunk(3)]))


def test_parts_of_a_batch(shared_daemon) -> None:
    torch.manual_seed(0)
    net, ours, theirs = _pair(Chunked())
    for rows in (9, 12, 8):
        x = torch.randn(rows, 6)
        for model in (ours, theirs):
            model.zero_grad()
            _loss(model(x)).backward()
        _same(net, theirs)


def test_means_over_all_batches(shared_daemon) -> None:
    """momentum=None, in some of the norms, and for a while: update_bn() makes all of them such."""
    torch.manual_seed(0)
    ours, wrapped, theirs = _pair(Net(momentum=None))
    ours.other.momentum = theirs.other.momentum = 0.2
    _steps(ours, wrapped, theirs, 4)
    batches = [torch.randn(rows, 6) + rows for rows in (5, 3, 7)]
    for net in (wrapped, theirs):
        torch.optim.swa_utils.update_bn(batches, net)
    _same_statistics(ours, theirs)
    assert [int(norm.num_batches_tracked) for norm in (ours.norm, ours.other)] == [3, 3]
    _steps(ours, wrapped, theirs, 2)
    for net in (wrapped, theirs):
        net.eval()
    torch.testing.assert_close(wrapped(batches[0]), theirs(batches[0]), rtol=1e-5, atol=1e-5)
    assert wrapped.gradd_stats()["in_torch"] == {}
    assert "forward" not in vars(ours.norm)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
def test_means_over_all_batches_of_other_norms(options, shared_daemon) -> None:
    ours, wrapped, theirs = _pair(Net(2, momentum=None, **options).double())
    for rows in (3, 0, 2):
        x = torch.randn(rows, 4, 5, 6, dtype=torch.float64)
        results = wrapped(x), theirs(x)
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
        for result in results:
            _loss(result).backward()
    _same(ours, theirs, rtol=1e-4, atol=1e-4)
    assert wrapped.gradd_stats()["in_torch"] == {}


def test_a_norm_has_its_own_forward_again_behind_calls_within_calls() -> None:
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=None))
    norms = cumulative_norms.Norms(net)
    with norms:
        with norms:
            assert "forward" in vars(net[0])
        assert "forward" in vars(net[0])
    assert "forward" not in vars(net[0])
