"""Every pattern of every family is recognised: plans match counts written by hand.

A row says, for a model of two layers, how many operators of each kind its authors put in: read the
model's source to change one. Whatever else is left of activations, normalisation, attention or
losses (explain's `leftover` rows) is a pattern that was missed, unless it is in ALLOWED, where it
says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.counts.plans import Row, check, counts, explained, leftovers
from helpers.models import more_families
from helpers.selection import by_mark, every_run

pytestmark = pytest.mark.one_in(4)

# Per layer a norm before attention and one before the unit, and a last one; q and k are rotated;
# seven products per layer and the head.
_LLAMA = Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1)
# Six linear layers per layer; the head has a transformation with GELU and norm, and a bias.
_BERT = Row(norm=6, attention=2, gelu=3, linear=14, table=1)
_GPT2 = Row(norm=5, attention=2, gelu=2, linear=8, product=1, table=1)

ROWS: dict[str, Row] = {
    "mlp_ce": Row(linear=2),
    "mlp_mse": Row(linear=2, loss=0),
    "mlp_bce": Row(linear=2, loss=0),
    "mlp_nll": Row(linear=2),
    "llama": _LLAMA,
    "llama_tied": _LLAMA,
    "mistral": _LLAMA,
    "granite": _LLAMA,
    "olmo": _LLAMA,
    "stablelm": _LLAMA,
    "smollm3": _LLAMA,
    "gemma": _LLAMA,
    "helium": _LLAMA,  # its epsilon is 1e-8
    # The difference of two attentions over one softmax, which run as one over both values, is
    # normalised without a weight.
    "diffllama": _LLAMA._replace(norm=7),
    "qwen2": _LLAMA._replace(linear=6, product=9),  # q, k, v with a bias
    "qwen3": _LLAMA._replace(norm=9),  # and q, k normalised
    "olmo2": _LLAMA._replace(norm=9),
    "gemma2": _LLAMA._replace(norm=9),  # norms before and after both halves
    "gemma3": _LLAMA._replace(norm=13),  # and q, k
    "phi3": _LLAMA._replace(product=9),  # q, k, v in one product, gate and up in one
    "glm": _LLAMA._replace(linear=6, product=7),
    "cohere": _LLAMA._replace(norm=3),  # attention and unit side by side behind one norm
    "peft_lora_llama": _LLAMA._replace(product=23),  # two more for q, v
    "gpt2": _GPT2,
    "gpt2_drop": _GPT2._replace(drop_add=4, drop=1),  # drop: of the embeddings
    "openai_gpt": _GPT2._replace(norm=4),  # norms behind the sums, none at the end
    "gptj": Row(norm=3, rope=4, attention=2, gelu=2, linear=5, product=8, table=1),
    "gpt_neox": Row(norm=5, rope=4, attention=2, gelu=2, linear=8, product=1, table=1),
    "gpt_neo": Row(norm=5, attention=2, gelu=2, linear=6, product=7, table=1),
    "opt": Row(norm=5, attention=2, linear=12, product=1, table=1),  # its unit is a ReLU
    "falcon": Row(norm=3, rope=4, attention=2, gelu=2, product=9, table=1),
    "phi": Row(norm=3, rope=4, attention=2, gelu=2, linear=13, table=1),
    "starcoder2": Row(norm=5, rope=4, attention=2, gelu=2, linear=12, product=1, table=1),
    "bert_mlm": _BERT,
    "bert_mlm_drop": _BERT._replace(drop_add=4, drop=1),
    "bert_cls": _BERT._replace(norm=5, gelu=2, table=2),  # pooler and classifier; first token
    "roberta": _BERT,
    "electra": _BERT,
    "distilbert": _BERT,
    "albert": _BERT._replace(linear=15),  # from embedding to hidden size
    # Two norms, and two products of contents with relative positions, whose embeddings go through a
    # norm and the layers of queries and keys once more.
    "deberta_v2": _BERT._replace(norm=7, linear=18, product=4),
    "modernbert": Row(
        norm=6, rope=4, attention=2, gated=2, gelu=1, linear=1, product=9, table=1
    ),  # no norm before the first attention; the head's bias
    # two token tables and two of relative positions; in the decoder two attentions per layer
    "t5": Row(norm=12, attention=6, product=33, table=4),
    "t5_gated": Row(norm=12, attention=6, gated=4, product=37, table=4),
    "bart": Row(norm=12, attention=6, gelu=4, linear=32, product=1, table=2),
}

ALLOWED: dict[str, dict[str, int]] = {
    "diffllama": {"ReduceSum": 4, "Exp": 4},  # lambda: exponentials of products of two vectors
    "mlp_mse": {"ReduceMean": 1},  # the mean of the squared error is the loss itself
    "mlp_bce": {"ReduceMean": 1, "Sigmoid": 1},  # the slope of its softplus
    "bert_cls": {"Tanh": 1},  # the pooler's activation
    "gemma2": {"Tanh": 1},  # the soft cap of the logits, behind the last product
}

# Of the others the classes of test_class_patterns.py are near relatives.
EVERY_RUN = ("llama", "gpt2_drop", "bert_cls", "deberta_v2")

# Families in another precision: the same counts, whatever casts the exporter puts in between.
IN_BF16 = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "bert_mlm", "phi3", "t5", "bart", "opt")


def test_every_family_has_a_row() -> None:
    assert set(ROWS) == set(more_families.FAMILIES)
    assert set(ALLOWED) <= set(ROWS)


def planned(name: str, folder: Path, *options: str, bf16: bool = False) -> dict[str, Any]:
    """The plan of one training step of a family."""
    model, make_batch = more_families.build(name)
    if bf16:
        model = model.bfloat16()
    return explained(model, make_batch(3, 12, 0), folder / f"{name}.onnx", *options)


def check_family(name: str, plan: dict[str, Any]) -> None:
    check(plan, ROWS[name], ALLOWED.get(name, {}))


MLPS = [name for name in ROWS if name.startswith("mlp")]


@pytest.mark.parametrize("name", by_mark(MLPS, EVERY_RUN, ROWS))
def test_family(name: str, tmp_path: Path) -> None:
    check_family(name, planned(name, tmp_path))


@pytest.mark.parametrize("name", every_run(("llama",), IN_BF16))
def test_family_in_bf16(name: str, tmp_path: Path) -> None:
    plan = planned(name, tmp_path, bf16=True)
    check_family(name, plan)
    assert {r["dtype"] for r in plan["rows"] if r["op"] == "FusedAttention"} == {"bf16"}


def test_family_without_recognition(tmp_path: Path) -> None:
    """The counts can fail: the plain plan has none of the operators, and leftovers instead."""
    plan = planned("llama", tmp_path, "--plain")
    plain = counts(plan)
    assert (plain.norm, plain.rope, plain.attention, plain.gated, plain.loss) == (0,) * 5
    assert plain.product == ROWS["llama"].product + 4  # two in each attention
    found = leftovers(plan)
    assert found["Softmax"] == 2 and found["Sigmoid"] == 2 and found["Sqrt"] == 5


def test_family_of_torch(tmp_path: Path) -> None:
    """torch's own encoder layer, whose norms and linear layers are torch's."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 1)).train()
    plan = explained(model, (torch.randn(2, 5, 16),), tmp_path / "encoder.onnx")
    # torch splits q, k and v with three Gathers, which count as tables here
    assert counts(plan) == Row(norm=2, attention=1, linear=5, table=3, loss=0)
    assert leftovers(plan) == {}
