"""Dropout wherever it occurs: rate, scale, one mask for both passes, torch's generator.

Counts are compared with the binomial distribution at five standard deviations, which a right
implementation leaves once in 1.7 million draws; seeds are fixed, so a test that passes stays so.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from helpers.graphs.captures import Lambda
from helpers.nets import Net, batch, loss_of

pytestmark = pytest.mark.usefixtures("shared_daemon")

SIGMAS = 5.0
N = 64


def hidden(p: float) -> tuple[nn.Module, torch.Tensor, float]:
    """y = dropout(x W) with W = 1: every kept element is 1 / (1 - p)."""
    module = Lambda(lambda self, x: self.drop(self.lin(x)), lin=linear(), drop=nn.Dropout(p))
    return module, torch.eye(N), 1.0


def in_place(p: float) -> tuple[nn.Module, torch.Tensor, float]:
    drop = nn.Dropout(p, inplace=True)
    return (
        Lambda(lambda self, x: self.drop(self.lin(x)), lin=linear(), drop=drop),
        torch.eye(N),
        1.0,
    )


def linear() -> nn.Linear:
    layer = nn.Linear(N, N, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def residual(p: float) -> tuple[nn.Module, torch.Tensor, float]:
    """The same behind a residual, which is taken away again."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.lin(x)) + x

    return Lambda(forward, lin=linear(), drop=nn.Dropout(p)), torch.eye(N), 1.0


def embedding(p: float) -> tuple[nn.Module, torch.Tensor, float]:
    table = nn.Embedding(7, N)
    nn.init.ones_(table.weight)
    module = Lambda(lambda self, ids: self.drop(self.table(ids)), table=table, drop=nn.Dropout(p))
    return module, torch.arange(N) % 7, 1.0


