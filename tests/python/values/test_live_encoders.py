"""Models of encoder and decoder leave out the encoder's padding, and rows without a label."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradd import ORTModule
from helpers.models.families import HIDDEN, VOCAB
from helpers.parity.live_rows import (
    IGNORED,
    SMALLEST,
    Twins,
    agree,
    drawn_batch,
    found,
    left_out,
)
from helpers.selection import SEED, every_run

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]
_SIZES = {"vocab_size": VOCAB, "d_model": HIDDEN, "use_cache": False, "decoder_start_token_id": 1}
_T5 = {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_BART = {"encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 128}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_BART |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
FAMILIES = {"t5": ("T5", _T5), "bart": ("Bart", _BART), "mbart": ("MBart", _BART)}
FAMILIES |= {"marian": ("Marian", _BART), "pegasus": ("Pegasus", _BART)}


def build(family: str, dropout: float = 0.0) -> Any:
    import transformers

    stem, sizes = FAMILIES[family]
    chance = {"dropout_rate": dropout}
    if family != "t5":
        chance = {"dropout": dropout, "attention_dropout": dropout, "pad_token_id": 0}
    config = getattr(transformers, f"{stem}Config")(**_SIZES, **sizes, **chance)
    names = {"marian": "MarianMTModel"}
    kind = getattr(transformers, names.get(family, f"{stem}ForConditionalGeneration"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(config).train()


def batch_of(draw: random.Random, decoder_mask: bool = False) -> dict[str, torch.Tensor]:
    """Of equal lengths now and then; a sequence without a real position of the encoder, too."""
    batch = drawn_batch(draw)
    rows, positions = batch["input_ids"].shape
    gen = torch.Generator().manual_seed(draw.getrandbits(40))
    own = draw.choice([SMALLEST, 3, 20, positions])
    if draw.random() < 0.8:
        batch["attention_mask"][:, draw.randrange(positions)] = 1
    labels = torch.randint(2, VOCAB, (rows, own), generator=gen)
    kept = torch.arange(own) < torch.randint(own + 1, (rows, 1), generator=gen)
    thin = draw.choice([0.0, 0.4, 1.0, 1.0])
    batch["labels"] = labels.masked_fill(
        ~kept | (torch.rand(rows, own, generator=gen) >= thin), IGNORED
    )
    if decoder_mask:
        batch["decoder_attention_mask"] = kept.long()
    return batch


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _cases(
    family: str, dtype: torch.dtype, count: int, patch: pytest.MonkeyPatch, mask: bool = False
) -> None:
    draw = random.Random(f"{SEED} {family}")
    whole, whole_mask = _half(), {"decoder_attention_mask": torch.ones(3, 24).long()}
    first = {"decoder_attention_mask": torch.ones(3, 12).long()} if mask else None
    twins = Twins(build(family), dtype, patch, first=first)
    for _ in range(count):
        case = batch_of(draw, mask)
        if family == "mbart":  # shifts labels by where the last one is, and needs one
            case["labels"][:, 0].clamp_(min=2)
        try:
            twins.compare(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    everywhere = whole["labels"].clamp(min=2)
    for labels in (whole["labels"], everywhere, everywhere):  # the second one asks for a plan
        twins.compare({**whole, "labels": labels, **(whole_mask if mask else {})})
    seen = left_out()
    assert seen["padding"] > 0
    assert seen["unlabelled"] > 0


@pytest.mark.parametrize("family", every_run(("t5",), ("t5", "bart")))
def test_random_batches_of_pairs(family: str, patch: pytest.MonkeyPatch) -> None:
    _cases(family, torch.float32, 3, patch)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_batches_of_pairs(
    family: str, dtype: torch.dtype, mask: bool, patch: pytest.MonkeyPatch
) -> None:
    _cases(family, dtype, 20, patch, mask)


def _half(rows: int = 3) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    mask = (torch.arange(40) < 20).long().expand(rows, -1).contiguous()
    labels = torch.randint(2, VOCAB, (rows, 24), generator=gen)
    labels[:, 9:] = IGNORED
    ids = torch.randint(2, VOCAB, (rows, 40), generator=gen)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("family", every_run(("t5",), ("t5", "bart")))
def test_dropout_is_that_of_all_rows(family: str, patch: pytest.MonkeyPatch) -> None:
    twins, draw = Twins(build(family, 0.2), torch.float32, patch), random.Random(7)
    for step in range(3):
        batch = _half()
        batch["attention_mask"] = (torch.rand(3, 40) < draw.random()).long()
        batch["attention_mask"][:, 0] = 1
        results = []
        for model in (twins.live, twins.full):
            torch.manual_seed(step)
            results.append(found(model, batch))
        agree(*results, twins.bound)
    assert left_out()["padding"] > 0


def test_a_sequence_of_padding_and_odd_masks_run_over_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Every call checks the assumptions about an encoder's mask."""
    patch.setenv("GRADD_SELF_CHECK", "0")
    model, batch = ORTModule(build("bart"), strict=True), _half()
    model(**batch).loss.backward()
    seen = model.gradd_stats()["padding_rows_left_out"]
    assert seen > 0
    for _ in range(2):  # the first one asks for a plan of its sizes, all are labelled
        model(**{**batch, "labels": batch["labels"].clamp(min=2)}).loss.backward()
    assert model.gradd_stats()["padding_rows_left_out"] == 2 * seen
    empty = {**batch, "attention_mask": batch["attention_mask"].clone()}
    empty["attention_mask"][1] = 0
    model(**empty).loss.backward()
    model(**{**batch, "attention_mask": batch["attention_mask"] * 3}).loss.backward()
    assert model.gradd_stats()["padding_rows_left_out"] == 2 * seen


def test_bits_are_the_same_again_and_a_switch_turns_it_off(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("GRADD_SELF_CHECK", "0")
    results = []
    for switch in ("1", "1", "0"):
        patch.setenv("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER", switch)
        model = ORTModule(build("t5"), strict=True)
        loss, grads = found(model, _half())
        results.append([loss, *(g for g in grads.values() if g is not None)])
        assert (model.gradd_stats()["padding_rows_left_out"] > 0) == (switch == "1")
    assert all(map(torch.equal, *results[:2]))
