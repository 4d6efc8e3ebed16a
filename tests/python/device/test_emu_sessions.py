"""Several processes train on one GPU, through its one daemon."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import conftest
import pytest

from gradd.memory.gpu_segments import WAYS
from helpers import emu_torch
from helpers.processes.session_children import ask, assert_same_bits, overlap, running

pytestmark = [
    pytest.mark.emu,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
]
# GPT-2 with dropout: random numbers too must not depend on other trainings.
FAMILIES = (
    *(("qwen3:bf16", 1), ("gpt2", 2), ("llama", 3)),
    *(("mlp_ce", seed) for seed in range(4, 9)),
)
STEPS = 4
ON_GPU = {"GRADD_TEST_TENSORS": "emu"}


def _gradd(daemon: Any, *words: str) -> list[str]:
    command = [str(conftest.BINARY), *words, "--dir", str(daemon.root)]
    return subprocess.check_output(command, text=True, timeout=60).splitlines()


def _sessions(daemon: Any) -> int:
    """Of the GPU's daemon, which is listed behind the CPU's."""
    _, on_gpu = (json.loads(line) for line in _gradd(daemon, "ps", "--json"))
    return len(on_gpu["sessions"])


@pytest.fixture(autouse=True)
def _stopped(daemon: Any) -> Iterator[None]:
    """No process of the test has started the GPU's daemon."""
    yield
    _gradd(daemon, "stop")


def test_eight_trainers_share_a_gpu_and_one_is_killed(daemon: Any) -> None:
    """Each has the bits of its solo run, also while a neighbour dies in the middle of a step."""
    with running(FAMILIES, **ON_GPU) as children:
        ask(children, "ready")
        assert _sessions(daemon) == len(FAMILIES)
        solo = [ask([child], f"train {STEPS}")[0] for child in children]
        assert len({one["digest"] for one in solo}) == len(FAMILIES)
        for _ in range(5):  # on a busy machine one may be over before the next begins
            together = ask(children, f"train {STEPS}")
            assert_same_bits(children, solo, together)
            if overlap(children, together):
                break
        else:
            pytest.fail("the runs did not overlap, so nothing was proven")
        victim, *others = children
        victim.tell("train 10000")
        for child in others:
            child.tell(f"train {STEPS}")
        victim.process.kill()
        assert_same_bits(others, solo[1:], [child.answer() for child in others])
        victim.process.wait(60)
        assert_same_bits(others, solo[1:], ask(others, f"train {STEPS}"))
        assert _sessions(daemon) == len(others)
        assert [child.close() for child in others] == [0] * len(others)


def test_every_kind_of_torchs_memory_gives_the_same_bits(daemon: Any) -> None:
    """Blocks with offsets, and expandable segments; with each way to share memory."""
    found = {}
    for segments in ("", "1"):
        for way in WAYS:
            variables = {"GRADD_SIM_VMM": segments, "GRADD_GPU_MEMORY": way}
            with running([("llama", 1)], **ON_GPU, **variables) as children:
                ask(children, "ready")
                (found[segments, way],) = ask(children, "train 6")
                assert [child.close() for child in children] == [0]
    assert len(found) == 2 * len(WAYS)
    assert len({one["digest"] for one in found.values()}) == 1
    assert all(one["fallbacks"] == {} for one in found.values())
