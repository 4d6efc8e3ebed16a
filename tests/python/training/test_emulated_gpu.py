"""Models train on the emulated GPU, by kernels that are written for CUDA: the CPU's losses.

The daemon is the one of the tests, which has that device; every operator of a plan runs in an
emulated kernel, through the device of the CUDA plug-in, on a stand-in for CUDA (tests/sim).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BINARY, PYTHONPATH

from helpers.selection import every_run

pytestmark = pytest.mark.one_in(4)

FAKE = BINARY.with_name("gradd-fake")
DAILY = [("mlp_ce", "float32"), ("gpt2", "float32")]
ALL = [
    *DAILY,
    ("llama", "float32"),
    ("llama_chunks", "float32"),
    ("llama_chunks", "bfloat16"),
    *((name, "float32") for name in ("bert_mlm", "qwen3", "gemma2", "llama_tied", "mlp_bce")),
    *((name, "bfloat16") for name in ("mlp_mse", "llama", "gpt2", "bert_mlm")),
]


def _train(folder: Path, name: str, dtype: str, *devices: str, **more: str) -> list[dict]:
    """What the child says of each device."""
    env = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "GRADD_BIN": str(FAKE),
        "GRADD_THREADS": "1",
        "GRADD_SIM_DELAY_US": "50",
        "GRADD_SELF_CHECK": "0",
        **more,
    }
    for device in devices:
        (folder / device).mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-m", "helpers.processes.device_trainer", name, dtype]
    command += [str(folder), *devices]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    finally:
        for device in devices:
            stop = [str(FAKE), "stop", "--dir", str(folder / device)]
            subprocess.run(stop, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(devices) :]]


@pytest.mark.parametrize("which", every_run(DAILY, ALL), ids="-".join)
def test_a_model_trains_as_on_the_cpu(tmp_path: Path, which: tuple[str, str]) -> None:
    name, dtype = which
    cpu, gpu = _train(tmp_path, name, dtype, "cpu", "emu")
    assert not cpu["fallbacks"] and not gpu["fallbacks"]
    off = 1e-5 if dtype == "float32" else 2e-2
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=off)
    assert gpu["chunks"] == cpu["chunks"] == name.endswith("_chunks")
    assert len(set(cpu["losses"])) > 1


def test_measured_products_stay_what_they_are(tmp_path: Path) -> None:
    """By the clock, each daemon would choose other algorithms: the second reads the first's."""
    cache = {"XDG_CACHE_HOME": str(tmp_path), "GRADD_CUDA_TUNE": "all"}
    (first,) = _train(tmp_path, "mlp_ce", "float32", "emu", **cache)
    (file,) = (tmp_path / "gradd" / "products").iterdir()
    kept = file.read_text()
    assert len(kept.splitlines()) > 4
    assert _train(tmp_path, "mlp_ce", "float32", "emu", **cache) == [first]
    assert file.read_text() == kept
    command = [str(FAKE), "doctor"]
    env = {**os.environ, **cache}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert f"{len(kept.splitlines()) - 1} measured algorithms in {file}" in told
