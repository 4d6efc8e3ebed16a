"""Several processes train one model: DistributedDataParallel around an ORTModule.

torchrun starts the ranks. Each writes what it has found to a file; the tests compare with the
module in PyTorch, in one process, on the batches of all ranks.
"""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BINARY, Daemon

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
@pytest.mark.usefixtures("daemon")
def test_a_trace_shows_reductions_within_the_backward(tmp_path: Path) -> None:
    """In a step at least: a busy machine may keep a rank from its processor for so long."""
    for rank in torchrun.launch(tmp_path, "cpu", "traced"):
        begun, ends = rank["traced"]["begun"], rank["traced"]["ends"]
        groups = len(begun) // ranks.STEPS
        assert len(ends) == ranks.STEPS and groups > 1
        assert any(first < end for first, end in zip(begun[::groups], ends, strict=True))


@pytest.mark.nightly
def test_a_hundred_killed_daemons_cost_no_bit(tmp_path: Path) -> None:
    """Each rank has a daemon of its own, and both kill them, at different places of a step."""
    for rank in range(2):
        ranks.own_directory(tmp_path, rank).mkdir(mode=0o700)
    try:
        found = torchrun.launch(tmp_path, "cpu", "killed_often")
    finally:
        for rank in range(2):
            where = str(ranks.own_directory(tmp_path, rank))
            subprocess.run([str(BINARY), "stop", "--dir", where], check=False)
    assert len({pid for rank in found for pid in rank["killed_often"]["pids"]}) >= 100
    right = found[0]["killed_often"]["False"]
    assert len(right) == ranks.KILLS * 2 * ranks.LAYERS
    for rank in found:
        assert rank["killed_often"]["recoveries"] >= 50
        for kills in ("False", "True"):
            assert all(map(torch.equal, right, rank["killed_often"][kills]))


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="there is no accelerate")
@pytest.mark.usefixtures("daemon")
def test_accelerate_launches_them_as_well(tmp_path: Path) -> None:
    found = torchrun.launch(tmp_path, "cpu", "plain", "prepared", by=torchrun.ACCELERATE)
    for case in ("plain", "prepared"):
        torchrun.assert_gradients(found, case)
