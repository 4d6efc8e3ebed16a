"""Starts the ranks of ranks.py, and compares what they find."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from conftest import PYTHONPATH

from helpers import nodes, ranks

_RANKS = 2
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc_per_node")
RESTARTING = (*TORCHRUN[:-1], "--max-restarts", "1", TORCHRUN[-1])
ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    "--num_processes",
)
OnNode = Callable[[int, nodes.Node], tuple[str, ...]]  # a launcher, by number and first node
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}


def torchrun_of(number: int, first: nodes.Node) -> tuple[str, ...]:
    """The launcher on one of two nodes."""
    return (
        *("torch.distributed.run", "--nnodes", "2", "--node_rank", str(number)),
        *("--master_addr", first.address, "--master_port", str(nodes.PORT)),
        *("--nproc_per_node", "1"),
    )


def accelerate_of(number: int, first: nodes.Node) -> tuple[str, ...]:
    """The same by accelerate."""
    return (
        *("accelerate.commands.launch", "--multi_gpu", "--num_machines", "2"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--machine_rank", str(number)),
        *("--main_process_ip", first.address, "--main_process_port", str(nodes.PORT)),
        *("--num_processes", "2"),
    )


def launch(
    folder: Path,
    device: str,
    *cases: str,
    by: tuple[str, ...] = TORCHRUN,
    script: str = ranks.__file__,
    python: str = sys.executable,
) -> list[dict[str, Any]]:
    """What each rank finds, by case, and there without groups (False) and with them.

    Args:
        folder: For what they find.
        device: Its type.
        cases: Of the script.
        by: The launcher.
        script: What each rank runs.
        python: The interpreter.
    """
    done = subprocess.run(
        [python, "-m", *by, str(_RANKS), script, str(folder), device, *cases],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **_ENVIRONMENT},
    )
    of_ranks = [line for line in done.stderr.splitlines() if line.startswith("[rank")]
    assert done.returncode == 0, "\n".join([*of_ranks[-60:], done.stderr[-1000:]])
    return [torch.load(folder / f"{rank}.pt") for rank in range(_RANKS)]


def launch_on(
    both: list[nodes.Node],
    folder: Path,
    *cases: str,
    by: OnNode = torchrun_of,
) -> list[dict[str, Any]]:
    """launch() with a rank on each of two nodes."""
    script = (ranks.__file__, str(folder), "cpu", *cases)
    commands = [(sys.executable, "-m", *by(i, both[0]), *script) for i in range(len(both))]
    nodes.run(both, commands, _ENVIRONMENT)
    return [torch.load(folder / f"{rank}.pt") for rank in range(_RANKS)]


def assert_gradients(found: list[dict[str, Any]], case: str) -> None:
    """Ranks agree, groups change no bit, and the mean is that of one process."""
    own, other = (rank[case] for rank in found)
    for grouped in ("False", "True"):
        assert all(map(torch.equal, own[grouped]["gradients"], other[grouped]["gradients"]))
    assert all(map(torch.equal, own["False"]["gradients"], own["True"]["gradients"]))
    expected = ranks.in_one_process(case)
    for ours, theirs in zip(own["True"]["gradients"], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for rank in (own, other):
        assert rank["True"]["groups"] == ranks.LAYERS
        assert rank["False"]["in_torch"] == rank["True"]["in_torch"] == {}
