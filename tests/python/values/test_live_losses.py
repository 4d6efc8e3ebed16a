"""Losses with weights of the classes leave out rows as others do."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradd import ORTModule
from helpers.models.families import VOCAB, build
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
LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed none": {"reduction": "none", "label_smoothing": 0.1},
}


class Weighted(nn.Module):
    """A language model whose loss has weights, some of them zero."""

    def __init__(self, family: str = "llama", **loss: Any) -> None:
        super().__init__()
        self.model = build(family)[0]
        self.loss = loss
        self.register_buffer("classes", torch.linspace(0, 2, VOCAB).round(decimals=1))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        logits = self.model(input_ids, attention_mask=attention_mask).logits
        rows, flat = logits.reshape(-1, VOCAB), labels.reshape(-1)
        loss = F.cross_entropy(rows, flat, weight=self.classes, **self.loss)
        return loss.square().sum() if loss.ndim else loss


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _cases(kind: str, dtype: torch.dtype, count: int, patch: pytest.MonkeyPatch) -> None:
    twins = Twins(Weighted(**LOSSES[kind]), dtype, patch)
    draw = random.Random(f"{SEED} {kind}")
    for _ in range(count):
        case = drawn_batch(draw)
        try:
            twins.compare(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
    seen = left_out()
    assert seen["unlabelled"] > 0
    assert seen["padding"] > 0


@pytest.mark.parametrize("kind", every_run(("mean",), ["mean", "smoothed none"]))
def test_random_batches_with_weights(kind: str, patch: pytest.MonkeyPatch) -> None:
    _cases(kind, torch.float32, 8, patch)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LOSSES)
def test_more_batches_with_weights(
    kind: str, dtype: torch.dtype, patch: pytest.MonkeyPatch
) -> None:
    _cases(kind, dtype, 25, patch)


@pytest.mark.parametrize("kind", ["mean", "smoothed"])
def test_a_batch_without_labels_is_as_in_pytorch(kind: str, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("GRADD_SELF_CHECK", "0")
    net = Weighted(**LOSSES[kind])
    ours = ORTModule(copy.deepcopy(net), strict=True)
    batch = masked_batch(random.Random(3), 4, 40, ("right",))
    agree(found(ours, batch), found(net, batch), 1e-4)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    for _ in range(2):
        agree(found(ours, batch), found(net, batch), 1e-4)
    assert ours.gradd_stats()["unlabelled_rows_left_out"] > 0
