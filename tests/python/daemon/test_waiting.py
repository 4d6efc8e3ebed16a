"""A run that finds no room waits for other sessions: bounded, said, and others are served."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import conftest
import numpy as np
import pytest
import torch
from test_memory_limit import branches

import gradd
from gradd import ORTModule, errors
from gradd.memory import devices, waiting
from gradd.memory.shm import Segment
from gradd.session import control
from helpers.hostile.raw_client import F32, Raw, many, put, tensor, types
from helpers.waiting import until

MIB = 1 << 20
LIMIT = 32  # MiB of all runs
LARGE = MIB  # elements: a run takes more than half of the limit
SMALL = 600 << 10  # a third of it, more or less
FOR_EVER = 2**63 - 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GRADD_MEMORY_MIB", str(LIMIT))
    with conftest._serving(monkeypatch, lambda: True) as daemon:
        yield daemon


class Session(Raw):
    """Runs of one plan over vectors of any length."""

    def __init__(self, daemon: Any, n: int) -> None:
        super().__init__(daemon.directory)
        self.attach()
        self.n = n
        self.segment = Segment(1, 8 * n + MIB)
        reply = self.control({"v": "segment", "id": 1, "bytes": 8 * n + MIB}, [self.segment.fd])
        assert reply["ok"], reply
        self.at(0, (n,))[:] = np.linspace(-1, 1, n)
        self.ends = 8 * n  # behind the vector and its gradient
        self.at(self.ends, ())[...] = 1
        planned = self.call({
            "v": "graph.plan", "graph": put(self, branches())["graph"], "plan": 1,
            "in": types([F32, [n]]), "grad": [0], "out": [0], "gmask": [0], "bound": [],
        })  # fmt: skip
        assert planned["ok"], planned
        self.peak = planned["peak"]

    def begin(self, run: int = 1, **more: Any) -> None:
        """Sends a forward."""
        self.q += 1
        self.send({
            "v": "forward", "q": self.q, "t": self.token, "plan": 1, "run": run, "seed": 0,
            "flags": 0, "in": many(tensor(0, (self.n,))),
            "out": many(tensor(self.ends + 64, ())), **more,
        })  # fmt: skip

    def forward(self, run: int = 1, **more: Any) -> dict[str, Any]:
        """The reply to one."""
        self.begin(run, **more)
        return self.receive()

    def backward(self, run: int = 1, keep: bool = False, **more: Any) -> dict[str, Any]:
        """The reply to one; the run ends with it, unless it is kept."""
        return self.call({
            "v": "backward", "run": run, "keep": keep,
            "go": many(tensor(self.ends, ()), at=[0]), "g": many(tensor(4 * self.n, (self.n,))),
            **more,
        })  # fmt: skip

    def gradient(self) -> bytes:
        """Of the last backward."""
        return self.at(4 * self.n, (self.n,)).tobytes()


def _row(daemon: Any, place: int = -1) -> dict[str, Any]:
    return sorted(daemon.ps()["sessions"], key=lambda s: s["session"])[place]


def _said(daemon: Any, verb: str, row: dict[str, Any]) -> str:
    """What the command prints of a session."""
    name = [str(row["session"])] if row else []
    command = [os.environ["GRADD_BIN"], verb, *name, "--dir", str(daemon.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def _waits(daemon: Any, place: int = -1) -> bool:
    return _row(daemon, place)["state"] == "waiting"


def test_a_run_waits_until_another_session_has_ended_its_own(server: Any) -> None:
    with Raw(server.directory).open() as third, Session(server, LARGE) as one:
        expected = third.step()
        assert one.peak > LIMIT * MIB / 2
        assert one.forward()["ok"]
        with Session(server, LARGE) as other:
            other.begin(wait=60000)
            until(lambda: _waits(server), "the second run does not wait")
            row = _row(server)
            assert row["wanted_bytes"] == other.peak and row["arena_bytes"] == 0
            assert f"waits       for {other.peak / MIB:.1f} MiB" in _said(server, "show", row)
            assert " waiting " in _said(server, "ps", {})
            for _ in range(3):
                assert third.step() == expected  # others are served
            assert not other.dealer.poll(0), "there was room for both"
            assert one.backward()["ok"]
            reply = other.receive()
            assert reply["ok"], reply
            assert other.backward()["ok"]
            assert _row(server)["wanted_bytes"] == 0
            assert other.gradient() == one.gradient()  # the bits of a run that has not waited


def test_one_that_is_not_to_wait_is_refused_with_the_figures(server: Any) -> None:
    with Session(server, LARGE) as one, Session(server, LARGE) as other:
        assert one.forward()["ok"]
        for wait, why in ((0, "it was not to wait, behind"), (30, "it has waited for 0.")):
            reply = other.forward(wait=wait)
            assert (reply["ok"], reply["code"], reply["session"]) == (0, "NOMEM", "alive"), reply
            assert f"of {LIMIT} MiB are in use" in reply["what"] and why in reply["what"]
            assert f"session {_row(server, 0)['session']}, ?, pid " in reply["what"]
        assert one.backward()["ok"] and other.forward(wait=0)["ok"]


def test_a_daemon_may_be_told_how_long_its_clients_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_MEMORY_MIB", str(LIMIT))
    monkeypatch.setattr(devices.Host, "serve", ("--wait", "0"))
    with conftest._serving(monkeypatch, lambda: True) as server:  # noqa: SIM117
        with Session(server, LARGE) as one, Session(server, LARGE) as other:
            assert one.forward()["ok"]
            reply = other.forward()
            assert reply["code"] == "NOMEM" and "it was not to wait" in reply["what"], reply


def test_what_never_fits_is_refused_at_once(server: Any) -> None:
    with Session(server, SMALL) as one, Session(server, 3 * LARGE) as other:
        assert one.forward()["ok"]
        reply = other.forward(wait=FOR_EVER)
        assert reply["code"] == "NOMEM" and "`gradd estimate`" in reply["what"], reply
        assert f"it cannot have more than {LIMIT} MiB" in reply["what"]
        assert one.forward(2, wait=FOR_EVER)["ok"]
        reply = one.forward(3, wait=FOR_EVER)  # its own runs are in the way
        assert reply["code"] == "NOMEM" and "it cannot have more than" in reply["what"], reply


def test_a_client_that_is_gone_waits_no_more(server: Any) -> None:
    with Session(server, LARGE) as one:
        assert one.forward()["ok"]
        with Session(server, LARGE) as other:
            other.begin(wait=FOR_EVER)
            until(lambda: _waits(server), "the second run does not wait")
        until(lambda: len(server.ps()["sessions"]) == 1, "its session does not end")
        assert one.backward()["ok"] and one.forward()["ok"]


def test_of_two_that_wait_for_each_other_the_youngest_is_refused(server: Any) -> None:
    with Session(server, SMALL) as one, Session(server, SMALL) as other:
        assert one.forward(1)["ok"] and other.forward(1)["ok"]
        assert LIMIT * MIB < 3 * one.peak < 2 * LIMIT * MIB
        one.begin(2, wait=FOR_EVER)
        until(lambda: _waits(server, 0), "the second run of the first session does not wait")
        reply = other.forward(2, wait=FOR_EVER)
        assert reply["code"] == "NOMEM" and "wait for each other" in reply["what"], reply
        assert not one.dealer.poll(0), "the older one was to go on waiting"
        assert other.backward(1)["ok"]
        assert one.receive()["ok"]
        assert other.forward(3, wait=0)["code"] == "NOMEM"


def test_the_older_one_goes_on_though_it_asks_last(server: Any) -> None:
    with Session(server, SMALL) as one, Session(server, SMALL) as other:
        assert one.forward(1)["ok"] and other.forward(1)["ok"]
        other.begin(2, wait=FOR_EVER)
        until(lambda: _waits(server), "the second run of the second session does not wait")
        one.begin(2, wait=FOR_EVER)
        reply = other.receive()
        assert reply["code"] == "NOMEM" and "wait for each other" in reply["what"], reply
        assert other.call({"v": "release", "runs": [1]})["ok"]
        assert one.receive()["ok"]


def test_a_backward_waits_too(server: Any) -> None:
    """One that keeps its activations needs a wider arena."""
    with Session(server, 400 << 10) as one, Session(server, SMALL) as other:
        assert one.forward()["ok"] and other.forward()["ok"]
        one.q += 1
        one.send({
            "v": "backward", "q": one.q, "t": one.token, "run": 1, "keep": True,
            "go": many(tensor(one.ends, ()), at=[0]), "g": many(tensor(4 * one.n, (one.n,))),
        })  # fmt: skip
        until(lambda: _waits(server, 0), "the backward does not wait")
        assert other.backward()["ok"]
        assert one.receive()["ok"]
        kept = one.gradient()
        assert one.backward()["ok"] and one.gradient() == kept  # nothing was lost


def test_a_stopping_daemon_does_not_wait_for_memory(server: Any) -> None:
    with Session(server, LARGE) as one, Session(server, LARGE) as other:
        assert one.forward()["ok"]
        other.begin(wait=FOR_EVER)
        until(lambda: _waits(server), "the second run does not wait")
        assert one.call({"v": "stop"})["ok"]
        server.process.wait(timeout=60)


def test_a_trainer_says_behind_which_session_it_waits(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "_ASK_AFTER", 1)
    monkeypatch.setattr(control, "_POLL_MS", 20)
    model = ORTModule(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()))
    gradd.wait_for_memory(0)
    try:
        with Session(server, LARGE) as one:
            assert one.forward()["ok"]
            free = LIMIT * MIB - one.peak
            rows = free // (8 * 4) + 1000  # of a saved activation alone
            x = torch.randn(rows, 8)
            with pytest.raises(errors.OutOfMemoryError, match="it was not to wait, behind session"):
                model(x).sum().backward()
            gradd.wait_for_memory("-1")
            with caplog.at_level(logging.WARNING, logger="gradd"):
                other = _end_when_warned(one, caplog)
                model(x).sum().backward()
                other.join()
        text = next(r.getMessage() for r in caplog.records if "a run waits for" in r.getMessage())
        assert f"has {one.peak >> 20} MiB" in text
    finally:
        gradd.wait_for_memory(None)


def _end_when_warned(one: Session, caplog: pytest.LogCaptureFixture) -> threading.Thread:
    """A thread in which the session ends its run once the trainer says that it waits."""

    def end() -> None:
        until(
            lambda: any("a run waits for" in r.getMessage() for r in caplog.records),
            "the trainer does not say that it waits",
        )
        assert one.call({"v": "release", "runs": [1]})["ok"]

    thread = threading.Thread(target=end)
    thread.start()
    return thread


@pytest.mark.quick
def test_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting._by_environment.cache_clear()
    try:
        assert waiting.wait_ms() is None  # the daemon decides
        for duration, ms in ((0, 0), ("90s", 90000), ("1.5m", 90000), (-1, FOR_EVER)):
            gradd.wait_for_memory(duration)
            assert waiting.wait_ms() == ms
        with pytest.raises(ValueError, match=r"wait_for_memory\(\)='soon': expected seconds"):
            gradd.wait_for_memory("soon")
        gradd.wait_for_memory(None)
        monkeypatch.setenv("GRADD_WAIT_FOR_MEMORY", "2m")
        waiting._by_environment.cache_clear()
        assert waiting.wait_ms() == 120000
    finally:
        gradd.wait_for_memory(None)
        waiting._by_environment.cache_clear()


def test_time_in_which_a_daemon_stood_still_is_named(server: Any) -> None:
    """It counts against no client, and says why all of them have waited."""
    session = Raw(server.directory)
    worker = server.worker()
    os.kill(worker, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(worker, signal.SIGCONT)
    until(lambda: "event=stood_still ms=" in server.log(), "the daemon says that it stood still")
    session.attach().call({"v": "detach"})
    session.close()


def test_what_is_not_answered_is_named(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "_SAY_MS", 50)
    monkeypatch.setattr(control, "_ASK_AGAIN", 1)
    monkeypatch.setattr(control, "_UNHEARD_SECONDS", 0)
    worker = server.worker()

    def unheard(call: Callable[[], Any]) -> Any:
        """Calls while the worker stands still until the message is there."""
        end = time.monotonic() + 30

        def wait() -> None:
            while "has not answered" not in caplog.text and time.monotonic() < end:
                time.sleep(0.05)
            os.kill(worker, signal.SIGCONT)

        os.kill(worker, signal.SIGSTOP)
        caplog.clear()
        go_on = threading.Thread(target=wait)
        go_on.start()
        made = call()
        go_on.join()
        return made

    connection = unheard(lambda: control.Connection(server.directory))
    assert f"daemon ? in {server.directory} has not answered hello for 0 s" in caplog.text
    unheard(connection.attach)
    assert (
        f"daemon {connection.daemon_pid} in {server.directory} has not answered attach for "
        in caplog.text
    )
    connection.close()
