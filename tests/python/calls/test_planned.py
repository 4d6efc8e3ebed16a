"""Planned bytes against the growth of the daemon's memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import gradd
from gradd import ORTModule
from helpers.selection import every_run

pytestmark = pytest.mark.one_in(2)

MIB = 1 << 20
SHARE, LEAST = 0.03, 8 * MIB
PASSING = 4 * MIB  # more for moments of a run in bf16: see docs/explain.md
PACKED = 16 * MIB  # what oneDNN takes for products of f32 in two threads: the same page


def packs_by_itself() -> bool:
    """Whether oneDNN's products of f32 pack their operands in memory of their own."""
    with open("/proc/cpuinfo") as cpu:
        return "avx512f" not in cpu.read()


def anonymous(pid: int) -> int:
    """Pages that the process has for itself: its part of shared memory is counted by the plan."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no Pss_Anon in smaps_rollup")


class Peak(threading.Thread):
    """The most that a process has had for itself, looked at all the time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.most, self.over = pid, 0, False

    def run(self) -> None:
        while not self.over:
            self.most = max(self.most, anonymous(self.pid))
            time.sleep(0.001)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.over = True
        self.join()


def llama(**options: Any) -> LlamaForCausalLM:
    config = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4}
    config |= {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 8000}
    return LlamaForCausalLM(LlamaConfig(**config, use_cache=False, **options))


def bert() -> BertForMaskedLM:
    config = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 6, "vocab_size": 8000}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**config, **none))


@pytest.mark.parametrize(
    "case",
    every_run(
        {(llama, torch.bfloat16)},
        [(llama, torch.float32), (llama, torch.bfloat16), (bert, torch.float32)],
    ),
)
def test_planned_is_measured(daemon: Any, monkeypatch: Any, case: tuple) -> None:
    """Activations, workspace, folded constants, oneDNN's buffers: all of the daemon's own."""
    build, dtype = case
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")  # its plans of few rows are others
    torch.manual_seed(0)
    module = build().to(dtype)
    ids = torch.randint(0, 8000, (4, 256))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    model = ORTModule(module, strict=True)
    pid = daemon.worker()
    before = anonymous(pid)
    with Peak(pid) as peak:
        for _ in range(4):
            module.zero_grad(set_to_none=True)
            model(**batch).loss.backward()
    grown = peak.most - before
    one = gradd.estimate(model, batch, optimizer="sgd")
    planned = one.activations + one.constants
    print(f"planned {planned / MIB:.1f} MiB, grown by {grown / MIB:.1f} MiB")
    least = LEAST + (PASSING if dtype == torch.bfloat16 else PACKED * packs_by_itself())
    assert abs(grown - planned) <= max(SHARE * planned, least)
