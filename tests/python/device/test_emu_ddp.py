"""Two processes, each with a GPU and its daemon, train one model."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

from helpers import emu_torch, ranks, torchrun

pytestmark = [
    pytest.mark.emu,
    pytest.mark.skipif(bool(emu_torch.why_not()), reason=emu_torch.why_not()),
    pytest.mark.usefixtures("daemon"),
]
_CASES = ("plain", "averaged", "killed")


def test_two_gpus_have_the_gradient_of_one_process(daemon: Any, tmp_path: Path) -> None:
    """Together and in groups, by DistributedDataParallel and by the daemons themselves; and if each
    rank's daemon dies between two groups."""
    found = torchrun.launch(tmp_path, "emu", *_CASES)
    assert len(conftest.gpu_directories(daemon.root)) == 2
    for case in _CASES[:-1]:
        torchrun.assert_gradients(found, case)
    expected = found[0]["killed"]["False"]["gradients"]
    for rank in found:
        assert all(map(torch.equal, rank["killed"]["True"]["gradients"], expected))
        assert rank["killed"]["True"]["pids"]
        assert rank["plain"]["True"]["groups"] == ranks.LAYERS
        pairs = zip(*(rank[case]["True"]["gradients"] for case in _CASES[:2]), strict=True)
        for by_ddp, by_daemons in pairs:
            torch.testing.assert_close(by_daemons, by_ddp, rtol=1e-6, atol=1e-7)
    # A daemon that had done all of its groups is not needed again: on an idle machine both may.
    assert max(rank["killed"]["True"]["recoveries"] for rank in found) <= 1
    stop = [str(conftest.BINARY), "stop", "--dir", str(daemon.root)]
    subprocess.run(stop, check=True, timeout=60, capture_output=True)
    for folder in conftest.gpu_directories(daemon.root):  # of such a daemon, which was killed
        for socket in folder.glob("*.sock"):
            socket.unlink()


@pytest.mark.nightly
def test_accelerate_starts_them_as_well(daemon: Any, tmp_path: Path) -> None:
    found = torchrun.launch(tmp_path, "emu", "plain", "averaged", by=torchrun.ACCELERATE)
    assert len(conftest.gpu_directories(daemon.root)) == 2
    for case in ("plain", "averaged"):
        torchrun.assert_gradients(found, case)
    stop = [str(conftest.BINARY), "stop", "--dir", str(daemon.root)]
    subprocess.run(stop, check=True, timeout=60, capture_output=True)
