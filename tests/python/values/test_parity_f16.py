"""Families in f16, with f16 parameters and under autocast, for five steps: as near to fp32 as
PyTorch's own f16, within a factor of two (half_precision.py says how that is measured)."""

from __future__ import annotations

import pytest
import torch

from helpers.models import families
from helpers.parity.half_precision import WAYS, Triple
from helpers.selection import every_run

pytestmark = pytest.mark.one_in(6)

STEPS = 5
EVERY_RUN = (*families.MLPS, "llama", "gpt2", "bert")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", every_run(EVERY_RUN, families.FAMILIES))
def test_family(daemon, family: str, way: str) -> None:
    torch.manual_seed(0)
    model, make_batch = families.build(family)
    triple = Triple(model, way, half=torch.float16)
    try:
        triple.train([make_batch(3, 12, seed) for seed in range(STEPS)])
    finally:
        print(f"{family} {way}: {triple.report}")
