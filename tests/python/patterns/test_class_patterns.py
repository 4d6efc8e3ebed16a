"""Model classes that train are planned as their authors wrote them: counts written by hand.

docs/families.md lists the classes; the rows of helpers/counts say how many operators of each kind a
reader of their source finds, and which operators are left that belong to no pattern. Not counted
yet are classes of images, scans, relative positions and block-sparse attention, and those whose
graph breaks (ctrl, mra) or picks rows by a mask (xmod). The models are those of `make families`,
with one batch of two rows of twelve tokens, but every rate of dropout that they know is 0.1. One of
them is drawn for every run. test_family_patterns.py does the same for other settings of fewer
families, mostly without dropout.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import pytest
import torch

from helpers import ROOT
from helpers.counts import decoders, encoders, experts, seq2seq
from helpers.counts.plans import check, explained
from helpers.selection import drawn, every_run

sys.path.insert(0, str(ROOT / "tools"))
import families_sizes
from families_sizes import Family

PARTS = (encoders, decoders, experts, seq2seq)
ROWS = {key: row for part in PARTS for key, row in part.ROWS.items()}
LEFT = {key: left for part in PARTS for key, left in part.LEFT.items()}
# Tokens of a batch where every token makes operators of its own: a step each in rwkv and xlstm.
LENGTH = {"rwkv": 6, "xlstm": 6}
RATE = {"diffllama": 0.0}  # of dropout; its attention refuses to have any
IN_BF16 = (
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ("gpt_oss", "GptOssForCausalLM"),
    ("m2m_100", "M2M100ForConditionalGeneration"),
    ("nanochat", "NanoChatForCausalLM"),
    ("roformer", "RoFormerForMaskedLM"),
)


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, str], Family]:
    return {(f.name, f.model): f for f in families_sizes.families()}


@pytest.mark.quick
def test_every_class_with_a_row_trains() -> None:
    page = (ROOT / "docs" / "families.md").read_text()
    trains = page[page.index("## Train in the daemon") : page.index("## Train partly")]
    named = set(re.findall(r"^\| (\S+) \| `(\w+)` \|", trains, re.MULTILINE))
    assert not set(ROWS) - named
    assert set(LEFT) <= set(ROWS) and set(IN_BF16) <= set(ROWS)
    assert sum(len(part.ROWS) for part in PARTS) == len(ROWS)


def trainable(family: Family, batch: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The first model of a family that PyTorch can train."""

    def attempt(model: torch.nn.Module) -> torch.nn.Module:
        loss = copy.deepcopy(model)(**copy.deepcopy(batch)).loss
        loss.backward()
        if not torch.isfinite(loss):
            raise ArithmeticError(f"{family}: the loss is {loss}")
        return model

    return families_sizes.first_that(family, attempt, RATE.get(family.name, 0.1))


def check_class(key: tuple[str, str], family: Family, path: Path, dtype: torch.dtype) -> None:
    batch = families_sizes.batch(family, 1, 2, LENGTH.get(family.name, 12))
    model = trainable(family, batch).to(dtype)
    if key in experts.ROWS:
        model.set_experts_implementation("batched_mm")
    check(explained(model, batch, path), ROWS[key], LEFT.get(key, {}))


@pytest.mark.parametrize("key", every_run(drawn(ROWS, 1), ROWS), ids="-".join)
def test_class(key: tuple[str, str], known: dict, tmp_path: Path) -> None:
    check_class(key, known[key], tmp_path / "model.onnx", torch.float32)


@pytest.mark.parametrize("key", every_run((), IN_BF16), ids="-".join)
def test_class_in_bf16(key: tuple[str, str], known: dict, tmp_path: Path) -> None:
    check_class(key, known[key], tmp_path / "model.onnx", torch.bfloat16)
