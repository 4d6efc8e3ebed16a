"""What a bridge and its client keep of captures, and what they forget: nothing may pile up."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from nets import Net, assert_same_grads, batch, loss_of, pair
from torch import nn

from gradd import ORTModule, bridge
from gradd.session import client

pytestmark = pytest.mark.usefixtures("daemon")


class Forms(Net):
    """Another graph for every value of `form`."""

    def forward(self, x: torch.Tensor, form: int = 0) -> torch.Tensor:
        return (self.first(x) * (form + 1)).sum()


class Wide(nn.Module):
    """Another graph for every width: forward() counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.w.sum() * 0
        for i in range(x.shape[1]):
            total = total + (x[:, i] * (i + 1)).sum() * self.w.sum()
        return total


def _captures(model: ORTModule) -> int:
    return model.gradd_stats()["captures"]


def _known_graphs() -> int:
    gc.collect()
    return len(client.get_client().ledger.graphs)


def test_the_form_that_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_KEPT_FORMS", 2)
    model = ORTModule(Forms(), strict=True)
    x, _ = batch()
    for form in (0, 1, 0, 2, 0):
        assert model(x, form=form).isfinite()
    assert _captures(model) == 3, "form 0 is used all the time and stays"
    assert _known_graphs() == 2
    model(x, form=1)
    assert _captures(model) == 4 and _known_graphs() == 2


def test_captures_of_one_form_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_KEPT_SIZES", 2)
    model = ORTModule(Wide(), strict=True)
    for width in (2, 3, 2, 4, 2):
        x = torch.ones(3, width)
        assert model(x).item() == pytest.approx(3 * sum(range(1, width + 1)))
    assert _captures(model) == 3
    assert _known_graphs() == 2 and model.gradd_stats()["plans"] <= 3


@pytest.mark.quick
def test_graphs_of_a_module_that_is_gone_are_not_repeated() -> None:
    model = ORTModule(Net(), strict=True)
    loss_of(model(*batch())).backward()
    twin = ORTModule(Net(seed=1), strict=True)
    loss_of(twin(*batch())).backward()
    assert _known_graphs() == 1, "equal graphs are one"
    del model
    assert _known_graphs() == 1
    del twin
    assert _known_graphs() == 0


def test_a_run_outlives_the_capture_it_was_made_of(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph is told to the next daemon as long as the run is not released."""
    monkeypatch.setattr(bridge, "_KEPT_FORMS", 1)
    ours, theirs = pair(Forms())
    x, _ = batch()
    loss = ours(x, form=3)
    ours(x, form=4)
    assert _known_graphs() == 2
    daemon.kill()
    loss.backward()
    theirs(x, form=3).backward()
    assert_same_grads(ours, theirs)
    del loss
    assert _known_graphs() == 1


def test_modules_without_parameters_leave_nothing(daemon: Any) -> None:
    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    for _ in range(4):
        assert ORTModule(Double(), strict=True)(torch.ones(2)).tolist() == [2.0, 2.0]
        gc.collect()
    client.get_client().flush()
    (session,) = daemon.ps()["sessions"]
    assert session["bindings"] == 0
