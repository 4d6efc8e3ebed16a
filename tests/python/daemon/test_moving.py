"""A worker that dies is replaced under its clients: connection, token and segments stay."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from conftest import PYTHONPATH, Daemon

from gradd import ORTModule, optim
from gradd.session import control
from helpers import sessions
from helpers.nets import Net, batch, loss_of
from helpers.waiting import until

pytestmark = pytest.mark.fake


class Steps:
    """A training with dropout, step by step."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.model = ORTModule(Net(width=16, dropout=0.3), strict=True)
        self.optimizer = optim.FusedAdam(self.model.parameters(), lr=0.1)
        self.losses: list[torch.Tensor] = []

    def step(self, rows: int = 5) -> None:
        """One more; `rows` of its batch."""
        loss = loss_of(self.model(*batch(rows, seed=len(self.losses))))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach().clone())

    def bits(self) -> list[torch.Tensor]:
        """Losses, and the parameters of now."""
        return [*self.losses, *(p.detach().clone() for p in self.model.parameters())]


def _undisturbed(n: int) -> list[torch.Tensor]:
    steps = Steps()
    for i in range(n):
        steps.step(5 + i % 2)
    return steps.bits()


def _losses(n: int) -> list[torch.Tensor]:
    steps = Steps()
    for _ in range(n):
        steps.step()
    return steps.losses


def _assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_connection_stays(daemon: Daemon) -> None:
    expected = _undisturbed(4)
    steps = Steps()
    steps.step()
    client = sessions.session()
    connection, session, token = client._connection, client.session, client._connection._token
    held = set(connection.held)
    for i in range(3):
        daemon.kill_worker()
        steps.step(5 + (i + 1) % 2)
        assert client._connection is connection and connection._token == token
        assert client.session == session and client.worker_pid == daemon.worker()
        assert client.recoveries == i + 1 and connection.held >= held
    _assert_equal(steps.bits(), expected)


def _held_by_owner(daemon: Daemon) -> int:
    """Descriptors of memory that the owner has."""
    held = 0
    for link in Path(f"/proc/{daemon.pid()}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            held += "memfd:" in os.readlink(link)
    return held


def test_a_segment_whose_worker_dies_is_passed_again(daemon: Daemon) -> None:
    steps = Steps()
    steps.step()
    held = _held_by_owner(daemon)
    client = sessions.session()
    connection = client._connection
    for answered in (False, True):  # by the worker that dies, or by the next one
        worker = daemon.worker()
        os.kill(worker, signal.SIGSTOP if not answered else signal.SIGKILL)
        if not answered:
            # The packet is on its way to a worker that will not read it.
            kill = threading.Timer(0.2, os.kill, (worker, signal.SIGKILL))
            kill.start()
        segment = client.create_segment(1 << 16, "gradients")
        assert client._connection is connection and segment.id in connection.held
        client.drop_segment(segment)
        steps.step()
        assert segment.id not in connection.held
        until(lambda: _held_by_owner(daemon) == held, "the owner lets go of the segment")
    _assert_equal(steps.losses, _losses(3))


def test_what_the_client_has_dropped_meanwhile_is_dropped(daemon: Daemon) -> None:
    """`unsegment` was on its way when the worker died: the next one has the segment."""
    steps = Steps()
    steps.step()
    client = sessions.session()
    segment = client.create_segment(1 << 16, "gradients")
    worker = daemon.worker()
    os.kill(worker, signal.SIGSTOP)
    kill = threading.Timer(0.2, os.kill, (worker, signal.SIGKILL))
    kill.start()
    client.drop_segment(segment)
    steps.step()  # sends it first
    steps.step()
    assert segment.id not in client._connection.held
    mine = next(s for s in daemon.ps()["sessions"] if s["session"] == client.session)
    assert mine["segments"] == len(client._segments)


def test_clients_that_do_not_say_that_they_move_are_hung_up_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a version before."""
    pack = control.protocol.pack

    def former(fields: dict) -> bytes:
        return pack({k: v for k, v in fields.items() if k != "replaced"})

    monkeypatch.setattr(control.protocol, "pack", former)
    expected = _undisturbed(2)
    steps = Steps()
    steps.step()
    client = sessions.session()
    connection, session = client._connection, client.session
    daemon.kill_worker()
    steps.step(6)
    assert client._connection is not connection and client.session > session
    _assert_equal(steps.bits(), expected)


def test_the_owner_rests_while_a_client_is_gone_and_its_worker_is_stuck(daemon: Daemon) -> None:
    """The worker has descriptors of the client open as well, which must not wake the owner."""
    script = "from gradd.session import client; client.get_client(); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as other:
        assert other.stdout.readline() == b"1\n"
        owner = psutil.Process(daemon.process.pid)
        (worker,) = owner.children()
        worker.suspend()
        other.kill()
    before = sum(owner.cpu_times()[:2])
    time.sleep(1)
    used = sum(owner.cpu_times()[:2]) - before
    worker.resume()
    assert used < 0.3  # of that second; a loop takes all of it
