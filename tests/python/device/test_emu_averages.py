"""Daemons of two GPUs average gradients among themselves, by the stand-in for NCCL."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import conftest
import pytest
import torch
from conftest import Daemon
from torch import nn

from gradd import ORTModule, errors
from helpers import averaging_ranks, emu_group, emu_torch, torchrun
from helpers.averaging_ranks import GROUP, WIDTH, Stack, batch

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
]
DEVICE = "emu:0"


# ---- one process -------------------------------------------------------------------------------


@pytest.fixture
def group(daemon: Daemon) -> Iterator[Any]:
    """A process group of this process alone."""
    emu_group.register()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("emu", rank=0, world_size=1, store=store)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def _steps(model: nn.Module, n: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(n):
        optimizer.zero_grad()
        model(batch(step, 0).to(DEVICE)).backward()
        found += [p.grad.cpu().clone() for p in model.parameters()]
        optimizer.step()
    return found


def test_one_rank_alone_keeps_every_bit(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_GROUP_BYTES", GROUP)
    alone = _steps(ORTModule(Stack(WIDTH, False).to(DEVICE), strict=True))
    averaged = _steps(ORTModule(Stack(WIDTH, False).to(DEVICE), process_group=group))
    assert all(map(torch.equal, averaged, alone))


def test_what_cannot_be_is_refused_by_name(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(errors.UnsupportedError, match=r"DistributedDataParallel.*over gloo"):
        ORTModule(module.to("cpu"), process_group=group)
    with pytest.raises(errors.UnsupportedError, match="GRADD_DISABLE=1"):
        monkeypatch.setenv("GRADD_DISABLE", "1")
        ORTModule(module.to(DEVICE), process_group=group)


def test_a_missing_library_is_named(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_NCCL", "/nowhere/libnccl.so.2")
    with pytest.raises(errors.UnsupportedError, match=r"NCCL cannot be loaded: /nowhere/libnccl"):
        ORTModule(nn.Linear(4, 4).to(DEVICE), process_group=group)


# ---- two processes -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both ranks, in all cases: starting them takes most of the time."""
    script = averaging_ranks.__file__
    folder = tmp_path_factory.mktemp("ranks")
    both = torchrun.launch(folder, "emu", *averaging_ranks.CASES, script=script)
    stop = [str(conftest.BINARY), "stop", "--dir", str(shared_daemon.root)]
    subprocess.run(stop, check=True, timeout=60, capture_output=True)
    return both


def _assert_close(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a is None) == (b is None), number
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.nightly
def test_two_ranks_have_the_gradient_of_one_process(found: list[dict[str, Any]]) -> None:
    """In groups and together, in a step of two batches; Python takes no part."""
    expected = averaging_ranks.in_one_process()
    for rank in found:
        _assert_close(rank["stack"]["groups"], expected)
        assert rank["stack"]["groups_collectives"] == rank["stack"]["together_collectives"] == 0
        for a, b in zip(rank["stack"]["groups"], rank["stack"]["together"], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    for a, b in zip(*(rank["stack"]["groups"] for rank in found), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.nightly
def test_a_llama_has_the_gradients_of_ddp(found: list[dict[str, Any]]) -> None:
    for rank in found:
        _assert_close(rank["llama"]["averaged"], rank["llama"]["ddp"])


@pytest.mark.nightly
def test_gradients_of_inputs_are_the_rank_s_own(found: list[dict[str, Any]]) -> None:
    total = []
    for number, rank in enumerate(found):
        module = Stack(WIDTH, False)
        x = batch(7, number).requires_grad_(True)
        module(x).backward()
        torch.testing.assert_close(rank["inputs"]["x"], 2 * x.grad, rtol=1e-5, atol=1e-7)
        total.append(module.layers[2].weight.grad)
    for rank in found:
        once, twice = rank["inputs"]["once"], rank["inputs"]["twice"]
        assert [i for i, g in enumerate(once) if g is not None] == [4, 5]
        torch.testing.assert_close(once[4], sum(total) / 2, rtol=1e-5, atol=1e-7)
        assert torch.equal(twice[4], 2 * once[4])


@pytest.mark.nightly
def test_other_parameters_fail_in_all_ranks(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["other_parameters"]["errors"]
        assert "all must have the same parameters" in said["backward"]
        assert said["backward"].startswith("PeerError")
        assert "has failed before" in said["again"]


@pytest.mark.nightly
def test_a_killed_daemon_is_an_error_in_all_ranks(found: list[dict[str, Any]]) -> None:
    """And no gradient is one of a rank alone: what was not averaged is NaN."""
    waits, killed = (rank["killed"] for rank in found)
    assert killed["pids"] and not waits["pids"]
    assert "has waited 20000 ms for the other ranks" in waits["errors"]["backward"]
    assert "is not known: it ends with the daemon" in killed["errors"]["backward"]
    for rank in (waits, killed):
        assert rank["errors"]["again"]
        for gradient, right in zip(rank["gradients"], rank["right"], strict=True):
            assert gradient.isnan().all() or torch.equal(gradient, right)


@pytest.mark.nightly
def test_what_would_not_be_averaged_is_refused(found: list[dict[str, Any]]) -> None:
    one, two = (rank["refused"] for rank in found)
    for said in (one, two):
        assert "the module of rank 1 has other parameters" in said["structure"]
        assert "sparse=True" in said["sparse"] and "operator Det" in said["operator"]
        assert "cannot be pickled" in said["pickle"]
    assert "PeerError: GRADD_E_PEER: process_group: rank 1 has failed" in one["one on the CPU"]
    assert "no daemon averages gradients on cpu" in two["one on the CPU"]
