"""Budgets, estimates and explanations of calls that several graphs of the daemon compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradd
from gradd import ORTModule, errors
from gradd.dynamo.budget import Budget, Curve, shares
from helpers.nets import Determinants, determinants


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))


class Cut(nn.Module):
    """Two pieces of one graph: what the daemon does not have lies between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = block(), block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(determinants(self.a(x))).square().mean()


class Broken(nn.Module):
    """Two graphs: a branch on a value lies between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = block(), block(), block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.a(x)
        if hidden.sum() > 1e9:
            hidden = self.c(hidden)
        return self.b(hidden).square().mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    model(x).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", [Cut, Broken])
def test_a_budget_bounds_the_sum(daemon: Any, kind: Any) -> None:
    x = torch.randn(512, 32)
    free = ORTModule(kind())
    expected = gradients(free, x)
    whole = free.gradd_explain().arena_bytes
    assert len(free.gradd_explain().as_dict()["graphs"]) == 2
    with pytest.raises(
        errors.OutOfMemoryError, match=r"memory budget of 262144 bytes \(256.0 KiB\): "
    ):
        ORTModule(kind(), memory_budget=1 << 18)(x)
    with pytest.raises(errors.OutOfMemoryError, match="the 2 graphs of a call") as raised:
        gradd.estimate(kind(), [x], memory_budget=1)
    least = int(str(raised.value).split("that can be met is ")[1].split()[0])
    assert least < whole
    budget = (least + whole) // 2
    tight = ORTModule(kind(), memory_budget=budget)
    for _ in range(3):  # the first time it is not known what follows
        loss = tight(x)
        said = tight.gradd_explain()
        assert said.arena_bytes <= budget
        loss.backward()
    found = gradients(tight, x)
    assert said.recomputed_bytes > 0
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("kind", [Cut, Broken])
def test_an_estimate_is_what_a_call_takes(daemon: Any, kind: Any) -> None:
    x = torch.randn(64, 32)
    planned = gradd.estimate(kind(), [x], "sgd")
    assert daemon.ps()["counters"]["forward"] == 0
    model = ORTModule(kind())
    model(x).backward()
    assert model.gradd_explain().arena_bytes == planned.activations
    assert model.gradd_explain(x).arena_bytes == planned.activations
    two = sum(p.nbytes for m in (model.a, model.b) for p in m.parameters())
    assert planned.parameters == two
    assert ("linalg_det" in str(planned)) == (kind is Cut)
    assert gradd.estimate(kind(), [x], "sgd", memory_budget=1 << 20).activations <= 1 << 20
    few = gradd.estimate(kind(), [x], "sgd", batches=[8, 64])
    assert few[0].activations < few[1].activations == planned.activations


def test_what_runs_in_pytorch_has_no_estimate(shared_daemon: Any) -> None:
    with pytest.raises(errors.GraddError, match="operator Det"):
        gradd.estimate(Determinants(), [torch.randn(2, 8)])


A = Curve(((100, 0.0), (50, 5.0), (10, 100.0)), 100.0, 0)
B = Curve(((30, 0.0), (20, 8.0)), 50.0, 7)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("budget", "expected"),
    [(137, [100, 30]), (200, [163, 30]), (136, [99, 30]), (87, [50, 30]), (80, [53, 20])],
)
def test_shares_of_a_budget(budget: int, expected: list[int]) -> None:
    found = shares(budget, [A, B])
    assert sum(found) + 7 == budget
    assert found == expected or found[0] >= 50


@pytest.mark.quick
def test_shares_that_are_too_small_name_the_least() -> None:
    assert shares(37, [A, B]) == [10, 20]
    with pytest.raises(errors.OutOfMemoryError, match=r"can be met is 37 bytes.*72.0 % more"):
        shares(36, [A, B])


@pytest.mark.quick
def test_what_follows_is_known_the_second_time() -> None:
    budget = Budget(140)
    for expected in ([10], [103]):
        assert budget.shares("a", False, lambda: [A]) == expected
        (rest,) = budget.shares("b", True, lambda: [B])
        assert expected[0] + rest + 7 <= 140
    budget.begin()
    assert budget.shares("a", False, lambda: [A]) == [103]
    with pytest.raises(errors.OutOfMemoryError):  # another way than ever
        budget.shares("c", True, lambda: [A] * 4)
    wide = Budget(60)
    for _ in range(3):
        assert sum(wide.shares("a", False, lambda: [A])) <= 33
        assert wide.shares("b", True, lambda: [B])
