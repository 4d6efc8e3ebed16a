"""`gradd restart` puts another process of the binary under running trainers."""

from __future__ import annotations

import json
import subprocess
import threading

import pytest
import torch
from conftest import BINARY, Daemon

import gradd
from gradd import ORTModule, optim
from helpers import sessions
from helpers.nets import Net, batch, loss_of

pytestmark = pytest.mark.fake


def _restart(daemon: Daemon, *more: str) -> str:
    command = [str(BINARY), "restart", "--dir", str(daemon.directory), *more]
    return subprocess.run(command, check=True, text=True, capture_output=True, timeout=60).stdout


def _train(steps: int, meanwhile: threading.Event | None = None) -> list[torch.Tensor]:
    """Losses and parameters; at least `steps`, and until the event is set, which is undisturbed."""
    torch.manual_seed(3)
    model = ORTModule(Net(width=16, dropout=0.3), strict=True)
    optimizer = optim.FusedAdam(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for step in range(steps):
        loss = loss_of(model(*batch(5 + step % 3, seed=step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.detach().clone(), *(p.detach().clone() for p in model.parameters())]
        if meanwhile is not None and meanwhile.is_set():
            break
    return found


def test_trainers_go_on_with_the_same_bits(daemon: Daemon) -> None:
    done = threading.Event()
    said = []

    def restart() -> None:
        for _ in range(6):
            said.append(json.loads(_restart(daemon, "--json")))
        done.set()

    thread = threading.Thread(target=restart)
    pid = daemon.pid()
    thread.start()
    found = _train(5000, done)
    thread.join()
    assert [entry["pid"] for entry in said] == [pid] * 6 and daemon.pid() == pid
    assert sessions.session().recoveries >= 1
    expected = _train(len(found) // (len(list(Net(width=16, dropout=0.3).parameters())) + 1))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_kept_sessions_stay(daemon: Daemon) -> None:
    torch.manual_seed(3)
    model = ORTModule(Net(width=16), strict=True)
    loss_of(model(*batch(5, seed=0))).backward()
    gradd.keep("net", model)
    before = daemon.worker()
    assert _restart(daemon).startswith("restarted: gradd ")
    assert daemon.worker() != before
    [kept] = daemon.ps()["kept"]
    assert kept["name"] == "net" and kept["in_use"] == 1
    loss_of(model(*batch(5, seed=0))).backward()
    gradd.forget("net")


def test_no_daemon(daemon: Daemon, tmp_path: object) -> None:
    command = [str(BINARY), "restart", "--dir", str(tmp_path)]
    found = subprocess.run(command, text=True, capture_output=True, timeout=60)
    assert found.returncode == 3 and "no daemon runs" in found.stderr
