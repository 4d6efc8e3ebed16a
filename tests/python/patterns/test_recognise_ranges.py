"""Masks that are intervals of positions become ranges, and results stay the same."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from gradd import ORTModule
from helpers.models.families import VOCAB, build
from helpers.selection import every_run

pytestmark = [pytest.mark.one_in(6), pytest.mark.usefixtures("shared_daemon")]


def packed(draw: random.Random, batch: int, positions: int, offset: int = 0) -> dict[str, Any]:
    """Sequences side by side, told apart by their positions alone."""
    gen = torch.Generator().manual_seed(draw.getrandbits(40))
    ids = torch.randint(2, VOCAB, (batch, positions), generator=gen)
    rows = []
    for _ in range(batch):
        numbers: list[int] = []
        while len(numbers) < positions:
            numbers += range(offset, offset + draw.randint(1, positions))
        rows.append(numbers[:positions])
    return {"input_ids": ids, "position_ids": torch.tensor(rows), "labels": ids}


def compare(wrapped: Any, plain: Any, batch: dict[str, Any]) -> None:
    found = []
    for model in (wrapped, plain):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6, equal_nan=True)
    for own, grad in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(own, grad, rtol=1e-4, atol=1e-5, equal_nan=True)


def shapes(wrapped: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(r.op, tuple(r.shape)) for r in wrapped.gradd_explain().rows if r.kind == "run"]


@pytest.mark.parametrize(
    "family", every_run(("llama", "gemma3"), ["llama", "gpt2", "mistral", "gemma3"])
)
def test_packed_sequences_have_no_mask(family: str) -> None:
    """Block-diagonal attention takes ranges of positions, whatever segments and windows."""
    plain, draw = build(family, mask=False)[0], random.Random(4)
    wrapped = ORTModule(copy.deepcopy(plain), strict=True)
    for batch, positions, offset in ((1, 40, 0), (1, 1, 0), (2, 23, 0), (3, 17, 5), (1, 60, 0)):
        compare(wrapped, plain, packed(draw, batch, positions, offset if family != "gpt2" else 0))
        rows = shapes(wrapped)
        if positions > 1:
            assert not [r for r in rows if r[1][-2:] == (positions, positions)]
            assert [r for r in rows if r[0] == "SegmentRanges"]
            assert not [r for r in rows if r[0] == "MaskRanges"]


@pytest.mark.parametrize(
    "family", every_run(("llama", "gemma3"), ["llama", "mistral", "gemma3", "gpt2"])
)
def test_known_masks_are_ranges(family: str) -> None:
    """Causal attention and windows keep no mask of positions by positions."""
    plain, make = build(family, mask=False)
    wrapped = ORTModule(copy.deepcopy(plain), strict=True)
    compare(wrapped, plain, make(2, 32, 1))
    assert wrapped.gradd_explain().constant_bytes < 4 << 20
    assert not [r for r in shapes(wrapped) if r[0] == "MaskRanges"]


def test_a_mask_that_is_no_interval_stays() -> None:
    """A mask of the user's with holes is a mask."""
    plain = build("llama", mask=False)[0]
    wrapped = ORTModule(copy.deepcopy(plain), strict=True)
    ids = torch.randint(2, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(2)) < 0.5
    mask |= torch.eye(12, dtype=torch.bool)
    compare(wrapped, plain, {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert [r for r in shapes(wrapped) if r[0] == "MaskRanges"]
