"""A device that fails: named errors, and no step lost.

Only where a device of the tests runs: the fake one (tests/fake), or the CUDA plug-in's on a
stand-in for CUDA (tests/sim).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from conftest import BINARY, DEVICE

from gradd import ORTModule, errors, optim
from gradd.session import client
from helpers import sessions
from helpers.nets import Net, batch, loss_of

pytestmark = [pytest.mark.fake, pytest.mark.fake_only, pytest.mark.usefixtures("daemon")]
EMULATED = DEVICE == "emu"
FAIL, ONCE = (f"GRADD_{'SIM' if EMULATED else 'FAKE'}_{name}" for name in ("FAIL", "ONCE"))
WORK = "kernel" if EMULATED else "item"
REFUSED = (
    [
        ("cudaMallocAsync:2", errors.OutOfMemoryError, "the GPU has no memory for"),
        ("cudaHostRegister:1", errors.OutOfMemoryError, "the GPU cannot map"),
    ]
    if EMULATED
    else [
        ("alloc:2", errors.OutOfMemoryError, "the device has no memory for"),
        ("map:1", errors.SharedMemoryError, "the device cannot map"),
    ]
)


def _train(steps: int) -> list[torch.Tensor]:
    torch.manual_seed(11)
    model = ORTModule(Net(dropout=0.2), strict=True)
    optimizer = optim.FusedAdam(model.parameters(), lr=0.01)
    history = []
    for step in range(steps):
        loss = loss_of(model(*batch(5, seed=step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.detach().clone())
    return [*history, *(p.detach().clone() for p in model.parameters())]


def _next_daemon(daemon: object, monkeypatch: pytest.MonkeyPatch, fail: str) -> None:
    """The one that a client starts instead of this one has a device that fails."""
    monkeypatch.setenv(FAIL, fail)
    daemon.kill()


def _forgive(daemon: object) -> None:
    """Daemons that ended because of their device ended as they should."""
    daemon.killed |= {p.pid for p in daemon.processes() if p.poll() == 69}


@pytest.mark.parametrize("item", [1, 7, 20, 33, 50, 90])
def test_a_lost_device_loses_no_bit(
    daemon: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, item: int
) -> None:
    expected = _train(4)
    client.close_all()
    monkeypatch.setenv(ONCE, str(tmp_path / "happened"))
    _next_daemon(daemon, monkeypatch, f"{WORK}:{item}")
    got = _train(4)
    _forgive(daemon)
    assert (tmp_path / "happened").exists()
    assert sessions.session().recoveries == 1
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_a_plan_that_loses_the_device_again_is_refused(
    daemon: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all daemons, until one is told to end; other plans are computed."""
    expected, said = _train(2), "the device was lost 2 times in a (forward|backward) of this plan"
    _next_daemon(daemon, monkeypatch, f"{WORK}:9")
    with pytest.raises(errors.UnsupportedError, match=said):
        _train(4)
    _forgive(daemon)
    assert sessions.session().recoveries == 3  # it was killed, and then lost its device twice
    monkeypatch.delenv(FAIL)
    daemon.kill()
    with pytest.raises(errors.UnsupportedError, match=said):
        _train(2)
    other = ORTModule(torch.nn.Linear(8, 3), strict=True)
    other(torch.ones(2, 8)).sum().backward()
    subprocess.check_call([str(BINARY), "stop", "--dir", str(daemon.directory)])
    assert all(map(torch.equal, _train(2), expected))


@pytest.mark.parametrize(("fail", "error", "what"), REFUSED)
def test_a_refusal_is_named_and_the_session_survives(
    daemon: object, monkeypatch: pytest.MonkeyPatch, fail: str, error: type, what: str
) -> None:
    _next_daemon(daemon, monkeypatch, fail)
    with pytest.raises(error, match=what):
        _train(2)
    assert _train(2)
    assert sessions.session().recoveries == 0
