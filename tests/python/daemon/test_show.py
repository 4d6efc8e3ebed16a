"""What people see: one session in full, the log, a drained daemon, what `stop` would end."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import Daemon

import gradd
from gradd import ORTModule, errors, optim
from gradd.check import checktimes
from gradd.session import client, control
from helpers.nets import Net, batch, loss_of
from helpers.slow_trainer import Slow
from helpers.waiting import until


def _gradd(daemon: Daemon, *words: str) -> subprocess.CompletedProcess:
    command = [os.environ["GRADD_BIN"], *words, "--dir", str(daemon.directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _json(daemon: Daemon, *words: str) -> dict[str, Any]:
    done = _gradd(daemon, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = loss_of(model(*batch(5, step)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _of_this_process(daemon: Daemon) -> dict[str, Any]:
    (session,) = _json(daemon, "show", str(os.getpid()))["sessions"]
    return session


@pytest.fixture
def slow(daemon: Daemon) -> Iterator[Slow]:
    trainer = Slow(JPY_SESSION_NAME="/home/ana/my tests.ipynb")
    try:
        yield trainer
    finally:
        trainer.end()


def test_a_session_in_full(daemon: Daemon) -> None:
    inner = Net()
    model = ORTModule(inner)
    optimizer = optim.FusedAdam(model.parameters())
    for step in range(3):
        _train(model, optimizer, step)
    plan = {"graph": b"0" * 32, "plan": 7, "in": {"dtypes": [], "dims": []}, "out": []}
    with pytest.raises(errors.StaleError):
        client.get_client().request("graph.plan", plan)
    with pytest.raises(errors.UnsupportedError):
        client.get_client().request("graph.plan", {**plan, "colour": 1})
    until(lambda: _of_this_process(daemon)["model"] == "Net", "the model is not said")
    session = _of_this_process(daemon)
    assert session["parameters"] == sum(p.numel() for p in inner.parameters())
    assert session["peak_arena_bytes"] > 0 and session["steps"] >= 3
    kinds = session["segment_kinds"]
    assert sum(kinds.values()) == session["segment_bytes"] and kinds["parameters"] > 0
    used = [plan for plan in session["plan_list"] if plan["backwards"]]
    assert sum(plan["forwards"] for plan in used) >= 3
    assert max(plan["arena_bytes"] for plan in used) <= session["peak_arena_bytes"]
    by_engine, by_form = session["errors"]
    assert (by_engine["verb"], by_engine["code"]) == ("graph.plan", "STALE")
    assert "has not put that graph" in by_engine["what"] and "'colour'" in by_form["what"]
    text = _gradd(daemon, "show", str(session["session"])).stdout
    assert text.startswith(f"session {session['session']}, {session['client']}, pid {os.getpid()}")
    assert "model       Net, " in text and "failed " in text and "BACKWARDS" in text
    del model, optimizer
    until(lambda: not _of_this_process(daemon)["plan_list"], "plans that are gone are shown")


def test_plans_of_a_self_check_are_marked(daemon: Daemon, monkeypatch: Any) -> None:
    """The second step is checked on few rows of a batch, by a plan of its own."""
    model = ORTModule(Net())
    optimizer = optim.FusedAdam(model.parameters())
    marked: list[int] = []
    ask = client.Client._exchange

    def look(self: Any, verb: str, fields: Any, frames: Any = (), *more: Any) -> Any:
        reply = ask(self, verb, fields, frames, *more)
        if verb == "about" and "check" in fields:
            plans = _of_this_process(daemon)["plan_list"]
            marked.extend(plan["plan"] for plan in plans if plan["self_check"])
            assert fields["check"] in marked and len(plans) > len(marked)
        return reply

    monkeypatch.setattr(client.Client, "_exchange", look)
    now = [0.0]  # a check may take half a percent of the time
    monkeypatch.setattr(checktimes, "clock", lambda: now[0])
    for _ in range(3):
        now[0] += 3600
        loss_of(model(*batch())).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.gradd_stats()["self_checks_on_few_rows"] and marked
    del model, optimizer


def test_it_answers_in_the_middle_of_a_step(daemon: Daemon, slow: Slow) -> None:
    slow.begin()
    until(lambda: daemon.ps()["counters"]["forward"], "the forward does not begin")
    (session,) = _json(daemon, "show", "my_tests.ipynb")["sessions"]
    assert session["state"] == "running" and session["model"] == "Slow"
    assert session["parameters"] == 1200 * 1200 and session["pid"] == slow.process.pid
    assert [s["pid"] for s in _json(daemon, "stop", "--dry-run")["sessions"]] == [slow.process.pid]
    assert _gradd(daemon, "show", "other.ipynb").stderr == (
        "gradd: there is no session 'other.ipynb' (gradd ps lists them)\n"
    )
    assert _gradd(daemon, "show").returncode == 2


def test_notes_of_a_kept_session(daemon: Daemon) -> None:
    model = ORTModule(Net())
    optimizer = optim.FusedAdam(model.parameters())
    kept = gradd.keep("net", model, optimizer)
    for step in range(3):
        kept.note(step=step, deep=[[[[{"a": [1.5, None, True, "\u00e9"]}]]]])
        _train(model, optimizer, step)
    kept.note(step=99)  # of a step that is not done
    found = _json(daemon, "show", "net")
    assert found["kept"]["name"] == "net" and found["kept_steps"] == 3
    assert found["notes"] == {"step": 2, "deep": [[[[{"a": [1.5, None, True, "\u00e9"]}]]]]}
    assert [s["pid"] for s in found["sessions"]] == [os.getpid()]
    assert '  notes       after 3 steps: {"step": 2, ' in _gradd(daemon, "show", "net").stdout
    assert kept.steps == 3  # nothing has been taken over
    _train(model, optimizer, 3)
    assert _json(daemon, "show", "net")["notes"]["step"] == 99
    client.close_all()  # the name is kept without a client
    until(lambda: not daemon.ps()["kept"][0]["in_use"], "it stays in use")
    found = _json(daemon, "show", "net")
    assert found["sessions"] == [] and found["notes"]["step"] == 99 and found["kept_steps"] == 4
    assert daemon.ps()["kept"][0]["pid"] == os.getpid()
    gradd.forget("net")


def test_a_drained_daemon_begins_nothing(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ORTModule(Net())
    optimizer = optim.FusedAdam(model.parameters())
    _train(model, optimizer, 0)
    monkeypatch.setattr("gradd.session.control._ASK_AFTER", 1)
    said = _json(daemon, "drain", "--why", "new cables")
    assert said == {"drained": True, "sessions": 1, "running": False}
    assert "drained: new cables" in _gradd(daemon, "ps").stdout
    done = threading.Event()

    def release() -> None:
        until(lambda: "is drained (new cables)" in caplog.text, "the client is not told")
        assert not done.is_set()
        assert _of_this_process(daemon)["state"] == "queued"
        _gradd(daemon, "drain", "--end")

    helper = threading.Thread(target=release)
    with caplog.at_level(logging.WARNING, "gradd"):
        helper.start()
        _train(model, optimizer, 1)
        done.set()
        helper.join(60)
    assert daemon.ps()["drained"] == "" and client.get_client().recoveries == 0
    del model, optimizer


def test_the_end_of_a_client_and_of_a_drained_daemon(daemon: Daemon) -> None:
    """Neither waits for the end of the drain; a trainer goes on with the next daemon."""
    model = ORTModule(Net(), strict=True)
    optimizer = optim.FusedAdam(model.parameters())
    first = _train(model, optimizer, 0)
    other = control.Connection(daemon.directory)
    other.attach()
    _json(daemon, "drain")
    other.close()
    until(lambda: len(daemon.ps()["sessions"]) == 1, "a dead client's session stays")

    def stop() -> None:
        until(lambda: _of_this_process(daemon)["waiting"], "nothing waits")
        _gradd(daemon, "stop")

    helper = threading.Thread(target=stop)
    helper.start()
    second = _train(model, optimizer, 0)
    helper.join(60)
    assert second < first and client.get_client().recoveries == 1
    assert daemon.process.wait(60) == 0
    del model, optimizer


def test_the_log_of_one_session(daemon: Daemon) -> None:
    model = ORTModule(Net())
    model(*batch(5, 1))
    number = _of_this_process(daemon)["session"]
    log = daemon.directory / "daemon.log"
    assert _gradd(daemon, "logs").returncode == 1  # a daemon of a test logs elsewhere
    other = 'gradd: a line of another kind "quoted"\n'
    log.write_text(daemon.log() + other)
    assert _gradd(daemon, "logs").stdout == log.read_text()
    lines = _gradd(daemon, "logs", str(os.getpid())).stdout.splitlines()
    assert lines and all(f"session={number} " in line for line in lines)
    entries = [json.loads(x) for x in _gradd(daemon, "logs", "--json").stdout.splitlines()]
    assert entries[-1] == {"text": other.rstrip()}
    assert entries[0]["event"] == "daemon_start" and entries[0]["time"].endswith("Z")
    attach = [e for e in entries if e.get("event") == "attach"]
    assert [e["session"] for e in attach] == [str(number)]
    assert _gradd(daemon, "logs", "other.py").stdout == ""
    _follow(daemon, number)
    del model


def _follow(daemon: Daemon, number: int) -> None:
    command = [os.environ["GRADD_BIN"], "logs", "-f", str(number), "--dir", str(daemon.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        try:
            assert f"event=attach session={number} " in reader.stdout.readline()
            with open(daemon.directory / "daemon.log", "a") as file:
                file.write(f"{time.time()} level=info event=other session={number + 100} x=1\n")
                file.write(f"2026-01-01T00:00:00.000Z level=info event=new session={number} x=1\n")
            assert "event=new" in reader.stdout.readline()
        finally:
            reader.kill()


def test_stop_names_what_it_ends(daemon: Daemon) -> None:
    model = ORTModule(Net())
    model(*batch(5, 1))
    asked = _gradd(daemon, "stop", "--dry-run").stdout
    assert f", pid {os.getpid()}, " in asked and asked.endswith("not stopped (--dry-run)\n")
    assert daemon.process.poll() is None
    ended = _gradd(daemon, "stop").stdout.splitlines()
    assert f", pid {os.getpid()}, " in ended[0] and ended[-1] == "stopped"
    assert daemon.process.wait(60) == 0
    del model
