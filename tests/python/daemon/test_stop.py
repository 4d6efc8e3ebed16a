"""A daemon that is told to stop while a request runs ends no training.

It finishes the request, which may take minutes, and meanwhile answers every new client with a word
that makes the client wait for its successor.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gradd import ORTModule
from gradd.session import client
from gradd.session import daemon as daemons
from helpers.nets import Net, batch, loss_of
from helpers.slow_trainer import Slow
from helpers.waiting import until

pytestmark = pytest.mark.one_in(4)


@pytest.fixture
def slow(daemon: Any) -> Iterator[Slow]:
    trainer = Slow()
    try:
        yield trainer
    finally:
        trainer.end()


def _train_one(model: ORTModule, seed: int) -> float:
    model.zero_grad()
    loss = loss_of(model(*batch(5, seed)))
    loss.backward()
    return loss.item()


def _said(caplog: pytest.LogCaptureFixture, what: str) -> list[str]:
    """Warnings of the client with these words."""
    ours = [r for r in caplog.records if r.name == "gradd" and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in ours if what in r.getMessage()]


def _wait_until_running(daemon: Any) -> None:
    def running() -> bool:
        return any(s["state"] == "running" for s in daemon.ps()["sessions"])

    until(running, "the slow trainer's request does not run")


def _tell_to_stop(daemon: Any) -> None:
    """SIGTERM that was taken note of: a second one before would be the same one."""
    daemon.process.send_signal(signal.SIGTERM)
    until(lambda: "event=daemon_stop" in daemon.log(), "the daemon does not notice SIGTERM")


def test_stop_during_a_long_request_ends_no_training(
    daemon: Any, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    slow.begin()
    first = slow.result()
    model = ORTModule(Net(), strict=True)
    expected = _train_one(model, 1)
    slow.begin()
    _wait_until_running(daemon)
    _tell_to_stop(daemon)
    with caplog.at_level(logging.WARNING, "gradd"):
        assert _train_one(model, 1) == expected
    assert daemon.process.wait(60) == 0
    assert slow.result()["total"] == first["total"]
    slow.begin()
    assert slow.result() == {"total": first["total"], "recoveries": 1}
    assert client.get_client().recoveries == 1
    assert len(_said(caplog, "ending after the request in progress")) == 1
    slow.process.stdin.close()
    assert slow.process.wait(60) == 0


def test_stop_now_repeats_the_request_at_the_next_daemon(daemon: Any, slow: Slow) -> None:
    slow.begin()
    first = slow.result()
    model = ORTModule(Net(), strict=True)
    expected = _train_one(model, 1)
    slow.begin()
    _wait_until_running(daemon)
    _tell_to_stop(daemon)
    daemon.process.send_signal(signal.SIGTERM)
    assert _train_one(model, 1) == expected
    assert slow.result() == {"total": first["total"], "recoveries": 1}
    assert daemon.process.wait(60) == 0
    slow.process.stdin.close()
    assert slow.process.wait(60) == 0


def test_the_command_stop_does_not_wait_for_the_next_daemon(daemon: Any) -> None:
    """Trainers may start it so early that the lock is never seen free."""
    command = [os.environ["GRADD_BIN"], "serve", "--dir", str(daemon.directory)]
    started: list[subprocess.Popen] = []
    done = threading.Event()

    def compete() -> None:
        while not done.is_set():
            one = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            started.append(one)
            while one.poll() is None and not done.is_set():
                time.sleep(0.002)

    threads = [threading.Thread(target=compete) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.2)
        stop = [os.environ["GRADD_BIN"], "stop", "--dir", str(daemon.directory)]
        assert subprocess.check_output(stop, text=True, timeout=60) == "stopped\n"
    finally:
        done.set()
        for thread in threads:
            thread.join()
        daemon.process.wait(60)
        for one in started:
            one.terminate()
        ends = {one.wait(60) for one in started}
    assert ends <= {0, 4, -signal.SIGTERM}


def test_a_lock_that_is_about_to_be_given_back_is_waited_for(daemon: Any) -> None:
    """In the moment of its end a daemon has no sockets any more, but the lock."""
    daemon.process.terminate()
    daemon.process.wait(60)
    with open(daemon.directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("1\n")
        lock.flush()
        timer = threading.Timer(0.6, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        session = client.get_client()
        session.connect()
        timer.join()
    assert session.daemon_pid == daemon.pid()


# ---- another build ----


def test_hello_tells_the_build(daemon: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gradd"):
        session = client.get_client()
        session.connect()
    assert session._connection.build == daemons.build_id() != ""
    assert not _said(caplog, "")


def test_a_daemon_of_another_build_is_named_once(
    daemon: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemons, "build_id", lambda: "5" * 40)
    model = ORTModule(Net(), strict=True)
    for seed in (1, 2):
        _train_one(model, seed)
    model._gradd_compiled.client._connection.close()  # connects to the same daemon again
    model._gradd_compiled.client._connection = None
    _train_one(model, 3)
    said = _said(caplog, "another build")
    assert len(said) == 1
    assert f"daemon {daemon.pid()} is another build than" in said[0] and "gradd stop" in said[0]
