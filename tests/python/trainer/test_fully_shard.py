"""fully_shard() around a wrapped module, and checkpoints, in one process.

test_sharded.py has several.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from gradd import ORTModule
from helpers.nets import Net, assert_close, batch, loss_of, pair

pytestmark = pytest.mark.usefixtures("daemon")


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class _Outer(nn.Module):
    """A part that is wrapped, and a layer that is not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.last = inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x)).square().mean()


def _part() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


@pytest.mark.usefixtures("alone")
def test_parameters_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    theirs, wrapped = _Outer(_part()), ORTModule(_part(), strict=True)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    ours = _Outer(fully_shard(wrapped, mesh=mesh))
    fully_shard(ours, mesh=mesh)
    assert isinstance(wrapped, FSDPModule) and isinstance(wrapped, ORTModule)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert wrapped in list(ours.modules()) and wrapped.module not in list(ours.modules())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    with caplog.at_level(logging.WARNING, "gradd"):
        for seed in range(3):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(seed=seed)[0]).backward()
                optimizer.step()
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert isinstance(a, DTensor)
                assert_close(a.grad.full_tensor(), b.grad)
    assert wrapped.gradd_stats()["mirrored"] == 4 and wrapped.gradd_stats()["forwards"] >= 3
    said = [r.getMessage() for r in caplog.records if "copied before every forward" in r.message]
    assert len(said) == 1 and "4 parameters" in said[0] and "FSDP" in said[0]
    wrapped.unshard()
    assert not isinstance(wrapped.module[0].weight, DTensor)
    wrapped.reshard()
    assert isinstance(wrapped.module[0].weight, DTensor)


def test_a_checkpoint_of_a_wrapped_model(tmp_path: Path) -> None:
    ours, theirs = pair()
    for model, name in ((ours, "ours"), (theirs, "theirs")):
        loss_of(model(*batch())).backward()
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / name, no_dist=True)
    other, plain = ORTModule(Net(seed=5)), Net(seed=5)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    other.load_state_dict(state)
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    plain.load_state_dict(state)
    for model in (other, plain):
        for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
