"""Language models train through one daemon at once, each with the bits of its solo run.

test_concurrency.py does the same with small networks; here the sizes change in every step, the
families differ, and one trainer is killed in the middle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.processes.session_children import Child, ask, assert_same_bits, overlap, running

# GPT-2 with dropout: random numbers too must not depend on other trainings.
FAMILIES = (("llama", 1), ("gpt2", 2), ("mlp_ce", 3), ("qwen3:bf16", 4))
STEPS = 8


@pytest.fixture
def children(daemon: Any) -> Iterator[list[Child]]:
    with running(FAMILIES) as found:
        yield found


@pytest.mark.one_in(4)
def test_four_families_at_once_and_one_is_killed(daemon: Any, children: list[Child]) -> None:
    """Each has the bits of its solo run, also while a neighbour dies in the middle of a step."""
    ask(children, "ready")
    assert len(daemon.ps()["sessions"]) == len(FAMILIES)
    solo = []
    for child in children:
        child.tell(f"train {STEPS}")
        solo.append(child.answer())
    assert len({one["digest"] for one in solo}) == len(FAMILIES)
    for _ in range(5):  # on a busy machine one may be over before the next begins
        together = ask(children, f"train {STEPS}")
        assert_same_bits(children, solo, together)
        if overlap(children, together):
            break
    else:
        pytest.fail("the runs did not overlap, so nothing was proven")

    victim, *others = children
    for child in children:
        child.tell(f"train {10000 if child is victim else STEPS}")
    time.sleep(0.1)
    victim.process.kill()
    assert_same_bits(others, solo[1:], [child.answer() for child in others])
    victim.process.wait(60)
    assert_same_bits(others, solo[1:], ask(others, f"train {STEPS}"))
    assert len(daemon.ps()["sessions"]) == len(others)
    assert [child.close() for child in others] == [0] * len(others)
