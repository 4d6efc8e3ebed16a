"""Tiny random models of the families that transformers knows, for tools/families.py.

What images and sounds need beside this stands in families_media.py.

candidates(family) makes them from the family's own configuration class: every size that a
configuration is known to name is made small, dropout is off unless a rate is given, and the layers
are few but of every kind that the default configuration has. Sizes that do not fit together are
left out one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import families_media
import torch

Result = TypeVar("Result")
MAX_PARAMETERS = 60_000_000
MAX_LAYERS = 4
_BY_VALUE: dict[Any, str] = {
    320: "vocab_size n_vocab vocab_size_per_layer_input entity_vocab_size",
    128: """intermediate_size ffn_dim d_ff n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim
            ffn_hidden_size inner_dim d_inner mlp_dim block_ff_dim""",
    64: """hidden_size d_model n_embd dim emb_dim embedding_size embed_dim model_dim embedding_dim
           word_embed_proj_dim max_position_embeddings n_positions n_ctx max_seq_len seq_length
           max_2d_position_embeddings""",
    32: """moe_intermediate_size expert_ffn_hidden_size shared_experts_intermediate_size
           moe_shared_expert_intermediate_size shared_expert_intermediate_size kv_lora_rank
           q_lora_rank""",
    24: "qk_head_dim",
    16: """head_dim d_kv attention_head_size kv_channels qk_nope_head_dim v_head_dim
           hidden_size_per_layer_input index_head_dim linear_head_dim linear_key_head_dim
           linear_value_head_dim state_size mamba_d_state ssm_state_size""",
    8: """rotary_dim qk_rope_head_dim attention_window block_size sliding_window window_size
          index_topk laurel_rank""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads
          decoder_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts
          index_n_heads linear_num_heads linear_num_value_heads mamba_n_heads""",
    2: """num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk top_k
          moe_k top_k_experts type_vocab_size linear_num_key_heads zero_expert_num""",
    1: """n_group topk_group num_expert_group n_groups mamba_n_groups first_k_dense_replace
          moe_layer_start_index num_nextn_predict_layers""",
    False: "use_cache",
}
SIZES = {name: value for value, names in _BY_VALUE.items() for name in names.split()}
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# None in some defaults, though the model wants a number.
_NEVER_NONE = {
    *("vocab_size", "head_dim", "num_key_value_heads", "num_experts_per_tok"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts"),
}
_DROPOUT = "drop"
_DROPOUTS = (torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d)
_NEVER_DROPPED = ("layerdrop", "drop_path", "jitter")  # whole layers, in Python; noise
_PART = "_config"  # ends the names of a configuration's parts
# What one family wants beyond the sizes above; a part of its configuration is a dictionary.
OWN: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {64: 4}},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "blip-2": {"image_token_index": families_media.IMAGE_TOKEN},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "dots1": {"n_shared_experts": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": 128},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2},
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "instructblip": {"image_token_index": families_media.IMAGE_TOKEN},
    "instructblipvideo": {
        **{"video_token_index": families_media.IMAGE_TOKEN, "num_query_tokens": 8},
    },
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16, "visual_embed": False},
    "kimi_k25": {"projection_hidden_size": 64, "vision_config": {"projection_hidden_size": 64}},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # its default has attention only
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},  # a multiple of six
    "llama4": {
        "vision_config": {
            **{"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64},
            "vision_output_dim": 64,
        }
    },
    "mamba2": {"num_heads": 8, "head_dim": 16},  # twice the hidden size
    "molmo2": {
        "image_patch_id": families_media.IMAGE_TOKEN,
        "adapter_config": {"vision_feature_layer": [1, 0]},
    },
    "mistral4": {"head_dim": 24},  # of which a third is turned: qk_rope_head_dim
    "muse_glimmer": {"out_hidden_size": 256},
    "pp_formulanet": {
        "vision_config": {
            **{"output_channels": 64, "post_conv_in_channels": 64, "post_conv_mid_channels": 64},
            **{"post_conv_out_channels": 64, "decoder_hidden_size": 64},
            "global_attn_indexes": [1],
        }
    },
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        {"vision_start_token_id": families_media.IMAGE_TOKEN - 1, "audio_start_token_id": 300},
    ),
    "reformer": {"axial_pos_embds": False},  # else one length only
    "sapiens2": {
        **{"image_size": families_media.SIDE, "pos_embed_rescale": None},  # which draws
        "head_config": {"upsample_out_channels": [32, 32], "conv_out_channels": [32]},
    },
    "step3p7": {"text_config": {"sliding_window": 8}},
    "tipsv2_dpt": {
        "backbone_config": {
            **{"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "apply_layernorm": True},
            "reshape_hidden_states": False,
        }
    },
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
# Values that hinder each other in some families: taken as they are, then left out.
_LEFT_OUT = ((), ("head_dim",), ("layer_types",), ("num_key_value_heads",))


class Family(NamedTuple):
    """A family with one of its model classes.

    Attributes:
        name: As transformers names it ("model_type").
        model: Name of the class.
        task: "causal", "seq2seq", "masked", "classification", or one of families_media.TASKS.
    """

    name: str
    model: str
    task: str


def families() -> list[Family]:
    """Every family and class; classification of text only where a family has nothing else."""
    from transformers.models.auto import modeling_auto as auto

    by_task = {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    }
    found: dict[tuple[str, str], Family] = {}
    for task, models in by_task.items():
        known = {name for name, _ in found}
        for name, model in models.items():
            model = model if isinstance(model, str) else model[0]
            if task != "classification" or name not in known:
                found.setdefault((name, model), Family(name, model, task))
    for task, models in families_media.families().items():
        for name, model in models.items():
            model = model if isinstance(model, str) else model[0]
            found.setdefault((name, model), Family(name, model, task))
    return sorted(found.values())


def first_that(
    family: Family, attempt: Callable[[torch.nn.Module], Result], dropout: float = 0.0
) -> Result:
    """What an attempt returns for the first model with which it succeeds.

    Args:
        family: The family and its class.
        attempt: Called with a model; raises an exception of any kind if that will not do.
        dropout: As for candidates().

    Raises:
        Exception: What the first model, or making it, objected to.
    """
    problem: Exception | None = None
    try:
        for model in candidates(family, dropout):
            try:
                return attempt(model)
            except Exception as error:  # of any kind: the code is the family's
                problem = problem or error
    except Exception as error:
        problem = problem or error
    raise problem or RuntimeError("there is no model to try")


def candidates(family: Family, dropout: float = 0.0) -> Iterator[torch.nn.Module]:
    """Models to try, in this order; then, if some could not be made, raises why.

    Args:
        family: The family and its class.
        dropout: Every rate of dropout that the configuration has, if it is a number by default.

    Raises:
        Exception: Whatever the configuration or the model objects to.
        OverflowError: The model is too large with these sizes.
    """
    import transformers

    model_class = getattr(transformers, family.model)
    problem: Exception | None = None
    tried: list[dict] = []
    for left_out in _LEFT_OUT:
        values = configuration_values(model_class.config_class, family, left_out, dropout)
        if values in tried:
            continue
        tried.append(values)
        try:
            config = configured(model_class.config_class, family, values)
            check_size(model_class, config)
            torch.manual_seed(0)
            model = model_class(config).train()
            for module in model.modules() if not dropout else ():
                if isinstance(module, _DROPOUTS):  # DPT names no rate in its configuration
                    module.p = 0.0
        except Exception as error:  # of any kind: the code is the family's
            problem = problem or error
            continue
        yield model
    if problem is not None:
        raise problem


def check_size(model_class: type, config: Any) -> None:
    """Counts the parameters without making them; raises OverflowError if there are too many."""
    with torch.device("meta"):
        model = model_class(copy.deepcopy(config))
    count = sum(p.numel() for p in model.parameters())
    if count > MAX_PARAMETERS:
        raise OverflowError(f"too large with these sizes: {count / 1e6:.0f} million parameters")


def configured(config_class: type, family: Family, values: dict[str, Any]) -> Any:
    """A configuration with these values and the tokens that training needs."""
    config = config_class(**values)
    for name, token in TOKENS.items():
        if getattr(config, name, None) is None:
            setattr(config, name, token)
    if family.task == "causal" and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    return config


def configuration_values(
    config_class: type, family: Family, left_out: tuple, dropout: float
) -> dict[str, Any]:
    """Arguments for the configuration class: small sizes for what its default names."""
    default = config_class()
    values = shrunk(default.to_dict(), dropout)
    if family.task in families_media.TASKS:
        values = families_media.shrunk(default.to_dict(), values)
    own = OWN.get(family.name, {})
    values |= {name: value for name, value in own.items() if not name.endswith(_PART)}
    for name in getattr(config_class, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None and hasattr(part, "to_dict"):
            values[name] = shrunk(part.to_dict(), dropout)
            if family.task in families_media.TASKS:
                values[name] = families_media.shrunk(part.to_dict(), values[name])
            if "model_type" in part.to_dict():
                values[name]["model_type"] = part.model_type
            values[name] |= own.get(name, {})
    return {name: value for name, value in values.items() if name not in left_out}


def shrunk(default: dict[str, Any], dropout: float) -> dict[str, Any]:
    """The entries of a default configuration that are to be others, with their new values."""
    layered, count = layer_lists(default)
    values: dict[str, Any] = {}
    for name, value in default.items():
        if name in SIZES and (value is not None or name in _NEVER_NONE):
            values[name] = [SIZES[name]] * count if name in layered else SIZES[name]
        elif name in LAYERS and isinstance(value, int):
            values[name] = count
        elif name in TOKENS and value is not None:
            values[name] = TOKENS[name]
        elif isinstance(value, float) and any(part in name for part in _NEVER_DROPPED):
            values[name] = 0.0
        elif isinstance(value, float) and _DROPOUT in name:
            values[name] = dropout
    if "qk_rope_head_dim" in default:  # latent attention
        same = {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": 4}
        values |= {name: value for name, value in same.items() if name in values}
    return layered | values


def layer_lists(default: dict[str, Any]) -> tuple[dict[str, list], int]:
    """What has an entry per layer, shortened to one layer of each kind, and the number of layers.

    Kinds of layers are the combinations of strings: attention with a dense unit and the same with
    experts are two.
    """
    depth = next((default[n] for n in LAYERS if isinstance(default.get(n), int)), 0)
    lists = {n: v for n, v in default.items() if isinstance(v, list) and len(v) == depth > 0}
    named = [v for v in lists.values() if all(isinstance(x, str) for x in v)]
    first = {kinds: at for at, kinds in reversed(list(enumerate(zip(*named))))}
    keep = sorted(first.values())[:MAX_LAYERS]
    while len(keep) < 2:
        keep.append(len(keep))
    return {n: [v[i] for i in keep] for n, v in lists.items()}, len(keep)


def batches(family: Family, shapes: tuple) -> Iterator[Callable[[torch.nn.Module], list[dict]]]:
    """Ways to make the batches of a model, of these (rows, lengths): the usual ones first."""
    if family.task not in families_media.TASKS:
        made = [batch(family, seed, *shape) for seed, shape in enumerate(shapes, 1)]
        yield lambda model: made
        return
    for form in families_media.forms(family.task):

        def make(model: torch.nn.Module, form: families_media.Form = form) -> list[dict]:
            # A row more: a batch norm refuses one value per channel.
            chance = torch.Generator().manual_seed(1)
            return [form(model, rows + 1, chance) for rows, _ in shapes]

        yield make


def batch(family: Family, seed: int, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Token ids with a mask that hides the end of the first row, and labels."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 300, (rows, length), generator=chance)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    labels = torch.where(mask.bool(), ids, -100)
    if family.task == "classification":
        labels = torch.randint(0, 2, (rows,), generator=chance)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
