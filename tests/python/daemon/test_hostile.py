"""Hundreds of bad inputs against one real daemon, each with its answer and its harmlessness.

The tables are in helpers/hostile. After each row the session that sent it still answers, the step
of a neighbour gives the same bits, and the daemon holds what it held before: plans, bindings, runs,
segments, descriptors. The processor time that the daemon spent on the row is bounded, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Daemon

from helpers.hostile import command_channel, control_socket, graphs, operators, runs, tensors
from helpers.hostile.raw_client import Balance, Raw, Row, model, put

TABLES: dict[str, list[Row]] = {
    **command_channel.TABLES,
    **tensors.TABLES,
    **control_socket.TABLES,
    **graphs.TABLES,
    **operators.TABLES,
    **runs.TABLES,
}
SLOWER = float(
    os.environ.get("GRADD_TEST_SLOWER", "4")
)  # a busy machine; more for a daemon with sanitizers
ALL = [row for table in TABLES.values() for row in table]


class Scene:
    """The session that misbehaves, its neighbour, and what the daemon held at the start."""

    def __init__(self, daemon: Daemon) -> None:
        self.bad = Raw(daemon.directory).open()
        self.neighbour = Raw(daemon.directory).open()
        self.neighbour.fill(seed=7)
        self.bits = self.neighbour.step()
        self.bad.step()
        self.balance = Balance(daemon.pid(), self.neighbour)
        self.before = self.balance.read()

    def close(self) -> None:
        """Both sessions end."""
        self.bad.close()
        self.neighbour.close()


@pytest.fixture(scope="module")
def scene(shared_daemon: Daemon) -> Iterator[Scene]:
    """One scene for all rows: what a row breaks, the next one sees."""
    made = Scene(shared_daemon)
    yield made
    made.close()


_VERBS = (
    *("hello", "segment", "unsegment", "attach", "detach", "graph.put", "graph.plan", "plan.drop"),
    *(
        "plan.estimate",
        "bind",
        "unbind",
        "forward",
        "backward",
        "release",
        "step",
        "explain",
        "ps",
        "stop",
    ),
)
# The verb, or what is wrong with a message before its verb is known.
_BEGIN = re.compile(
    rf"({'|'.join(map(re.escape, _VERBS))}|request|control): (?!\1: )"
    r"|message |field |unknown |a control packet |\d+ bytes after "
)


def check_answer(row: Row, reply: dict[str, Any]) -> None:
    """Code, words and session of an answer are the row's; the verb stands in front."""
    assert reply["ok"] == 0, f"{row.name}: was accepted: {reply}"
    what = reply["what"]
    assert reply["code"] == row.code, f"{row.name}: {reply['code']}: {what}"
    assert _BEGIN.match(what), f"{row.name}: no verb at the beginning of '{what}'"
    for part in row.parts:
        assert part in what, f"{row.name}: no '{part}' in '{what}'"
    assert reply.get("session") == row.session, f"{row.name}: session {reply.get('session')}"


def check_harmless(row: Row, scene: Scene, spent_ms: float) -> None:
    """Checks that no other session noticed, and that nothing is left."""
    assert spent_ms <= row.cpu_ms * SLOWER, f"{row.name}: {spent_ms:.0f} ms of the daemon's time"
    alive = scene.bad.call({"v": "release", "runs": [1]})
    assert alive["ok"], f"{row.name}: the session is gone: {alive}"
    assert scene.neighbour.step() == scene.bits, f"{row.name}: the neighbour's bits changed"
    after = scene.balance.settled(scene.before)
    assert after == scene.before, f"{row.name}: the daemon holds {after}, held {scene.before}"


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_bad_input(row: Row, scene: Scene) -> None:
    scene.bad.fill()
    put(scene.bad, model())  # of 64 graphs the one that was used least recently goes
    before = scene.balance.cpu_ms()
    reply = row.send(scene.bad)
    spent = scene.balance.cpu_ms() - before
    check_answer(row, reply)
    check_harmless(row, scene, spent)


def test_the_tables_are_large_and_their_rows_distinct() -> None:
    names = [row.name for row in ALL]
    assert len(set(names)) == len(names)
    assert len(names) >= 150
