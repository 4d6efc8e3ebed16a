"""Numbers that are computed from sizes, in arithmetic with tensors: for every size and type."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gradd import ORTModule
from helpers.graphs.captures import Lambda, assert_same

pytestmark = pytest.mark.usefixtures("shared_daemon")

USES = {
    "divided by a root": lambda x, n: x / n**0.5,
    "divided by math.sqrt": lambda x, n: x / math.sqrt(n),
    "times a power": lambda x, n: x * n**-0.5,
    "plus a quotient": lambda x, n: x + n / 3,
    "from a root": lambda x, n: n**0.5 - x,
    "times a size": lambda x, n: x * n,
    "divided by a size": lambda x, n: x / n,
    "size divided by it": lambda x, n: n / (x.abs() + 1),
    "minus a size": lambda x, n: x - n,
    "compared": lambda x, n: (x > n / 9).to(x.dtype) * x,
    "equal": lambda x, n: (x == n / 8).to(x.dtype) + x,
    "mean": lambda x, n: x.sum(-1) / n,
    "mean times a root": lambda x, n: x.mean() * n**0.5,
    "scaled sum": lambda x, n: torch.add(x, x, alpha=n**0.5),
    "integers": lambda x, n: x * (torch.arange(n) * n + n).to(x.dtype),
    "rolled": lambda x, n: x.roll(n // 2) * x + x.roll((n, -1 - n // 3), (-1, 0)),
    "in place": lambda x, n: x.clone().mul_(n**-0.5).add_(n),
}


class Sized(nn.Module):
    def __init__(self, use: Callable) -> None:
        super().__init__()
        self.scale, self.use = nn.Parameter(torch.full((1,), 1.5)), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x * self.scale, x.shape[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_sizes_take_part_in_the_tensors_type(use: Callable, dtype: torch.dtype) -> None:
    plain = Sized(use).to(dtype)
    wrapped = ORTModule(copy.deepcopy(plain), strict=True)
    for n in (8, 12, 15):
        x = torch.linspace(-2, 3, 3 * n, dtype=torch.float64).reshape(3, n).to(dtype)
        results = []
        for module in (plain, wrapped):
            module.zero_grad()
            out = module(x)
            out.float().square().mean().backward()
            results.append((out, module.scale.grad))
        for theirs, ours in zip(*results, strict=True):
            assert ours.dtype is theirs.dtype
            off = 2.0**-6 if dtype is torch.bfloat16 else 1e-5
            bound = float(theirs.detach().abs().max()) * off
            torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


class Floats(nn.Module):
    """Floats that are arguments of the graph where all is dynamic; one of them nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(10, 4), nn.Linear(4, 4)  # with a norm_type
        self.by, self.eps = 1.5, 1e-3

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = nn.functional.layer_norm(self.table(ids), (4,), eps=self.eps)
        return nn.functional.avg_pool1d(self.layer(h), 2).sum() * self.by


@pytest.mark.parametrize("how", ["compiled", "wrapped"])
def test_floats_of_a_module_where_all_is_dynamic(how: str) -> None:
    ours, theirs = Floats(), Floats()
    called = (
        torch.compile(ours, backend="gradd", dynamic=True) if how == "compiled" else ORTModule(ours)
    )
    for n, by in ((3, 1.5), (4, 1.5), (5, 2.5), (5, 3.5)):
        ours.by = theirs.by = by
        for net, call in ((ours, called), (theirs, theirs)):
            net.zero_grad()
            call(torch.arange(n)[None]).backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


FLOATS = {
    "times another": lambda x, a, b: x + a * b,
    "a sum of both": lambda x, a, b: (x + (a + b)) * a,
    "an exponent": lambda x, a, b: x.sigmoid() ** a,
    "a base": lambda x, a, b: a**x,
    "an exponent of both": lambda x, a, b: (x.abs() + 1).pow(a * b) + b,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FLOATS)
