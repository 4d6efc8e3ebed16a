"""Traces for Perfetto: gradd.trace()."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradd
from gradd import tracing
from gradd.optim import FusedAdam
from gradd.session import client as clients

pytestmark = pytest.mark.usefixtures("shared_daemon")

Event = dict[str, Any]


def _training() -> tuple[gradd.ORTModule, Callable[[], None]]:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = gradd.ORTModule(net, strict=True)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _lanes(events: list[Event]) -> dict[str, list[Event]]:
    """Slices by the name of their lane."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


@pytest.mark.quick
def test_lanes_hold_what_a_step_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    model, step = _training()
    step()
    before = time.perf_counter_ns()
    with gradd.trace(path):
        step()
        step()
    after = time.perf_counter_ns()
    step()  # is not in it
    events = json.loads(path.read_text())
    lanes = _lanes(events)
    assert list(lanes) == ["trainer", "queue", "forward", "backward", "optimizer"]
    order = ["forward", "backward", "step"] * 2
    trainer = lanes["trainer"]
    lanes["trainer"] = trainer[1::2]
    assert [e["name"] for e in lanes["trainer"]] == order == [e["name"] for e in lanes["queue"]]
    assert {e["name"] for e in trainer[::2]} == {"trainer"} and trainer[0]["ts"] == 0
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in itertools.pairwise(trainer))
    runs = ("forward", "backward", "optimizer")
    assert {name: len(lanes[name]) for name in runs} == dict.fromkeys(runs, 2)
    for asked, waited in zip(lanes["trainer"], lanes["queue"], strict=True):
        (ran,) = [e for n in runs for e in lanes[n] if e["ts"] == waited["ts"] + waited["dur"]]
        end = asked["ts"] + asked["dur"]  # the daemon's clock ticks in microseconds
        assert asked["ts"] - 1 <= waited["ts"] and ran["ts"] + ran["dur"] <= end + 2
        assert end <= (after - before) / 1e3
    memory = [e["args"]["MiB"] for e in events if e["ph"] == "C"]
    arena = model.gradd_explain().arena_bytes / 2**20
    assert len(memory) == 12 and max(memory) >= arena > 0  # two points for each run
    assert memory[3::6] == memory[5::6] == [0, 0]  # a backward ends its run
    assert {e["pid"] for e in events} == {os.getpid()}


def test_clients_that_come_later_are_in_it(tmp_path: Path) -> None:
    clients.close_all()
    with gradd.trace(tmp_path / "trace.json"):
        _, step = _training()
        step()
    lanes = _lanes(json.loads((tmp_path / "trace.json").read_text()))
    verbs = [e["name"] for e in lanes["trainer"][1::2]]
    assert verbs.index("graph.put") < verbs.index("graph.plan") < verbs.index("forward")
    assert not any(c.said.listeners for c in clients.clients())
    assert clients.Client(tmp_path).said.listeners == ()


def test_a_running_daemon_tells_its_last_requests(shared_daemon: Any, tmp_path: Path) -> None:
    _, step = _training()
    step()
    start = time.monotonic()
    for _ in range(3):
        step()
    path = tmp_path / "trace.json"
    command = [os.environ["GRADD_BIN"], "trace", "--dir", str(shared_daemon.directory)]
    seconds = str(int(time.monotonic() - start) + 1)
    done = subprocess.run(
        [*command, "--out", str(path), "--seconds", seconds], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    events = json.loads(path.read_text())
    (own,) = [e for e in events if e["name"] == "process_name" and e["pid"] == os.getpid()]
    lanes = _lanes([e for e in events if e["tid"] // 10 == own["tid"] // 10])
    assert [e["name"] for e in lanes["queue"]][-9:] == ["forward", "backward", "step"] * 3
    assert lanes["trainer"] and len(lanes["forward"]) >= len(lanes["optimizer"]) >= 3
    for name in ("forward", "backward", "optimizer"):
        ends = [e["ts"] + e["dur"] for e in lanes["queue"]]
        assert all(e["ts"] in ends and e["dur"] > 0 for e in lanes[name])
    count = sum(e["name"] not in ("trainer",) for e in events if e["ph"] == "X") // 2
    assert done.stdout == (
        f"{count} requests of 1 daemon in {path}: open it at https://ui.perfetto.dev\n"
    )
    assert subprocess.run(command, capture_output=True).returncode == 2  # no file is named
    lost = subprocess.run([*command, "--out", str(tmp_path / "no" / "x")], capture_output=True)
    assert lost.returncode == 1 and b"cannot write" in lost.stderr


def test_a_trace_is_bounded_and_survives_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_MOST", 30)
    _, step = _training()
    step()
    path = tmp_path / "trace.json"
    with caplog.at_level(logging.WARNING, "gradd"), pytest.raises(KeyError), gradd.trace(path):
        for _ in range(5):
            step()
        raise KeyError
    assert len(json.loads(path.read_text())) == 30
    # How many requests are on their way when the trace ends differs from run to run.
    assert re.search(r"has the first 30 events; [5-9]\d more were left out", caplog.text)
    with pytest.raises(OSError), gradd.trace(tmp_path / "none" / "trace.json"):
        pass
    step()
