"""Heads whose loss forms gradients in the forward: values beside PyTorch, and their slots."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from helpers import sessions
from helpers.nets import assert_close

pytestmark = [pytest.mark.one_in(4), pytest.mark.fake]
V, K = 2503, 16  # logits of a batch below have 256 KiB: with less they are made as a whole


@pytest.fixture(autouse=True)
def _all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that leaves out rows has too few of them here for a second chunk."""
    monkeypatch.setenv("GRADD_LIVE_ROWS", "0")


class Tiny(nn.Module):
    """A language model of one layer, with the variants of heads and losses of models."""

    def __init__(
        self, tied: bool = False, bias: bool = False, cap: float = 0.0, weighted: bool = False
    ) -> None:
        super().__init__()
        self.cap = cap
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(V, K)
            self.inner = nn.Linear(K, K)
            self.head = nn.Linear(K, V, bias=bias)
        self.register_buffer("classes", torch.linspace(0, 2, V) if weighted else None)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, num_items: Any = None, smoothing: float = 0.0
    ) -> torch.Tensor:
        logits = self.head(torch.tanh(self.inner(self.embed(ids))))
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        rows, flat = logits.float().view(-1, V), labels.reshape(-1)
        if num_items is not None:
            known = {"ignore_index": -100, "weight": self.classes, "reduction": "sum"}
            return F.cross_entropy(rows, flat, **known) / num_items
        known = {"ignore_index": -100, "weight": self.classes, "label_smoothing": smoothing}
        return F.cross_entropy(rows, flat, **known)


def batch(rows: int = 3, length: int = 33, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (rows, length), generator=generator)
    labels = ids.masked_fill(torch.rand((rows, length), generator=generator) < 0.4, -100)
    labels[0, -1] = 5
    return ids, labels


