"""What a run on a GPU brings home: the page of results, and graphs with PyTorch's gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from helpers import BUILD, ROOT

sys.path.insert(0, str(ROOT / "tools/gpu"))
import bundles
import shapes
import table

BENCH = BUILD / "bin/bench_engine-fake"


def _part(name: str, *lines: dict, status: int = 0) -> dict:
    return {"part": name, "status": status, "seconds": 1, "lines": list(lines)}


RECORDED = [
    _part("machine", {"gpu": "NVIDIA H200, 580.1"}, {"torch": "2.11", "transformers": "5.17"}),
    _part(
        "bundles", {"bundle": "mlp", "held": True, "of_limit": 0.25}, {"bundle": "x", "held": False}
    ),
    _part(
        "engine-1b-4x2048",
        {"plan_ms": 3.0, "arena_mb": 11958.1, "forward_launches": 300, "backward_launches": 500},
        {"best_ms": 142.4, "forward_ms": 50.0, "backward_ms": 92.4, "loss": 11.7},
        {"adamw_millions": 1236.0, "adamw_ms": 41.25, "norm": 1.0},
        {"ms": 60.5, "calls": 16.0, "row": "bwd MatMul bf16"},
        {"ms": 70.25, "calls": 16.0, "row": "fwd MatMul bf16"},
    ),
    _part("sdpa-8b", {"shape": "8b", "size": "1x2048", "forward_ms": 0.12, "backward_ms": 0.44}),
    _part(
        "attention-8b-1x2048",
        {"ms": 0.28, "calls": 1.0, "row": "fwd FusedAttention bf16"},
        {"ms": 0.75, "calls": 1.0, "row": "bwd FusedAttentionGrad bf16"},
    ),
    _part("probe-words", {"failed": "wait(0)", "line": 3, "status": 801}, status=1),
]
PEER = {"engine": "gradd", "shape": "1b", "size": "4x2048", "what": "full", "held": True}
MORE = [
    _part("probe-words", {"probe": "words", "turn_us": 12.5, "host_us": 4.0}),
    _part("probe-streams", {"probe": "streams", "host_us": 3.5}),
    _part(
        "peers-1b",
        PEER | {"step_ms": 150.0, "tokens_per_s": 54613, "memory_mib": 21000, "loss": 11.71},
        PEER | {"engine": "liger", "held": False, "failed": "the process ended with status 1"},
        status=1,
    ),
]


@pytest.mark.quick
def test_a_page_of_results(tmp_path: Path) -> None:
    files = [tmp_path / "results.json", tmp_path / "probe-words.json"]
    for file, parts in zip(files, (RECORDED, MORE), strict=True):
        file.write_text(json.dumps(parts))
    text = table.page(table.Results.read(files), "2026-12-01")
    assert text.startswith("NVIDIA H200, driver 580.1, torch 2.11, transformers 5.17, measured\non")
    row = "| 1B, 4 x 2048 | 142.4 | 50.0 | 92.4 | 41.2 | 57,528 | 45 % | 300 + 500 | 11,958 |"
    assert row in text
    assert text.index("`fwd MatMul bf16` | 70.25") < text.index("`bwd MatMul bf16` | 60.50")
    assert "| 8B, 1x2048 | 0.28 | 0.12 | 0.75 | 0.44 |" in text
    assert "| gradd | 150.0 |  | 54,613 | 21,000 |  | 11.7100 |" in text
    assert "| liger |  |  |  |  |  | failed |" in text
    assert "| turn of words between two processes | 12.5 us |" in text
    assert "| event of a context of 64 idle streams, on the host | 3.5 us |" in text
    assert "* Failed: peers-1b." in text and "probe-words" in text.split("* Failed")[0]
    assert "1 of 2; the worst of these at 25 % of its limit" in " ".join(text.split())
    assert all(len(line) <= 100 or line.startswith("|") for line in text.splitlines())


@pytest.mark.quick
def test_operations_of_a_step() -> None:
    """Against the sizes of Llama-3.2-1B, counted by hand."""
    one = shapes.SHAPES["1b"]
    layer = 2048 * 2048 * 2 + 2048 * 512 * 2 + 3 * 2048 * 8192
    assert one.multiplied == 16 * layer + 128256 * 2048
    pairs = 2048 * 2049 / 2
    assert one.operations(1, 2048) == 6 * one.multiplied * 2048 + 12 * 16 * 2048 * pairs
    assert one.operations(2, 8, 0.0) * 3 > one.operations(2, 8) * 2
    assert shapes.peak_of("NVIDIA H200") == 989e12 and shapes.peak_of("another") == 0


def _compare(folder: Path, device: str) -> tuple[int, list[dict]]:
    command = [sys.executable, bundles.__file__, "compare", str(folder), str(BENCH), device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.usefixtures("daemon")
def test_a_bundle_is_held_and_a_wrong_gradient_is_not(tmp_path: Path) -> None:
    bundles.make("mlp", "float32", tmp_path / "mlp")
    status, (line,) = _compare(tmp_path, "cpu")
    assert status == 0 and line["held"] and 0 < line["of_limit"] <= 1, line
    file = tmp_path / "mlp/expected/inner.weight.bin"
    gradient = np.fromfile(file, np.float32)
    gradient[7] += 3e-4 * np.abs(gradient).max()
    gradient.tofile(file)
    status, (line,) = _compare(tmp_path, "cpu")
    assert status == 1 and not line["held"] and line["worst"] == "inner.weight"
    (tmp_path / "mlp/data/x.bin").write_bytes(b"too short")
    status, (line,) = _compare(tmp_path, "cpu")
    assert status == 1 and "does not have 768 bytes" in line["failed"]


@pytest.mark.nightly
@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_all_bundles_are_held(tmp_path: Path, device: str) -> None:
    for name in bundles.CASES:
        for dtype in ("float32", "bfloat16"):
            bundles.make(name, dtype, tmp_path / f"{name.replace(' ', '-')}-{dtype}")
    status, lines = _compare(tmp_path, device)
    assert len(lines) == 2 * len(bundles.CASES)
    assert status == 0, [line for line in lines if not line["held"]]
