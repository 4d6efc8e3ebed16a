"""The demo from end to end with few steps: its output, files and results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest


def test_corpus_and_tokenizer_need_no_network_and_repeat() -> None:
    from optimum.gradd import demo_data

    texts = demo_data.read_corpus(limit=300_000)
    assert texts == demo_data.read_corpus(limit=300_000)
    tokenizer = demo_data.train_tokenizer(texts[:6])
    line = "def naïve(x):\n    return x  # ✓\n"
    assert tokenizer.decode(tokenizer.encode(line).ids) == line  # any bytes survive
    tokens = demo_data.encode(tokenizer, texts[:2])
    assert (tokens == tokenizer.token_to_id("<file>")).sum() == 2
    blocks = demo_data.Blocks(tokens)
    assert len(blocks) == len(tokens) // demo_data.BLOCK
    np.testing.assert_array_equal(blocks[1]["input_ids"], tokens[128:256].astype(np.int64))


def test_model_has_the_promised_size_and_the_same_weights() -> None:
    import torch

    from optimum.gradd import demo_data

    first, second = demo_data.build_model(), demo_data.build_model()
    assert 10e6 <= sum(p.numel() for p in first.parameters()) <= 15e6
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_the_worker_is_asked_for_while_another_thread_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from optimum.gradd import memory

    monkeypatch.setitem(sys.modules, "gradd.session.client", types.ModuleType("client"))
    assert memory.worker_pid() is None


@pytest.mark.usefixtures("daemon")
def test_demo_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "optimum.gradd.demo", "--out", str(out)]
    done = subprocess.run(
        [*command, "--steps", "3", "--compare", "2", "--minutes", "4", "--characters", "300000"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GRADD_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    worst = re.search(r"largest difference in the first 2 steps: (\S+)", text)
    assert worst and float(worst.group(1)) < 1e-4
    # Both processes were measured: the daemon's memory is a figure and not a dash.
    daemon = re.search(r"peak memory, daemon\s+(\S+)\s+([\d,]+) MiB", text)
    assert daemon and daemon.group(1) == "-" and int(daemon.group(2).replace(",", "")) > 10
    assert "make bench" in text and "Warning" not in text
    assert (out / "demo.png").stat().st_size > 10_000
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(out / "model").config.num_hidden_layers == 6
