"""DeepSpeed trains an ORTModule on two processes, by a loop that knows of gradd in one line."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Daemon

from helpers import sharded_ranks, torchrun
from helpers.trainers import environment

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
Ranks = Callable[[str], list[Any]]
_SCRIPT = sharded_ranks.__file__
_COMPILES = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
# Of what PyTorch gives under DeepSpeed: an Adam of torch turns rounding of small gradients into
# part of a step of 1e-2.
CLOSE = {"f32": 1e-5, "bf16": 2e-2, "f16": 5e-3, "twice": 1e-5, "llama": 2e-2}


@pytest.fixture(scope="module")
def ranks(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """What both ranks find in a case of sharded_ranks.py."""
    python = environment.interpreter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        # DeepSpeed compiles a library once, which takes minutes; a rank that is killed while it
        # waits leaves a lock.
        subprocess.run([python, "-c", _COMPILES], check=True, capture_output=True, timeout=500)

        @functools.cache
        def run(case: str) -> list[Any]:
            folder = tmp_path_factory.mktemp("ranks")
            both = torchrun.launch(folder, "cpu", case, script=_SCRIPT, python=python)
            return [rank[case] for rank in both]

        yield run


@pytest.fixture(scope="module")
def found(ranks: Ranks) -> list[dict[str, Any]]:
    """Of both ranks, by case; see sharded_ranks.deepspeed."""
    return ranks("deepspeed")


@pytest.mark.parametrize("kind", CLOSE)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_trains_as_with_pytorch(stage: int, kind: str, found: list[dict[str, Any]]) -> None:
    """Also with two batches in a step, an optimizer that scales losses, and a model whose outputs
    DeepSpeed gives hooks."""
    for rank in found:
        ours, theirs = (rank[f"{stage} {kind}"][name] for name in ("gradd", "torch"))
        assert ours["in_torch"] == [{}] and ours["forwards"][0] >= 6
        assert ours["type"] == "DeepSpeedZeroOptimizer"
        assert (ours["scales"], ours["rates"]) == (theirs["scales"], theirs["rates"])
        torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=CLOSE[kind], atol=1e-4)
        if kind == "llama":  # Adam's steps double what bf16 rounds in small gradients
            continue
        for a, b in zip(ours["parameters"], theirs["parameters"], strict=True):
            torch.testing.assert_close(a, b, rtol=CLOSE[kind], atol=CLOSE[kind])
        assert all(map(torch.equal, ours["loaded"], ours["parameters"]))
    own, other = (rank[f"{stage} {kind}"]["gradd"]["parameters"] for rank in found)
    assert all(map(torch.equal, own, other))


@pytest.mark.parametrize("stage", [1, 2])
def test_fp16_optimizer_skips_the_steps_that_deepspeed_skips(
    stage: int, found: list[dict[str, Any]]
) -> None:
    for rank in found:
        case = rank[f"{stage} f16"]["gradd"]
        assert case["replaced"]
        skipped = [a != b for a, b in zip(case["scales"], case["scales"][1:], strict=False)]
        assert any(skipped) and not all(skipped)


def test_stage_3_runs_in_pytorch_by_name(found: list[dict[str, Any]]) -> None:
    for rank in found:
        ours, theirs = (rank["3 f32"][name] for name in ("gradd", "torch"))
        assert ours["in_torch"] == [{"sharded_parameters": 6}]
        assert ours["losses"] == theirs["losses"]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_trainer_with_deepspeed_among_its_arguments(stage: int, ranks: Ranks) -> None:
    for rank in ranks("deepspeed_trainer"):
        ours, theirs = (rank[stage][name] for name in ("gradd", "torch"))
        assert ours["in_torch"] == {} and ours["forwards"] >= 8 and ours["mirrored"] > 0
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
        assert ours.get("files") == theirs.get("files")
