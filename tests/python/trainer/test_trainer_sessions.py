"""A training that goes on in another process, from what the daemon has kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import PYTHONPATH, Daemon

from gradd import errors
from helpers.trainers.hugging_face import make_trainer

STEPS = 12

TRAINER = """
import os, sys, torch, transformers
from pathlib import Path
from helpers.trainers.hugging_face import Tokens, make_trainer, tiny_llama

class Said(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)

folder, resume = Path(sys.argv[1]), sys.argv[2]
kept = {"keep_session": "llama"} if resume == "new" else {}
trainer = make_trainer(
    "gradd", folder, tiny_llama(attention_dropout=0.1), train_dataset=Tokens(20),
    callbacks=[Said()], max_steps=STEPS, gradient_accumulation_steps=2,
    per_device_train_batch_size=2,
    optim="adamw_ort_fused", learning_rate=3e-3, warmup_steps=3, max_grad_norm=0.5, seed=3,
    logging_steps=1, **kept,
)
trainer.train("session:llama" if resume == "again" else None)
optimizer = trainer.gradd_own_optimizer()
found = {"model": trainer.model.state_dict(), "state": optimizer.state_dict()["state"]}
torch.save({**found, "steps": trainer.state.global_step}, folder / f"{resume}.pt")
os._exit(0)
""".replace("STEPS", str(STEPS))


def _start(folder: Path, resume: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), resume],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "GRADD_SELF_CHECK": "0"},
    )


def _result(folder: Path, resume: str) -> dict:
    process = _start(folder, resume)
    text, words = process.communicate(timeout=300)
    assert process.returncode == 0, words[-3000:]
    return torch.load(folder / f"{resume}.pt") | {"said": text}


def _killed_in(folder: Path, resume: str, step: int, after: float) -> None:
    process = _start(folder, resume)
    try:
        while (line := process.stdout.readline()).strip() != f"step {step}":
            assert line, process.communicate()[1][-3000:]
        time.sleep(after)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("step", [4, pytest.param(5, marks=pytest.mark.nightly)])
def test_a_killed_training_goes_on_with_the_same_bits(
    daemon: Daemon, tmp_path: Path, step: int
) -> None:
    """Five steps are an epoch: the fifth begins the next one."""
    whole = _result(tmp_path, "whole")
    _killed_in(tmp_path, "new", step, 0.003)
    again = _result(tmp_path, "again")
    assert f"step {step - 1}\n" not in again["said"] and f"step {step + 1}\n" in again["said"]
    assert whole["steps"] == again["steps"] == STEPS
    for name, value in whole["model"].items():
        assert torch.equal(again["model"][name], value), name
    for number, state in whole["state"].items():
        assert torch.equal(again["state"][number]["exp_avg_sq"], state["exp_avg_sq"])
        assert again["state"][number]["step"] == state["step"]


def test_what_cannot_be_resumed_is_named(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer("gradd", tmp_path, max_steps=1, keep_session="one")
    with pytest.raises(errors.SessionError, match="no session 'none': none is kept"):
        trainer.train("session:none")
    with pytest.raises(ValueError, match=r"state of AdamW is not kept; use .*adamw_ort_fused"):
        trainer.train()
    monkeypatch.setenv("GRADD_DISABLE", "1")
    plain = make_trainer("gradd", tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="gradd is disabled"):
        plain.train("session:one")
