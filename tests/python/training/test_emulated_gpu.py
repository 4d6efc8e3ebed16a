"""Models train on the emulated GPU, by kernels that are written for CUDA: the CPU's losses.

The daemon is the one of the tests, which has that device; every operator of a plan runs in an
emulated kernel, and each piece of work in memory that nobody else can touch (tests/fake).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import BINARY
from selection import every_run

CHILD = Path(__file__).resolve().parents[1] / "helpers" / "training_child.py"
FAKE = BINARY.with_name("gradd-fake")
DAILY = [("mlp_ce", "float32"), ("llama", "float32"), ("gpt2", "float32")]
ALL = [
    *DAILY,
    ("llama_chunks", "float32"),
    ("llama_chunks", "bfloat16"),
    *((name, "float32") for name in ("bert_mlm", "qwen3", "gemma2", "llama_tied", "mlp_bce")),
    *((name, "bfloat16") for name in ("mlp_mse", "llama", "gpt2", "bert_mlm")),
]


def _train(folder: Path, device: str, name: str, dtype: str, **more: str) -> dict:
    directory = folder / device
    directory.mkdir(mode=0o700, exist_ok=True)
    env = {
        **os.environ,
        "GRADD_DIR": str(directory),
        "GRADD_BIN": str(FAKE),
        "GRADD_DEVICE": device,
        "GRADD_THREADS": "1",
        "GRADD_FAKE_DELAY_US": "50",
        "GRADD_SELF_CHECK": "0",
        **more,
    }
    command = [sys.executable, str(CHILD), name, dtype]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    finally:
        subprocess.run([str(FAKE), "stop"], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("which", every_run(DAILY, ALL), ids="-".join)
def test_a_model_trains_as_on_the_cpu(tmp_path: Path, which: tuple[str, str]) -> None:
    name, dtype = which
    cpu = _train(tmp_path, "cpu", name, dtype)
    gpu = _train(tmp_path, "emu", name, dtype)
    assert not cpu["fallbacks"] and not gpu["fallbacks"]
    off = 1e-5 if dtype == "float32" else 2e-2
    assert gpu["losses"] == pytest.approx(cpu["losses"], rel=off)
    assert gpu["chunks"] == cpu["chunks"] == name.endswith("_chunks")
    assert len(set(cpu["losses"])) > 1


def test_measured_products_stay_what_they_are(tmp_path: Path) -> None:
    """By the clock, each daemon would choose other algorithms: the second reads the first's."""
    cache = {"XDG_CACHE_HOME": str(tmp_path), "GRADD_CUDA_TUNE": "all"}
    first = _train(tmp_path, "emu", "mlp_ce", "float32", **cache)
    (file,) = (tmp_path / "gradd" / "products").iterdir()
    kept = file.read_text()
    assert len(kept.splitlines()) > 4
    assert _train(tmp_path, "emu", "mlp_ce", "float32", **cache)["losses"] == first["losses"]
    assert file.read_text() == kept
    command = [str(FAKE), "doctor"]
    env = {**os.environ, **cache}
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert f"{len(kept.splitlines()) - 1} measured algorithms in {file}" in told
