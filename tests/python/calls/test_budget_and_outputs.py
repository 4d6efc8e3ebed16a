"""A memory budget beside work that exceeds the training step: checks, logits, all rows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import gradd
from gradd import ORTModule, errors

pytestmark = [pytest.mark.one_in(8), pytest.mark.slow, pytest.mark.usefixtures("shared_daemon")]
VOCAB = 8000


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**config, **none))


def batch(real: float = 1.0, labelled: float = 1.0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (8, 64), generator=draw)
    mask = (torch.arange(64) < 64 * real).long().expand(8, 64).clone()
    labels = ids.masked_fill((torch.rand(8, 64, generator=draw) > labelled) | (mask == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def least(data: dict[str, torch.Tensor]) -> int:
    """Bytes of the smallest budget that holds for such a batch of a module."""
    return gradd.estimate(bert(), data, optimizer="sgd").curve[-1].activations


def losses(model: Any, data: dict[str, torch.Tensor], read: bool, steps: int = 3) -> list[float]:
    found = []
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        out = model(**data)
        out.loss.backward()
        found.append(float(out.loss.detach()) + (float(out.logits.detach().sum()) if read else 0.0))
    return found


@pytest.mark.parametrize("check", ["first", "decades"])
def test_the_self_check_needs_no_larger_budget(monkeypatch: Any, check: str) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", check)
    model = ORTModule(bert(), strict=True, memory_budget=least(batch()))
    assert losses(model, batch(), read=False) == pytest.approx(losses(bert(), batch(), False))
    assert model.gradd_stats()["self_checks"] >= 1


def test_logits_that_have_no_room_are_computed_apart(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(bert(), strict=True, memory_budget=least(batch()))
    with caplog.at_level(logging.WARNING, "gradd"):
        got = losses(model, batch(), read=True)
    assert got == pytest.approx(losses(bert(), batch(), True), rel=1e-4)
    said = [r.message for r in caplog.records if "do not fit into its memory budget" in r.message]
    assert len(said) == 1
    assert model.gradd_stats()["repeated_forwards"] == 3


def test_rows_that_are_needed_meet_a_budget_that_all_rows_do_not() -> None:
    part, whole = batch(real=0.5, labelled=0.2), batch()
    budget = least(whole) - 1
    assert gradd.estimate(bert(), part, memory_budget=budget).activations <= budget
    with pytest.raises(errors.OutOfMemoryError, match="smallest that can be met"):
        gradd.estimate(bert(), whole, memory_budget=budget)
    model = ORTModule(bert(), strict=True, memory_budget=budget)
    assert losses(model, part, False) == pytest.approx(losses(bert(), part, False), rel=1e-4)
    for _ in range(6):  # never looked at less often, nor run over all rows
        with pytest.raises(errors.OutOfMemoryError, match="; the call is out of memory"):
            model(**whole)
    assert losses(model, part, False) == pytest.approx(losses(bert(), part, False), rel=1e-4)


def test_an_estimate_of_a_wrapped_module_has_its_budget() -> None:
    budget = least(batch())
    model = ORTModule(bert(), memory_budget=budget)
    assert gradd.estimate(model, batch()).activations <= budget
    assert gradd.estimate(bert(), batch()).activations > budget
