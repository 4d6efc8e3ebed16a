"""Starts processes of session_trainer.py and tells them what to do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from conftest import PYTHONPATH


class Child:
    """A trainer in a process of its own."""

    def __init__(self, family: str, seed: int, variables: dict[str, str]) -> None:
        self.family = family
        self.process = subprocess.Popen(
            [sys.executable, "-m", "helpers.processes.session_trainer", family, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": PYTHONPATH,
                **variables,
            },
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


@contextlib.contextmanager
def running(families: Sequence[tuple[str, int]], **variables: str) -> Iterator[list[Child]]:
    """A trainer for each family and seed; those that still run in the end are killed."""
    found = [Child(family, seed, variables) for family, seed in families]
    try:
        yield found
    finally:
        for child in found:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait(60)
            child.process.stdout.close()


def ask(children: list[Child], command: str) -> list[dict[str, Any]]:
    """Gives all of them a command, and then waits for every answer."""
    for child in children:
        child.tell(command)
    return [child.answer() for child in children]


def overlap(children: list[Child], runs: list[dict]) -> bool:
    """A moment was part of all runs but those of the smallest model."""
    slow = [run for child, run in zip(children, runs, strict=True) if child.family != "mlp_ce"]
    return max(r["begin"] for r in slow) < min(r["end"] for r in slow)


def assert_same_bits(children: list[Child], solo: list[dict], runs: list[dict]) -> None:
    """Losses, gradients and parameters; nothing ran in PyTorch."""
    for child, alone, run in zip(children, solo, runs, strict=True):
        assert run["digest"] == alone["digest"], f"{child.family} has other bits in company"
        assert run["fallbacks"] == {} and run["captures"] == 1
