"""Every pattern of every family is recognised: what is planned equals counts written by hand.

A row says, for a model of two layers, how many operators of each kind its authors put in: read the
model's source to change one. Whatever else is left of activations, normalisation, attention or
losses (explain's `leftover` rows) is a pattern that was missed, unless it is in ALLOWED, where it
says why.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import families
import pytest
import torch
from conftest import BINARY

from gradd import export


class Row(NamedTuple):
    """Operators of the forward of one family.

    norm: RMS and layer normalisations. rope: rotary embeddings, of queries and keys. attention:
    self and cross. gated: SwiGLU and its kin. gelu: GELU in any form. linear: products with a bias.
    product: products without. table: embeddings, sums of them as one. loss: cross-entropies.
    drop_add: dropouts that go into a residual sum. drop: dropouts that stand alone.
    """

    norm: int = 0
    rope: int = 0
    attention: int = 0
    gated: int = 0
    gelu: int = 0
    linear: int = 0
    product: int = 0
    table: int = 0
    loss: int = 1
    drop_add: int = 0
    drop: int = 0


KINDS = {
    "norm": ("RMSNormalization", "LayerNormalization"),
    "rope": ("Rope",),
    "attention": ("FusedAttention",),
    "gated": ("GatedActivation",),
    "gelu": ("Gelu",),
    "linear": ("Linear",),
    "product": ("MatMul", "FusedMatMul", "Gemm"),
    "table": ("EmbeddingSum", "Gather"),
    "loss": ("CrossEntropy",),
    "drop_add": ("DropoutAdd",),
    "drop": ("Dropout",),
}

# Per layer a norm before attention and one before the unit, and a last one; q and k are rotated;
# seven products per layer and the head.
_LLAMA = Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1)
# Six linear layers per layer; the head has a transformation with GELU and norm, and a bias.
_BERT = Row(norm=6, attention=2, gelu=3, linear=14, table=1)
_GPT2 = Row(norm=5, attention=2, gelu=2, linear=8, product=1, table=1)

ROWS: dict[str, Row] = {
    "mlp_ce": Row(linear=2),
    "mlp_mse": Row(linear=2, loss=0),
    "mlp_bce": Row(linear=2, loss=0, table=1),  # picks one of two log-probabilities
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
    "mlp_bce": {"ReduceMean": 1, "LogSoftmax": 1},  # the exporter's form of log-sigmoid
    "bert_cls": {"Tanh": 1},  # the pooler's activation
    "gemma2": {"Tanh": 1},  # the soft cap of the logits, behind the last product
}

# Families in another precision: the same counts, whatever casts the exporter puts in between.
IN_BF16 = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "bert_mlm", "phi3", "t5", "bart", "opt")


def test_every_family_has_a_row() -> None:
    assert set(ROWS) == set(families.FAMILIES)
    assert set(ALLOWED) <= set(ROWS)


def explained(name: str, folder: Path, *options: str, bf16: bool = False) -> dict[str, Any]:
    """The plan of one training step."""
    model, make_batch = families.build(name)
    if bf16:
        model = model.bfloat16()
    batch = make_batch(3, 12, 0)
    cap = export.capture(model, (), batch)
    path = folder / f"{name}.onnx"
    path.write_bytes(cap.onnx)
    leaves, _, _ = export.flatten_inputs((), batch)
    sizes = {i.name: leaves[i.leaf].shape for i in cap.inputs}
    given = [f"{n}={'x'.join(map(str, shape))}" for n, shape in sizes.items()]
    trained = ["--train", ",".join(cap.params), "--json"]
    command = [str(BINARY), "explain", str(path), *given, *trained, *options]
    return json.loads(subprocess.check_output(command, text=True, timeout=60))


def counts(plan: dict[str, Any]) -> Row:
    """What was planned, by kind."""
    ops = Counter(r["op"] for r in plan["rows"] if r["phase"] == "forward" and r["step"] >= 0)
    return Row(**{kind: sum(ops[op] for op in names) for kind, names in KINDS.items()})


def leftovers(plan: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(r["op"] for r in plan["rows"] if r["leftover"]))


def check(name: str, plan: dict[str, Any]) -> None:
    assert counts(plan) == ROWS[name]
    where = [(r["op"], r["node_name"]) for r in plan["rows"] if r["leftover"]]
    assert leftovers(plan) == ALLOWED.get(name, {}), where


def _mark(name: str):
    quick = name.startswith("mlp")
    return pytest.param(name, marks=pytest.mark.quick if quick else pytest.mark.slow)


@pytest.mark.parametrize("name", [_mark(n) for n in ROWS])
def test_family(name: str, tmp_path: Path) -> None:
    check(name, explained(name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
def test_family_in_bf16(name: str, tmp_path: Path) -> None:
    plan = explained(name, tmp_path, bf16=True)
    check(name, plan)
    assert {r["dtype"] for r in plan["rows"] if r["op"] == "FusedAttention"} == {"bf16"}


@pytest.mark.slow
def test_family_without_recognition(tmp_path: Path) -> None:
    """The counts can fail: the plain plan has none of the operators, and leftovers instead."""
    plan = explained("llama", tmp_path, "--plain")
    plain = counts(plan)
    assert (plain.norm, plain.rope, plain.attention, plain.gated, plain.loss) == (0,) * 5
    assert plain.product == ROWS["llama"].product + 4  # two in each attention
    found = leftovers(plan)
    assert found["Softmax"] == 2 and found["Sigmoid"] == 2 and found["Sqrt"] == 5


@pytest.mark.slow
def test_family_of_torch(tmp_path: Path) -> None:
    """torch's own encoder layer, whose norms and linear layers are torch's."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 1)).train()
    cap = export.capture(model, (torch.randn(2, 5, 16),), {})
    path = tmp_path / "encoder.onnx"
    path.write_bytes(cap.onnx)
    command = [str(BINARY), "explain", str(path), f"{cap.inputs[0].name}=2x5x16"]
    command += ["--train", ",".join(cap.params), "--json"]
    plan = json.loads(subprocess.check_output(command, text=True, timeout=60))
    # torch splits q, k and v with three Gathers, which count as tables here
    assert counts(plan) == Row(norm=2, attention=1, linear=5, table=3, loss=0)
    assert leftovers(plan) == {}
