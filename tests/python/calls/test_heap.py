"""The process does not keep memory that capture and self-check have freed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradd import ORTModule
from gradd.memory import unused

pytestmark = pytest.mark.usefixtures("shared_daemon")
MIB = 1 << 20


def private_bytes() -> int:
    """Pages that this process alone has written."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Private_Dirty in smaps_rollup")


def test_first_step_leaves_no_freed_pages() -> None:
    """The self-check alone holds several copies of 48 MiB of gradients for a moment."""
    blocks = [nn.Linear(2048, 2048, bias=False) for _ in range(3)]
    model = ORTModule(nn.Sequential(*blocks).bfloat16())
    model(torch.ones(4, 2048, dtype=torch.bfloat16)).sum().backward()
    assert model.gradd_stats()["self_checks"] == 1
    before = private_bytes()
    unused.trim()
    assert before - private_bytes() < 8 * MIB
