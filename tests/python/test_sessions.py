"""Several processes train through one daemon at once, each with the bits of its solo run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).with_name("session_child.py")
# GPT-2 with dropout: random numbers too must not depend on who else trains.
FAMILIES = (("llama", 1), ("gpt2", 2), ("mlp_ce", 3))
STEPS = 12


class Child:
    """A trainer in a process of its own."""

    def __init__(self, family: str, seed: int) -> None:
        self.family = family
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), family, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the trainer of {self.family} ended with status {self.process.wait(30)}"
        return json.loads(line)

    def close(self) -> int:
        self.process.stdin.close()
        return self.process.wait(60)


@pytest.fixture
def children(daemon: Any) -> Iterator[list[Child]]:
    found = [Child(family, seed) for family, seed in FAMILIES]
    try:
        yield found
    finally:
        for child in found:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait(30)
            child.process.stdout.close()


def _all(children: list[Child], command: str) -> list[dict[str, Any]]:
    for child in children:
        child.tell(command)
    return [child.answer() for child in children]


def test_three_trainers_at_once_have_their_solo_bits(daemon: Any, children: list[Child]) -> None:
    _all(children, "ready")
    assert len(daemon.ps()["sessions"]) == len(FAMILIES)
    solo = []
    for child in children:
        child.tell(f"train {STEPS}")
        solo.append(child.answer())
    for _ in range(2):
        together = _all(children, f"train {STEPS}")
        for child, alone, crowd in zip(children, solo, together, strict=True):
            assert crowd["digest"] == alone["digest"], f"{child.family} has other bits in company"
            assert crowd["fallbacks"] == {} and crowd["captures"] == 1
    assert len({one["digest"] for one in solo}) == len(FAMILIES)
    slow = [run for child, run in zip(children, together, strict=True) if child.family != "mlp_ce"]
    begin, end = max(r["begin"] for r in slow), min(r["end"] for r in slow)
    assert begin < end, "the runs did not overlap, so nothing was proven"
    assert [child.close() for child in children] == [0] * len(FAMILIES)


def test_one_dies_and_the_others_keep_their_bits(daemon: Any, children: list[Child]) -> None:
    """kill -9 of one trainer in the middle of its steps; its session ends, others do not notice."""
    _all(children, "ready")
    victim, *others = children
    expected = _all(others, f"train {STEPS}")
    victim.tell("train 100000")
    for child in others:
        child.tell(f"train {STEPS}")
    victim.process.kill()
    got = [child.answer() for child in others]
    assert [r["digest"] for r in got] == [r["digest"] for r in expected]
    victim.process.wait(30)
    again = _all(others, f"train {STEPS}")
    assert [r["digest"] for r in again] == [r["digest"] for r in expected]
    assert len(daemon.ps()["sessions"]) == len(others)
    assert [child.close() for child in others] == [0] * len(others)
