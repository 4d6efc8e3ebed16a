"""Operators that the authors of decoders without experts put in, counted by hand in their source.

Keys are families and classes of tools/families_sizes.py; see test_class_patterns.py.
Dropout: of attention weights alone, or behind attention and behind the unit of each layer into the
sum and of the embeddings (4 and 1), unless the comment says otherwise.
"""

from __future__ import annotations

from helpers.counts.plans import Row

ROWS: dict[tuple[str, str], Row] = {
    # per layer q/k norm per head + 2 layer norms (4), final norm; 4 attn + up + down = 6 products
    # per layer, head; MLP is not gated: down(xielu(up)); Exp = torch.expm1 in
    # XIELUActivation._xielu_python, 1 per layer
    ("apertus", "ApertusForCausalLM"): Row(norm=9, rope=4, attention=2, product=13, table=1),
    # Llama but MLP not gated: down(relu2(up)), so 6 products per layer + head; Pow = torch.square
    # in ReLUSquaredActivation, 1 per layer
    ("arcee", "ArceeForCausalLM"): Row(norm=5, rope=4, attention=2, product=13, table=1),
    # text only = Qwen2: q,k,v with bias (3 linear per layer), o + gate + up + down without (4
    # products per layer), head without bias; audio tower and projector are not called
    ("audioflamingo3", "AudioFlamingo3ForConditionalGeneration"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=6, product=9, table=1
    ),
    # Llama + attn_sub_norm before o_proj + ffn_sub_norm before down: 4 norms per layer, last one;
    # MLP is relu2(gate)*up: relu squared is not among the gate activations, so gated 0 and Pow
    # (torch.square of ReLUSquaredActivation) 1 per layer
    ("bitnet", "BitNetForCausalLM"): Row(norm=9, rope=4, attention=2, product=15, table=1),
    # parallel block with a single LayerNorm per layer, ln_f; qkv_proj and out_proj without bias (2
    # products per layer), fc_in, fc_out with bias (2 linear per layer), head with bias; gelu_new 1
    # per layer; rope (every-two) on the first 8 of 16 dims, q and k; eager attention only. Dropout:
    # behind attention and behind the unit of each layer, both into one sum with the residual; of
    # the embeddings
    ("codegen", "CodeGenForCausalLM"): Row(
        norm=3, rope=4, attention=2, gelu=2, linear=5, product=4, table=1, drop_add=4, drop=1
    ),
    # parallel block: one LayerNorm (handwritten, no bias) per layer + last one; use_qk_norm false;
    # 7 products per layer + tied head; logits * logit_scale
    ("cohere", "CohereForCausalLM"): Row(norm=3, rope=4, attention=2, gated=2, product=15, table=1),
    # as cohere, but RoPE only in sliding layers (layer 0 sliding, layer 1 full without RoPE); 7
    # products per layer + tied head
    ("cohere2", "Cohere2ForCausalLM"): Row(
        norm=3, rope=2, attention=2, gated=2, product=15, table=1
    ),
    # exactly Llama; layer 1 has a sliding window mask; RoPE in both layers
    ("cwm", "CwmForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1),
    # Llama + per layer: attention_interface called twice (same q,k, two halves of v) = 2
    # attentions; self.groupnorm is a weightless nn.RMSNorm over 2*head_dim: 3 norms per layer, last
    # one; lambda_1, lambda_2 = exp(sum(lambda_q*lambda_k)): 2 Exp and 2 ReduceSum per layer on
    # parameters. The two attentions of a layer have one softmax and run as one over both values.
    # Dropout: refused by the model
    ("diffllama", "DiffLlamaForCausalLM"): Row(
        norm=7, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # exactly Llama (text model, dropout 0 on residuals). Dropout: one nn.Dropout(attention_dropout)
    # per layer called twice, behind attention and behind the unit, into the sum; no embedding
    # dropout
    ("emu3", "Emu3ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1, drop_add=4
    ),
    # Llama; use_bias false; RoPE interleaved (every two) over the full head; tied head
    ("ernie4_5", "Ernie4_5ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # post-norm: norms after attention and after MLP + q/k norm per head = 4 per layer, last one;
    # RoPE only in the sliding layer (layer 0; sliding_window is 8), layer 1 full without
    ("exaone4", "Exaone4ForCausalLM"): Row(
        norm=9, rope=2, attention=2, gated=2, product=15, table=1
    ),
    # parallel attention with one input_layernorm per layer, ln_f; fused qkv, dense, h_to_4h,
    # 4h_to_h without bias = 4 products per layer, tied head; gelu 1 per layer; multi_query: one k/v
    # head, k = fused_qkv[..., [-2], :] and v = [..., [-1], :] are list indices = 2 picks per layer.
    # Dropout: parallel_attn: (mlp + attention) dropped once per layer, dropout_add with the
    # residual; without alibi attention weights are not dropped (dropout_p=0.0 / not applied)
    ("falcon", "FalconForCausalLM"): Row(
        norm=3, rope=4, attention=2, gelu=2, product=9, table=1, drop_add=2
    ),
    # post-norm: embedding norm + 2 per layer; q,k,v,out,lin1,lin2 with bias = 6 linear per layer,
    # pred_layer.proj with bias (tied weight); gelu 1 per layer; token + position sum is one table
    # (n_langs 1: no language embedding); output multiplied by the mask; plain cross_entropy without
    # shift
    ("flaubert", "FlaubertWithLMHeadModel"): Row(
        norm=5, attention=2, gelu=2, linear=13, table=1, drop_add=4, drop=1
    ),
    # q and k normalised per head: 4 norms per layer, last one; RoPE only in the sliding layer
    # (layer 1); mlp_only_layers [0,1]: both MLPs dense, no MoE; eager attention with learned sinks:
    # softmax over cat([scores, sink]), last column cut, = 1 attention per layer; no aux loss
    ("flint", "FlintForCausalLM"): Row(norm=9, rope=2, attention=2, gated=2, product=15, table=1),
    # text only = Persimmon: q/k LayerNorm per head + 2 layer norms = 4 per layer, last one; fused
    # qkv, dense, h_to_4h, 4h_to_h with bias = 4 linear per layer; head without bias; partial RoPE
    # (first 8 of 16 dims) on q and k; Pow = torch.square of relu2, 1 per layer; picks =
    # fused_qkv[..., 0/1/2, :], 3 per layer; vision_embed_tokens not called. Dropout: Persimmon text
    # model: dropout behind the unit of each layer into the sum, none behind attention; attention
    # weights by config.attention_dropout (the nn.Dropout of that name is never called)
    ("fuyu", "FuyuForCausalLM"): Row(
        norm=9, rope=4, attention=2, linear=8, product=1, table=7, drop_add=2
    ),
    # Llama with (1+weight) RMSNorm, gate activation gelu_pytorch_tanh (gated gelu), embedding *
    # sqrt(d), tied head
    ("gemma", "GemmaForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1),
    # pre and post norm of attention and of MLP = 4 norms per layer, last one; gated gelu tanh; no
    # q/k norm; eager only: softcap tanh(scores/50)*50 inside each attention (regarded as part of
    # it); Tanh = final_logit_softcapping 30 on the logits
    ("gemma2", "Gemma2ForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=15, table=1),
    # 4 layer norms + q/k norm per head = 6 per layer, last one; gated gelu tanh; RoPE in both
    # layers (two thetas); no soft caps (both null)
    ("gemma3_text", "Gemma3ForCausalLM"): Row(
        norm=13, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # its language model alone, without an image
    ("gemma3", "Gemma3ForConditionalGeneration"): Row(
        norm=13, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # per layer q, k and (weightless) v norm + 4 layer norms = 7, last one; norm uses pow(x,-0.5); 7
    # products per layer, tied head; no shared kv, no k=v, no soft cap; output * layer_scalar
    # buffer; RoPE in both layers, full one proportional (over the whole head, zero frequencies)
    ("gemma4_unified", "Gemma4UnifiedForConditionalGeneration"): Row(
        norm=15, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # per layer q, k and (weightless) v norm + 4 layer norms = 7, last one; norm uses pow(x,-0.5); 7
    # products per layer, tied head; no shared kv, no k=v, no soft cap; gated gelu tanh; RoPE in
    # both layers
    ("gemma4_unified_text", "Gemma4UnifiedForCausalLM"): Row(
        norm=15, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # q,k,v with bias = 3 linear per layer; o, gate_up, down without = 3 products per layer, head;
    # gated silu on the two chunks of gate_up; partial interleaved RoPE (first 8 of 16 dims) on q
    # and k
    ("glm", "GlmForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=6, product=7, table=1
    ),
    # as glm, plus post_self_attn_layernorm and post_mlp_layernorm: 4 norms per layer, last one
    ("glm4", "Glm4ForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, linear=6, product=7, table=1
    ),
    # text only = exactly Llama; audio tower and projector are not called
    ("glmasr", "GlmAsrForConditionalGeneration"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # text only = Qwen2: q,k,v with bias (3 linear per layer), o + gate + up + down without (4
    # products per layer), head without bias; vision tower and projector are not called
    ("got_ocr2", "GotOcr2ForConditionalGeneration"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=6, product=9, table=1
    ),
    # GPT-2: per layer ln_1, ln_2, Conv1D (addmm with bias) c_attn, c_proj, c_fc, c_proj = 4 linear,
    # one gelu_new; last ln_f; table = wte + wpe summed; head tied without bias = the 1 product
    ("gpt-sw3", "GPT2LMHeadModel"): Row(
        norm=5, attention=2, gelu=2, linear=8, product=1, table=1, drop_add=4, drop=1
    ),
    # per layer ln_1, ln_2, Conv1D (addmm with bias) c_attn, c_proj, c_fc, c_proj = 4 linear, one
    # gelu_new; last ln_f; table = wte + wpe summed; head tied without bias = the 1 product
    ("gpt2", "GPT2LMHeadModel"): Row(
        norm=5, attention=2, gelu=2, linear=8, product=1, table=1, drop_add=4, drop=1
    ),
    # like GPT-2 with nn.Linear: 4 linear with bias and one gelu_pytorch_tanh per layer; multi-query
    # (1 key/value head, split from c_attn); wte + wpe summed; head without bias
    ("gpt_bigcode", "GPTBigCodeForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=8, product=1, table=1, drop_add=4, drop=1
    ),
    # per layer q, k, v without bias = 3 product, out_proj, c_fc, c_proj with bias = 3 linear; eager
    # attention by hand, unscaled, with where(causal buffer) before the additive mask; gelu_new; wte
    # + wpe summed; head without bias
    ("gpt_neo", "GPTNeoForCausalLM"): Row(
        norm=5, attention=2, gelu=2, linear=6, product=7, table=1, drop_add=4, drop=1
    ),
    # per layer query_key_value, dense, dense_h_to_4h, dense_4h_to_h all with bias = 4 linear;
    # partial rope (4 of 16 dims, rest concatenated back); parallel residual with two layernorms of
    # the same input; exact gelu; head without bias. Dropout: behind attention and behind the unit
    # of each layer, both into one sum with the residual; of the embeddings
    ("gpt_neox", "GPTNeoXForCausalLM"): Row(
        norm=5, rope=4, attention=2, gelu=2, linear=8, product=1, table=1, drop_add=4, drop=1
    ),
    # per layer 4 Linear without bias, head without bias = 9 products, of which the last layer's
    # attention.dense gets dense_bias added (bias_dropout_add, bias.expand_as(residual)) -> 1 linear
    # + 8 product; rope on all 16 dims; attention by hand (baddbmm onto zeros with beta=1); exact
    # gelu. Dropout: bias_dropout_add behind attention and behind the unit of each layer into the
    # sum (sequential); no embedding dropout
    ("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM"): Row(
        norm=5, rope=4, attention=2, gelu=2, linear=1, product=8, table=1, drop_add=4
    ),
    # one ln_1 per layer feeds attention and MLP in parallel + ln_f = 3 norms; q, k, v, out without
    # bias = 4 product per layer; fc_in, fc_out with bias = 2 linear per layer, lm_head with bias =
    # 5; interleaved (rotate_every_two) partial rope, 8 of 16 dims; picks:
    # torch.gather(embed_positions, position_ids) once per layer; gelu_new; attention by hand.
    # Dropout: behind attention and behind the unit of each layer, both into one sum with the
    # residual; of the embeddings
    ("gptj", "GPTJForCausalLM"): Row(
        norm=3, rope=4, attention=2, gelu=2, linear=5, product=8, table=1, drop_add=4, drop=1
    ),
    # as Llama, with constant multipliers on embeddings, residuals, attention scores and logits (all
    # 1.0 here)
    ("granite", "GraniteForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # as Granite/Llama; layer_rope_theta both non-zero, so rope in both layers; no sdpa
    # (_supports_sdpa False): eager attention with sinks: per layer sigmoid(logsumexp(scores) -
    # sink) of shape [..,1] multiplied onto the attention output -> Sigmoid 1 per layer (broadcast,
    # not gated), and torch.logsumexp = Exp + ReduceSum (+ Log, Max) 1 per layer. The log-sum-exp
    # reads the scores beside attention: their product and what is rotated for it are computed
    # twice. ReduceLogSumExp is one operator
    ("granite_swa", "GraniteSWAForCausalLM"): Row(
        norm=5, rope=8, attention=2, gated=2, product=17, table=1
    ),
    # as Llama; interleaved rope (x[0::2], x[1::2] stacked, cos/sin first half repeat_interleave(2))
    ("helium", "HeliumForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1),
    # H_cycles 2 x (L_cycles 3 x L stack + 1 x H stack) = 8 stack runs of 2 layers = 16 layer runs
    # (modules shared); per layer run 2 weightless RMSNorm, 5 products in attention (q,k,v,gate,o) +
    # 3 in MLP = 8, silu-gated MLP + sigmoid(gate)*attn_output of equal shape = 2 gated; final_norm
    # of each stack run = 8 (32+8 norms), no norm after it; head 1 (128+1 products)
    ("hrm_text", "HrmTextForCausalLM"): Row(
        norm=40, rope=32, attention=16, gated=32, product=129, table=1
    ),
    # as Llama plus RMSNorm of q and k per head AFTER rope: 4 norms per layer, last one
    ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # as Granite (multipliers) plus post_norm1/post_norm2 (use_post_norm true) on attention and MLP
    # outputs: 4 norms per layer, last one
    ("hyperclovax", "HyperCLOVAXForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # Llama: 7 products, 2 norms, rope on q and k, 1 silu-gated per layer; last norm, head; no
    # biases
    ("internlm3", "LlamaForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # Llama: 7 products, 2 norms, rope on q and k, 1 silu-gated per layer; last norm, head; no
    # biases
    ("iquestcoder", "LlamaForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # Llama with LayerNorm and biases: q,k,v,o,up,down with bias = 6 linear per layer, head without
    # bias = 1 product; no gate; leftover: relu squared, torch.square(relu(x)) in the MLP, 1 per
    # layer
    ("jais2", "Jais2ForCausalLM"): Row(norm=5, rope=4, attention=2, linear=12, product=1, table=1),
    # Llama: 7 products, 2 norms, rope on q and k, 1 silu-gated per layer; last norm, head; no
    # biases
    ("llama", "LlamaForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1),
    # MLA: q_a, q_b, kv_a, kv_b, o = 5 products + 3 in MLP = 8 per layer, tied head; norms q_a,
    # kv_a, input, post_attention = 4 per layer, last one; half-split rope on q_rot and on the
    # single-head k_rot (8 dims); key put together by copy_ into slices of an empty tensor;
    # embedding times scale_emb, residual and logits scaled by constants
    ("minicpm3", "MiniCPM3ForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=17, table=1
    ),
    # as Llama; both layers with a sliding window mask
    ("ministral", "MinistralForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # as Llama with yarn rope (cos/sin scaled); the query is multiplied after rope by 1 + beta*log(1
    # + floor(position/16384)), Log and Floor of constant positions only
    ("ministral3", "Ministral3ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # as Llama; sliding window mask
    ("mistral", "MistralForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # as Llama; cross-attention layers start at index 3, the model has 2 layers, so only self-
    # attention; table of 328 rows, head of 320
    ("mllama", "MllamaForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1),
    # LayerNorm without bias: embeddings 1, layer 0 only mlp_norm (attn_norm Identity), layer 1 two,
    # final_norm, head norm = 6; per layer q,k,v,Wo,Wi,mlp.Wo = 6 products, head dense without bias
    # 1 = 13; decoder with bias = 1 linear; MLP gelu(first half)*second half = gated; gelu in the
    # prediction head = 1; two rope thetas. Dropout: out_drop (rate attention_dropout) behind
    # attention of each layer into the sum; embeddings 1, in front of Wo of each mlp 2; head has
    # none
    ("modernbert-decoder", "ModernBertDecoderForCausalLM"): Row(
        norm=6,
        rope=4,
        attention=2,
        gated=2,
        gelu=1,
        linear=1,
        product=13,
        table=1,
        drop_add=2,
        drop=3,
    ),
    # text decoder only; per layer q,k,v,o,fc1,fc2 = 6 products (gate and up fused in fc1), head;
    # picks: h.view(B,S,2,-1)[..., 0, :] and [..., 1, :] in MoshiGatingMLP, 2 per layer; silu gate;
    # rotary cos/sin computed in each attention
    ("moshi", "MoshiForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=13, table=5),
    # Qwen3 language model (audio tower and projector not run without input_features): as Llama plus
    # q_norm and k_norm per head before rope: 4 norms per layer, last one; head
    ("moss_transcribe_diarize", "MossTranscribeDiarizeForConditionalGeneration"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # per layer 4 products (Wqkv, out_proj, up, down), 2 LayerNorm without bias, erf GELU; tied
    # head; final norm; eager attention with ALiBi bias added to the scores, no position table
    # although learned_pos_emb is true
    ("mpt", "MptForCausalLM"): Row(norm=5, attention=2, gelu=2, product=9, table=1),
    # text only runs Qwen2: per layer q,k,v with bias = 3 linear, o+gate+up+down = 4 products, 2
    # norms; head; last norm. Audio tower, projector, time rope (pos_emb) need input_features
    ("musicflamingo", "MusicFlamingoForConditionalGeneration"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=6, product=9, table=1
    ),
    # all norms weightless: one after the embedding (same module self.norm), per layer input,
    # post_attention, q, k = 4, last one; per layer q,k,v,o,fc1,fc2 = 6 products, head. RoPE before
    # the q/k norm, rotate_half is (x2, -x1). Tanh: final_logit_softcapping 15; Pow: torch.square of
    # relu2, one per layer
    ("nanochat", "NanoChatForCausalLM"): Row(norm=10, rope=4, attention=2, product=13, table=1),
    # LayerNorm1P (weight + 1, bias): 2 per layer, last one; per layer q,k,v,o,up,down = 6 products
    # (no gate), head; partial rope (half of the head). Pow: torch.square of relu2, one per layer
    ("nemotron", "NemotronForCausalLM"): Row(norm=5, rope=4, attention=2, product=13, table=1),
    # as Llama, 7 products per layer, head; LayerNorm without weight and bias: 2 per layer, last
    # one; clip_qkv null
    ("olmo", "OlmoForCausalLM"): Row(norm=5, rope=4, attention=2, gated=2, product=15, table=1),
    # 7 products per layer, head; q and k normalised over all heads at once (before the split),
    # norms AFTER attention and mlp: 4 norms per layer, last one
    ("olmo2", "Olmo2ForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=15, table=1),
    # as olmo2: 4 norms per layer (q, k, post_attention, post_feedforward), last one; 7 products per
    # layer, head; layer 0 sliding, layer 1 full, each with its own cos/sin, both with rope
    ("olmo3", "Olmo3ForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=15, table=1),
    # post-norm: 2 LayerNorm per layer, NO last norm; 4 Conv1D with bias per layer; gelu_new (afn
    # gelu); tied head without bias; table = token + position; eager attention with w*b - 1e4*(1-b)
    # and additive padding mask: b is a buffer of numbers, an input of the graph, of which nothing
    # says that it holds zeros and ones, so both products, softmax and dropout stay as they are
    ("openai-gpt", "OpenAIGPTLMHeadModel"): Row(
        norm=4, gelu=2, linear=8, product=5, table=1, drop_add=4, drop=3
    ),
    # per layer LayerNorms input, post_attention, q, k (qk_layernorm) = 4, last one; per layer
    # query_key_value, dense, two mlp, all with bias = 4 linear; head product; partial rope. picks:
    # fused_qkv[..., 0|1|2, :] of _split_heads, 3 per layer. Pow: torch.square of relu2, one per
    # layer. Dropout: behind mlp of each layer into the sum; the attention_dropout module is built
    # but never called, attention takes the rate from the configuration
    ("persimmon", "PersimmonForCausalLM"): Row(
        norm=9, rope=4, attention=2, linear=8, product=1, table=7, drop_add=2
    ),
    # parallel attention and mlp from ONE LayerNorm per layer, last one; per layer
    # q,k,v,dense,fc1,fc2 with bias = 6 linear, head with bias; gelu_new; qk_layernorm false;
    # partial rope. Dropout: behind attention and behind the unit of each layer, both into one sum
    # with the residual; of the embeddings
    ("phi", "PhiForCausalLM"): Row(
        norm=3, rope=4, attention=2, gelu=2, linear=13, table=1, drop_add=4, drop=1
    ),
    # per layer qkv_proj, o, gate_up_proj, down = 4 products, head; silu(gate)*up on the halves of
    # one product (chunk). Dropout: behind attention and behind mlp of each layer into the sum; no
    # embedding dropout in the code (embd_pdrop never read)
    ("phi3", "Phi3ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=9, table=1, drop_add=4
    ),
    # text only is phi3: per layer qkv_proj, o, gate_up_proj, down = 4 products, head;
    # embed_tokens_extend returns inputs_embeds unchanged without pixels/audio; no LoRA in this
    # source. Dropout: behind attention and behind mlp of each text layer into the sum;
    # embed_dropout is built and never called, image and audio dropouts do not run on text
    ("phi4_multimodal", "Phi4MultimodalForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=9, table=1, drop_add=4
    ),
    # as Llama but q,k,v with bias: 3 linear and o,gate,up,down = 4 products per layer, head
    ("qwen2", "Qwen2ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=6, product=9, table=1
    ),
    # 7 products per layer, head; q and k normalised per head: 4 norms per layer, last one
    ("qwen3", "Qwen3ForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=15, table=1),
    # text only runs Qwen3: 7 products and 4 norms (input, post, q, k) per layer, last norm, tied
    # head; audio tower and projector need input_features
    ("qwen3_asr", "Qwen3ASRForConditionalGeneration"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # S = sequence length. norm: pre_ln (block 0 only), ln1 and ln2 per layer, ln_out, all LayerNorm
    # (no GroupNorm in this source). Per layer key,value,receptance,output + key,receptance,value =
    # 7 products, head. gated: sigmoid(receptance)*rwkv and sigmoid(receptance)*value, one each per
    # layer, equal shape. Pow: torch.square(relu(key)), one per layer. Exp
    # (rwkv_linear_attention_cpu): exp(time_decay) once per layer + 4 per step, minus the 2 state
    # updates of the last step, whose result is not read (use_cache False) = 4*S-1 per layer. picks:
    # key[:, t] and value[:, t], 2 per step and layer. attention_mask unused
    ("rwkv", "RwkvForCausalLM"): Row(norm=6, gated=4, product=15, table=25),
    # as Qwen2: attention_bias true gives q,k,v a bias = 3 linear, attention_out_bias false:
    # o,gate,up,down = 4 products per layer, head. Dropout: residual_dropout at the end of attention
    # and of mlp of each layer, directly into the sum
    ("seed_oss", "SeedOssForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=6, product=9, table=1, drop_add=4
    ),
    # as Llama: 7 products per layer, tied head; no_rope_layers is [1, 1] and 1 means rope is used,
    # so both layers have it
    ("smollm3", "SmolLM3ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # as Llama with LayerNorm (weight and bias): 2 per layer (use_parallel_residual false), last
    # one; use_qkv_bias false, qk_layernorm false: 7 products per layer, head; partial rope 0.25 (4
    # of 16). Dropout: behind mlp of each layer into the sum (use_parallel_residual false)
    ("stablelm", "StableLmForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1, drop_add=2
    ),
    # LayerNorm 2 per layer, last one; use_bias: q,k,v,o,c_fc,c_proj = 6 linear per layer; tied head
    # without bias; tanh GELU
    ("starcoder2", "Starcoder2ForCausalLM"): Row(
        norm=5, rope=4, attention=2, gelu=2, linear=12, product=1, table=1, drop_add=4, drop=1
    ),
    # Gemma2 without the post norms: input and pre_feedforward norm (1 + weight) per layer, last
    # one; 7 products per layer, tied head; gelu_tanh(gate)*up; eager attention (no sdpa), layer 0
    # sliding, layer 1 full. Tanh: final_logit_softcapping 30
    ("vaultgemma", "VaultGemmaForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # text only runs Llama: 7 products and 2 norms per layer, last norm, head; audio tower and
    # projector need input_features
    ("voxtral", "VoxtralForConditionalGeneration"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # layer_norm_emb, post-norm 2 per layer, no last norm; q,k,v,out,lin1,lin2 with bias = 6 linear
    # per layer, pred_layer.proj tied with bias; erf gelu; table = token + position (n_langs 1: no
    # language table); not causal, padding mask only; loss without shift
    ("xlm", "XLMWithLMHeadModel"): Row(
        norm=5, attention=2, gelu=2, linear=13, table=1, drop_add=4, drop=1
    ),
    # S = sequence length < 64 (config.mode is inference also in training, so S < chunk_size runs
    # the step-by-step kernel). RMSNorm norm_mlstm, norm_ffn per layer, out_norm. groupnorm:
    # multihead_norm once per layer (hand-written LayerNorm over the head's last axis, weight over
    # all heads after a reshape). linear: igate, fgate per layer. product:
    # q,k,v,ogate,out_proj,up_gate,up,down = 8 per layer, head = 17, plus per step and layer k(x)v,
    # q@C, q@n = 3. gated: sigmoid(ogate)*h_norm and silu(gate)*up per layer. Tanh: soft_cap of
    # igate and fgate (2 per layer) and of the logits. Exp: scaF_act, scaI_act, exp(-m) = 3 per step
    # and layer. picks: fgate, igate, query, key, value at t = 5 per step and layer. attention_mask
    # ignored. The norms over heads are layer normalisations. log-sigmoid is a softplus
    ("xlstm", "xLSTMForCausalLM"): Row(norm=7, gated=4, linear=4, product=53, table=61),
    # MLA: q_a, q_b, kv_a_proj_with_mqa, kv_b, o = 5 products + 3 mlp per layer, tied head; norms
    # input, post, q_a, kv_a = 4 per layer, last one; rope interleaved (even/odd slices) on q_rot
    # and the shared k_rot
    ("youtu", "YoutuForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=17, table=1),
    # is_moe false. Products per layer: q,k,v,o, dt_proj, 3 MLP = 8; head. Norms per layer: input,
    # q, k, post; + last. Exp: torch.exp(A*softplus(dt)) dynamic mask, 1 per layer. Residuals scaled
    # by a vector. Window 2048 > sequence: no top-k of the mask. Dropout: behind attention and unit
    # of each layer into the sum with the scaled residual
    ("doge", "DogeForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=17, table=1, drop_add=4
    ),
}

# What belongs to no pattern; the comment of the row says what it is.
LEFT: dict[tuple[str, str], dict[str, int]] = {
    ("arcee", "ArceeForCausalLM"): {"Pow": 2},
    ("bitnet", "BitNetForCausalLM"): {"Pow": 2},
    ("diffllama", "DiffLlamaForCausalLM"): {"Exp": 4, "ReduceSum": 4},
    ("fuyu", "FuyuForCausalLM"): {"Pow": 2},
    ("gemma2", "Gemma2ForCausalLM"): {"Tanh": 1},
    ("granite_swa", "GraniteSWAForCausalLM"): {"Sigmoid": 2},
    ("jais2", "Jais2ForCausalLM"): {"Pow": 2},
    ("nanochat", "NanoChatForCausalLM"): {"Tanh": 1, "Pow": 2},
    ("nemotron", "NemotronForCausalLM"): {"Pow": 2},
    ("openai-gpt", "OpenAIGPTLMHeadModel"): {"Softmax": 2},
    ("persimmon", "PersimmonForCausalLM"): {"Pow": 2},
    ("rwkv", "RwkvForCausalLM"): {"Pow": 2, "Exp": 46},
    ("vaultgemma", "VaultGemmaForCausalLM"): {"Tanh": 1},
    ("xlstm", "xLSTMForCausalLM"): {"Tanh": 5, "Exp": 36},
    ("doge", "DogeForCausalLM"): {"Exp": 2},
}
