"""The daemon's numbers in what a trainer logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from helpers.trainers.hugging_face import Tokens, losses, make_trainer, pad, tiny_llama
from optimum.gradd import accelerate

pytestmark = pytest.mark.usefixtures("daemon")

NAMES = ["gradd_compute_ms", "gradd_memory_mib", "gradd_rows_saved", "gradd_wait_ms"]
OPTIONS = {"max_steps": 4, "logging_steps": 2, "data_collator": pad, "eval_strategy": "epoch"}


class Seen(TrainerCallback):
    """What the writers of TensorBoard and W&B are given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keeps it."""
        self.logs.append(dict(kwargs["logs"]))


def _trained(kind: str, folder: Path, **options: Any) -> tuple[Trainer, list[dict[str, Any]]]:
    seen = Seen()
    data = Tokens(40, varied=True)
    given = {**OPTIONS, "train_dataset": data, "callbacks": [seen], **options}
    trainer = make_trainer(kind, folder, tiny_llama(), **given)
    if options:
        accelerate(trainer)
    trainer.train()
    return trainer, seen.logs


def _without(log: dict[str, Any]) -> list[str]:
    return [name for name in log if not name.startswith("gradd_")]


def test_a_log_of_training_has_the_numbers_of_its_interval(tmp_path: Path) -> None:
    plain, theirs = _trained("torch", tmp_path)
    trainer, ours = _trained("gradd", tmp_path)
    assert list(map(_without, ours)) == list(map(_without, theirs))
    assert losses(trainer) == pytest.approx(losses(plain), abs=1e-4)
    training = [log for log in ours if "loss" in log]
    assert len(training) == 2
    assert all(sorted(set(log) - set(_without(log))) == NAMES for log in training)
    others = [log for log in ours if "loss" not in log]
    assert others and all(_without(log) == list(log) for log in others)
    stats = trainer.gradd_stats()
    total = {name: sum(log[name] for log in training) for name in NAMES}
    left_out = stats["padding_rows_left_out"] + stats["unlabelled_rows_left_out"]
    assert total["gradd_rows_saved"] == left_out > 0
    assert 0 < training[1]["gradd_compute_ms"] < total["gradd_compute_ms"] <= stats["compute_ms"]
    assert 0 <= total["gradd_wait_ms"] <= stats["wait_ms"]
    arena = trainer.gradd_explain().arena_bytes / 2**20
    assert arena <= training[1]["gradd_memory_mib"] + 0.01
    assert training[1]["gradd_memory_mib"] <= stats["arena_bytes"] / 2**20 + 0.01
    client = trainer._gradd_compiled.client
    assert client.said.listeners == ()  # it has trained


def test_an_accelerated_trainer_has_them_and_an_option_turns_them_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, logs = _trained("torch", tmp_path, max_steps=2)
    assert sorted(set(logs[0]) - set(_without(logs[0]))) == NAMES
    assert logs[0]["gradd_compute_ms"] > 0
    monkeypatch.setenv("GRADD_METRICS", "0")
    _, logs = _trained("torch", tmp_path, max_steps=2)
    assert all(_without(log) == list(log) for log in logs)
