"""FusedAdam(sparse_rows=True), lazy Adam: against torch.optim.SparseAdam and a reference in
PyTorch, with accumulation, clipping, tied heads, bf16, and kills of the daemon in a step."""

from __future__ import annotations

import contextlib
import copy
import logging
import subprocess
import threading

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.optim import FusedAdam

WORDS, D = 300, 24


class Words(nn.Module):
    """Tokens, positions and a head of its own or the table's."""

    def __init__(self, tied=False, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, D, padding_idx=0)
        self.places = nn.Embedding(64, D)
        self.head = nn.Linear(D, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.to(dtype)

    def forward(self, ids):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        logits = self.head(torch.tanh(h)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ids_of(seed, words=WORDS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, words, (3, 7), generator=generator)


def step_lazily(p, state, t, *, lr, eps=1e-6, betas=(0.9, 0.999), decay=0.0, scale=1.0):
    """AdamWMode.ADAMW_TRANSFORMERS on the rows that have a gradient, in double."""
    b1, b2 = betas
    m, v = state.setdefault(p, (torch.zeros_like(p.double()), torch.zeros_like(p.double())))
    rows = (p.grad != 0).flatten(1).any(1) if p.dim() > 1 else torch.ones(len(p), dtype=torch.bool)
    g = p.grad[rows].double() * scale
    m[rows] = b1 * m[rows] + (1 - b1) * g
    v[rows] = b2 * v[rows] + (1 - b2) * g * g
    rate = lr * (1 - b2**t) ** 0.5 / (1 - b1**t)
    new = p.data[rows].double() - rate * m[rows] / (v[rows].sqrt() + eps)
    p.data[rows] = (new * (1 - lr * decay)).to(p.dtype)
    return int(rows.sum())


def train_reference(net, steps, *, lr, decay=0.0, clip=None, parts=1):
    """As `train` does, in PyTorch; the words and positions are stepped by rows."""
    state: dict = {}
    by_rows = {net.words.weight, net.places.weight}
    for t in range(1, steps + 1):
        for part in range(parts):
            (net(ids_of(10 * t + part)) / parts).backward()
        norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in net.parameters()))
        scale = min(1.0, float(clip / (norm + 1e-6))) if clip else 1.0
        for p in net.parameters():
            if p in by_rows:
                step_lazily(p, state, t, lr=lr, decay=decay, scale=scale)
                continue
            m, v = state.setdefault(p, (torch.zeros_like(p.double()),) * 2)
            g = p.grad.double() * scale
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            state[p] = (m, v)
            rate = lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
            p.data = ((p.double() - rate * m / (v.sqrt() + 1e-6)) * (1 - lr * decay)).to(p.dtype)
        net.zero_grad()


def train(model, optimizer, steps, *, parts=1, start=1):
    for t in range(start, start + steps):
        for part in range(parts):
            (model(ids_of(10 * t + part)) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p.detach().float() - q.detach().float()).abs().max()) for p, q in pairs)


@pytest.mark.quick
@pytest.mark.parametrize("settings", [{}, {"parts": 3}, {"clip": 0.05}, {"decay": 0.1}])
def test_rows_with_a_gradient_are_stepped(daemon, settings):
    mine, ref = Words(), Words()
    parts, clip, decay = (settings.get(k) for k in ("parts", "clip", "decay"))
    optimizer = FusedAdam(
        mine.parameters(), lr=1e-2, sparse_rows=True, weight_decay=decay or 0.0, max_grad_norm=clip
    )
    before = mine.words.weight.detach().clone()
    train(ORTModule(mine), optimizer, 6, parts=parts or 1)
    train_reference(ref, 6, lr=1e-2, parts=parts or 1, clip=clip, decay=decay or 0.0)
    assert difference(mine, ref) < 1e-5
    used = {
        int(i) for t in range(1, 7) for k in range(parts or 1) for i in ids_of(10 * t + k).flatten()
    }
    alone = [i for i in range(WORDS) if i not in used or i == 0]
    assert len(alone) > 50 and torch.equal(mine.words.weight[alone], before[alone])
    assert not optimizer.state[mine.words.weight]["exp_avg"][alone].any()


def test_it_is_torch_sparse_adam(daemon):
    mine, ref = nn.Embedding(WORDS, D), nn.Embedding(WORDS, D, sparse=True)
    ref.load_state_dict(mine.state_dict())
    optimizer = FusedAdam(mine.parameters(), lr=1e-2, eps=1e-8, sparse_rows=True)
    reference = torch.optim.SparseAdam(ref.parameters(), lr=1e-2, eps=1e-8)
    model = ORTModule(mine)
    for seed in range(8):
        ids = ids_of(seed, 40)
        for net, o in ((model, optimizer), (ref, reference)):
            net(ids).sin().sum().backward()
            o.step()
            o.zero_grad()
    assert difference(mine, ref) < 1e-6


