"""Operators that the authors of encoders (BERT and its kin) put in, counted by hand.

Keys are families and classes of tools/families_sizes.py; see test_class_patterns.py.
Dropout: behind attention and behind the unit of each layer into the sum, and of the embeddings,
unless the comment says otherwise.
"""

from __future__ import annotations

from helpers.counts.plans import Row

ROWS: dict[tuple[str, str], Row] = {
    # BERT with one layer applied twice: norm = embedding + 2 per layer + head; linear =
    # embedding_hidden_mapping_in + 6 per layer + head dense and decoder (decoder.bias); gelu_new
    # per layer + head; word+type+position one sum; no pooler. Dropout: output_dropout behind
    # attention into the sum, once per call (shared layer called twice); embeddings;
    # AlbertLayer.dropout is built, never called
    ("albert", "AlbertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=15, table=1, drop_add=2, drop=1
    ),
    # norm = embedding + 2 per layer + head transform; linear = 6 per layer (q,k,v,o,2 FFN) + head
    # dense + decoder; gelu per layer + head; word+type+position one sum; no pooler
    ("bert", "BertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as BertForMaskedLM, causal mask, no cross-attention
    ("bert", "BertLMHeadModel"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # BERT without head transform and without token types: norm = embedding + 2 per layer; linear =
    # 6 per layer + decoder; word+position one sum
    ("bert-generation", "BertGenerationDecoder"): Row(
        norm=5, attention=2, gelu=2, linear=13, table=1, drop_add=4, drop=1
    ),
    # RoBERTa: as BERT, head = dense, gelu, layer_norm, decoder; position ids from cumsum(input_ids
    # != pad); word+type+position one sum
    ("camembert", "CamembertForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as CamembertForCausalLM, bidirectional mask
    ("camembert", "CamembertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # RoBERTa, same as camembert
    ("data2vec-text", "Data2VecTextForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # RoBERTa, same as camembert
    ("data2vec-text", "Data2VecTextForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # relative_attention false; per layer in_proj (no bias, q/k/v in one) = 1 product, q_bias and
    # v_bias are added only after the chunk into q,k,v; linear = 3 per layer (out, 2 FFN) + head
    # dense + decoder; norm = hand-written DebertaLayerNorm (embedding + 2 per layer) + nn.LayerNorm
    # of the legacy head; attention written out (bool mask, masked_fill); embedding times
    # attention_mask
    ("deberta", "DebertaForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=8, product=2, table=1, drop_add=4, drop=1
    ),
    # relative_attention false, no conv; as BERT (6 linears per layer + head dense + decoder; norm
    # embedding + 2 per layer + head); attention written out with bmm on (batch*heads), key divided
    # by the scale, softmax on the 4-D view with masked_fill
    ("deberta-v2", "DebertaV2ForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # norm = embedding + 2 per layer + vocab_layer_norm; linear = 6 per layer + vocab_transform +
    # vocab_projector; gelu per layer + head; word+position one sum, no token types. Dropout: behind
    # lin2 of each unit into the sum (none behind attention); embeddings
    ("distilbert", "DistilBertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=2, drop=1
    ),
    # as BERT: head = generator_predictions (dense, gelu, LayerNorm) + generator_lm_head with bias;
    # no embeddings_project as embedding_size = hidden_size
    ("electra", "ElectraForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as ElectraForCausalLM, bidirectional
    ("electra", "ElectraForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as BertLMHeadModel; use_task_id false, hence no task embedding
    ("ernie", "ErnieForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as BertForMaskedLM; use_task_id false
    ("ernie", "ErnieForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # pre-norm: 2 per layer + emb_layer_norm_after + head; no embedding norm (emb_layer_norm_before
    # null); position_embedding_type absolute = no RoPE; hand-written erf gelu per layer + head;
    # linear = 6 per layer + head dense + decoder (bias=False but + self.bias); word+position one
    # sum (position ids by cumsum), times attention_mask; contact_head not called. Dropout: behind
    # attention and behind the unit of each layer into the sum; the embeddings dropout is built, its
    # call is commented out; token_dropout is a bool (false)
    ("esm", "EsmForMaskedLM"): Row(norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4),
    # Llama-like with LayerNorm: per layer 4 norms (input, q_norm and k_norm over the full width
    # before the head split, post_attention), last one, head's one; 7 products per layer;
    # silu(gate)*up; residual branches divided by a constant; head = dense with bias, gelu,
    # layer_norm, decoder with bias
    ("esmc", "EsmcForMaskedLM"): Row(
        norm=10, rope=4, attention=2, gated=2, gelu=1, linear=2, product=14, table=1
    ),
    # Llama (RMSNorm, GQA 4/2) with a bidirectional mask: 7 products per layer + untied head without
    # bias
    ("eurobert", "EuroBertForMaskedLM"): Row(
        norm=5, rope=4, attention=2, gated=2, product=15, table=1
    ),
    # post-norm BERT with RoPE and gelu(gate)*up: linear = q,k,v,o,down per layer + head dense and
    # decoder; product = gate and up per layer (no bias); norm = embedding + 2 per layer + head;
    # gelu alone only in the head; word+type one sum, no positions. Dropout: behind attention and
    # behind the unit of each layer into the sum; embeddings, and act*up in front of down_proj in
    # each unit (2)
    ("gte", "GteForMaskedLM"): Row(
        norm=6,
        rope=4,
        attention=2,
        gated=2,
        gelu=1,
        linear=12,
        product=4,
        table=1,
        drop_add=4,
        drop=3,
    ),
    # post-norm RoBERTa with RoPE: linear = 6 per layer + head dense and decoder; norm = embedding +
    # 2 per layer + head; gelu per layer + head; word+type one sum, no positions; no pooler
    ("jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM"): Row(
        norm=6, rope=4, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as BERT; embedding is ONE sum of 9 lookups (word, position, 4 box corners, h, w, type; bbox
    # None = zeros made inside); linear = 6 per layer + head dense and decoder + pooler; Tanh and
    # pick = LayoutLMPooler.forward (hidden_states[:, 0], tanh), which LayoutLMModel.forward always
    # calls. The pooler is computed and not used: it does not run
    ("layoutlm", "LayoutLMForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # RoBERTa + layout, no visual part: norm = embedding + 2 per layer; linear = 6 per layer +
    # classifier dense and out_proj; Tanh = LayoutLMv3ClassificationHead.forward; pick =
    # outputs[0][:, 0, :]; word+type+position (cumsum ids) one sum, to which the cat of 6 box
    # lookups is added; eager CogView attention: query/sqrt(d), + (rel_pos+rel_2d_pos)/sqrt(d), +
    # mask, /32, minus amax, *32, softmax, times V; rel_pos*_bias are indexed (weight.t()[bucket],
    # under no_grad), never multiplied = 0 products. Table: 6 lookups of boxes, which are
    # concatenated, and the last pick besides. Dropout: behind attention and behind the unit of each
    # layer into the sum; text embeddings, head twice (before dense and behind tanh;
    # classifier_dropout None -> hidden_dropout_prob)
    ("layoutlmv3", "LayoutLMv3ForSequenceClassification"): Row(
        norm=5, attention=2, gelu=2, linear=14, table=8, drop_add=4, drop=3
    ),
    # two streams: per layer 2 attentions (text, layout; both softmaxes over the sum of both
    # streams' scaled QK^T + mask), 4 norms, 2 gelus, 12 linears (q,k,v,out,2 FFN of each stream); +
    # norms of text and layout embeddings; + box_linear_embeddings + classifier dense and out_proj;
    # tables: word+type+position sum, and box_position_embeddings(position_ids) added to a linear's
    # result; Tanh and pick = LiltClassificationHead (features[:, 0, :]). Table: word, position and
    # type in one sum, 7 of layout (6 boxes, concatenated, and positions), the pick. The last layer
    # has no use for its layout half: it does not run. The product of one half is the bias of the
    # other: 2 products in the first layer, 1 in the last. Dropout: text: attention+unit of both
    # layers (4), layout: attention+unit of the first layer only (2; those of the last layer do not
    # reach the loss); text embeddings, layout embeddings, head twice
    ("lilt", "LiltForSequenceClassification"): Row(
        norm=8, attention=3, gelu=3, linear=23, product=3, table=9, drop_add=6, drop=4
    ),
    # no entity_ids: entity embeddings, w2e/e2w/e2e queries and entity_predictions do not run;
    # RoBERTa with written-out attention; linear = 6 per layer + head dense and decoder + pooler;
    # norm = embedding + 2 per layer + head; word+position+type one sum; Tanh and pick =
    # LukePooler.forward (hidden_states[:, 0]), called by LukeModel.forward. The pooler is computed
    # and not used: it does not run
    ("luke", "LukeForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # norm = embedding + 2 per layer; linear = 6 per layer + xpath_unitseq2_inner and inner2emb
    # (xpath_unitseq2_embeddings is not called) + pooler + classifier; word+position+type one sum
    # with the xpath MLP's result added (its ReLU counts nothing); Tanh and pick = MarkupLMPooler
    # (hidden_states[:, 0]), used by the classifier. Table: 100 lookups of tags and subscripts
    # besides, which are concatenated, and the pick. Dropout: behind attention and behind the unit
    # of each layer into the sum; xpath embeddings behind relu (also without xpath inputs, on
    # padding ids), embeddings, in front of classifier (None -> hidden_dropout_prob)
    ("markuplm", "MarkupLMForSequenceClassification"): Row(
        norm=5, attention=2, gelu=2, linear=16, table=102, drop_add=4, drop=3
    ),
    # pre-norm BERT: no embedding norm, 2 per layer + encoder.ln + head transform; written-out
    # attention; linear = 6 per layer + head dense and decoder; word+type+position one sum; no
    # pooler
    ("megatron-bert", "MegatronBertForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # as MegatronBertForCausalLM, bidirectional
    ("megatron-bert", "MegatronBertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # NoNorm is only x*weight+bias: no norm; the head's LayerNorm is the only one. 15 linears per
    # layer (bottleneck input+attention 2, q k v 3, attn out 1, 3 ffn x 2 = 6, intermediate 1,
    # output 1, output bottleneck 1) = 30, + embedding_transformation (on the trigram concat) + head
    # dense + head matmul with += decoder.bias. Act is ReLU. SDPA. No pooler. Tokens go through a
    # linear layer before positions and types are added: 2 tables. Dropout: only OutputBottleneck of
    # each layer into the sum (use_bottleneck: none behind attention, none in FFNs); embeddings
    ("mobilebert", "MobileBertForMaskedLM"): Row(
        norm=1, attention=2, linear=33, table=2, drop_add=2, drop=1
    ),
    # norm: embeddings 1, layer 0 only mlp_norm (attn_norm is Identity), layer 1 two, final 1, head
    # 1. Per layer 4 products: fused Wqkv, Wo, Wi (chunked in input and gate, gelu(input)*gate), Wo.
    # Head: dense without bias, gelu, norm; decoder with bias. RoPE written in float32
    # (q.float()*cos ...). sparse_prediction false. Dropout: out_drop behind attention (rate
    # attention_dropout > 0, else Identity) into the sum; embeddings + inside MLP of each layer
    # before Wo; classifier_dropout unused here
    ("modernbert", "ModernBertForMaskedLM"): Row(
        norm=6,
        rope=4,
        attention=2,
        gated=2,
        gelu=1,
        linear=1,
        product=9,
        table=1,
        drop_add=2,
        drop=3,
    ),
    # Vision and connector do not run without pixel_values; text model is ModernBert called with
    # inputs_embeds (lookup done outside, norm still applied): same counts as modernbert. Head:
    # projection_head.dense no bias, gelu, norm; lm_head with bias. Dropout: text model =
    # ModernBert: out_drop into the sum; embeddings (on inputs_embeds) + inside MLP of each layer;
    # vision not run, classifier_dropout unused
    ("modernvbert", "ModernVBertForMaskedLM"): Row(
        norm=6,
        rope=4,
        attention=2,
        gated=2,
        gelu=1,
        linear=1,
        product=9,
        table=1,
        drop_add=2,
        drop=3,
    ),
    # 6 linears per layer (q k v o, intermediate, output), head dense + decoder; norms: embeddings
    # 1, 2 per layer, head 1. Eager attention only, with a relative position bias added to the
    # scores (computed once, shared by both layers). Embedding = word + position (positions from
    # input_ids by cumsum). One table of relative positions
    ("mpnet", "MPNetForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=2, drop_add=4, drop=1
    ),
    # Weightless RMSNorms written with torch.pow(mean+eps, -0.5): embedding_norm 1, 4 per layer
    # (input, q, k, post_attention), final 1. RoPE full width in layer 0, first quarter (partial
    # 0.25) in layer 1. gated = attn_output * sigmoid(gate_proj(x)), equal shape, 1 per layer. 7
    # products per layer (q k v gate o up down) + embedding_projection + hidden @
    # unembedding_projection.weight + lm_head. Tables: word lookup (then projected) and
    # value_embeddings lookup (added to v in layer 1 only). picks: lambdas[0], lambdas[1] per layer.
    # Leftovers per layer: Pow 1 relu^2 (ACT2FN relu2 = torch.square(relu)); F.normalize(value) =
    # Pow 1 + ReduceSum 1 + Sqrt 1; ReduceSum 1 (attn_output*value_unit).sum(-1); Tanh 1
    # torch.tanh(alpha). Table: the picks, and cos and sin of two axes for two kinds of layers (8).
    # F.normalize is one ReduceL2
    ("neomme", "NeoMMEForMaskedLM"): Row(
        norm=10, rope=4, attention=2, gated=2, product=17, table=14
    ),
    # Post-norm LayerNorms: embeddings 1, 2 per layer, head 1. 7 products per layer without bias (q
    # k v o gate up down), head dense + decoder with bias; head activation is SiLU (counts nothing).
    # Table = word + type (no position table)
    ("nomic_bert", "NomicBertForMaskedLM"): Row(
        norm=6, rope=4, attention=2, gated=2, linear=2, product=14, table=1, drop_add=4, drop=1
    ),
    # BERT (6 linears per layer, 2 norms per layer) + embedding_hidden_mapping_in linear (256 to 64)
    # before the layers; head dense 64 to 1664, gelu, norm, untied decoder with bias. Embedding norm
    # is on width 256. Eager attention only
    ("rembert", "RemBertForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=15, table=1, drop_add=4, drop=1
    ),
    # As RemBertForCausalLM, with a bidirectional mask
    ("rembert", "RemBertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=15, table=1, drop_add=4, drop=1
    ),
    # BERT: 6 linears, 2 norms, 1 gelu per layer; embeddings norm; head dense, gelu, layer_norm,
    # decoder with bias. Embedding = word + type + position in one sum; position ids from input_ids
    # by cumsum. SDPA, causal
    ("roberta", "RobertaForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # As RobertaForCausalLM, bidirectional mask
    ("roberta", "RobertaForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # Pre-norm RoBERTa: embeddings norm 1, per layer attention.LayerNorm + intermediate.LayerNorm
    # (outputs have none), a final LayerNorm 1, head layer_norm 1. 6 linears per layer + head dense
    # + decoder
    ("roberta-prelayernorm", "RobertaPreLayerNormForCausalLM"): Row(
        norm=7, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # As RobertaPreLayerNormForCausalLM, bidirectional mask
    ("roberta-prelayernorm", "RobertaPreLayerNormForMaskedLM"): Row(
        norm=7, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # BERT + map_inputs_layer (linear on concat of word 64, shape 512, pronunciation 768 lookups). 6
    # linears per layer, head dense + decoder. Word, shape and pronunciation are concatenated and
    # mapped before positions and types are added: 4 tables
    ("roc_bert", "RoCBertForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=15, table=4, drop_add=4, drop=1
    ),
    # As RoCBertForCausalLM, bidirectional mask. Word, shape and pronunciation are concatenated and
    # mapped before positions and types are added: 4 tables
    ("roc_bert", "RoCBertForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=15, table=4, drop_add=4, drop=1
    ),
    # BERT with interleaved RoPE on q and k (rotary_value false), eager attention only. Embedding =
    # word + type; sin/cos come from a frozen sinusoidal table by arange under no_grad (not
    # counted). embedding_size = hidden_size: no embeddings_project. One table of sines
    ("roformer", "RoFormerForCausalLM"): Row(
        norm=6, rope=4, attention=2, gelu=3, linear=14, table=2, drop_add=4, drop=1
    ),
    # As RoFormerForCausalLM, bidirectional mask. One table of sines
    ("roformer", "RoFormerForMaskedLM"): Row(
        norm=6, rope=4, attention=2, gelu=3, linear=14, table=2, drop_add=4, drop=1
    ),
    # BERT, eager attention; one sum of 9 lookups (word, position, 7 type tables). token_type_ids
    # are zeros made inside, so the position ids (segment reduce_min + gather by cell) are constants
    # too
    ("tapas", "TapasForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # Llama layer (7 products, 2 RMSNorms, silu gate), bidirectional, GQA; final norm. Head:
    # linear1, gelu tanh, linear2, gelu tanh, decoder, none with bias and no norm; outer decoder is
    # Identity
    ("ultrabert", "UltrabertForMaskedLM"): Row(
        norm=5, rope=4, attention=2, gated=2, gelu=2, product=17, table=1
    ),
    # Vision and connector (with its RMSNorm) do not run; text model is Ultrabert by inputs_embeds:
    # same counts; head linear1, gelu tanh, linear2, gelu tanh, lm_head without bias
    ("ultravbert", "UltraVBertForMaskedLM"): Row(
        norm=5, rope=4, attention=2, gated=2, gelu=2, product=17, table=1
    ),
    # Source is roberta's line by line
    ("xlm-roberta", "XLMRobertaForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # Source is roberta's line by line
    ("xlm-roberta", "XLMRobertaForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=4, drop=1
    ),
    # Pre-norm RoBERTa WITHOUT embeddings norm: per layer self_attn_layer_norm + LayerNorm,
    # encoder's final LayerNorm 1, head layer_norm 1. 6 linears per layer + head dense + decoder.
    # Dropout: behind attention of each layer into the sum (none behind the unit); embeddings (no
    # norm)
    ("xlm-roberta-xl", "XLMRobertaXLForCausalLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=2, drop=1
    ),
    # As XLMRobertaXLForCausalLM, bidirectional mask. Dropout: behind attention of each layer into
    # the sum (none behind the unit); embeddings (no norm)
    ("xlm-roberta-xl", "XLMRobertaXLForMaskedLM"): Row(
        norm=6, attention=2, gelu=3, linear=14, table=1, drop_add=2, drop=1
    ),
}

# What belongs to no pattern; the comment of the row says what it is.
LEFT: dict[tuple[str, str], dict[str, int]] = {
    ("layoutlmv3", "LayoutLMv3ForSequenceClassification"): {"Tanh": 1},
    ("lilt", "LiltForSequenceClassification"): {"Tanh": 1},
    ("markuplm", "MarkupLMForSequenceClassification"): {"Tanh": 1},
    ("neomme", "NeoMMEForMaskedLM"): {"Tanh": 2, "ReduceSum": 2, "Pow": 2},
}
