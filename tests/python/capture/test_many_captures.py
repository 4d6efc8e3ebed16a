"""Captures that do not pay are given up: by name, once, and until the same call comes often."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from nets import Net, assert_close, assert_same_grads, batch
from torch import nn

from gradd import ORTModule, bridge, fallback
from gradd.export import CaptureError

pytestmark = pytest.mark.usefixtures("daemon")


class Scaled(Net):
    """An attribute that forward() reads."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() * self.factor


def test_an_attribute_that_changes_in_every_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bridge, "_KEPT_FORMS", 3)
    theirs = Scaled()
    ours = ORTModule(copy.deepcopy(theirs))
    x, _ = batch()
    early = ours(x)
    for step in range(9):
        ours.factor = theirs.factor = 2.0 + step
        assert_close(ours(x), theirs(x))
    assert len(ours._gradd_bridge._graphs) == 3
    assert ours.gradd_stats()["captures"] == 4
    assert ours.gradd_stats()["fallbacks"] == {"many_captures": 6}
    assert caplog.text.count("captured 4 times") == 1 and "has come 20 times" in caplog.text
    early.backward()  # of a capture that is forgotten
    theirs.factor = 1.0
    theirs(x).backward()
    assert_same_grads(ours, theirs)


class Times(Net):
    """A number among the arguments."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.first(x) * number


def _captures_after(model: Any, numbers: Iterable[int]) -> list[int]:
    """Captures after each of these calls."""
    x, _ = batch()
    counts = []
    for number in numbers:
        assert_close(model(x, number), model.module(x, number))
        counts.append(model.gradd_stats()["captures"])
    return counts


def test_a_number_that_changes_in_every_call() -> None:
    model = ORTModule(Times())
    assert _captures_after(model, [*range(6), 0, 1])[-1] == 4, "what has been captured runs"
    assert model.gradd_stats()["fallbacks"] == {"many_captures": 2}
    counts = _captures_after(model, [7] * 22)
    assert counts == [4] * 20 + [5] * 2, "and what comes again and again is captured"


def test_captures_that_pay_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "MANY_CAPTURES", 7)
    model = ORTModule(Times())
    pays = fallback.PAYS
    assert _captures_after(model, [0, 1, *[2] * pays, 3, 4, 5])[-1] == 6, (
        "one of the last four paid"
    )
    assert _captures_after(model, [6] * (pays + 1))[-1] == 7
    assert _captures_after(model, [7] * pays)[-1] == 7, "7 are many"
    assert _captures_after(model, [7])[-1] == 8
    assert _captures_after(model, [8] * pays)[-1] == 8, (
        "and for the next it takes twice as many calls"
    )
    assert _captures_after(model, [8] * (pays + 1))[-1] == 9


class Unrolled(Net):
    """As many operators as rows: each number of rows is a capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        state = h[0]
        for t in range(1, len(h)):
            state = torch.tanh(state + h[t])
        return state.sum()


def test_sizes_that_change_in_every_call() -> None:
    model = ORTModule(Unrolled())
    for rows in range(3, 10):
        x = torch.randn(rows, 8)
        assert_close(model(x), model.module(x))
    assert model.gradd_stats()["captures"] == 4
    assert model.gradd_stats()["fallbacks"] == {"many_captures": 3}


FACTOR = [1.0]


class Outside(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * FACTOR[0]


def test_an_outside_value_that_changes_in_every_call(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(Outside())
    x, _ = batch()
    for factor in range(8):
        FACTOR[0] = float(factor)
        assert_close(model(x), model.module(x))
    assert model.gradd_stats()["captures"] == 4
    assert model.gradd_stats()["fallbacks"] == {"many_captures": 4}
    assert "differ in what forward() reads outside" in caplog.text and "3.0 -> 4.0" in caplog.text


class Changed(nn.Module):
    """The loss of a trainer that puts the model into it anew before every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()


@pytest.mark.parametrize("strict", [False, True])
def test_a_module_that_is_changed_before_every_step(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = ORTModule(Changed(), strict=strict)
    x = torch.randn(5, 8)
    for _ in range(7):
        model.module.model = model.model = copy.deepcopy(model.module.model)
        model.zero_grad()
        model(x).backward()
        expected = torch.autograd.grad(model.module(x), model.module.model.weight)[0]
        assert_close(model.module.model.weight.grad, expected)
    assert model.gradd_stats()["captures"] == (7 if strict else 4)
    assert model.gradd_stats()["fallbacks"] == ({} if strict else {"many_captures": 3})
    assert caplog.text.count("captured 4 times") == 1
    assert ("Where nothing may run in PyTorch, it goes on" in caplog.text) == strict


def test_a_warning_says_what_a_failed_capture_cost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        time.sleep(0.2)
        raise CaptureError("export_failed", "it does not work")

    monkeypatch.setattr(bridge.Bridge, "_capture", fails)
    ORTModule(Scaled())(batch()[0])
    (said,) = [r.getMessage() for r in caplog.records if "runs in PyTorch" in r.getMessage()]
    found = re.search(r"took ([0-9.]+) s before that was known", said)
    assert found and float(found.group(1)) >= 0.2
