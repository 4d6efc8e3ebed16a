"""Operators that the authors of encoder-decoders and their decoders put in, counted by hand.

Keys are families and classes of tools/families_sizes.py; see test_class_patterns.py.
Dropout: behind each attention and each unit into the sum; behind the activation in each unit and of
the embeddings; T5 also behind its last norms.
"""

from __future__ import annotations

from helpers.counts.plans import Row

ROWS: dict[tuple[str, str], Row] = {
    # decoder only, no encoder_hidden_states: cross-attention and its norm not called. per layer 6
    # linear (q,k,v,out,fc1,fc2), 2 norms (post-norm); layernorm_embedding; head without bias; token
    # + learned position = 1 table; loss not shifted
    ("bart", "BartForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # encoder layer 6 linear/2 norms/1 attention, decoder layer 10 linear/3 norms/2 attentions, 2+2
    # layers; layernorm_embedding in both (5+7 norms); head: lm_head(x) + final_logits_bias; token +
    # position = 1 table each side. final_logits_bias is a buffer of zeros: the head has no bias
    ("bart", "BartForConditionalGeneration"): Row(
        norm=12, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # decoder only, full attention (block sparse is encoder only), no cross-attention. use_bias
    # False: q,k,v,out without bias (4 products per layer), fc1/fc2 with bias; pre-norm 2 per layer,
    # layernorm_embedding is applied at the END; gelu_new; head without bias
    ("bigbird_pegasus", "BigBirdPegasusForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=4, product=9, table=1, drop_add=4, drop=3
    ),
    # per layer 6 linear, 2 norms (pre-norm), last layer_norm; output_projection without bias;
    # token*scale + learned position (arange+2) = 1 table
    ("biogpt", "BioGptForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # decoder only, no cross-attention called; per layer 6 linear, 2 norms (pre-norm), last
    # layer_norm; no layernorm_embedding; head without bias
    ("blenderbot", "BlenderbotForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # pre-norm BART: encoder 6 linear/2 norms per layer + last norm, decoder 10 linear/3 norms per
    # layer + last norm; head + final_logits_bias. final_logits_bias is a buffer
    # of zeros: the head has no bias
    ("blenderbot", "BlenderbotForConditionalGeneration"): Row(
        norm=12, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # like BART (post-norm), but the decoder applies layernorm_embedding to the token lookup BEFORE
    # the positions are added: the token lookup stands alone (1 table), the position lookup (arange,
    # learned table) is alone and constant: not counted; 2 norms per layer + layernorm_embedding.
    # Positions are added behind the norm: a table of their own
    ("blenderbot-small", "BlenderbotSmallForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=2, drop_add=4, drop=3
    ),
    # like BART; encoder: token + position = 1 table; decoder: norm between token lookup and the
    # addition of positions, so token lookup alone = 1, position lookup by arange not counted; head
    # + final_logits_bias. final_logits_bias is a buffer of zeros: the head has no
    # bias. Positions are added behind the decoder's norm: a table of their own
    ("blenderbot-small", "BlenderbotSmallForConditionalGeneration"): Row(
        norm=12, attention=6, gelu=4, linear=32, product=1, table=3, drop_add=10, drop=6
    ),
    # BertModel encoder with pooler (12 linear + pooler dense, norm 1+4, gelu 2) and BertLMHeadModel
    # decoder (12 linear + transform dense + decoder with bias, norm 1+4+1, gelu 2+1);
    # decoder.add_cross_attention and is_decoder are False: NO cross-attention, encoder's output is
    # used nowhere. word+type+position = 1 table each. Tanh = BertPooler.activation of the encoder;
    # pick = BertPooler hidden_states[:, 0]; one loss, outside of the decoder. The decoder does not
    # look at the encoder, which does not run. Dropout: only the BERT decoder counts: behind
    # attention and unit of 2 layers into the sum; its embeddings
    ("encoder-decoder", "EncoderDecoderModel"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # pre-norm BART with ReLU: encoder 6 linear/2 norms per layer + last, decoder 10 linear/3 norms
    # per layer + last; head without bias and no final_logits_bias; token*scale + index_select of
    # fixed sinusoidal table by positions made from input_ids (cumsum of non-pad) = 1 table each
    # side
    ("m2m_100", "M2M100ForConditionalGeneration"): Row(
        norm=12, attention=6, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # post-norm BART decoder without layernorm_embedding and without last norm: 2 norms per layer;
    # no cross-attention called; token + frozen sinusoidal position (arange) = 1 table; head without
    # bias
    ("marian", "MarianForCausalLM"): Row(
        norm=4, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # BART without layernorm_embedding and without last norms: 2 norms per encoder layer, 3 per
    # decoder layer; head + final_logits_bias. final_logits_bias is a buffer of
    # zeros: the head has no bias
    ("marian", "MarianMTModel"): Row(
        norm=10, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # pre-norm: 2 norms per layer, layernorm_embedding AND last layer_norm; no cross-attention
    # called; head without bias
    ("mbart", "MBartForCausalLM"): Row(
        norm=6, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # pre-norm BART with layernorm_embedding and last norm on both sides (6+8 norms); head +
    # final_logits_bias. shift_tokens_right: ReduceSum =
    # prev_output_tokens.ne(pad).sum(dim=1) (integers: where the last token of the labels is),
    # gathers 1 = prev_output_tokens.gather(1, index_of_eos) of that token id. final_logits_bias is
    # a buffer of zeros: the head has no bias
    ("mbart", "MBartForConditionalGeneration"): Row(
        norm=14, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # no biases: encoder layer 4+3 products/2 RMS norms, decoder layer 8+3 products/3 norms, last
    # norm each side, head; gelu_new(wi_0)*wi_1 gated in all 4 layers; token lookup alone on each
    # side. Two tables of relative positions
    ("mt5", "MT5ForConditionalGeneration"): Row(
        norm=12, attention=6, gated=4, product=37, table=4, drop_add=10, drop=8
    ),
    # BART decoder, attention written by hand (bmm, softmax, bmm; q scaled after its projection), no
    # prompt (use_prompt False), no cross-attention called; post-norm 2 per layer +
    # layernorm_embedding; head without bias
    ("mvp", "MvpForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # like BART, attention by hand (bmm), no prompt; head + final_logits_bias.
    # final_logits_bias is a buffer of zeros: the head has no bias
    ("mvp", "MvpForConditionalGeneration"): Row(
        norm=12, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # NO MoE layer in the tiny model (sparse_step 4, 2 layers; output_router_logits False): M2M100
    # with ReLU: encoder 6 linear/2 norms per layer + last, decoder 10 linear/3 norms per layer +
    # last; head without bias; token*scale + index_select of fixed sinusoidal table by positions
    # from input_ids = 1 table each side
    ("nllb-moe", "NllbMoeForConditionalGeneration"): Row(
        norm=12, attention=6, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # ReLU; do_layer_norm_before: 2 norms per layer + final_layer_norm; 6 linear per layer; no
    # project_in/out; token + learned position (by cumsum of attention_mask) = 1 table; head without
    # bias. Dropout: behind attention and behind fc2 of each of 2 layers into the sum;
    # OPTDecoder.dropout (embeddings) is never applied, none in the unit
    ("opt", "OPTForCausalLM"): Row(norm=5, attention=2, linear=12, product=1, table=1, drop_add=4),
    # pre-norm decoder, 2 norms per layer + last layer_norm, no layernorm_embedding; no cross-
    # attention called; token + frozen sinusoidal position (arange) = 1 table; head without bias
    ("pegasus", "PegasusForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # pre-norm, encoder 6 linear/2 norms per layer + last, decoder 10 linear/3 norms per layer +
    # last; head + final_logits_bias. final_logits_bias is a buffer of zeros: the
    # head has no bias
    ("pegasus", "PegasusForConditionalGeneration"): Row(
        norm=12, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # encoder layer: blocks of tokens and global tokens, 8 products without bias (q, k, v, out for
    # both) and 6 einsums, 4 norms, fc1/fc2 for both; of the last layer the global tokens are not
    # used: 6 products, 4 einsums, 3 norms, one pair. Decoder layer 8 products, 2 linear, 3 norms;
    # a last norm each side; head. Tables: tokens of both sides, global tokens. Softmax: local
    # attention of each layer, global of the first, each with a dropout of its own
    ("pegasus_x", "PegasusXForConditionalGeneration"): Row(
        norm=15, attention=4, gelu=5, linear=10, product=41, table=3, drop_add=12, drop=10
    ),
    # as T5; the encoder attends in blocks, by two einsums and a softmax with a dropout per layer
    ("longt5", "LongT5ForConditionalGeneration"): Row(
        norm=12, attention=4, product=37, table=4, drop_add=10, drop=10
    ),
    # as BartForCausalLM (post-norm, layernorm_embedding), token*8 + learned position = 1 table;
    # head without bias
    ("plbart", "PLBartForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # as BART; head + final_logits_bias. shift_tokens_right as in MBart: ReduceSum
    # = prev_output_tokens.ne(pad).sum(dim=1) (integers), gathers 1 = prev_output_tokens.gather(1,
    # index_of_eos). final_logits_bias is a buffer of zeros: the head has no bias
    ("plbart", "PLBartForConditionalGeneration"): Row(
        norm=12, attention=6, gelu=4, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # text encoder and text decoder as M2M100 (pre-norm, ReLU): encoder 6 linear/2 norms per layer +
    # last, decoder 10 linear/3 norms per layer + last; head without bias; token*scale +
    # index_select of fixed sinusoidal table by positions from input_ids = 1 table each side; speech
    # parts absent
    ("seamless_m4t", "SeamlessM4TForTextToText"): Row(
        norm=12, attention=6, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # identical to seamless_m4t for text: pre-norm, ReLU, 6/10 linear per layer, 2/3 norms per layer
    # + last norms, head without bias; position_embeddings_type relative_key is of the speech
    # encoder only
    ("seamless_m4t_v2", "SeamlessM4Tv2ForTextToText"): Row(
        norm=12, attention=6, linear=32, product=1, table=2, drop_add=10, drop=6
    ),
    # NO MoE layer in the tiny model (sparse_step 0): T5 with ReLU: encoder 4+2 products/2 RMS norms
    # per layer, decoder 8+2 products/3 norms, last norm each side, head; token lookup alone on each
    # side; decoder output * d_model^-0.5 before the head (constant). Two tables of relative
    # positions
    ("switch_transformers", "SwitchTransformersForConditionalGeneration"): Row(
        norm=12, attention=6, product=33, table=4, drop_add=10, drop=8
    ),
    # ReLU, not gated: encoder 4+2 products/2 RMS norms per layer, decoder 8+2 products/3 norms,
    # last norm each side, head; no scaling in attention; relative bias of layer 0 is shared by
    # layer 1; scale_decoder_outputs: constant factor. Two tables of relative positions
    ("t5", "T5ForConditionalGeneration"): Row(
        norm=12, attention=6, product=33, table=4, drop_add=10, drop=8
    ),
    # encoder layer 4 norms (pre/post attention, pre/post mlp) and 4+3 products, decoder layer 6
    # norms and 8+3 products, last norm each side, head; RoPE on q and k of the 4 self-attentions,
    # none in cross-attention; gelu_tanh(gate)*up in all 4 layers. Tanh = final_logit_softcapping 30
    # of the logits
    ("t5gemma", "T5GemmaForConditionalGeneration"): Row(
        norm=22, rope=8, attention=6, gated=4, product=37, table=2, drop_add=10, drop=8
    ),
    # BART decoder, attention by hand (bmm), encoder_attn exists but is not called; post-norm 2 per
    # layer + layernorm_embedding; token + learned position = 1 table; output_projection without
    # bias
    ("trocr", "TrOCRForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
    # as mt5: encoder 4+3 products/2 RMS norms per layer, decoder 8+3 products/3 norms, last norm
    # each side, head; gelu_new(wi_0)*wi_1; relative bias in EVERY self-attention (4 lookups, by
    # arange: constant, not counted); output * d_model^-0.5 (tied). Each layer has a table of
    # relative positions: 4
    ("umt5", "UMT5ForConditionalGeneration"): Row(
        norm=12, attention=6, gated=4, product=37, table=6, drop_add=10, drop=8
    ),
    # k_proj has no bias: per layer 5 linear (q,v,out,fc1,fc2) + 1 product (k); head proj_out
    # without bias; pre-norm 2 per layer + last layer_norm; no cross-attention called; token +
    # weight[position_ids] (arange repeated) = 1 table
    ("whisper", "WhisperForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=10, product=3, table=1, drop_add=4, drop=3
    ),
    # pre-norm 2 per layer + last layer_norm; attention by hand (bmm, mask, torch.max(scores,
    # finfo.min), softmax, bmm); no cross-attention (add_cross_attention False); token*8 +
    # index_select of fixed sinusoidal table (arange+2) = 1 table; head without bias
    ("xglm", "XGLMForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=3
    ),
}

# What belongs to no pattern; the comment of the row says what it is.
LEFT: dict[tuple[str, str], dict[str, int]] = {
    ("longt5", "LongT5ForConditionalGeneration"): {"Softmax": 2},
    ("pegasus_x", "PegasusXForConditionalGeneration"): {"Softmax": 3},
    ("t5gemma", "T5GemmaForConditionalGeneration"): {"Tanh": 1},
}
