"""Random networks that read changing state from outside: right at every step, or named."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from outside_random import Network

from gradd import ORTModule

pytestmark = pytest.mark.usefixtures("shared_daemon")
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
_FIRST = int(os.environ.get("GRADD_SEED", "0"))
_CHANGES = 2


def _follow(seed: int) -> dict[str, int]:
    """Compares each step with PyTorch; returns the statistics."""
    network = Network(seed, _CHANGES)
    torch.manual_seed(0)
    eager = network.names["Net"]()
    ours = ORTModule(copy.deepcopy(eager))
    for step in range(_CHANGES + 1):
        if step:
            network.change(step - 1, (ours.module, eager))
        expected, found = eager(X), ours(X)
        same = torch.allclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)
        assert same and found.dtype == expected.dtype, (
            f"seed {seed} after {network.changes[:step]}:\n{network.text}"
        )
    return ours.gradd_stats()


def _follow_all(seeds: range) -> None:
    print(f"seeds {seeds}")
    captured = sum(_follow(seed)["captures"] > 0 for seed in seeds)
    assert captured > 0.8 * len(seeds), f"only {captured} of {len(seeds)} run in the daemon"


def test_twenty_networks() -> None:
    _follow_all(range(_FIRST, _FIRST + 20))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(20, 320, 20))
def test_three_hundred_networks(first: int) -> None:
    _follow_all(range(_FIRST + first, _FIRST + first + 20))
