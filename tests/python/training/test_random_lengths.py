"""Hundreds of steps of random lengths and densities: few plans, no growth, the losses of all rows.

`benchmarks/random_lengths.py` shows what such steps take beside those of plans over all rows.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradd import ORTModule
from gradd.calls import graph
from gradd.memory.pss import pss_bytes
from helpers.models import families
from helpers.selection import SEED
from helpers.sessions import session

IGNORED = -100
LONGEST = 64
NEAR = 2e-5
# Of the daemon from the middle on. Every product of another size has its own generated code, so
# 1.4 MiB come and go with a plan, and pages between what is still used stay. A plan that is not
# given back would be seen (there are 500 more of them), or 48 KiB that a step leaves.
GROWTH = 24 << 20


def batch(draw: random.Random) -> dict[str, torch.Tensor]:
    """Rows of any length, on one side of their padding, any part of which is labelled."""
    rows, length = draw.randint(2, 5), draw.randint(2, LONGEST)
    generator = torch.Generator().manual_seed(draw.getrandbits(40))
    ids = torch.randint(2, families.VOCAB, (rows, length), generator=generator)
    ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = (torch.arange(length) < ends).long()
    if draw.random() < 0.3:
        mask = mask.flip(1)
    chosen = torch.rand(rows, length, generator=generator) < draw.random() ** 2
    real = mask.bool() & mask.roll(1, 1).bool()  # in front of the label, too
    labels = ids.masked_fill(~(chosen & real), IGNORED)
    labels[0, -1] = IGNORED if not real[0, -1] else ids[0, -1]
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def held() -> tuple[int, int]:
    """PSS of the trainer and of the daemon, in bytes."""
    gc.collect()
    client = session()
    client.flush()
    return pss_bytes(), pss_bytes(client.worker_pid)


def plans_of_daemon() -> int:
    client = session()
    client.flush()
    plans = client.request("explain", {"proto": 2})["plans"]
    return sum(plan["session"] == client.session for plan in plans)


def all_rows(model: ORTModule, patch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """The loss by another wrapper of the same module, whose plans leave nothing out."""

    def forward(**data: torch.Tensor) -> torch.Tensor:
        with patch.context() as inner:
            inner.setenv("GRADD_LIVE_ROWS", "0")
            return dense(**data).loss.detach()

    dense = ORTModule(model.module, strict=True)
    return forward


@pytest.mark.parametrize("steps", [60, pytest.param(1000, marks=pytest.mark.nightly)])
def test_any_lengths(daemon: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADD_SELF_CHECK", "0")
    model = ORTModule(families.build("llama")[0], strict=True)
    dense, draw = all_rows(model, monkeypatch), random.Random(f"{SEED} lengths")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    early: tuple[int, int] = (0, 0)
    for step in range(steps):
        data = batch(draw)
        loss = model(**data).loss
        if step % 5 == 0:
            torch.testing.assert_close(
                loss.detach(), dense(**data), rtol=NEAR, atol=NEAR, equal_nan=True
            )
        loss.backward()
        if loss.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        if step == steps // 2:
            early = held()
        assert model.gradd_stats()["plans"] <= graph._PLANS
    stats = model.gradd_stats()
    assert stats["captures"] == 1 and stats["fallbacks"] == {}
    assert stats["padding_rows_left_out"] > 0.2 * stats["rows"]
    assert stats["unlabelled_rows_left_out"] > stats["padding_rows_left_out"]
    del loss
    # Of both wrappers, and of the calls that their fast paths know.
    assert plans_of_daemon() <= 2 * (graph._PLANS + 1)
    if steps >= 1000:  # before, there are more plans in the end than in the middle
        for name, before, after in zip(("trainer", "daemon"), early, held(), strict=True):
            assert after - before <= GROWTH, f"the {name} has grown from {before} to {after} bytes"
