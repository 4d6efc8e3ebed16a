"""Two processes that divide parameters or states, or keep them in a checkpoint, by torch's means.

torchrun starts the ranks of helpers/sharded_ranks.py; each does all cases, and the tests compare
what they find with PyTorch's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Daemon

from helpers import sharded_ranks, torchrun

pytestmark = pytest.mark.nightly
Found = list[dict[str, Any]]
CASES = (
    *("fsdp", "fsdp_methods", "fsdp_bf16", "fsdp_killed", "fsdp_of_before"),
    *("zero_redundancy", "checkpoint"),
)


@pytest.fixture(scope="module")
def found(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of both ranks, in all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    both = torchrun.launch(folder, "cpu", *CASES, script=sharded_ranks.__file__)
    for rank in both:
        shared_daemon.killed.update(rank["fsdp_killed"]["pids"])
    return both


def _assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def _assert_gradients(ours: list[torch.Tensor]) -> None:
    for a, b in zip(ours, sharded_ranks.in_one_process(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("goes", [True, False])
@pytest.mark.parametrize("way", sharded_ranks.FSDP_WAYS)
def test_fully_shard_has_the_gradient_of_one_process(way: str, goes: bool, found: Found) -> None:
    """Around wrapped blocks, around a wrapped model, and inside of one; see _sharded()."""
    for rank in found:
        case = rank["fsdp"][f"{way} {goes}"]
        _assert_gradients(case["gradients"])
        assert all(case["forwards"]) and all(case["mirrored"])
        if way in ("blocks", "root"):  # else graphs break at the hooks of FSDP
            assert not any(case["in_torch"])


def test_methods_of_fully_shard_reach_a_wrapped_block(found: Found) -> None:
    case = found[0]["fsdp_methods"]
    assert case["names"] == [name for name, _ in sharded_ranks.Blocks().named_parameters()]
    assert torch.equal(case["whole"], sharded_ranks.Blocks().blocks[0].up.weight)
    assert case["is_part"]


def test_a_policy_of_bf16_is_that_of_pytorch(found: Found) -> None:
    for rank in found:
        ours, theirs = (rank["fsdp_bf16"][way] for way in ("blocks", "plain"))
        assert all(ours["forwards"]) and not any(ours["in_torch"])
        for a, b in zip(ours["gradients"], theirs["gradients"], strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3)


def test_a_daemon_that_dies_before_a_backward_costs_no_bit(found: Found) -> None:
    """The copies of parameters that are gone by then are what the next daemon reads."""
    for rank in found:
        _assert_equal(rank["fsdp_killed"]["False"], rank["fsdp_killed"]["True"])
        assert rank["fsdp_killed"]["pids"]


@pytest.mark.parametrize("uses_original", [True, False])
def test_parts_of_a_flat_parameter_run_in_pytorch_by_name(
    uses_original: bool, found: Found
) -> None:
    for rank in found:
        case = rank["fsdp_of_before"]
        assert case[f"gradd {uses_original}"] == case[f"torch {uses_original}"]
        assert case[f"in_torch {uses_original}"] == {"sharded_parameters": 3}


def test_zero_redundancy_optimizer(found: Found) -> None:
    for rank in found:
        _assert_gradients(rank["zero_redundancy"]["gradients"])
        assert rank["zero_redundancy"]["in_torch"] == [{}]
    whole = len(list(sharded_ranks.Blocks().parameters()))
    assert sum(rank["zero_redundancy"]["stepped"] for rank in found) == whole


@pytest.mark.parametrize("way", ["ddp", "blocks"])
def test_training_goes_on_from_a_distributed_checkpoint(way: str, found: Found) -> None:
    names = [name for name, _ in sharded_ranks.Blocks().named_parameters()]
    for rank in found:
        whole, resumed = rank["checkpoint"][way]
        _assert_equal(whole, resumed)
        assert rank["checkpoint"][f"{way} names"] == names


@pytest.mark.usefixtures("daemon")
def test_an_elastic_restart_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies behind a checkpoint; torchrun starts both again, and they read it."""
    # Else gloo finds addresses of the ranks that are gone, in PyTorch alone as well.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    found = {}
    for by in (torchrun.TORCHRUN, torchrun.RESTARTING):
        folder = tmp_path / str(len(found))
        folder.mkdir()
        script = sharded_ranks.__file__
        ranks = torchrun.launch(folder, "cpu", "elastic", by=by, script=script)
        found[by] = [rank["elastic"] for rank in ranks]
    for whole, resumed in zip(*found.values(), strict=True):
        assert (whole["restarts"], whole["begun"]) == (0, 0)
        assert (resumed["restarts"], resumed["begun"]) == (1, 4)
        _assert_equal(whole["parameters"], resumed["parameters"])