def test_floats_that_change_are_inputs(name: str, dtype: torch.dtype) -> None:
    """Computed with each other, and in powers."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.k = nn.Parameter(torch.linspace(-1, 1, 6).to(dtype)), 0.5

        def forward(self, x: torch.Tensor, a: float) -> torch.Tensor:
            self.k *= 0.9
            return FLOATS[name](x * self.weight, a, self.k)

    theirs = Net()
    ours = ORTModule(copy.deepcopy(theirs))
    tolerance = {} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for step in range(4):
        x, a = torch.randn(3, 6).to(dtype), 0.3 + 0.1 * step
        for net in (ours, theirs):
            net.zero_grad()
            net(x, a).sum().backward()
        torch.testing.assert_close(ours.module.weight.grad, theirs.weight.grad, **tolerance)
    stats = ours.gradd_stats()
    assert not stats["parts_in_torch"] and not stats["fallbacks"] and stats["captures"] <= 3


def test_a_number_goes_in_as_data_and_for_an_operator_that_makes_a_tensor() -> None:
    def forward(self, x: torch.Tensor, n: int, k: float) -> torch.Tensor:
        made = torch.scalar_tensor(k * k) * torch.full((n, 4), 3.0)
        return self.lin(x * n * (k * k)).sum() * made.sum()

    calls = ((torch.randn(3, 4), 2 + i, 0.5 + i) for i in range(3))
    net = assert_same(Lambda(forward, lin=nn.Linear(4, 2)), *calls, captures=None)
    assert not net.gradd_stats()["parts_in_torch"]


def test_powers_of_integers_and_of_decisions() -> None:
    def forward(self, x: torch.Tensor, n: torch.Tensor, g: float) -> torch.Tensor:
        powers = (n**0.5).sum() + (n**2).sum() + (n**g).sum() + ((n > 2) ** 2).sum()
        return self.lin(x).sum() * powers

    calls = ((torch.randn(3, 4), torch.arange(1, 5), 0.3 + i) for i in range(3))
    assert_same(Lambda(forward, lin=nn.Linear(4, 2)), *calls, captures=None)


REMAINDERS = {
    "must be known": lambda h, f: h.quantile(f % 1),
    "an operand": lambda h, f: torch.add(h, h.sin(), alpha=-(f % 1)),
    "of a remainder": lambda h, f: nn.functional.leaky_relu(h, (f % 2) % 1 / 2),
    "a whole number": lambda h, f: h * (torch.full((int(f % 1 * 4),), 2.0).sum() + 1),
    "a whole operand": lambda h, f: h + int(f % 2),
}


@pytest.mark.parametrize("name", REMAINDERS)
def test_remainders_of_floats_are_not_taken_for_whole(name: str) -> None:
    """The first of the changing floats is whole."""
    net = Lambda(lambda self, x, f: REMAINDERS[name](self.lin(x), f), lin=nn.Linear(4, 2))
    ours = ORTModule(copy.deepcopy(net))
    x = torch.randn(3, 4)
    for f in (0.5, 3.0, 1.25, 2.75):
        torch.testing.assert_close(ours(x, f), net(x, f))
    stats = ours.gradd_stats()
    assert stats["captures"] <= 4
    assert ("unsupported_operator" in stats["parts_in_torch"]) is (name == "must be known")


@pytest.mark.parametrize("function", ["leaky_relu", "softplus"])
def test_gradients_of_infinite_slopes(function: str) -> None:
    call = getattr(nn.functional, function)
    net = Lambda(lambda self, x, f: call(self.w * x, f), w=nn.Parameter(torch.linspace(-2, 3, 6)))
    ours = ORTModule(copy.deepcopy(net))
    for f in (0.5, 1.5, math.inf):
        for one in (net, ours):
            one.zero_grad()
            one(torch.ones(()), f).sum().backward()
        torch.testing.assert_close(ours.module.w.grad, net.w.grad, equal_nan=True)
