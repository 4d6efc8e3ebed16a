"""Every way to write a head and its loss that is made in chunks, beside PyTorch.

A row of the table is a form in which models and trainers write it: the head, the loss over its
logits, and the parameters that are trained. Losses and gradients in f32 are compared with PyTorch
in f64; in bf16 they may differ from f64 no more than PyTorch's own in bf16 do. That the plan has
the operator, and that it takes more than one chunk, is checked for each row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from helpers.selection import one_in

pytestmark = pytest.mark.one_in(8)

V, K, ROWS, LENGTH = 2503, 24, 9, 65  # 585 rows: two chunks, the second short
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that leaves out rows has too few of them here for a second chunk."""
    monkeypatch.setenv("GRADD_LIVE_ROWS", "0")


class Net(nn.Module):
    """A language model of one layer: head and loss are the table's."""

    def __init__(
        self,
        loss: Loss,
        *,
        head: Callable[[torch.Tensor], torch.Tensor] = lambda z: z,
        tied: bool = False,
        bias: bool = False,
        frozen: str = "",
        classes: int = V,
    ) -> None:
        super().__init__()
        self.loss, self.bend = loss, head
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.embed = nn.Embedding(classes, K)
            self.inner = nn.Linear(K, K)
            self.head = nn.Linear(K, classes, bias=bias)
        if tied:
            self.head.weight = self.embed.weight
        for name, p in self.named_parameters():
            p.requires_grad_(not frozen or not name.startswith(tuple(frozen.split())))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.bend(self.head(2 * torch.tanh(self.inner(self.embed(ids)))))
        return self.loss(logits.float() if logits.dtype == torch.bfloat16 else logits, labels)


def rows_of(z: torch.Tensor) -> torch.Tensor:
    return z.reshape(-1, z.shape[-1])


