"""50 training steps through the daemon end where PyTorch's do, with all that saves work and memory.

Four kinds of batches (helpers/parity/trainings.py), f32 and bf16, torch's AdamW and FusedAdam; with
everything that leaves out rows, chunks the loss or computes again, and with each of it switched
off. Bits are those of another run, and of one whose daemon was killed in the middle.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from gradd import ORTModule, optim
from helpers.parity import trainings
from helpers.parity.trainings import Trajectory
from helpers.selection import every_run

pytestmark = pytest.mark.one_in(6)

F32, BF16 = torch.float32, torch.bfloat16
TYPES = {"f32": F32, "bf16": BF16}
NEAR = 1e-3  # to PyTorch in f32, of the way that a parameter went
NEARER = 3e-4  # to plans without all that
OFF = {"GRADD_LIVE_ROWS": "0", "GRADD_CHUNKED_LOSS": "0"}


@dataclass(frozen=True)
class Switch:
    """Variables, and what a trajectory of "sft" does under them."""

    env: dict[str, str]
    labels: bool = True  # rows without a label are left out
    padding: bool = True
    chunked: bool = False  # rows that are left out are too many for chunks of what is left
    again: bool = False  # something is computed again


SWITCHES = {
    "everything": Switch({}),
    "no live rows": Switch({"GRADD_LIVE_ROWS": "0"}, False, False, True),
    "no compute optimizer": Switch({"ORTMODULE_ENABLE_COMPUTE_OPTIMIZER": "0"}, False, False, True),
    "no labels": Switch({"ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": "0"}, False, True, True),
    "no padding": Switch({"ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER": "0"}, True, False),
    "no chunks": Switch({"GRADD_CHUNKED_LOSS": "0"}),
    "nothing": Switch(OFF, False, False),
    "layers": Switch({"ORTMODULE_MEMORY_OPT_LEVEL": "1"}, again=True),
    "compromise": Switch({"ORTMODULE_MEMORY_OPT_LEVEL": "2"}, again=True),
}


def fused(model: torch.nn.Module) -> optim.FusedAdam:
    """The AdamW of trainings.adamw, in the daemon."""
    return optim.FusedAdam(
        model.parameters(),
        lr=trainings.RATE,
        eps=1e-8,
        weight_decay=0.01,
        adam_w_mode=optim.AdamWMode.ADAMW_TORCH,
    )


OPTIMIZERS = {"torch": trainings.adamw, "fused": fused}


@functools.cache
def eager(kind: str, start: torch.dtype, dtype: torch.dtype) -> Trajectory:
    """PyTorch's trajectory in `dtype`, from values that `start` has."""
    return trainings.train(kind, trainings.start(kind, start).to(dtype))


def trajectory(
    kind: str,
    dtype: torch.dtype,
    optimizer: str,
    env: dict[str, str],
    halfway: Callable[[int, str], object] = lambda step, where: None,
) -> tuple[Trajectory, ORTModule]:
    """A trajectory through the daemon, and the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADD_SELF_CHECK", "0")
        for name, value in env.items():
            patch.setenv(name, value)
        model = ORTModule(trainings.start(kind, dtype), strict=True)
        return trainings.train(kind, model, OPTIMIZERS[optimizer], halfway), model


@functools.cache
def all_off(kind: str, dtype: torch.dtype, optimizer: str) -> Trajectory:
    return trajectory(kind, dtype, optimizer, OFF)[0]


def check(kind: str, dtype: torch.dtype, optimizer: str, ours: Trajectory) -> None:
    """Beside PyTorch, and in f32 beside the plans over all rows with whole logits."""
    first, theirs = trainings.start(kind, dtype), eager(kind, dtype, dtype)
    assert theirs.losses[-4:].mean() < 0.8 * theirs.losses[:4].mean(), "nothing was learned"
    if dtype == F32:
        trainings.check_near(ours, theirs, first, NEAR)
        trainings.check_near(ours, all_off(kind, dtype, optimizer), first, NEARER)
    else:
        trainings.check_as_near(ours, theirs, eager(kind, dtype, F32))


ALL = list(product(trainings.KINDS, TYPES, OPTIMIZERS, SWITCHES))
KEPT = {("sft", "f32", "fused" if i % 2 else "torch", name) for i, name in enumerate(SWITCHES)}
KEPT |= {("bert", "bf16", "fused", "everything"), ("packed", "f32", "fused", "everything")}


@pytest.mark.parametrize("case", every_run(KEPT, ALL), ids=" ".join)
def test_ends_where_pytorch_ends(shared_daemon: Any, case: tuple[str, str, str, str]) -> None:
    kind, type_, optimizer, switch = case
    dtype, meant = TYPES[type_], SWITCHES[switch]
    ours, model = trajectory(kind, dtype, optimizer, meant.env)
    stats, plan = model.gradd_stats(), model.gradd_explain()
    assert stats["fallbacks"] == {} and stats["captures"] == 1
    if kind == "sft":
        assert (stats["unlabelled_rows_left_out"] > 0) == meant.labels
        assert (stats["padding_rows_left_out"] > 0) == meant.padding
        if dtype == F32:  # the logits of bf16 are too short
            assert ("LinearCrossEntropy" in plan.counts()) == meant.chunked
    assert (plan.recomputed_bytes > 0) == meant.again
    check(kind, dtype, optimizer, ours)


KILLED = [(*case, "compromise") for case in product(trainings.KINDS, TYPES, OPTIMIZERS)]
KILLED += [
    (kind, type_, "fused", "no live rows") for kind, type_ in product(trainings.KINDS, TYPES)
]
KILLS = {(5, "backward"), (6, "step"), (31, "backward"), (40, "forward")}


@pytest.mark.parametrize(
    "case", every_run({("sft", "f32", "fused", "compromise")}, KILLED), ids=" ".join
)
def test_bits_are_those_of_another_run(daemon: Any, case: tuple[str, str, str, str]) -> None:
    """Whatever happens to the daemon, and whatever is computed again in backward."""
    kind, type_, optimizer, switch = case
    env = SWITCHES[switch].env
    keeps = {k: v for k, v in env.items() if k != "ORTMODULE_MEMORY_OPT_LEVEL"}
    expected, _ = trajectory(kind, TYPES[type_], optimizer, keeps)
    undisturbed, _ = trajectory(kind, TYPES[type_], optimizer, env)
    assert undisturbed.same_bits(expected)

    def halfway(step: int, where: str) -> None:
        if (step, where) in KILLS:
            daemon.kill()

    killed, model = trajectory(kind, TYPES[type_], optimizer, env, halfway)
    assert model.gradd_stats()["recoveries"] == len(KILLS)
    assert killed.same_bits(expected)
