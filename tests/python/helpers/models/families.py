"""Tiny models by family name, with a maker of batches, for capture and parity tests.

build("llama") gives a two-layer model with random weights and make_batch(batch, seq, seed),
which returns the keyword arguments of a forward call, labels included, so that the loss is in
the graph. No model hub is used. Dropout is off unless asked for. Attribute `mask=False` leaves
the attention mask out of the batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCAB = 96
HIDDEN = 64
MakeBatch = Callable[[int, int, int], dict[str, torch.Tensor]]


class MLP(nn.Module):
    """Two linear layers and a loss; which loss is the argument `kind`."""

    def __init__(self, kind: str, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(16, width)
        self.outer = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.outer(torch.relu(self.inner(x)))
        if self.kind == "ce":
            loss = nn.functional.cross_entropy(scores, y)
        elif self.kind == "mse":
            loss = nn.functional.mse_loss(scores, y)
        elif self.kind == "bce":
            loss = nn.functional.binary_cross_entropy_with_logits(scores, y)
        else:
            loss = nn.functional.nll_loss(torch.log_softmax(scores, dim=-1), y)
        return loss, scores


def _mlp(kind: str, over: dict[str, Any]) -> tuple[nn.Module, MakeBatch]:
    model = MLP(kind, **over)
    classes = model.outer.out_features

    def make_batch(batch: int, seq: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(batch, 16, generator=gen)
        if kind in ("ce", "nll"):
            return {"x": x, "y": torch.randint(0, classes, (batch,), generator=gen)}
        y = torch.rand(batch, classes, generator=gen)
        return {"x": x, "y": (y > 0.5).float() if kind == "bce" else y}

    return model, make_batch


def _decoder(family: str) -> dict[str, Any]:
    """Configuration of a decoder: class names and sizes in the family's own words."""
    common = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
    }
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}
    gemma["layer_types"] = ["sliding_attention", "full_attention"]
    own = {
        "llama": {"pad_token_id": None},
        "llama_tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
        "mistral": {"sliding_window": 4},
        "qwen2": {},
        "qwen3": {"head_dim": 16},
        "gemma2": {**gemma, "attn_implementation": "eager"},
        "gemma3": gemma,
        "phi3": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    }
    return {**common, **own[family]}


_CLASSES = {
    "llama": "Llama",
    "llama_tied": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi3": "Phi3",
    "gpt2": "GPT2",
    "bert_mlm": "Bert",
    "bert_cls": "Bert",
}
_HEADS = {"gpt2": "GPT2LMHeadModel", "bert_mlm": "BertForMaskedLM"}
_HEADS["bert_cls"] = "BertForSequenceClassification"
_CONFIGS = {"gemma3": "Gemma3TextConfig"}


def _config(family: str, over: dict[str, Any]) -> dict[str, Any]:
    if family == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4}
        sizes |= {"n_positions": 64, "use_cache": False, "bos_token_id": 1, "eos_token_id": 1}
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return {**sizes, **off, **over}
    if family.startswith("bert"):
        sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "intermediate_size": 128}
        sizes |= {"max_position_embeddings": 64, "num_labels": 3}
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {**sizes, **off, **over}
    return {**_decoder(family), **over}


def _transformer(family: str, over: dict[str, Any], mask: bool) -> tuple[nn.Module, MakeBatch]:
    import transformers

    values = _config(family, over)
    attention = values.pop("attn_implementation", None)
    stem = _CLASSES[family]
    config = getattr(transformers, _CONFIGS.get(family, f"{stem}Config"))(**values)
    kind = getattr(transformers, _HEADS.get(family, f"{stem}ForCausalLM"))
    extra = {"attn_implementation": attention} if attention else {}
    return kind._from_config(config, **extra), _text_batches(family == "bert_cls", mask)


def _text_batches(classify: bool, mask: bool) -> MakeBatch:
    def make_batch(batch: int, seq: int, seed: int = 0) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, VOCAB, (batch, seq), generator=gen)
        out = {"input_ids": ids}
        if mask:  # every second row ends in padding, when there is room for it
            keep = torch.ones_like(ids)
            keep[1::2, seq - seq // 4 :] = 0
            out["input_ids"] = ids * keep
            out["attention_mask"] = keep
        if classify:
            out["labels"] = torch.randint(0, 3, (batch,), generator=gen)
        else:
            out["labels"] = ids.masked_fill(out["input_ids"] == 0, -100)
        return out

    return make_batch


def _lora(over: dict[str, Any], mask: bool) -> tuple[nn.Module, MakeBatch]:
    import peft

    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    lora |= {k: over.pop(k) for k in list(over) if k in lora}
    model, make_batch = _transformer("llama", over, mask)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **lora)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():  # lora_B starts at zero: then lora_A would have no gradient
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(0.0, 0.05)
    return model, make_batch


MLPS = ("mlp_ce", "mlp_mse", "mlp_bce", "mlp_nll")
FAMILIES = (*MLPS, *_CLASSES, "peft_lora_llama")


def build(name: str, **over: Any) -> tuple[nn.Module, MakeBatch]:
    """Builds a tiny model.

    Args:
        name: One of FAMILIES; a trailing "_nomask" is the same as mask=False.
        **over: Configuration values that replace the defaults; `seed` seeds the weights,
            `mask` says whether batches carry an attention mask.

    Returns:
        The module (in train mode) and make_batch(batch, seq, seed) -> keyword arguments.
    """
    mask = over.pop("mask", not name.endswith("_nomask"))
    family = name.removesuffix("_nomask")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(over.pop("seed", 0))
        if family in MLPS:
            module, make_batch = _mlp(family.removeprefix("mlp_"), over)
        elif family == "peft_lora_llama":
            module, make_batch = _lora(over, mask)
        else:
            module, make_batch = _transformer(family, over, mask)
    return module.train(), make_batch