def test_it_is_not_adam(daemon):
    """A row that had a gradient once goes on moving with Adam."""
    nets = [nn.Embedding(WORDS, D) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    after = []
    for net, sparse in zip(nets, (False, True), strict=True):
        optimizer = FusedAdam(net.parameters(), lr=1e-2, sparse_rows=sparse)
        model = ORTModule(net)
        rows = []
        for ids in (torch.tensor([5]), torch.tensor([7])):
            model(ids).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            rows.append(net.weight[5].detach().clone())
        after.append(torch.equal(*rows))
    assert after == [False, True]


def test_of_a_tied_head_all_rows_are_stepped(daemon):
    mine, dense = Words(tied=True), Words(tied=True)
    for net, sparse in ((mine, True), (dense, False)):
        optimizer = FusedAdam(net.parameters(), lr=1e-2, weight_decay=0.1, sparse_rows=sparse)
        train(ORTModule(net), optimizer, 4)
    assert torch.equal(mine.words.weight, dense.words.weight)


@pytest.mark.parametrize("master", [False, True])
def test_bf16(daemon, master):
    nets = [Words(dtype=torch.bfloat16) for _ in range(2)]
    for net, sparse in zip(nets, (True, False), strict=True):
        optimizer = FusedAdam(net.parameters(), lr=1e-2, sparse_rows=sparse, master_weights=master)
        before = net.words.weight.detach().clone()
        train(ORTModule(net), optimizer, 1)  # one step: touched rows are those of Adam
        if sparse:
            untouched = torch.ones(WORDS, dtype=torch.bool)
            untouched[ids_of(10).flatten()] = False
            assert torch.equal(net.words.weight[untouched], before[untouched])
    assert torch.equal(nets[0].words.weight, nets[1].words.weight)


def test_groups_say_it_themselves(daemon):
    """A group's word counts more than the constructor's, for whatever has rows."""
    a, b, c = (nn.Parameter(torch.ones(4, 3)) for _ in range(3))
    d = nn.Parameter(torch.ones(4))
    groups = [
        {"params": [a, d], "sparse_rows": True},
        {"params": [b], "sparse_rows": False},
        {"params": [c]},
    ]
    optimizer = FusedAdam(groups, lr=0.1, weight_decay=0.5)
    for p in (a, b, c, d):
        p.grad = torch.zeros_like(p)
        p.grad[1] = 1
    optimizer.step()
    assert [bool((p[0] == 1).all()) for p in (a, b, c, d)] == [True, False, False, False]
    assert all(bool((p[1] != 1).all()) for p in (a, b, c, d))
    state = copy.deepcopy(optimizer.state_dict())
    assert state["param_groups"][0]["sparse_rows"] is True


def test_without_a_table_it_says_so_once(daemon, caplog):
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = FusedAdam([p], lr=0.1, weight_decay=0.5, sparse_rows=True)
    p.grad = torch.zeros_like(p)
    with caplog.at_level(logging.WARNING, logger="gradd"):
        optimizer.step()
        optimizer.step()
    assert caplog.text.count("none of the parameters is the weight of an nn.Embedding") == 1
    assert bool((p != 1).all())


def test_a_copied_optimizer_keeps_it(daemon):
    optimizer = FusedAdam([nn.Parameter(torch.ones(4, 3))], sparse_rows=True)
    assert copy.deepcopy(optimizer).sparse_rows


def test_daemon_killed_during_steps(daemon):
    """Big enough that a kill lands inside of a step; every one must be finished, none twice."""

    def parameter():
        return nn.Parameter(torch.linspace(-1, 1, 3_000_000).reshape(-1, 50))

    p, q = parameter(), parameter()
    grad = torch.linspace(1, -1, 3_000_000).reshape(-1, 50).clone()
    grad[::3] = 0
    grad[20_000:30_000] = 0
    optimizers = []
    for x in (q, p):
        x.grad = grad.clone()
        group = {"params": [x], "sparse_rows": True}
        optimizers.append(FusedAdam([group], lr=1e-2, max_grad_norm=1.0))
    for _ in range(20):
        optimizers[0].step()
    done, killed = threading.Event(), threading.Event()

    def killer():
        for wait in (0.1, 0.25, 0.15, 0.3, 0.2):
            if done.wait(wait):
                return
            with contextlib.suppress(subprocess.CalledProcessError):
                daemon.kill()
                killed.set()

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        for i in range(20):
            optimizers[1].step()
            if i == 9:
                killed.wait(60)
    finally:
        done.set()
        thread.join()
    assert torch.equal(p, q)
    assert optimizers[1]._client.recoveries > 0
    untouched = torch.linspace(-1, 1, 3_000_000).reshape(-1, 50)[20_000:30_000]
    assert torch.equal(p[20_000:30_000], untouched)
