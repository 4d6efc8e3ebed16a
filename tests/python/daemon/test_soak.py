"""Sessions that come and go leave the daemon as it was (a hundredth of `benchmarks/soak.py`)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["cycles", "kills", "garbage"])
def test_a_part_leaves_nothing(part: str) -> None:
    script = ROOT / "benchmarks" / "soak.py"
    command = [sys.executable, str(script), "--only", part, "--scale", "0.01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(part)
