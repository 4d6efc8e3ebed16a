"""Operators that the authors of mixtures of experts put in, counted by hand in their source.

Keys are families and classes of tools/families_sizes.py; see test_class_patterns.py.
Their only dropout is of attention weights. The experts run as "batched_mm": two products per layer.
Gathers by the router's choice are in the comments only.
"""

from __future__ import annotations

from helpers.counts.plans import Row

ROWS: dict[tuple[str, str], Row] = {
    # First layer dense, second MoE. 4 norms per layer and those of q and k, last norm. Rope in the
    # layer with a window only. Products: 5 per layer (q, k, v, gate, o), dense 3, router 1, experts
    # 2, shared 3; head. Gated: attention times sigmoid(gate) per layer, dense, experts, shared.
    # Sigmoid: router. ReduceSum: sum of top-k weights, sum over experts
    ("afmoe", "AfmoeForCausalLM"): Row(norm=13, rope=2, attention=2, gated=5, product=20, table=1),
    # Both layers MoE. Products per layer: 4 attention, 1 router, 2 experts, 3 shared = 10; head.
    # Gated per layer: experts 1, shared 1. 2 norms per layer + last. Gathers per layer:
    # gate_up_proj[expert_ids], down_proj[expert_ids]. Softmax: router, over the top-k logits
    # (AriaTextTopKRouter). ReduceSum: sum over the chosen experts (moe.py .sum(dim=1))
    ("aria_text", "AriaTextForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=4, product=21, table=1
    ),
    # MLA: 5 products per layer (q_a,q_b,kv_a,kv_b,o); layer 0 dense MLP 3; layer 1 MoE: router 1,
    # experts 2, shared 3; head. Norms per layer 4 (input, q_a, kv_a, post), plus post_mlp_layernorm
    # on the MoE layer, plus last. Gathers: scores.gather, gate_up, down. Sigmoid: router scores.
    # ReduceSum: group scores topk(2)[0].sum, sum of top-k weights (norm_topk_prob), sum over
    # experts
    ("axk1", "AXK1ForCausalLM"): Row(norm=10, rope=4, attention=2, gated=3, product=20, table=1),
    # Per layer: 5 norms (input, q_a, kv_a, indexer k_norm = LayerNorm, post) + last. Rope per
    # layer: q,k and indexer q,k. Products: attention 5 per layer (q_a, q_gate, kv_a, kv_b, o),
    # indexer 5 per layer (wq_b, wk, weights_proj, q@k^T, weights@scores), gated norms fc1+fc2 x 3
    # (input of both layers, post of the MoE layer) = 6, dense MLP 3, MoE 1+2+3, head 1. Gated: 3
    # gated norms y*sigmoid(mlp(y)), 2 attn_output*sigmoid(gate), MLP 1, experts 1, shared 1.
    # Sigmoid: router scores. ReduceSum: sum of top-k weights, sum over experts (n_group null: no
    # group scores). Picks: attention_mask[:, 0] per layer (on the mask). SiLU between fc1 and fc2
    # counts nothing. Table: attention_mask[:, 0], once for both layers
    ("axk2", "AXK2ForCausalLM"): Row(norm=11, rope=8, attention=2, gated=8, product=36, table=2),
    # 3 layers (dense, MoE, MoE). 6 norms per layer (input, q, k, post_attention, pre_ffn, post_ffn)
    # + last. RoPE only in the 2 sliding layers (full layer is NoPE). Products per layer:
    # q,k,v,o,gate_proj = 5; MLP 3; MoE router 1 + experts 2 (no shared) x 2; head. Gated:
    # attn_output*sigmoid(gate) x 3, MLP 1, experts 2. Tanh: final logit softcap. Sigmoid: router
    # scores x 2. ReduceSum per MoE layer: group scores, sum of top-k weights, sum over experts
    ("beam", "BeamForCausalLM"): Row(norm=19, rope=4, attention=3, gated=6, product=25, table=1),
    # Parallel block: one (hand-written) LayerNorm per layer + last. RoPE only in the sliding layer
    # (force_rope false: both MLPs sparse). Products per layer: 4 attention, router 1, experts 2 =
    # 7; tied head 1. No shared experts. Softmax: router over top-k logits. ReduceSum: sum over
    # experts. Logits * logit_scale only
    ("cohere2_moe", "Cohere2MoeForCausalLM"): Row(
        norm=3, rope=2, attention=2, gated=2, product=15, table=1
    ),
    # MLA: 5 products per layer; dense MLP 3 (layer 0); MoE 1+2+3 (layer 1); head. Norms per layer:
    # input, q_a, kv_a, post; + last. Interleaved rope, q_rot and single-head k_rot. Gathers:
    # scores.gather, gate_up, down. Sigmoid: router scores. ReduceSum: group scores, sum of top-k
    # weights, sum over experts
    ("deepseek_v3", "DeepseekV3ForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=3, product=20, table=1
    ),
    # As deepseek_v3 plus an indexer per layer: k_norm (LayerNorm) 1, rope 2 (half-split), products
    # 5 (wq_b, wk, weights_proj, q@k^T, weights@scores). Norms 5 per layer + last. Products 10 per
    # layer, MLP 3, MoE 6, head 1. Picks: attention_mask[:, 0] per layer. Sigmoid: router.
    # ReduceSum: group scores, top-k weights, experts. Table: attention_mask[:, 0], once for both
    # layers
    ("deepseek_v32", "DeepseekV32ForCausalLM"): Row(
        norm=11, rope=8, attention=2, gated=3, product=30, table=2
    ),
    # 3 layers (HCA, CSA, HCA); eager attention with sinks. Norms per layer 7: 2 hyper-connection
    # input_norm (weightless), input, q_a, q_b (weightless), kv, post; CSA layer +2 (compressor
    # kv_norm, indexer kv_norm); hc_head input_norm, last. HCA kv_norm is not called (rate 128 >
    # sequence). Rope: q, kv, and inverse rotation of attn_output = 3 per layer; CSA layer +3
    # (compressed, indexer compressed, indexer q). Products per layer 15: q_a,q_b,kv,o_a (grouped
    # bmm),o_b; hyper-connection fn x2; comb^T@streams x2; router 1; experts 2; shared 3. HCA
    # compressor kv,gate 2 each (4); CSA compressor kv,gate 2 + indexer
    # kv,gate,q_b,q@k^T,weights_proj 5; hc_head 1; lm_head 1. Gated (with clamps): experts, shared
    # per layer. Table: tokens 1, tid2eid[input_ids] 1 (integer table of the hash router, layer 0).
    # Gathers per layer: scores.gather, gate_up, down. Sigmoid: pre and post of 6 hyper-connections,
    # hc_head (broadcast, not gated). Softmax: comb of 6 hyper-connections, CSA compressor gate,
    # indexer gate. Sqrt: sqrt(softplus) router scores x 3. ReduceSum: Sinkhorn 39 per hyper-
    # connection x 6 = 234, collapse 6, hc_head 1, top-k weights 3, experts 3, CSA compressor 1,
    # indexer compressor 1, indexer scorer 1. Compressed rows beyond the sequence are not used: 4
    # products do not run. The lookup of the hash router is of integers
    ("deepseek_v4", "DeepseekV4ForCausalLM"): Row(
        norm=25, rope=12, attention=3, gated=6, product=54, table=1
    ),
    # Products: attention 4 per layer, dense MLP 3, MoE 1+2+3, head. Norms per layer: input, q, k
    # (per head), post; + last. Sigmoid: router. ReduceSum: group scores, sum over experts
    # (norm_topk_prob false). Gathers: scores.gather, gate_up, down
    ("dots1", "Dots1ForCausalLM"): Row(norm=9, rope=4, attention=2, gated=3, product=18, table=1),
    # Products: attention 4 per layer, dense MLP 3, MoE 1+2+3, tied head 1 (use_bias false). 2 norms
    # per layer + last. Softmax: router over all experts. ReduceSum: sum of top-k weights (then
    # clamp min), sum over experts. Gathers: routing weights, gate_up, down
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=3, product=18, table=1
    ),
    # 3 layers (dense, MoE, MoE). Norms per layer: input, q, k, post; + last. RoPE only in the 2
    # sliding layers. Products: attention 4 per layer = 12, MLP 3, MoE (1+2+3) x 2 = 12, head.
    # Gated: MLP 1, (experts+shared) x 2. Sigmoid: router x 2. ReduceSum per MoE layer: group
    # scores, top-k weights, experts. Gathers per MoE layer 3
    ("exaone_moe", "ExaoneMoeForCausalLM"): Row(
        norm=13, rope=4, attention=3, gated=5, product=28, table=1
    ),
    # Both layers MoE, no shared. Products per layer: 4 attention, router 1, experts 2 = 7; head.
    # Norms per layer: q, k (whole width), post_attention, post_feedforward; + last. Softmax: router
    # over all experts. ReduceSum: sum over experts (norm_topk_prob false)
    ("flex_olmo", "FlexOlmoForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # use_qk_norm false: 2 norms per layer + last. Partial rope (half of the head) on q and k.
    # Products: attention 4 per layer, dense MLP 3, MoE 1+2+3, head. Sigmoid: router. ReduceSum:
    # group scores, top-k weights, experts
    ("glm4_moe", "Glm4MoeForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=3, product=18, table=1
    ),
    # MLA as deepseek_v3: 5 products per layer, MLP 3, MoE 1+2+3, head; norms per layer input, q_a,
    # kv_a, post; + last. Sigmoid: router. ReduceSum: group scores, top-k weights, experts
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=3, product=20, table=1
    ),
    # As deepseek_v32 (indexer in both layers, indexer_types full; its rope interleaved): 5 norms
    # per layer + last; rope 4 per layer; products 10 per layer, MLP 3, MoE 6, head 1. Picks:
    # attention_mask[:, 0] per layer. Sigmoid: router. ReduceSum: group scores, top-k weights,
    # experts. Table: attention_mask[:, 0], once for both layers
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM"): Row(
        norm=11, rope=8, attention=2, gated=3, product=30, table=2
    ),
    # Linear: q,k,v,o with bias and router F.linear with bias = 5 per layer. Products: experts 2 per
    # layer, head 1. Eager attention with sinks (cat of a sink logit, minus max, softmax, drop
    # last). Gathers per layer: gate_up, gate_up_bias, down, down_bias by expert_ids. Gated:
    # gate*sigmoid(1.702*gate) * (up+1), 1 per layer, gate and up are strided slices [..., ::2].
    # Softmax: router over top-k logits. ReduceSum: sum over experts
    ("gpt_oss", "GptOssForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, linear=10, product=5, table=1
    ),
    # Both layers MoE, no shared. Products per layer: 4 attention, router 1, experts 2 = 7; head. 2
    # norms per layer + last. Softmax: router over top-k logits. ReduceSum: sum over experts.
    # Multipliers (embedding, residual, logits) are scalars
    ("granitemoe", "GraniteMoeForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # As granitemoe (shared_intermediate_size 0: no shared MLP; layer_rope_theta nonzero: rope in
    # both). Eager attention (no sdpa): output scaled by sigmoid(logsumexp(scores) - sink),
    # broadcast over head_dim: Sigmoid 1 and logsumexp 1 per layer. Softmax: router over top-k
    # logits. ReduceSum: sum over experts. The log-sum-exp reads the scores beside attention: their
    # product and what is rotated for it are computed twice
    ("granitemoe_swa", "GraniteMoeSWAForCausalLM"): Row(
        norm=5, rope=8, attention=2, gated=2, product=17, table=1
    ),
    # 2 MoE layers, 7 products each (q,k,v,o, router, experts gate_up+down) + head;
    # shared_intermediate_size 0 = no shared MLP; 2 norms per layer + last; gathers =
    # gate_up_proj[ids], down_proj[ids] per layer; Softmax per layer = softmax over the top-k logits
    # (TopKRouter, after topk, so no top-k sum); ReduceSum per layer = sum(dim=1) over the experts'
    # outputs (integrations/moe.py)
    ("granitemoeshared", "GraniteMoeSharedForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # 2 MoE layers, 10 products each (q,k,v,o, gate.wg, experts 2, shared_mlp 3) + head; 4 norms per
    # layer (query/key_layernorm per head, applied AFTER rope) + last; gated per layer: experts +
    # shared_mlp; gathers = 2 expert weights per layer; Softmax = router's, ReduceSum per layer =
    # routing_weights.sum and sum over the experts' outputs
    ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=4, product=21, table=1
    ),
    # layer 0 dense: 7 products, 1 gated; layer 1 MoE: 10 products (4 + router 1 + experts 2 +
    # shared 3), 2 gated; + head; 4 norms per layer (q_norm, k_norm per head before rope) + last;
    # gathers = 2 expert weights + routing_weights.gather(1, top_k_index); Sigmoid = router's
    # scores; ReduceSum = top_k_weights.sum and sum over the experts' outputs
    ("hy_v3", "HYV3ForCausalLM"): Row(norm=9, rope=4, attention=2, gated=3, product=18, table=1),
    # 3 MLA layers (0 dense, 1-2 MoE; indexer in 0 and 1, layer 2 shares its top-k); eager attention
    # with a sink column inside the softmax, max subtracted by hand. Norms: 3x4 (input,
    # post_attention, q_a, kv_a) + 2 indexer LayerNorms + 7 UnweightedRMSNorm (attn_hc, ffn_hc per
    # layer, hc_head) + last. Rope: 2 per attention + 2 per indexer. Gated:
    # sigmoid(gate)*attn_output 3, dense 1, experts 2 (silu(clamped gate)*clamped up), shared 2.
    # Products: attention 3x6 (q_a,q_b,kv_a,kv_b,gate,o), indexer 2x5 (wq_b, wk, weights_proj,
    # q@k^T, weights@scores), hyper-connections 6x1 (fn) + hc_head 1, dense 3, MoE 2x6 (router,
    # experts 2, shared 3), head 1. Gathers per MoE layer: 2 expert weights + scores.gather. Picks:
    # scale.unbind(0) 2 per HyperConnection = 12, attention_mask[:,0] for the indexer 2. Sigmoid:
    # pre and post of 6 HyperConnections 12 + hc_head 1 + routers 2. ReduceSum: stream sum of 6 HC +
    # head = 7; per MoE layer group_scores topk(2).sum, topk_weights.sum, experts' sum = 6. Seven of
    # the norms are the factor rsqrt(mean(x^2) + eps) alone, which multiplies a product of x: no
    # RMSNorm, but Pow, ReduceMean, Sqrt, Reciprocal. Table: attention_mask[:, 0], once for both
    # layers
    ("hy_v4", "HYV4ForCausalLM"): Row(norm=15, rope=10, attention=3, gated=8, product=51, table=2),
    # 2 MoE layers, 10 products each (q,k,v,o, router, experts 2, shared 3) + head; 6 norms per
    # layer (q,k, input, post_attention, post_self_attn, post_mlp) + last; RoPE only in the sliding
    # layer 0 (full layer 1 is NoPE: 'if sliding_window is None or is_sliding'); gathers per layer =
    # 2 expert weights + router_logits.gather; Sigmoid = of the gathered top-k logits; ReduceSum =
    # sum over the experts' outputs (norm_topk_prob false: no top-k sum)
    ("kolibri1", "Kolibri1ForCausalLM"): Row(
        norm=13, rope=2, attention=2, gated=4, product=21, table=1
    ),
    # 5 products per attention (q,k,v,o and g_proj per head), layer 0 dense 3, layer 1 MoE 6
    # (router, experts 2, shared 3), head; 4 norms per layer (q,k per head) + last; partial RoPE
    # (half of head_dim); attention gate = softplus(g_proj) broadcast over head_dim: not gated,
    # counts nothing; gathers = 2 expert weights + routing_scores.gather; Sigmoid = router's (soft
    # cap 0 = no Tanh); ReduceSum = routing_weights.sum, experts' sum
    ("laguna", "LagunaForCausalLM"): Row(norm=9, rope=4, attention=2, gated=3, product=20, table=1),
    # as Qwen3-MoE: 7 products per layer (q,k,v,o, router, experts 2) + head; q,k normalised per
    # head: 4 norms per layer + last; both layers full attention, sparse; Softmax = router's;
    # ReduceSum per layer = top-k sum (norm_topk_prob true) and experts' sum
    ("mellum", "MellumForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=15, table=1),
    # 3 layers: 0 dense (7 products), 1 and 2 MoE without shared experts (7 each: q,k,v,o, router,
    # experts 2), head; 2 norms per layer + last, no q/k norms; eager attention (no sdpa), max
    # subtracted by hand, layer 1 (sliding) with a sink column in the softmax; values scaled by
    # 0.707; partial RoPE (6 of 16); gathers per MoE layer = 2 expert weights + scores.gather;
    # Sigmoid = routers'; ReduceSum per MoE layer = group_scores topk(2).sum, topk_weights.sum,
    # experts' sum
    ("mimo_v2_flash", "MiMoV2FlashForCausalLM"): Row(
        norm=7, rope=6, attention=3, gated=3, product=22, table=1
    ),
    # layer 0 softmax attention with RoPE (4 products), layer 1 Lightning (linear) attention: no
    # RoPE, no softmax; qkv_proj, output_gate, out_proj = 3 products, its own norm over all heads,
    # sigmoid(output_gate)*attn_output = 1 gated, silu on qkv counts nothing; 4 matmuls per block of
    # 8 positions (Q@K^T, (.)@V, Q@inter, K^T@V); per layer router 1 + experts 2; head 1: product =
    # 14 + 4n, n = ceil(S/8) blocks, written for n = 2 (9..16 positions). Norms 2 per layer (post-
    # norm-like residual) + lightning 1 + last. Softmax = routers'; ReduceSum per layer = top-k sum,
    # experts' sum; Exp = block_decay exp(-slope_rate*block), n of them, of a buffer only. The state
    # after the last block is not used: 1 product, 1 Exp do not run
    ("minimax", "MiniMaxForCausalLM"): Row(
        norm=6, rope=2, attention=1, gated=3, product=21, table=1
    ),
    # 7 products per layer (q,k,v,o, router, experts 2) + head; q_norm/k_norm over the whole
    # projection before the split in heads: 4 norms per layer + last; RoPE in the partial form but
    # over the whole head (factor 1, empty pass-through part concatenated); gathers per layer = 2
    # expert weights + routing_weights.gather; Sigmoid = routers'; ReduceSum per layer = top-k sum,
    # experts' sum
    ("minimax_m2", "MiniMaxM2ForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # 2 full-attention MoE layers (no indexer), 9 products each (q,k,v,o, router, experts 2, shared
    # gate_up+down 2) + head; q,k normalised per head (Gemma-style 1+weight): 4 norms per layer +
    # last; RoPE over the whole head (no partial_rotary_factor in rope_parameters); gated per layer:
    # experts and shared, (up+1) * gate*sigmoid(1.702*gate), both clamped; gathers per layer = 2
    # expert weights + routing_weights.gather; Sigmoid = routers'; ReduceSum per layer = top-k sum,
    # experts' sum
    ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=4, product=19, table=1
    ),
    # MLA: 5 products per attention (q_a,q_b,kv_a,kv_b,o), layer 0 dense 3, layer 1 MoE 6 (router,
    # experts 2, shared 3), score 1; 4 norms per layer (input, post_attention, q_a, kv_a) + last;
    # interleaved RoPE (even/odd slices) on q_rot and the single-head k_rot; queries times
    # 1+beta*log(1+floor(pos/8192)) (Log of constant positions, not counted); gathers = 2 expert
    # weights + scores.gather + logits[arange, last_non_pad_token] (index from input_ids); Softmax =
    # router's; ReduceSum = group_scores topk(2).sum, topk_weights.sum, experts' sum
    ("mistral4", "Mistral4ForSequenceClassification"): Row(
        norm=9, rope=4, attention=2, gated=3, product=20, table=1
    ),
    # as Llama with MoE: 7 products per layer (q,k,v,o, router, experts 2) + head; 2 norms per layer
    # + last; gathers = 2 expert weights per layer; Softmax = router's; ReduceSum per layer = top-k
    # sum, experts' sum
    ("mixtral", "MixtralForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # 7 products per layer (q,k,v,o, router, experts 2) + head; q_norm/k_norm over the whole
    # projection before the split in heads: 4 norms per layer + last; clip_qkv null; Softmax =
    # router's; ReduceSum per layer = experts' sum only (norm_topk_prob false)
    ("olmoe", "OlmoeForCausalLM"): Row(norm=9, rope=4, attention=2, gated=2, product=15, table=1),
    # q,k,v with bias: 3 linear per layer; 8 products per layer (o, router, experts 2, shared 3,
    # shared_expert_gate 1) + head; 2 norms per layer + last; gated per layer: experts + shared
    # expert; Softmax = router's; Sigmoid = sigmoid(shared_expert_gate) of last size 1, broadcast;
    # ReduceSum per layer = experts' sum only (norm_topk_prob false)
    ("qwen2_moe", "Qwen2MoeForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=4, linear=6, product=17, table=1
    ),
    # 7 products per layer (q,k,v,o, router, experts 2) + head, no shared expert; q,k normalised per
    # head: 4 norms per layer + last; Softmax = router's; ReduceSum per layer = experts' sum only
    # (norm_topk_prob false)
    ("qwen3_moe", "Qwen3MoeForCausalLM"): Row(
        norm=9, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # 2 MoE layers, 10 products each (q,k,v,o, router, experts 2, shared 3) + head; 2 norms per
    # layer + last, no q/k norms; gated per layer: experts + shared; gathers per layer = 2 expert
    # weights + scores.gather; Sigmoid = routers'; ReduceSum per layer = group_scores topk(2).sum,
    # topk_weights.sum, experts' sum
    ("solar_open", "SolarOpenForCausalLM"): Row(
        norm=5, rope=4, attention=2, gated=4, product=21, table=1
    ),
}

# What belongs to no pattern; the comment of the row says what it is.
LEFT: dict[tuple[str, str], dict[str, int]] = {
    ("afmoe", "AfmoeForCausalLM"): {"Sigmoid": 1, "ReduceSum": 2},
    ("aria_text", "AriaTextForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("axk1", "AXK1ForCausalLM"): {"Sigmoid": 1, "ReduceSum": 3},
    ("axk2", "AXK2ForCausalLM"): {"Sigmoid": 1, "ReduceSum": 2},
    ("beam", "BeamForCausalLM"): {"Tanh": 1, "Sigmoid": 2, "ReduceSum": 6},
    ("cohere2_moe", "Cohere2MoeForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("deepseek_v3", "DeepseekV3ForCausalLM"): {"Sigmoid": 1, "ReduceSum": 3},
    ("deepseek_v32", "DeepseekV32ForCausalLM"): {"Sigmoid": 1, "ReduceSum": 3},
    ("deepseek_v4", "DeepseekV4ForCausalLM"): {
        "Sigmoid": 13,
        "Softmax": 8,
        "Sqrt": 3,
        "ReduceSum": 250,
    },
    ("dots1", "Dots1ForCausalLM"): {"Sigmoid": 1, "ReduceSum": 2},
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"): {"Softmax": 1, "ReduceSum": 2},
    ("exaone_moe", "ExaoneMoeForCausalLM"): {"Sigmoid": 2, "ReduceSum": 6},
    ("flex_olmo", "FlexOlmoForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("glm4_moe", "Glm4MoeForCausalLM"): {"Sigmoid": 1, "ReduceSum": 3},
    ("glm4_moe_lite", "Glm4MoeLiteForCausalLM"): {"Sigmoid": 1, "ReduceSum": 3},
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM"): {"Sigmoid": 1, "ReduceSum": 3},
    ("gpt_oss", "GptOssForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("granitemoe", "GraniteMoeForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("granitemoe_swa", "GraniteMoeSWAForCausalLM"): {"Softmax": 2, "ReduceSum": 2, "Sigmoid": 2},
    ("granitemoeshared", "GraniteMoeSharedForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM"): {"Softmax": 2, "ReduceSum": 4},
    ("hy_v3", "HYV3ForCausalLM"): {"Sigmoid": 1, "ReduceSum": 2},
    ("hy_v4", "HYV4ForCausalLM"): {
        "Pow": 7,
        "ReduceMean": 7,
        "Sqrt": 7,
        "Reciprocal": 7,
        "Sigmoid": 15,
        "ReduceSum": 13,
    },
    ("kolibri1", "Kolibri1ForCausalLM"): {"Sigmoid": 2, "ReduceSum": 2},
    ("laguna", "LagunaForCausalLM"): {"Sigmoid": 1, "ReduceSum": 2},
    ("mellum", "MellumForCausalLM"): {"Softmax": 2, "ReduceSum": 4},
    ("mimo_v2_flash", "MiMoV2FlashForCausalLM"): {"Sigmoid": 2, "ReduceSum": 6},
    ("minimax", "MiniMaxForCausalLM"): {"Softmax": 2, "ReduceSum": 4, "Exp": 1},
    ("minimax_m2", "MiniMaxM2ForCausalLM"): {"Sigmoid": 2, "ReduceSum": 4},
    ("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"): {"Sigmoid": 2, "ReduceSum": 4},
    ("mistral4", "Mistral4ForSequenceClassification"): {"Softmax": 1, "ReduceSum": 3},
    ("mixtral", "MixtralForCausalLM"): {"Softmax": 2, "ReduceSum": 4},
    ("olmoe", "OlmoeForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("qwen2_moe", "Qwen2MoeForCausalLM"): {"Softmax": 2, "Sigmoid": 2, "ReduceSum": 2},
    ("qwen3_moe", "Qwen3MoeForCausalLM"): {"Softmax": 2, "ReduceSum": 2},
    ("solar_open", "SolarOpenForCausalLM"): {"Sigmoid": 2, "ReduceSum": 6},
}
