"""There is one set of gradients, and more only while one is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.calls import slots

pytestmark = pytest.mark.usefixtures("shared_daemon")


def made() -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), strict=True)


def step(model: ORTModule, *, accumulate: bool = False) -> None:
    if not accumulate:
        model.zero_grad(set_to_none=True)
    model(torch.ones(4, 64)).sum().backward()


def count(model: ORTModule) -> int:
    return model.gradd_stats()["slots"]


def test_the_usual_loop_has_one() -> None:
    model = made()
    for _ in range(5):
        step(model)
        assert count(model) == 1


def test_one_that_was_kept_goes() -> None:
    model = made()
    step(model)
    kept = [p.grad for p in model.parameters()]
    values = [g.clone() for g in kept]
    step(model)
    assert count(model) == 2
    with_two = model.gradd_stats()["shared_bytes"]
    assert all(map(torch.equal, kept, values))
    kept.clear()
    for _ in range(slots._KEPT + 2):
        step(model)
    assert count(model) == 1
    model(torch.ones(4, 64))  # a request that takes the segment along
    assert model.gradd_stats()["shared_bytes"] < with_two


@pytest.mark.parametrize("index", [0, 2])
def test_one_gradient_keeps_all_of_a_slot(index: int) -> None:
    model = made()
    step(model)
    kept = list(model.parameters())[index].grad
    values = kept.clone()
    assert kept.untyped_storage().nbytes() == 4 * kept.numel()
    for _ in range(2):
        step(model)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad)
    assert (
        count(model) == 2
        and torch.equal(kept, values)
        and not torch.equal(list(model.parameters())[index].grad, values)
    )
    del kept
    for _ in range(slots._KEPT + 2):
        step(model)
    assert count(model) == 1


def test_accumulation_keeps_two() -> None:
    """They would be made anew in every step otherwise."""
    model = made()
    seen = set()
    for _ in range(4):
        for micro in range(10):
            step(model, accumulate=micro > 0)
        seen.add(count(model))
    assert seen == {2}


def test_gradients_of_another_choice_go() -> None:
    model = made()
    step(model)
    next(model.parameters()).requires_grad_(False)
    for _ in range(slots._KEPT + 2):
        step(model)
    assert count(model) == 1


def test_checks_leave_no_slot() -> None:
    """Those of a check may be laid out otherwise: the next backward makes its own."""
    model = made()
    loss = model(torch.ones(4, 64)).sum()
    assert model.gradd_stats()["self_checks"] == 1
    assert count(model) == 0
    loss.backward()
    assert count(model) == 1
