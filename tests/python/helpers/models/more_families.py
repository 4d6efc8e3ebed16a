"""More tiny Hugging Face families than families.py has, for the counts of recognised patterns.

build(name) is families.build for the families there, and knows some twenty more. Two layers,
dropout off unless a name ends in "_drop", random weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from helpers.models import families

VOCAB, HIDDEN = families.VOCAB, families.HIDDEN

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "attention_dropout": 0.0}
_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPTJ = {"vocab_size": VOCAB, "n_positions": 64, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4}
_GPTJ |= {"rotary_dim": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 16, "d_ff": 128, "num_layers": 2}
_T5 |= {"num_heads": 4, "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
_BART = {"vocab_size": VOCAB, "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2}
_BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128}
_BART |= {"decoder_ffn_dim": 128, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0}
_BART |= {"use_cache": False, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}

# name -> (class of the configuration, class of the model, sizes)
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cohere": ("CohereConfig", "CohereForCausalLM", _GROUPED),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPTJ, "use_cache": False}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**_DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 2, "num_heads": 4},
            **{"intermediate_size": 128, "max_position_embeddings": 64, "window_size": 4},
            **{"attention_types": [[["global", "local"], 1]], "use_cache": False},
            **{"bos_token_id": 1, "eos_token_id": 1, "resid_dropout": 0.0, "embed_dropout": 0.0},
        },
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **{k: v for k, v in _DECODER.items() if k != "intermediate_size"},
            **{"ffn_dim": 128, "word_embed_proj_dim": HIDDEN, "dropout": 0.0},
        },
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {**_DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", _GROUPED),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", _GROUPED),
    "glm": ("GlmConfig", "GlmForCausalLM", {**_GROUPED, "head_dim": 16}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", _GROUPED),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_GROUPED, "head_dim": 16}),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "helium": ("HeliumConfig", "HeliumForCausalLM", {**_GROUPED, "head_dim": 16}),
    "diffllama": ("DiffLlamaConfig", "DiffLlamaForCausalLM", _GROUPED),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", _GROUPED),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_ENCODER, "pad_token_id": 0}),
    "electra": (
        "ElectraConfig",
        "ElectraForMaskedLM",
        {**_ENCODER, "embedding_size": HIDDEN},
    ),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {
            **{"vocab_size": VOCAB, "dim": HIDDEN, "n_layers": 2, "n_heads": 4},
            **{"hidden_dim": 128, "dropout": 0.0, "attention_dropout": 0.0},
        },
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**_DECODER, "attention_dropout": 0.0, "global_attn_every_n_layers": 2},
    ),
    "deberta_v2": (  # as microsoft/deberta-v3-base
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {
            **{**_ENCODER, "type_vocab_size": 0, "position_biased_input": False},
            **{"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True},
            **{"position_buckets": 8, "norm_rel_ebd": "layer_norm"},
        },
    ),
    "openai_gpt": (
        "OpenAIGPTConfig",
        "OpenAIGPTLMHeadModel",
        {k: v for k, v in _GPTJ.items() if k != "rotary_dim"},
    ),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": HIDDEN}),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "t5_gated": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu"},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
}
_DROPOUT = {
    "bert_mlm": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}
FAMILIES = (*families.FAMILIES, "bert_mlm_drop", "gpt2_drop", *MORE)


def build(name: str) -> tuple[nn.Module, families.MakeBatch]:
    """A tiny model in train mode, and make_batch(batch, seq, seed)."""
    family = name.removesuffix("_drop")
    if family not in MORE:
        over = _DROPOUT[family] if name.endswith("_drop") else {}
        return families.build(family, **over)
    import transformers

    config_name, model_name, sizes = MORE[family]
    config = getattr(transformers, config_name)(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(config)
    return model.train(), families._text_batches(False, True)