def plain(z: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(rows_of(z), y.reshape(-1), **options)


def padded(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As transformers shifts labels."""
    return plain(z, F.pad(y, (0, 1), value=-100)[..., 1:].contiguous())


def cut(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As trainers shift logits."""
    return plain(z[..., :-1, :].contiguous(), y[..., 1:].contiguous())


def items(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y, reduction="sum") / 77


def ignore_other(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y.masked_fill(y == -100, 7), ignore_index=7)


def masked_mean(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != -100).to(z.dtype)
    each = plain(z, y, reduction="none").view(y.shape)
    return (each * mask).sum() / mask.sum()


def mean_of_means(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every sequence counts alike."""
    used = y != -100
    each = plain(z, y, reduction="none").view(y.shape) / used.sum(1, keepdim=True)
    return each.sum() / y.shape[0] * 0.5


def by_class(z: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    weights = torch.linspace(0, 2, z.shape[-1]).to(z.dtype)
    return plain(z, y, weight=weights, **options)


def z_all(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 1e-2 * (torch.logsumexp(z, -1) ** 2).mean()


def z_masked(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != -100).to(z.dtype)
    lse = torch.logsumexp(z, dim=-1)
    return 1e-2 * (lse.pow(2) * mask).sum() / mask.sum() + plain(z, y, label_smoothing=0.1)


def z_filled(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lse = torch.logsumexp(rows_of(z), -1).masked_fill(y.reshape(-1) == -100, 0)
    return plain(z, y, reduction="sum") / 77 + lse.square().sum() * 1e-3


def z_where(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lse = z.logsumexp(-1)
    return padded(z, y) + 0.01 * torch.where(y != -100, lse * lse, 0.0).mean()


def z_cut(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    moved = z[..., :-1, :].contiguous()
    lse = torch.logsumexp(moved, -1)
    return plain(moved, y[..., 1:]) + 0.01 * (lse**2).mean()


def z_cut_alone(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lse = torch.logsumexp(z[:, :-1], -1)
    return plain(z, y) + 0.01 * ((lse * (y[:, 1:] != -100)) ** 2).sum() / 50


def z_and_masked_mean(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != -100).to(z.dtype)
    lse = torch.logsumexp(z, dim=-1)
    return masked_mean(z, y) + 1e-2 * ((lse * lse) * mask).sum() / mask.sum().clamp(min=1)


FORMS: dict[str, dict[str, Any]] = {
    "mean": {"loss": plain},
    "sum": {"loss": lambda z, y: plain(z, y, reduction="sum")},
    "items": {"loss": items},
    "smoothing": {"loss": lambda z, y: plain(z, y, label_smoothing=0.1)},
    "ignore_index": {"loss": ignore_other},
    "padded shift": {"loss": padded},
    "cut shift": {"loss": cut},
    "tied": {"loss": padded, "tied": True},
    "bias": {"loss": plain, "bias": True},
    "soft cap": {"loss": plain, "head": lambda z: torch.tanh(z / 3.0) * 3.0},
    "scale": {"loss": plain, "head": lambda z: z * 0.0625},
    "quotient": {"loss": padded, "head": lambda z: z / 8.0, "tied": True},
    "scale and cap": {"loss": plain, "head": lambda z: 5 * torch.tanh(z * 0.3 / 5), "bias": True},
    "frozen head": {"loss": plain, "bias": True, "frozen": "head"},
    "frozen trunk": {"loss": plain, "bias": True, "frozen": "embed inner"},
    "frozen bias": {"loss": plain, "bias": True, "frozen": "head.bias"},
    "only the bias": {"loss": plain, "bias": True, "frozen": "embed inner head.weight"},
    "odd vocabulary": {"loss": padded, "classes": 2503 - 6},
    "masked mean": {"loss": masked_mean},
    "mean of means": {"loss": mean_of_means, "tied": True},
    "class weights": {"loss": by_class, "bias": True},
    "sum by class weights": {"loss": lambda z, y: by_class(z, y, reduction="sum") / 50},
    "class weights and z-loss": {
        "loss": lambda z, y: by_class(z, y) + 1e-2 * (torch.logsumexp(z, -1) ** 2).mean()
    },
    "z-loss": {"loss": z_all},
    "z-loss of labelled rows": {"loss": z_masked, "bias": True},
    "z-loss of filled rows": {"loss": z_filled},
    "z-loss of chosen rows": {"loss": z_where, "tied": True},
    "z-loss of cut logits": {"loss": z_cut},
    "z-loss of cut logits alone": {"loss": z_cut_alone},
    "z-loss under a cap": {"loss": z_all, "head": lambda z: torch.tanh(z / 3.0) * 3.0},
    "z-loss beside a masked mean": {"loss": z_and_masked_mean},
    "z-loss, frozen head": {"loss": z_all, "frozen": "head"},
}


def batch(seed: int = 0, classes: int = V, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(classes - 6, (rows, LENGTH), generator=generator)
    labels = ids.masked_fill(torch.rand((rows, LENGTH), generator=generator) < 0.1, -100)
    labels[:, -1] = 5
    return ids, labels


def run(
    net: nn.Module, feed: tuple[torch.Tensor, ...], factor: float = 1.0
) -> dict[str, torch.Tensor]:
    """The loss and the gradients of `factor` times it."""
    net.zero_grad()
    loss = net(*feed)
    (loss * factor).backward()
    grads = {n: p.grad.double().clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double()} | grads


def wrapped(net: nn.Module) -> ORTModule:
    return ORTModule(copy.deepcopy(net), strict=True)


def assert_chunked(model: ORTModule) -> None:
    counts = model.gradd_explain().counts()
    assert counts.get("LinearCrossEntropy") == 1, counts
    assert not {"CrossEntropy", "SoftmaxCrossEntropyLoss", "ReduceLogSumExp"} & counts.keys()


def assert_near(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tol: float = 1e-5
) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        scale = value.abs().max().clamp(min=1e-30)
        error = (got[name] - value).abs().max() / scale
        assert error < tol, f"{name}: {error}"


@pytest.mark.parametrize("name", one_in(2, FORMS))
def test_f32(shared_daemon: object, name: str) -> None:
    net = Net(**FORMS[name])
    model, exact = wrapped(net), copy.deepcopy(net).double()
    for seed, factor in ((0, 1.0), (1, -0.3)):
        feed = batch(seed, FORMS[name].get("classes", V))
        assert_near(run(model, feed, factor), run(exact, feed, factor))
    assert_chunked(model)


@pytest.mark.parametrize("name", one_in(2, FORMS))
def test_bf16(shared_daemon: object, name: str) -> None:
    net = Net(**FORMS[name]).bfloat16()
    model, exact = wrapped(net), copy.deepcopy(net).double()
    feed = batch(2, FORMS[name].get("classes", V))
    got, torchs, want = (run(one, feed) for one in (model, net, exact))
    assert got.keys() == want.keys()
    for key, value in want.items():
        ours, theirs = ((g[key] - value).norm() for g in (got, torchs))
        assert ours < 1.5 * theirs + 1e-2 * value.norm(), key
    assert_chunked(model)


@pytest.mark.parametrize("name", ["mean", "masked mean", "z-loss", "z-loss of labelled rows"])
def test_beside_live_rows(
    shared_daemon: object, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rows that a plan leaves out are not those that only a z-loss counts."""
    monkeypatch.delenv("GRADD_LIVE_ROWS")
    net = Net(**FORMS[name])
    model, exact = wrapped(net), copy.deepcopy(net).double()
    ids, labels = batch(3)
    labels[:, :50] = -100
    for _ in range(4):
        assert_near(run(model, (ids, labels)), run(exact, (ids, labels)))


# ---- what stays whole ----


class Learned(Net):
    """The weight of the z-loss is trained."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.weight = nn.Parameter(torch.tensor(0.01))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = self.head(torch.tanh(self.inner(self.embed(ids))))
        return plain(z, labels) + self.weight * (torch.logsumexp(z, -1) ** 2).mean()


class Told(Net):
    """The cross-entropy is an output of its own."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        z = self.head(torch.tanh(self.inner(self.embed(ids))))
        loss = plain(z, labels)
        return loss + 0.01 * (torch.logsumexp(z, -1) ** 2).mean(), loss


class Apart(Net):
    """The log-sum-exp is of logits without the cap."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        z = self.head(torch.tanh(self.inner(self.embed(ids))))
        return plain(torch.tanh(z), labels) + 0.01 * (torch.logsumexp(z, -1) ** 2).mean()


class Chosen(Net):
    """Rows weigh as much as the model itself is sure of them."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.inner(self.embed(ids)))
        each = plain(self.head(hidden), labels, reduction="none")
        return (each * hidden.sum(-1).view(-1)).mean()


def not_squared(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 0.01 * torch.logsumexp(z, -1).mean()


def over_positions(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 0.01 * (torch.logsumexp(z, 1) ** 2).mean()


def cubed(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 1e-3 * (torch.logsumexp(z, -1) ** 3).mean()


def fourth(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 1e-4 * ((torch.logsumexp(z, -1) ** 2) ** 2).mean()


def squared_mean(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 0.01 * torch.logsumexp(z, -1).mean() ** 2


def squared_losses(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (plain(z, y, reduction="none") ** 2).mean()


def without_gradient(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return plain(z, y) + 0.01 * (torch.logsumexp(z.detach(), -1) ** 2).mean()


def without_gradient_of_half(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lse = torch.logsumexp(z, -1)
    return plain(z, y) + 0.01 * (lse * lse.detach()).mean()


def read_twice(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    lse = torch.logsumexp(z, -1)
    return plain(z, y) + 0.01 * (lse**2).mean() + 0.1 * lse.max()


WHOLE: dict[str, Callable[[], Net]] = {
    "a weight that is trained": Learned,
    "a loss that is an output": lambda: Told(plain),
    "other logits": lambda: Apart(plain),
    "weights that are trained": lambda: Chosen(plain),
    "no square": lambda: Net(not_squared),
    "another axis": lambda: Net(over_positions),
    "a cube": lambda: Net(cubed),
    "a fourth power": lambda: Net(fourth),
    "the square of a mean": lambda: Net(squared_mean),
    "squares of losses": lambda: Net(squared_losses),
    "a z-loss without a gradient": lambda: Net(without_gradient),
    "half a square's gradient": lambda: Net(without_gradient_of_half),
    "another reader": lambda: Net(read_twice),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(shared_daemon: object, name: str) -> None:
    class First(nn.Module):
        def __init__(self, net: Net) -> None:
            super().__init__()
            self.net = net

        def forward(self, *feed: torch.Tensor) -> Any:
            return self.net(*feed)

    net = First(WHOLE[name]())
    model, exact = wrapped(net), copy.deepcopy(net).double()
    found = []
    for one in (model, exact):
        out = one(*batch())
        terms = out if isinstance(out, tuple) else (out,)
        sum(k * t for k, t in enumerate(terms, 1)).backward()
        grads = {n: p.grad.double().clone() for n, p in one.named_parameters()}
        found.append({str(k): t.detach().double() for k, t in enumerate(terms)} | grads)
    assert_near(*found, tol=3e-5)
    # an output that is not the first one is made when it is read, by a plan of its own
    assert (
        name == "a loss that is an output"
        or "LinearCrossEntropy" not in model.gradd_explain().counts()
    )


# ---- edges ----

EDGES = ["mean", "class weights", "padded shift", "soft cap", "masked mean", "z-loss"]


def same_numbers(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Near where PyTorch has numbers, and none where it has none."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name].isfinite(), value.isfinite()), name
    assert_near(
        {n: v.nan_to_num(0, 0, 0) for n, v in got.items()},
        {n: v.nan_to_num(0, 0, 0) for n, v in want.items()},
    )


@pytest.mark.parametrize("name", EDGES)
def test_few_labels(shared_daemon: object, name: str) -> None:
    net = Net(**FORMS[name])
    model, exact = wrapped(net), copy.deepcopy(net).double()
    ids, labels = batch(4)
    for labelled in (0, 1, 16, 512, 513):
        few = torch.full_like(labels, -100).view(-1)
        few[1 : 1 + labelled] = ids.view(-1)[1 : 1 + labelled]
        feed = ids, few.view(labels.shape)
        same_numbers(run(model, feed), run(exact, feed))
    assert_chunked(model)


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("half", [False, True], ids=["f32", "bf16"])
def test_extreme_logits(shared_daemon: object, name: str, half: bool) -> None:
    """Logits of 1e4: the label has all, or another class has."""
    net = Net(**FORMS[name])
    with torch.no_grad():
        net.head.weight.mul_(2e4)
    net = net.bfloat16() if half else net
    model, exact = wrapped(net), copy.deepcopy(net).double()
    feed = batch(5)
    got, torchs, want = (run(one, feed) for one in (model, copy.deepcopy(net), exact))
    for key, value in want.items():
        assert got[key].isfinite().all(), key
        ours, theirs = ((g[key] - value).norm() for g in (got, torchs))
        assert ours < 2 * theirs + (1e-2 if half else 1e-4) * value.norm(), key
    assert_chunked(model)


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("what", [float("inf"), float("nan")])
@pytest.mark.parametrize("labelled", [False, True])
def test_no_numbers_in_a_row(
    shared_daemon: object, monkeypatch: pytest.MonkeyPatch, name: str, what: float, labelled: bool
) -> None:
    """One token's hidden state has no numbers. Without a label its row is left out, where PyTorch
    multiplies it by 0: expected is what PyTorch gives for a token with numbers."""
    if not labelled and name == "z-loss":
        pytest.skip("a z-loss counts rows without a label too: none is left out")
    net = Net(**FORMS[name])
    net.inner.requires_grad_(False)
    net.embed.requires_grad_(False)
    exact = copy.deepcopy(net).double()
    for one in (net, exact)[: 1 + labelled]:
        with torch.no_grad():
            one.embed.weight[V - 1, 1::2].fill_(what)
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model = ORTModule(net, strict=True)
    ids, labels = batch(6)
    labels = labels.masked_fill(labels == -100, 1)
    ids[2, 9] = V - 1
    labels[2, 9:11] = 3 if labelled else -100
    same_numbers(run(model, (ids, labels)), run(exact, (ids, labels)))
    assert_chunked(model)


def test_one_row(shared_daemon: object) -> None:
    """One row of many classes."""
    classes = 70001
    net = Net(plain, classes=classes, bias=True)
    model, exact = wrapped(net), copy.deepcopy(net).double()
    feed = torch.tensor([[3]]), torch.tensor([[69999]])
    assert_near(run(model, feed), run(exact, feed))
