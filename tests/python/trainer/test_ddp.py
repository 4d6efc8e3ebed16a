"""Several processes train one model: DistributedDataParallel around an ORTModule.

torchrun starts the ranks. Each writes what it has found to a file; the tests compare with the
module in PyTorch, in one process, on the batches of all ranks.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Daemon

from helpers import ranks, torchrun


@pytest.fixture(scope="module")
def found(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both ranks, in all cases: starting them takes most of the time."""
    both = torchrun.launch(tmp_path_factory.mktemp("ranks"), "cpu", *ranks.CASES)
    for rank in both:
        for case in ("killed", "killed_bucket_view"):
            shared_daemon.killed.update(rank[case]["True"]["pids"])
    return both


@pytest.mark.parametrize("case", ["plain", *sorted(ranks.OPTIONS)])
def test_two_ranks_have_the_gradient_of_one_process(found: list[dict[str, Any]], case: str) -> None:
    """Also with unused parameters, a static graph, in buckets, and in steps of two batches."""
    torchrun.assert_gradients(found, case)


def test_reducing_begins_before_the_backward_ends(found: list[dict[str, Any]]) -> None:
    torchrun.assert_gradients(found, "events")
    for rank in found:
        assert not any(e.startswith("group") for e in rank["events"]["False"]["events"])
        events = rank["events"]["True"]["events"]
        last = events.index(f"group {ranks.LAYERS - 1}")  # there the request is answered
        assert events.index("reduce 0") < last and events.count("reduce 0") == 1


def test_groups_have_the_sizes_of_buckets(found: list[dict[str, Any]]) -> None:
    """A first one of 1 MiB, and the rest: where several processes train."""
    assert [rank["default"]["groups"] for rank in found] == [2, 2]


@pytest.mark.parametrize("case", ["killed", "killed_bucket_view"])
def test_a_killed_daemon_costs_no_bit(found: list[dict[str, Any]], case: str) -> None:
    """A rank kills it between two groups, when the first ones may be reduced already."""
    own, other = (rank[case] for rank in found)
    for gradients in (other["True"], other["False"], own["False"]):
        assert all(map(torch.equal, own["True"]["gradients"], gradients["gradients"]))
    killers = [rank["True"] for rank in (own, other) if rank["True"]["pids"]]
    assert killers and all(rank["recoveries"] > 0 for rank in killers)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="there is no accelerate")
@pytest.mark.usefixtures("daemon")
def test_accelerate_launches_them_as_well(tmp_path: Path) -> None:
    found = torchrun.launch(tmp_path, "cpu", "plain", by=torchrun.ACCELERATE)
    torchrun.assert_gradients(found, "plain")