def pair(**kinds: Any) -> tuple[ORTModule, nn.Module]:
    """A wrapped model and one for PyTorch."""
    net = Tiny(**kinds)
    return ORTModule(net, strict=True), copy.deepcopy(net)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(a: nn.Module, b: nn.Module) -> None:
    """Equal up to rounding, each relative to its largest entry."""
    left, right = gradients(a), gradients(b)
    assert left.keys() == right.keys()
    for name, want in right.items():
        scale = want.abs().max().clamp(min=1e-8)
        torch.testing.assert_close(left[name] / scale, want / scale, rtol=0, atol=1e-5, msg=name)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def chunked(model: ORTModule) -> bool:
    return "LinearCrossEntropy" in model.gradd_explain().counts()


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "tied": ({"tied": True}, {}),
    "bias": ({"bias": True}, {}),
    "cap": ({"cap": 3.0}, {}),
    "smoothing": ({}, {"smoothing": 0.1}),
    "items": ({"tied": True}, {"num_items": torch.tensor(11)}),
    "weights": ({"weighted": True, "cap": 3.0}, {}),
    "smoothed weights": ({"weighted": True, "bias": True}, {"smoothing": 0.1}),
    "weights and items": ({"weighted": True}, {"num_items": torch.tensor(11)}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", [1.0, -0.3])
def test_beside_pytorch(daemon: object, kind: str, factor: float) -> None:
    model, expected = pair(**KINDS[kind][0])
    for seed in range(2):
        for one in (model, expected):
            one.zero_grad()
            loss = one(*batch(seed=seed), **KINDS[kind][1])
            (loss * factor).backward()
        assert_close(model(*batch(seed=seed), **KINDS[kind][1]), loss)
        same_gradients(model, expected)
    assert chunked(model)


@pytest.mark.parametrize("frozen", ["head", "trunk"])
def test_frozen(daemon: object, frozen: str) -> None:
    model, expected = pair(bias=True)
    for one in (model, expected):
        for name, p in one.named_parameters():
            p.requires_grad_(name.startswith("head") != (frozen == "head"))
        one(*batch()).backward()
    same_gradients(model, expected)
    assert chunked(model)


@pytest.mark.parametrize("rows", [3, 4])
def test_nothing_labelled_and_one_label(daemon: object, rows: int) -> None:
    model, expected = pair()
    ids = batch(rows)[0]
    for one in (model, expected):
        loss = one(ids, torch.full_like(ids, -100))
        assert loss.isnan()
        loss.backward()
    zero = {n for n, g in gradients(expected).items() if not g.any()}
    assert {n for n, g in gradients(model).items() if not g.any()} == zero
    for one in (model, expected):
        one.zero_grad()
        labels = torch.full_like(ids, -100)
        labels[0, 1] = 7
        one(ids, labels).backward()
    same_gradients(model, expected)
    assert chunked(model)


def test_bf16(daemon: object) -> None:
    model, expected = pair(tied=True)
    exact = copy.deepcopy(expected).double()
    for one in (model, expected):
        one.bfloat16()
    for one in (model, expected, exact):
        one(*batch(8, 30)).backward()
    left, right, want = gradients(model), gradients(expected), gradients(exact)
    for name, grad in want.items():
        ours, torchs = ((g[name].double() - grad).norm() for g in (left, right))
        assert ours < 1.5 * torchs + 1e-2 * grad.norm(), name


def test_switch(daemon: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_CHUNKED_LOSS", "0")
    model, expected = pair(tied=True)
    for one in (model, expected):
        one(*batch()).backward()
    same_gradients(model, expected)
    assert not chunked(model)


def test_wanted_logits_stay(daemon: object) -> None:
    class Both(Tiny):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            logits = self.head(self.embed(ids))
            return F.cross_entropy(logits.view(-1, V), labels.view(-1)), logits.sigmoid()

    net = Both()
    model, expected = ORTModule(net, strict=True), copy.deepcopy(net)
    for one in (model, expected):
        loss, logits = one(*batch()[:1], batch()[0])
        (loss + logits.mean()).backward()
    same_gradients(model, expected)
    assert not chunked(model)


# ---- slots ----


def test_two_forwards_before_a_backward(daemon: object) -> None:
    model, expected = pair(tied=True)
    for one in (model, expected):
        losses = [one(*batch(seed=s)) for s in range(3)]
        for factor, loss in zip((1, 2, 0.5), losses, strict=True):
            (factor * loss).backward()
    same_gradients(model, expected)


def test_second_backwards_are_scaled_anew(daemon: object) -> None:
    """What the first backward gave away may be changed by its owner."""
    model, expected = pair()
    for one in (model, expected):
        loss = one(*batch())
        parameters = list(one.parameters())
        for factor in (1, 3):
            for grad in torch.autograd.grad(factor * loss, parameters, retain_graph=True):
                grad.fill_(777)
        (0.5 * loss).backward(retain_graph=True)
        one.head.weight.grad.mul_(2)
        loss.backward()
    same_gradients(model, expected)


def test_kept_gradients_and_accumulation(daemon: object) -> None:
    model, expected = pair(tied=True)
    kept = []
    for one in (model, expected):
        one(*batch()).backward()
        first = one.head.weight.grad
        value = first.clone()
        one.zero_grad()
        for seed in range(4):
            one(*batch(seed=seed)).backward()
        assert torch.equal(first, value)
        kept.append(value)
    assert_close(*kept)
    same_gradients(model, expected)


def test_forwards_without_backward_give_their_slot_back(daemon: object) -> None:
    model, _ = pair()
    model(*batch()).backward()
    model.zero_grad()
    for seed in range(20):
        model(*batch(seed=seed))
    model(*batch()).backward()
    binds = sessions.session().ledger.binds  # of the parameters, early gradients, the others
    assert len(binds) == 3


def test_a_loss_outlives_its_module(daemon: object) -> None:
    model, expected = pair(tied=True)
    parameters = list(model.parameters())
    loss = model(*batch())
    other = pair()[0]
    del model
    other(*batch(seed=1)).backward()  # takes slots of its own
    loss.backward()
    expected(*batch()).backward()
    for p, q in zip(parameters, expected.parameters(), strict=True):
        scale = q.grad.abs().max()
        torch.testing.assert_close(p.grad / scale, q.grad / scale, rtol=0, atol=1e-5)


# ---- a daemon that is killed ----


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("when", ["backward", "forwards", "kept", "module"])
def test_kills_cost_no_bit(daemon: Any, tied: bool, when: str) -> None:
    def train(kill: Callable[[], object]) -> dict[str, torch.Tensor]:
        model = pair(tied=tied)[0]
        losses = [model(*batch(seed=s)) for s in range(2)]
        if when == "forwards":
            kill()
        parameters = dict(model.named_parameters())
        losses[0].backward(retain_graph=when == "kept")
        if when != "module":
            kill()
        if when == "kept":
            (3 * losses[0]).backward()
        if when == "module":
            del model
            kill()
        losses[1].backward()
        return {n: p.grad.clone() for n, p in parameters.items()}

    same_bits(train(daemon.kill), train(lambda: None))
    assert sessions.session().recoveries >= 1
