"""Rows that are not needed are left out, and nothing else changes.

A wrapped module that leaves out padding and rows without a label is compared with its twin over all
rows: loss and every gradient agree to rounding, whatever the mask, the labels and the sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from gradd import ORTModule, errors
from gradd.calls.liverows import LiveRows, filled, rounded
from helpers.models import families
from helpers.parity.live_rows import (
    IGNORED,
    Twins,
    agree,
    drawn_batch,
    found,
    left_out,
    masked_batch,
)
from helpers.selection import SEED, every_run

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]
FAMILIES = (
    *("llama", "llama_tied", "bert_mlm", "gpt2", "mistral", "qwen2", "qwen3", "phi3"),
    *("gemma2", "gemma3", "peft_lora_llama"),
)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _cases(family: str, dtype: torch.dtype, count: int, patch: pytest.MonkeyPatch) -> None:
    twins, draw = Twins(family, dtype, patch), random.Random(f"{SEED} {family}")
    for _ in range(count):
        case = drawn_batch(draw)
        try:
            twins.compare(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    if count >= 10:
        seen = left_out()
        assert seen["unlabelled"] > 0
        assert seen["padding"] > 0


@pytest.mark.parametrize("family", ["llama", "bert_mlm"])
def test_random_batches(family: str, patch: pytest.MonkeyPatch) -> None:
    _cases(family, torch.float32, 15, patch)


@pytest.mark.parametrize("family", every_run(("llama",), FAMILIES))
def test_random_batches_without_padding(family: str, patch: pytest.MonkeyPatch) -> None:
    """Rows without a label stay: the last one of a sequence has none, and is real."""
    patch.setenv("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", "0")
    twins, draw = Twins(family, torch.float32, patch), random.Random(f"{SEED} {family}")
    for _ in range(6):
        batch = masked_batch(draw, 3, 17, ("right",))
        batch["attention_mask"][0::2] = 1
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        twins.compare(batch)
    stats = twins.live.gradd_stats()
    assert stats["padding_rows_left_out"] > 0 == stats["unlabelled_rows_left_out"]


def test_a_refusal_is_said_once_and_keeps_no_tensors(
    patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler may keep records; an error in one would keep the frames that it went through."""

    def refuse(*_: object) -> None:
        raise errors.GraphError("pass live_rows: not this one")

    patch.setattr(LiveRows, "_plan", refuse)
    patch.setenv("GRADD_SELF_CHECK", "0")
    module, make_batch = families.build("llama")
    model = ORTModule(module, strict=True)
    for step in range(2):
        batch = make_batch(3, 17, step)
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, 3:] = IGNORED
        model(**batch).loss.backward()
    (record,) = [r for r in caplog.records if "are computed as well" in r.msg]
    assert "not this one" in record.getMessage()
    assert all(isinstance(arg, str) for arg in record.args)


def test_few_rows_without_a_label_stay(patch: pytest.MonkeyPatch) -> None:
    """Where every real row has a label, a list of the rows with one is not worth it."""
    twins = Twins("llama", torch.float32, patch, num_hidden_layers=6)
    batch = masked_batch(random.Random(3), 4, 40, ("none",))
    batch["attention_mask"][1, 24:] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    for _ in range(2):
        twins.compare(batch)
    stats = twins.live.gradd_stats()
    assert stats["padding_rows_left_out"] > 0 == stats["unlabelled_rows_left_out"]


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_random_batches(family: str, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    _cases(family, dtype, 25, patch)


@pytest.mark.quick
def test_sizes_of_lists() -> None:
    """At most eight to an octave, never too small, and what fills them stands for nothing."""
    sizes = {rounded(n) for n in range(4097)}
    for low in (64, 512, 2048):
        assert sum(low < size <= 2 * low for size in sizes) <= 8
    assert all(n <= rounded(n) <= max(8, n * 9 / 8 + 1) for n in range(4097))
    assert filled(torch.tensor([3, 5]), 4).tolist() == [3, 5, ~5, ~5]
    assert filled(torch.tensor([], dtype=torch.int64), 2).tolist() == [-1, -1]


def _with_chance(family: str) -> dict[str, float]:
    """Configuration with dropout everywhere that the family has any."""
    if family == "gpt2":
        return {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
    if family == "bert_mlm":
        return {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}
    return {"attention_dropout": 0.2}


@pytest.mark.parametrize("family", every_run(("llama",), ["bert_mlm", "gpt2", "llama"]))
def test_masks_of_dropout_are_those_of_all_rows(family: str, patch: pytest.MonkeyPatch) -> None:
    """The same seed drops the same elements, whatever rows are left out."""
    twins, draw = Twins(family, torch.float32, patch, **_with_chance(family)), random.Random(7)
    for step in range(8):
        size = draw.randint(2, 4), draw.choice([17, 60])
        batch = masked_batch(draw, *size, ("right", "holes", "mixed"))
        results = []
        for model in (twins.live, twins.full):
            torch.manual_seed(step)
            results.append(found(model, batch))
        agree(*results, twins.bound)
    assert left_out()["padding"] > 0
