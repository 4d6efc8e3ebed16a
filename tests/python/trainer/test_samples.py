"""The samples at small size against plain Trainer, their data, and their check of memory."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import ROOT
from helpers.trainers.hugging_face import assert_same_losses

sys.path.insert(0, str(ROOT / "samples"))
import common

NAMES = ("bert_pretraining", "llama_lora")
MIB = 1 << 20


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.nightly)])
def test_a_sample_trains_as_plain_trainer_does(name: str, tmp_path: Path) -> None:
    sample = importlib.import_module(name)
    given = {"max_steps": 3, "use_cpu": True}
    ours = common.make_trainer(sample, sample.SIZES["small"], str(tmp_path), strict=True, **given)
    theirs = common.make_trainer(sample, sample.SIZES["small"], str(tmp_path), plain=True, **given)
    for trainer in (theirs, ours):
        trainer.train()
    assert_same_losses(theirs, ours)
    stats = ours.gradd_stats()
    assert stats["forwards"] >= 3 and stats["in_torch"] == {} and stats["self_check_failures"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_as_a_script(name: str, capsys: Any) -> None:
    trainer = common.main(importlib.import_module(name), ["--steps", "4"])
    assert trainer.state.global_step == 4
    said = capsys.readouterr().out
    assert "estimated memory of training:" in said and "in PyTorch 0" in said


@pytest.mark.quick
def test_too_little_memory_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(total=2048 * MIB, activations=MIB, available=3000 * MIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(common, "estimate", lambda sample, size: small)
    sample = importlib.import_module(NAMES[0])
    monkeypatch.setattr(sample, "build", lambda size: pytest.fail("built"))
    with pytest.raises(SystemExit) as ended:
        common.main(sample, [])
    assert str(ended.value) == (
        "not run: 3,584 MiB are needed (2,048 for training, 1,536 for the processes), and the "
        "machine has 3,000 left; --force runs it all the same"
    )
    with pytest.raises(pytest.fail.Exception, match="built"):
        common.main(sample, ["--force"])
    small.available = 3584 * MIB
    with pytest.raises(pytest.fail.Exception, match="built"):
        common.main(sample, [])


@pytest.mark.quick
def test_bert_rows_are_masked_pairs() -> None:
    sample = importlib.import_module("bert_pretraining")
    size = sample.SIZES["small"]
    rows = list(sample.Rows(size, 200))
    ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
    assert ids.shape == (200, size.tokens) and ids.min() > 0 and ids.max() < size.vocabulary
    labelled = labels != sample.IGNORED
    assert abs(float(labelled.float().mean()) - 0.15) < 0.01
    assert abs(float((ids == sample.MASK).float().mean()) - 0.12) < 0.01
    assert bool((labels[labelled] >= sample.FIRST_WORD).all())
    assert bool(labelled[ids == sample.MASK].all()) and bool((labels != ids)[ids == 3].all())
    assert sum(int(row["next_sentence_label"]) for row in rows) == 100
    second = torch.stack([row["token_type_ids"] for row in rows])
    assert bool((ids[:, 0] == sample.CLS).all()) and bool((ids[:, -1] == sample.SEP).all())
    assert second.sum(1).unique().tolist() == [size.tokens // 2]
    half, words = size.tokens // 2, size.vocabulary - sample.FIRST_WORD
    for number, row in enumerate(rows[:20]):  # the second sentence goes on, or does not
        whole = torch.where(row["labels"] == sample.IGNORED, row["input_ids"], row["labels"])
        step = (whole[2] - whole[1]) % words
        assert ((whole[half] - whole[half - 2]) % words == step) == (number % 2 == 0)


@pytest.mark.quick
def test_llama_rows_label_the_answer() -> None:
    sample = importlib.import_module("llama_lora")
    size = sample.SIZES["small"]
    row = sample.Rows(size, 3)[2]
    half = size.tokens // 2
    assert bool((row["labels"][:half] == sample.IGNORED).all())
    assert torch.equal(row["labels"][half:], row["input_ids"][:half].flip(0))
    assert len(list(sample.Rows(size, 3))) == 3


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "held", "trained"), [(NAMES[0], 335, 335), (NAMES[1], 6742, 4.19)]
)
def test_full_sizes_are_estimated_without_weights(name: str, held: int, trained: int) -> None:
    sample = importlib.import_module(name)
    size = sample.SIZES["full"]
    found = common.estimate(sample, size)
    each = size.dtype.itemsize
    assert found.parameters / each == pytest.approx(trained * 1e6, rel=0.06)
    assert (found.parameters + found.frozen) / each == pytest.approx(held * 1e6, rel=0.01)
    assert found.total > found.parameters + found.frozen + found.gradients + found.state
