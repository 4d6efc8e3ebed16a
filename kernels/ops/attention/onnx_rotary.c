/* RotaryEmbedding of ONNX (opset 23), a composite: its expansion is Rope.
 *
 * X is [B, heads, S, D], or [B, S, heads * D] with num_heads. cos_cache and sin_cache hold one
 * column per pair, R / 2 of them with R = rotary_embedding_dim (D if that is 0): [positions, R / 2]
 * with position_ids [B, S], else [B, S, R / 2]. Pairs are (i, i + R / 2), or (2i, 2i + 1) with
 * interleaved; elements from R on are copied. Y has the type of X.
 * Source: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html
 */
#include "kernels/contract/op.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { X, COS, SIN, IDS };

typedef struct rotary_sizes_s {
    bool flat, by_id;
    int64_t batch, heads, positions, width, pairs;
} rotary_sizes_t;

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t misfit(const char *what, const gradd_type_t *type) {
    char text[GRADD_TYPE_TEXT];
    return GRADD_FAIL(GRAPH, "%s of type %s does not fit", what, gradd_type_format(type, text));
}

static gradd_status_t read_x(const gradd_type_t *x, gradd_attrs_t attrs, rotary_sizes_t *s) {
    const int64_t heads = gradd_attr_int(attrs, "num_heads", 0);
    s->flat = x->rank == 3;
    if (x->rank != 3 && x->rank != 4) return misfit("X", x);
    if (s->flat && (heads < 1 || x->dims[2] % heads))
        return GRADD_FAIL(GRAPH, "%lld columns are not %lld heads", (long long)x->dims[2],
                          (long long)heads);
    s->batch = x->dims[0];
    s->heads = s->flat ? heads : x->dims[1];
    s->positions = x->dims[s->flat ? 1 : 2];
    s->width = s->flat ? x->dims[2] / heads : x->dims[3];
    return GRADD_OK;
}

/* Of four inputs, absent ones without a type. */
static gradd_status_t describe(const gradd_type_t *in, gradd_attrs_t attrs, rotary_sizes_t *s) {
    const int64_t turned = gradd_attr_int(attrs, "rotary_embedding_dim", 0);
    *s = (rotary_sizes_t){.by_id = in[IDS].dtype != GRADD_DT_NONE};
    GRADD_TRY(read_x(&in[X], attrs, s));
    if (turned < 0 || turned % 2 || turned > s->width || (!turned && s->width % 2))
        return GRADD_FAIL(GRAPH, "rotary_embedding_dim %lld of %lld columns", (long long)turned,
                          (long long)s->width);
    s->pairs = (turned ? turned : s->width) / 2;
    for (int i = COS; i <= SIN; i++) {
        const gradd_type_t *t = &in[i];
        bool fits = t->dtype == in[X].dtype && t->rank == (s->by_id ? 2 : 3) &&
                    t->dims[t->rank - 1] == s->pairs;
        if (fits && !s->by_id) fits = t->dims[0] == s->batch && t->dims[1] == s->positions;
        if (!fits) return misfit(i == COS ? "cos_cache" : "sin_cache", t);
    }
    const gradd_type_t *ids = &in[IDS];
    const bool fits = ids->rank == 2 && ids->dims[0] == s->batch && ids->dims[1] == s->positions;
    return s->by_id && !fits ? misfit("position_ids", ids) : GRADD_OK;
}

static gradd_status_t infer_rotary(gradd_infer_t *c) {
    gradd_type_t in[4] = {{0}};
    rotary_sizes_t s;
    for (int i = 0; i < c->n_in; i++)
        in[i] = c->in[i].type;
    GRADD_TRY(describe(in, c->attrs, &s));
    c->out[0] = in[X];
    return GRADD_OK;
}

/* ---- expansion ------------------------------------------------------------------------------- */

static gradd_status_t expand_rotary(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    gradd_type_t types[4] = {{0}};
    rotary_sizes_t s;
    for (int i = 0; i < x->n_in; i++)
        if (x->in[i] != GRADD_NONE) types[i] = *gradd_val_type(b, x->in[i]);
    GRADD_TRY(describe(types, x->attrs, &s));
    const gradd_attr_t attrs[2] = {
        gradd_make_int("shared", 1),
        gradd_make_int("interleaved", gradd_attr_int(x->attrs, "interleaved", 0))};
    const int64_t heads_behind[4] = {s.batch, s.positions, 1, s.pairs};
    const int64_t heads_before[4] = {s.batch, 1, s.positions, s.pairs};
    const int64_t apart[4] = {s.batch, s.positions, s.heads, s.width};
    gradd_val_t in[3] = {x->in[X]};
    if (s.flat) in[X] = gradd_reshape_to(b, in[X], apart, 4);
    for (int i = COS; i <= SIN; i++) {
        in[i] = s.by_id ? GRADD_EMIT(b, "Gather", x->in[i], x->in[IDS]) : x->in[i];
        in[i] = gradd_reshape_to(b, in[i], s.flat ? heads_behind : heads_before, 4);
    }
    gradd_val_t y = gradd_emit_attrs(b, "Rope", in, 3, attrs, 2);
    x->out[0] = gradd_reshape_to(b, y, types[X].dims, types[X].rank);
    return b->status;
}

/* ---- row ------------------------------------------------------------------------------------- */

GRADD_OPS(
    onnx_rotary,
    GRADD_OP("RotaryEmbedding", "", 23, (3, 4), (1, 1), .flags = GRADD_OP_CHEAP,
             .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_DTB(I64)},
             .attrs = GRADD_ATTR_LIST({"interleaved", GRADD_ATTR_INT, false},
                                      {"num_heads", GRADD_ATTR_INT, false},
                                      {"rotary_embedding_dim", GRADD_ATTR_INT, false}),
             .infer = infer_rotary, .expand = expand_rotary,
             .cases = GRADD_CASES(
                 {.text = "f32[2,3,4,8] f32[2,4,4] f32[2,4,4]"},
                 {.text = "f32[2,3,4,8] f32[7,4] f32[7,4] i64[2,4]:(0,6)"},
                 {.text = "f32[2,3,4,8] f32[7,4] f32[7,4] i64[2,4]:(0,6) | interleaved=1"},
                 {.text = "f32[2,4,24] f32[7,4] f32[7,4] i64[2,4]:(0,6) | num_heads=3"},
                 {.text = "f32[2,4,24] f32[2,4,2] f32[2,4,2] | num_heads=3 rotary_embedding_dim=4"},
                 {.text = "f32[2,3,4,10] f32[2,4,3] f32[2,4,3] | rotary_embedding_dim=6 "
                          "interleaved=1"},
                 {.text = "f32[0,3,4,8] f32[7,4] f32[7,4] i64[0,4]"})));
