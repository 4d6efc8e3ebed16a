"""nn.Embedding(sparse=True): `.grad` is sparse and equal to torch's when that is coalesced."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradd import ORTModule, errors
from gradd.optim import FusedAdam
from helpers.selection import quick_or_slow

WORDS, D = 50, 6


class Bag(nn.Module):
    """One table, looked up in one of several ways."""

    def __init__(self, how="plain", dtype=torch.float32, padding=None):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, D, sparse=True, padding_idx=padding)
        self.head = nn.Linear(D, WORDS)
        self.register_buffer("calls", torch.zeros(()))
        if how == "tied":
            self.head.weight = self.words.weight
        self.how = how
        self.to(dtype)

    def forward(self, ids):
        h = self.words(ids)
        if self.how == "twice":
            h = h * torch.sigmoid(self.words((ids * 7 + 3) % WORDS))
        if self.how == "functional":
            h = h + nn.functional.embedding(ids.flip(1), self.words.weight, sparse=True)
        if self.how == "mixed":  # a dense reader beside the sparse one
            h = h + nn.functional.embedding(ids.flip(1), self.words.weight)
        if self.how == "buffers":
            self.calls.add_(1)
        logits = self.head(torch.tanh(h))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten().long())
        return {"loss": loss, "logits": logits}


def ids_of(seed=0, dtype=torch.int64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 20, (3, 5), generator=generator).to(dtype)


def pair(*args, **kwargs):
    ref = Bag(*args, **kwargs)
    net = copy.deepcopy(ref)
    return ref, net, ORTModule(net, strict=True)


def assert_same_gradient(got, want, tol=1e-5):
    assert got.layout == want.layout
    if want.is_sparse:
        got, want = got.coalesce(), want.coalesce()
        assert torch.equal(got.indices(), want.indices())
        got, want = got.values(), want.values()
    torch.testing.assert_close(got.float(), want.float(), rtol=tol, atol=tol)


@pytest.mark.parametrize(
    "how", quick_or_slow({"plain"}, ["plain", "twice", "functional", "buffers"])
)
@pytest.mark.parametrize("padding", [None, 3])
def test_indices_and_values_are_torchs(daemon, how, padding):
    ref, net, model = pair(how, padding=padding)
    for seed in range(2):
        ids = ids_of(seed)
        model(ids)["loss"].backward()
        ref(ids)["loss"].backward()
        grad = net.words.weight.grad
        if not seed:  # AccumulateGrad leaves the flag out
            assert torch.equal(grad._indices(), grad.coalesce().indices())
        assert_same_gradient(grad, ref.words.weight.grad)
        assert_same_gradient(net.head.weight.grad, ref.head.weight.grad)


@pytest.mark.parametrize("how", ["tied", "mixed"])
def test_beside_a_dense_reader_it_is_dense(daemon, how):
    ref, net, model = pair(how)
    ids = ids_of()
    model(ids)["loss"].backward()
    ref(ids)["loss"].backward()
    assert not net.words.weight.grad.is_sparse
    assert_same_gradient(net.words.weight.grad, ref.words.weight.grad)


def test_int32_and_bf16(daemon):
    ref, net, model = pair(dtype=torch.bfloat16)
    ids = ids_of(dtype=torch.int32)
    model(ids)["loss"].backward()
    ref(ids)["loss"].backward()
    assert net.words.weight.grad.dtype is torch.bfloat16
    assert_same_gradient(net.words.weight.grad, ref.words.weight.grad, 2e-2)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_optimizers_for_sparse_gradients(daemon, optimizer):
    ref, net, model = pair(padding=0)
    steps = [optimizer([n.words.weight], lr=0.1) for n in (net, ref)]
    for seed in range(8):
        ids = ids_of(seed)
        for call, step in zip((model, ref), steps, strict=True):
            call(ids)["loss"].backward()
            step.step()
            step.zero_grad()
    torch.testing.assert_close(net.words.weight, ref.words.weight, rtol=1e-5, atol=1e-5)


def test_fused_adam_says_that_it_takes_dense_ones(daemon):
    _, net, model = pair()
    model(ids_of())["loss"].backward()
    with pytest.raises(errors.TensorError, match="sparse_coo.*it takes dense"):
        FusedAdam(net.parameters()).step()


def test_autograd_grad_and_retain_graph(daemon):
    ref, net, model = pair()
    got, want = [], []
    for call, n, found in ((model, net, got), (ref, ref, want)):
        loss = call(ids_of())["loss"]
        for keep in (True, False):
            found += torch.autograd.grad(loss, [n.words.weight], retain_graph=keep)
    for a, b in zip(got, want, strict=True):
        assert a.is_coalesced()
        assert_same_gradient(a, b)


def test_a_loss_of_the_users(daemon):
    """From logits that the loss alone would have left out."""
    ref, net, model = pair()
    for call in (model, ref):
        call(ids_of())["logits"].float().sin().sum().backward()
    assert_same_gradient(net.words.weight.grad, ref.words.weight.grad)


def test_two_forwards_before_the_backwards(daemon):
    ref, net, model = pair()
    for call in (model, ref):
        losses = [call(ids_of(seed))["loss"] for seed in (1, 2)]
        losses[0].backward()
        losses[1].backward()
    assert_same_gradient(net.words.weight.grad, ref.words.weight.grad)


def test_frozen_and_without_gradients(daemon):
    _, net, model = pair()
    net.words.weight.requires_grad_(False)
    model(ids_of())["loss"].backward()
    assert net.words.weight.grad is None and net.head.weight.grad is not None
    with torch.no_grad():
        assert torch.isfinite(model(ids_of())["loss"])


def test_a_kill_between_forward_and_backward(daemon):
    ref, net, model = pair()
    loss = model(ids_of())["loss"]
    daemon.kill()
    loss.backward()
    ref(ids_of())["loss"].backward()
    assert_same_gradient(net.words.weight.grad, ref.words.weight.grad)


def test_lengths_of_other_calls(daemon):
    ref, net, model = pair()
    for size in (1, 4, 9):
        ids = torch.arange(2 * size).reshape(2, size) % 11
        for call in (model, ref):
            call(ids)["loss"].backward()
        assert_same_gradient(net.words.weight.grad, ref.words.weight.grad)
    assert model.gradd_stats()["forwards"] >= 3


def test_what_is_no_parameter_is_named(daemon):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Parameter(torch.randn(WORDS, D))

        def forward(self, ids):
            return nn.functional.embedding(ids, self.words * 2, sparse=True).sum()

    model = ORTModule(Scaled(), strict=True)
    with pytest.raises(Exception, match="sparse=True. of a weight that is no parameter"):
        model(ids_of())
