"""Padding is left out where attention has a bias for each pair of positions."""

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
    Twins,
    agree,
    drawn_batch,
    found,
    left_out,
    masked_batch,
)
from helpers.selection import SEED, every_run

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]
_SIZES = {"vocab_size": VOCAB, "num_labels": VOCAB, "use_cache": False}
_T5 = {"d_model": HIDDEN, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_BERT = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {
    # a table of relative positions, of one layer for all
    "t5": ("T5Config", "T5ForTokenClassification", _T5, "dropout_rate"),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", {**_BERT, "intermediate_size": 128}, "drop"),
    # linear in the distance
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": HIDDEN, "n_heads": 4, "n_layers": 2}, ""),
}


def build(family: str, dropout: float = 0.0) -> Any:
    import transformers

    config, model, sizes, drop = FAMILIES[family]
    chance = {"dropout_rate": dropout}
    if drop == "drop":
        chance = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, model)(
            getattr(transformers, config)(**_SIZES, **sizes, **(chance if drop else {}))
        )
        for name, p in made.named_parameters():
            if "relative_attention_bias" in name:  # as large as a trained one
                p.data.normal_()
    return made.train()


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _cases(family: str, dtype: torch.dtype, count: int, patch: pytest.MonkeyPatch) -> None:
    twins, draw = Twins(build(family), dtype, patch), random.Random(f"{SEED} {family}")
    for _ in range(count):
        case = drawn_batch(draw, 90)
        try:
            twins.compare(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    assert left_out()["padding"] > 0


@pytest.mark.parametrize("family", every_run(("mpt",), ["t5", "mpt"]))
def test_random_batches_with_biases(family: str, patch: pytest.MonkeyPatch) -> None:
    _cases(family, torch.float32, 8, patch)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_more_batches_with_biases(
    family: str, dtype: torch.dtype, patch: pytest.MonkeyPatch
) -> None:
    _cases(family, dtype, 25, patch)


@pytest.mark.parametrize("family", ["t5"])
def test_dropout_beside_a_bias_is_that_of_all_rows(family: str, patch: pytest.MonkeyPatch) -> None:
    twins, draw = Twins(build(family, 0.2), torch.float32, patch), random.Random(7)
    for step in range(4):
        batch = masked_batch(draw, 3, draw.choice([17, 60]), ("right", "holes", "mixed"))
        results = []
        for model in (twins.live, twins.full):
            torch.manual_seed(step)
            results.append(found(model, batch))
        agree(*results, twins.bound)
    assert left_out()["padding"] > 0


def test_bits_with_a_bias_are_the_same_again(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("GRADD_SELF_CHECK", "0")
    batch, results = masked_batch(random.Random(5), 4, 70, ("holes",)), []
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    for _ in range(2):
        model = ORTModule(build("t5"), strict=True)
        loss, grads = found(model, batch)
        results.append([loss, *(g for g in grads.values() if g is not None)])
        assert model.gradd_stats()["padding_rows_left_out"] > 0
    assert all(map(torch.equal, *results))


def test_a_bias_out_of_data_may_hide_keys_and_keeps_all_rows(patch: pytest.MonkeyPatch) -> None:
    """Keys that only the mask hides count where a bias hides all others."""

    class Biased(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(VOCAB, HIDDEN)
            self.head = torch.nn.Linear(HIDDEN, VOCAB)

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any, bias: Any) -> Any:
            x = self.embed(input_ids)
            q = x.view(*x.shape[:2], 4, -1).transpose(1, 2)
            least = torch.finfo(x.dtype).min
            hidden = attention_mask[:, None, None, :] == 0
            scores = (q @ q.transpose(-1, -2) + bias).masked_fill(hidden, least)
            x = (scores.softmax(-1) @ q).transpose(1, 2).reshape(x.shape)
            return torch.nn.functional.cross_entropy(self.head(x).view(-1, VOCAB), labels.view(-1))

    net = Biased()
    twins = Twins(net, torch.float32, patch, first={"bias": torch.zeros(12, 12)})
    batch = masked_batch(random.Random(2), 4, 40, ("right",))
    bias = torch.zeros(40, 40)
    bias[:, :20] = -torch.inf
    bias[7] = torch.finfo(torch.float32).min
    for more in (torch.zeros(40, 40), bias.clamp(min=torch.finfo(torch.float32).min)):
        twins.compare({**batch, "bias": more})
    assert twins.live.gradd_stats()["padding_rows_left_out"] == 0
