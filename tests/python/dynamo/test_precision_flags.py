"""Settings of torch's libraries neither stop a capture nor are changed by it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers.utils import enable_tf32

from helpers.nets import Net, pair, step_agrees

pytestmark = pytest.mark.usefixtures("shared_daemon")

KNOBS = [("generic", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")]
KNOBS += [("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")]


def _knobs() -> list[str]:
    return [torch._C._get_fp32_precision_getter(*knob) for knob in KNOBS]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = _knobs()
    yield
    for knob, value in zip(KNOBS, before, strict=True):
        torch._C._set_fp32_precision_setter(*knob, value)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "none"])
def test_a_precision_for_all_libraries(precision: str) -> None:
    torch.backends.fp32_precision = precision
    before = _knobs()
    ours, theirs = pair(Layers())
    step_agrees(ours, theirs, torch.randn(3, 4))
    assert ours.gradd_stats()["fallbacks"] == {} and ours.gradd_stats()["captures"] == 1
    assert _knobs() == before


@pytest.mark.parametrize("enable", [True, False])
def test_transformers_switch(enable: bool) -> None:
    enable_tf32(enable)
    ours, theirs = pair(Layers())
    step_agrees(ours, theirs, torch.randn(3, 4))
    assert ours.gradd_stats()["fallbacks"] == {}


def test_libraries_are_switched_on_again() -> None:
    before = [torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled]
    ours, theirs = pair(Net())
    ours(torch.randn(2, 8))
    assert [torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled] == before
