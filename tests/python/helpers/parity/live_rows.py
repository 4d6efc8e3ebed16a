"""A module over live rows and its twin over all rows, and batches of all kinds of padding."""

from __future__ import annotations

import copy
import gc
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gradd import ORTModule
from gradd.calls.liverows import LiveRows
from helpers.models.families import VOCAB, build

IGNORED = -100
BOUND = {torch.float32: 2e-5, torch.bfloat16: 5e-2}
# A size of 1 or 2 has a graph of its own, which takes as long as all others together.
SMALLEST = 1 if os.environ.get("GRADD_NIGHTLY") else 3
KINDS = ("right", "left", "mixed", "holes", "none", "few")


def masked_batch(
    draw: random.Random, batch: int, positions: int, kinds: Sequence[str] = KINDS
) -> dict[str, torch.Tensor]:
    """A batch with a random kind of padding and of labels."""
    gen = torch.Generator().manual_seed(draw.getrandbits(40))
    ids = torch.randint(2, VOCAB, (batch, positions), generator=gen)
    place = torch.arange(positions)
    mask = torch.ones_like(ids)
    kind = draw.choice(kinds)
    for row in range(batch):
        length = draw.randint(1, positions)
        side = draw.choice(["right", "left"]) if kind == "mixed" else kind
        if side == "right":
            mask[row] = place < length
        elif side == "left":
            mask[row] = place >= positions - length
        elif side == "holes":
            mask[row] = torch.rand(positions, generator=gen) < 0.6
        elif side == "few":
            mask[row] = place < 1
    density = draw.choice([0.0, 0.05, 0.3, 1.0])
    labelled = torch.rand(batch, positions, generator=gen) < density
    # Row s answers for the label at s + 1 in some models, for its own in others: both are real.
    before = torch.cat([mask[:, :1], mask[:, :-1]], 1)
    labels = ids.masked_fill(~(labelled & mask.bool() & before.bool()), IGNORED)
    if density and draw.random() < 0.2:  # a single one
        labels = torch.full_like(ids, IGNORED)
        labels[0, -1] = ids[0, -1] if bool(mask[0, -1] and before[0, -1]) else IGNORED
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def drawn_batch(draw: random.Random, *longer: int) -> dict[str, torch.Tensor]:
    """Of any size, `longer` ones too."""
    lengths = [n for n in (1, 2, 3, 17, 40, *longer) if n >= SMALLEST]
    return masked_batch(draw, draw.randint(min(SMALLEST, 2), 5), draw.choice(lengths))


def found(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    result = model(**batch)
    loss = getattr(result, "loss", result)
    loss.backward()
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return loss.detach().clone(), grads


def _size(values: torch.Tensor) -> float:
    """Of the largest that is finite."""
    return float(values.float().abs().nan_to_num(0, 0, 0).max())


def agree(ours: tuple, theirs: tuple, bound: float) -> None:
    assert torch.equal(ours[0].isnan(), theirs[0].isnan())
    if not ours[0].isnan():
        torch.testing.assert_close(ours[0], theirs[0], rtol=bound, atol=bound)
    sizes = {n: _size(g) for n, g in theirs[1].items() if g is not None}
    largest = max(sizes.values(), default=0.0)
    for name, grad in theirs[1].items():
        own = ours[1][name]
        assert (own is None) == (grad is None), name
        if grad is None:
            continue
        assert torch.equal(own.isfinite(), grad.isfinite()), name
        apart = _size(own.float() - grad.float())
        limit = bound * max(sizes[name], 1e-3 * largest)
        assert apart <= limit, f"{name}: {apart} > {limit}"


def left_out() -> dict[str, int]:
    """Rows that the live modules of this process have left out, together."""
    seen: dict[str, int] = {}
    for one in gc.get_objects():
        if type(one) is LiveRows:
            for name, count in one.seen.items():
                seen[name] = seen.get(name, 0) + count
    return seen


class Twins:
    """A model over live rows and its twin over all rows."""

    def __init__(
        self,
        family: Any,
        dtype: torch.dtype,
        patch: pytest.MonkeyPatch,
        first: dict[str, torch.Tensor] | None = None,
        **over: Any,
    ) -> None:
        model = build(family, **over)[0] if isinstance(family, str) else family
        model = model.to(dtype)
        patch.setenv("GRADD_SELF_CHECK", "0")
        self.bound = BOUND[dtype]
        self.live = ORTModule(model, strict=True)
        patch.setenv("GRADD_LIVE_ROWS", "0")
        self.full = ORTModule(copy.deepcopy(model), strict=True)
        found(self.full, {**masked_batch(random.Random(1), 3, 12), **(first or {})})
        patch.delenv("GRADD_LIVE_ROWS")

    def compare(self, batch: dict[str, torch.Tensor]) -> None:
        agree(found(self.live, batch), found(self.full, batch), self.bound)
