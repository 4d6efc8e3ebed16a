"""Language models train through one daemon at once, each with the bits of its solo run.

test_concurrency.py does the same with small networks; here the sizes change in every step, the
families differ, and one trainer is killed in the middle.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import PYTHONPATH

# GPT-2 with dropout: random numbers too must not depend on other trainings.
FAMILIES = (("llama", 1), ("gpt2", 2), ("mlp_ce", 3), ("qwen3:bf16", 4))
STEPS = 8


class Child:
    """A trainer in a process of its own."""

    def __init__(self, family: str, seed: int) -> None:
        self.family = family
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.processes.session_trainer", family, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH},
        )

    def tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the trainer of {self.family} ended with status {self.process.wait(60)}"
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
            child.process.wait(60)
            child.process.stdout.close()


def _all(children: list[Child], command: str) -> list[dict[str, Any]]:
    for child in children:
        child.tell(command)
    return [child.answer() for child in children]


@pytest.mark.one_in(4)
def test_four_families_at_once_and_one_is_killed(daemon: Any, children: list[Child]) -> None:
    """Each has the bits of its solo run, also while a neighbour dies in the middle of a step."""
    _all(children, "ready")
    assert len(daemon.ps()["sessions"]) == len(FAMILIES)
    solo = []
    for child in children:
        child.tell(f"train {STEPS}")
        solo.append(child.answer())
    assert len({one["digest"] for one in solo}) == len(FAMILIES)
    for _ in range(5):  # on a busy machine one may be over before the next begins
        together = _all(children, f"train {STEPS}")
        _assert_same_bits(children, solo, together)
        if _overlap(children, together):
            break
    else:
        pytest.fail("the runs did not overlap, so nothing was proven")

    victim, *others = children
    for child in children:
        child.tell(f"train {10000 if child is victim else STEPS}")
    time.sleep(0.1)
    victim.process.kill()
    _assert_same_bits(others, solo[1:], [child.answer() for child in others])
    victim.process.wait(60)
    _assert_same_bits(others, solo[1:], _all(others, f"train {STEPS}"))
    assert len(daemon.ps()["sessions"]) == len(others)
    assert [child.close() for child in others] == [0] * len(others)


def _overlap(children: list[Child], runs: list[dict]) -> bool:
    """A moment was part of all runs but those of the smallest model."""
    slow = [run for child, run in zip(children, runs, strict=True) if child.family != "mlp_ce"]
    return max(r["begin"] for r in slow) < min(r["end"] for r in slow)


def _assert_same_bits(children: list[Child], solo: list[dict], runs: list[dict]) -> None:
    for child, alone, run in zip(children, solo, runs, strict=True):
        assert run["digest"] == alone["digest"], f"{child.family} has other bits in company"
        assert run["fallbacks"] == {} and run["captures"] == 1