def attention(p: float) -> tuple[nn.Module, torch.Tensor, float]:
    """Equal scores and the identity as values: the result is the dropped matrix of weights."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rate = p if self.training else 0.0
        zero = self.lin(x) * 0.0
        return F.scaled_dot_product_attention(zero, zero, self.value, dropout_p=rate)

    value = nn.Parameter(torch.eye(N)[None])
    return Lambda(forward, lin=linear(), value=value), torch.eye(N)[None], 1.0 / N


def lora(p: float) -> tuple[nn.Module, torch.Tensor, float]:
    """A frozen zero layer, and an adapter that is the identity."""
    import peft

    base = Lambda(lambda self, x: self.lin(x), lin=linear())
    nn.init.zeros_(base.lin.weight)
    config = peft.LoraConfig(r=N, lora_alpha=N, lora_dropout=p, target_modules=["lin"])
    module = peft.inject_adapter_in_model(config, base)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.eye(N))
    return module, torch.ones(N, N), 1.0


PLACES = [hidden, in_place, residual, embedding, attention, lora]
Place = Callable[[float], tuple[nn.Module, torch.Tensor, float]]


def masks(place: Place, model: nn.Module, x: torch.Tensor, unit: float, p: float) -> torch.Tensor:
    """One call; checks that elements are zero or `unit` / (1 - p), and returns which are kept."""
    y = model(x)
    if place is residual:
        y = y - x
    kept = y.detach() != 0
    want = kept * (unit / (1.0 - p))
    torch.testing.assert_close(y.detach(), want, rtol=1e-6, atol=1e-6)
    return kept


def count_is_binomial(kept: torch.Tensor, p: float) -> None:
    n = kept.numel()
    bound = SIGMAS * math.sqrt(n * p * (1.0 - p))
    assert abs(int(kept.sum()) - n * (1.0 - p)) <= bound, f"{int(kept.sum())} of {n} kept, p {p}"


@pytest.mark.parametrize("p", [0.1, 0.6])
@pytest.mark.parametrize("place", PLACES)
def test_rate_and_scale(place: Place, p: float) -> None:
    torch.manual_seed(5)
    module, x, unit = place(p)
    model = ORTModule(module.train(), strict=True)
    calls = [masks(place, model, x, unit, p) for _ in range(3)]
    count_is_binomial(torch.stack(calls), p)
    rows, columns = (torch.stack(calls).float().mean(d) for d in ((0, -1), (0, -2)))
    assert rows.std() > 0 and columns.std() > 0  # no row or column is dropped as a whole
    same = (calls[0] == calls[1]).float().mean().item()
    expected = p * p + (1 - p) * (1 - p)
    deviation = math.sqrt(expected * (1 - expected) / calls[0].numel())
    assert abs(same - expected) <= SIGMAS * deviation, "masks of two calls depend on each other"


@pytest.mark.parametrize("place", PLACES)
def test_backward_has_the_mask_of_forward(place: Place) -> None:
    p = 0.4
    torch.manual_seed(6)
    module, x, unit = place(p)
    model = ORTModule(module.train(), strict=True)
    weights = torch.linspace(-1.0, 2.0, N * N).reshape(N, N)
    y = model(x)
    (y * weights).sum().backward()
    mask = ((y.detach() - (x if place is residual else 0)) != 0).float()
    mask = mask.reshape(N, N) / (1.0 - p)
    grads = {n: g.grad for n, g in model.named_parameters() if g.grad is not None}
    through = mask * weights
    if place is embedding:
        want = torch.zeros(7, N).index_add_(0, x, through)
        name = "table.weight"
    elif place is attention:
        want, name = (mask * unit).T @ weights, "value"
    elif place is lora:
        want, name = weights.T @ mask, "lora_B"
    else:
        want, name = through.T @ x, "lin.weight"
    got = next(g for n, g in grads.items() if name in n)
    torch.testing.assert_close(got.reshape(want.shape), want, rtol=1e-5, atol=1e-4)


def test_every_layer_draws_its_own_mask() -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.lin(x)
        return self.drop(x), self.drop(x), self.other(x)

    parts = {"lin": linear(), "drop": nn.Dropout(0.5), "other": nn.Dropout(0.5)}
    model = ORTModule(Lambda(forward, **parts).train(), strict=True)
    torch.manual_seed(1)
    a, b, c = (y.detach() != 0 for y in model(torch.eye(N)))
    for one, two in ((a, b), (a, c), (b, c)):
        equal = int((one == two).sum())
        assert abs(equal - N * N / 2) <= SIGMAS * math.sqrt(N * N / 4)


def test_torchs_generator_decides() -> None:
    model = ORTModule(Net(dropout=0.5, width=128), strict=True)
    x, y = batch(16)

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        loss = loss_of(model(x, y))
        loss.backward()
        return [loss.detach().clone(), *[p.grad.clone() for p in model.parameters()]]

    torch.manual_seed(3)
    first, second = step(), step()
    torch.manual_seed(3)
    again = step()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        elsewhere = step()
    after_fork = step()
    state = torch.random.get_rng_state()
    third = step()
    torch.random.set_rng_state(state)
    third_again = step()
    for a, b in ((first, again), (second, after_fork), (third, third_again)):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    for other in (second, elsewhere, third):
        assert not torch.equal(first[0], other[0])


def test_train_and_eval() -> None:
    torch.manual_seed(2)
    net = Net(dropout=0.5, width=64)
    model = ORTModule(net, strict=True)
    x, y = batch(8)
    noisy = {float(loss_of(model(x, y))) for _ in range(5)}
    assert len(noisy) == 5
    model.eval()
    quiet = {float(loss_of(model(x, y))) for _ in range(3)}
    assert len(quiet) == 1
    net.eval()
    assert math.isclose(quiet.pop(), float(loss_of(net(x, y))), rel_tol=1e-5)
    model.train()
    assert len({float(loss_of(model(x, y))) for _ in range(5)} | noisy) == 10
    assert model.gradd_stats()["captures"] == 2


def test_a_rate_of_zero_is_another_graph() -> None:
    net = Net(dropout=0.0, width=64)
    model = ORTModule(net, strict=True)
    x, y = batch(8)
    assert len({float(loss_of(model(x, y))) for _ in range(3)}) == 1
    net.dropout.p = 0.5
    assert len({float(loss_of(model(x, y))) for _ in range(3)}) == 3
    net.dropout.p = 1.0
    gone = loss_of(model(x, y))
    gone.backward()
    want = F.cross_entropy(net.second.bias.detach().expand(len(y), -1), y)
    torch.testing.assert_close(gone.detach(), want, rtol=1e-5, atol=0)
    assert not net.first.weight.grad.any() and net.second.bias.grad.any()


def rows(y: torch.Tensor) -> torch.Tensor:
    return y[:, :, None]


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda y: F.dropout(y, 0.3, True),
    "in place": lambda y: F.dropout(y, 0.3, True, True).mul_(2),
    "in place, read again": lambda y: F.dropout(y, 0.3, True, True) + y,
    "dropout_": lambda y: torch.dropout_(y, 0.3, True),
    "alpha": lambda y: F.alpha_dropout(y, 0.3, True),
    "alpha, read again": lambda y: F.alpha_dropout(y, 0.3, True, True) + y,
    "torch.alpha_dropout": lambda y: torch.alpha_dropout(y, 0.3, True),
    "torch.alpha_dropout_": lambda y: torch.alpha_dropout_(y, 0.3, train=True),
    "feature alpha": lambda y: F.feature_alpha_dropout(rows(y), 0.3, True),
    "channels": lambda y: F.dropout1d(rows(y), 0.3, True),
    "channels, read again": lambda y: (F.dropout1d(rows(y), 0.3, True, True), y * y)[1],
    "torch.feature_dropout": lambda y: torch.feature_dropout(rows(y), 0.3, True),
    "torch.feature_dropout_": lambda y: torch.feature_dropout_(rows(y), 0.3, True),
    "native": lambda y: torch.native_dropout(y, 0.3, True)[0],
    "native mask": lambda y: y * torch.native_dropout(y, 0.3, True)[1],
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_passes_the_self_check(form: str) -> None:
    """It compares with dropout that lets everything through, on both sides."""
    module = Lambda(lambda self, x: FORMS[form](self.lin(x)).sum(), lin=nn.Linear(4, 4))
    model = ORTModule(module, strict=True)
    model(torch.randn(3, 4)).backward()
    assert model.gradd_stats()["self_checks"] == 1


OF_CONSTANTS: dict[str, Callable[[], torch.Tensor]] = {
    "bernoulli": lambda: torch.bernoulli(torch.full((200,), 0.5)),
    "bernoulli_": lambda: torch.empty(200).bernoulli_(0.5),
    "dropout": lambda: F.dropout(torch.ones(200), 0.5, True),
    "dropout of a literal": lambda: F.dropout(torch.tensor([1.0, 2.0] * 100), 0.5, True),
    "native dropout": lambda: torch.native_dropout(torch.ones(200), 0.5, True)[0],
    "alpha dropout": lambda: F.alpha_dropout(torch.ones(200), 0.5, True),
    "uniform": lambda: torch.rand_like(torch.ones(200)),
    "normal": lambda: torch.normal(torch.zeros(200), torch.ones(200)),
    "attention": lambda: F.scaled_dot_product_attention(
        *[torch.eye(20)[None, None, :, :10]] * 3, dropout_p=0.5
    ).flatten(),
}


@pytest.mark.parametrize("of", OF_CONSTANTS)
@pytest.mark.parametrize("check", ["0", "decades"])
def test_what_is_drawn_from_constants_differs(
    of: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    module = Lambda(
        lambda self: self.weight * OF_CONSTANTS[of](), weight=nn.Parameter(torch.ones(200))
    )
    model = ORTModule(module, strict=True)
    drawn = [model().detach().clone() for _ in range(4)]
    assert all(not torch.equal(a, b) for a, b in zip(drawn, drawn[1:], strict=False))


UNIFORM: dict[str, Callable[[float], tuple[torch.Tensor, float]]] = {
    "numbers": lambda high: (torch.empty(40, 50).uniform_(-1, 2), -1.0),
    "a number that changes": lambda high: (torch.empty(40, 50).uniform_(0, high), 0.0),
    "halves": lambda high: (torch.empty(40, 50, dtype=torch.bfloat16).uniform_(-high, high), -high),
}


@pytest.mark.parametrize("of", UNIFORM)
def test_uniform_numbers_keep_to_their_bounds(of: str) -> None:
    module = Lambda(
        lambda self, high: (self.weight * UNIFORM[of](high)[0].float(), high),
        weight=nn.Parameter(torch.ones(50)),
    )
    model = ORTModule(module, strict=True)
    for bound in (2.0, 3.0, 5.0):
        drawn, low = model(bound)[0].detach(), UNIFORM[of](bound)[1]
        high = 2.0 if of == "numbers" else bound
        width = high - low
        assert low <= drawn.min() <= low + width / 50 and high >= drawn.max() > high - width / 50
        assert abs(drawn.mean() - (low + high) / 2) < width / 20
