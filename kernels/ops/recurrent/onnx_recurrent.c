/* LSTM, GRU and RNN of ONNX, composites: for each direction a product over all steps and
 * Recurrence, whose gates stand in torch's order.
 *
 * X [T, B, I]; of D directions W [D, G H, I], R [D, G H, H], B [D, 2 G H], and perhaps the first
 * states and cells [D, B, H]. Y [T, D, B, H], Y_h and Y_c [D, B, H]. Gates of ONNX: i, o, f, c and
 * z, r, h. Refused: lengths of sequences, peepholes, other functions than the usual ones (of an RNN
 * tanh), clip, layout=1, and a GRU that multiplies by the reset gate first (ONNX's default).
 * Source: https://onnx.ai/onnx/operators/onnx__LSTM.html
 */
#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/describe/recurrence.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { IN_SEQUENCES, IN_WEIGHT, IN_MATRIX, IN_BOTH, IN_LENGTHS, IN_FIRST, IN_MEMORY, IN_PEEPHOLES };

typedef struct onnx_layer_s {
    const char *kind;
    int gates, order[4]; /* ONNX's places of torch's gates */
    int64_t ways, steps, batch, inputs, cells;
    gradd_dtype_t dtype;
} onnx_layer_t;

static onnx_layer_t kind_of(const gradd_op_t *op) {
    const onnx_layer_t lstm = {
        .kind = "lstm", .gates = 4, .order = {0, 2, 3, 1}
    };
    const onnx_layer_t gru = {
        .kind = "gru", .gates = 3, .order = {1, 0, 2}
    };
    const onnx_layer_t plain = {.kind = "tanh", .gates = 1};
    return !strcmp(op->name, "LSTM") ? lstm : !strcmp(op->name, "GRU") ? gru : plain;
}

/* ---- shape rule ------------------------------------------------------------------------------ */

static gradd_status_t check(const gradd_type_t *t, const char *name, const int64_t *dims,
                            int rank) {
    char is[GRADD_TYPE_TEXT], wanted[GRADD_TYPE_TEXT];
    gradd_type_t expected = {.dtype = t->dtype, .rank = rank};
    memcpy(expected.dims, dims, sizeof *dims * (size_t)rank);
    if (t->dtype == GRADD_DT_NONE || gradd_type_equal(t, &expected)) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "%s is %s, expected %s", name, gradd_type_format(t, is),
                      gradd_type_format(&expected, wanted));
}

static gradd_status_t refuse(const gradd_type_t *in, gradd_attrs_t attrs, const onnx_layer_t *k) {
    const bool gru = !strcmp(k->kind, "gru");
    if (in[IN_LENGTHS].dtype) return GRADD_FAIL(UNSUPPORTED, "sequence_lens is not supported");
    if (in[IN_PEEPHOLES].dtype) return GRADD_FAIL(UNSUPPORTED, "peepholes are not supported");
    if (gradd_attr_int(attrs, "layout", 0)) return GRADD_FAIL(UNSUPPORTED, "layout=1");
    if (gradd_attr_float(attrs, "clip", 0) != 0) return GRADD_FAIL(UNSUPPORTED, "clip");
    if (gradd_attr_int(attrs, "input_forget", 0)) return GRADD_FAIL(UNSUPPORTED, "input_forget=1");
    if (gru && !gradd_attr_int(attrs, "linear_before_reset", 0))
        return GRADD_FAIL(UNSUPPORTED, "linear_before_reset=0; the reset gate is applied behind "
                                       "the product here, as in torch");
    return GRADD_OK;
}

/* Of all operands, absent ones without a type. */
static gradd_status_t describe(const gradd_op_t *op, const gradd_type_t *in, gradd_attrs_t attrs,
                               onnx_layer_t *out) {
    onnx_layer_t k = kind_of(op);
    const gradd_type_t *x = &in[IN_SEQUENCES], *r = &in[IN_MATRIX];
    GRADD_TRY(refuse(in, attrs, &k));
    k.ways = strcmp(gradd_attr_string(attrs, "direction", "forward"), "bidirectional") ? 1 : 2;
    if (x->rank != 3 || r->rank != 3) return GRADD_FAIL(GRAPH, "X and R must have 3 dimensions");
    k.dtype = x->dtype, k.steps = x->dims[0], k.batch = x->dims[1], k.inputs = x->dims[2];
    k.cells = r->dims[2];
    const int64_t rows = k.gates * k.cells;
    GRADD_TRY(check(&in[IN_WEIGHT], "W", (int64_t[]){k.ways, rows, k.inputs}, 3));
    GRADD_TRY(check(r, "R", (int64_t[]){k.ways, rows, k.cells}, 3));
    GRADD_TRY(check(&in[IN_BOTH], "B", (int64_t[]){k.ways, 2 * rows}, 2));
    const int64_t states[] = {k.ways, k.batch, k.cells};
    GRADD_TRY(check(&in[IN_FIRST], "initial_h", states, 3));
    GRADD_TRY(check(&in[IN_MEMORY], "initial_c", states, 3));
    *out = k;
    return GRADD_OK;
}

static gradd_status_t infer_layer(gradd_infer_t *c) {
    gradd_type_t in[IN_PEEPHOLES + 1] = {{0}};
    onnx_layer_t k;
    for (int i = 0; i < c->n_in; i++)
        in[i] = c->in[i].type;
    GRADD_TRY(describe(c->op, in, c->attrs, &k));
    c->out[0] = (gradd_type_t){
        k.dtype, 4, {k.steps, k.ways, k.batch, k.cells}
    };
    for (int j = 1; j < c->n_out; j++)
        c->out[j] = (gradd_type_t){
            k.dtype, 3, {k.ways, k.batch, k.cells}
        };
    return GRADD_OK;
}

/* ---- expansion ------------------------------------------------------------------------------- */

/* Direction `way` of [D, n, ...] as [n, ...]. */
static gradd_val_t of_way(gradd_builder_t *b, gradd_val_t v, int64_t way) {
    if (v == GRADD_NONE || b->status) return GRADD_NONE;
    const gradd_type_t t = *gradd_val_type(b, v);
    v = gradd_slice(b, v, 0, way, way + 1, 1);
    return gradd_reshape_to(b, v, t.dims + 1, t.rank - 1);
}

/* Rows of the gates, from `first` on, in torch's order. */
static gradd_val_t ordered(gradd_builder_t *b, const onnx_layer_t *k, gradd_val_t v,
                           int64_t first) {
    gradd_val_t parts[4];
    if (v == GRADD_NONE) return GRADD_NONE;
    for (int g = 0; g < k->gates; g++) {
        const int64_t from = first + k->order[g] * k->cells;
        parts[g] = gradd_slice(b, v, 0, from, from + k->cells, 1);
    }
    return k->gates > 1 ? gradd_concat(b, parts, k->gates, 0) : parts[0];
}

static gradd_val_t first_of(gradd_builder_t *b, const onnx_layer_t *k, gradd_val_t v, int64_t way) {
    if (v != GRADD_NONE) return of_way(b, v, way);
    const int64_t dims[] = {k->batch, k->cells};
    const gradd_dtype_t wide = gradd_dtype_is_half(k->dtype) ? GRADD_DT_F32 : k->dtype;
    return GRADD_EMIT(b, "Expand", gradd_const_scalar(b, wide, 0), gradd_const_i64s(b, dims, 2));
}

static void run_way(gradd_expand_t *x, const onnx_layer_t *k, int64_t way, gradd_val_t *out) {
    gradd_builder_t *b = x->b;
    gradd_val_t in[IN_PEEPHOLES + 1];
    for (int i = 0; i <= IN_PEEPHOLES; i++)
        in[i] = i < x->n_in ? gradd_wide(b, x->in[i]) : GRADD_NONE;
    const bool lstm = k->gates == 4;
    const char *direction = gradd_attr_string(x->attrs, "direction", "forward");
    const gradd_attr_t transposed[] = {gradd_make_int("transA", 0), gradd_make_int("transB", 1),
                                       gradd_make_float("alpha", 1)};
    const gradd_attr_t attrs[] = {
        gradd_make_string(GRADD_RNN_KIND, k->kind),
        gradd_make_int(GRADD_RNN_REVERSE, way || !strcmp(direction, "reverse"))};
    const gradd_val_t w = ordered(b, k, of_way(b, in[IN_WEIGHT], way), 0);
    const gradd_val_t biases = of_way(b, in[IN_BOTH], way), pair[2] = {in[IN_SEQUENCES], w};
    gradd_val_t product = gradd_emit_attrs(b, "FusedMatMul", pair, 2, transposed, 3);
    if (biases != GRADD_NONE) product = GRADD_EMIT(b, "Add", product, ordered(b, k, biases, 0));
    const gradd_val_t operands[GRADD_RNN_INPUTS] = {
        [GRADD_RNN_X] = product,
        [GRADD_RNN_U] = ordered(b, k, of_way(b, in[IN_MATRIX], way), 0),
        [GRADD_RNN_STATE] = first_of(b, k, in[IN_FIRST], way),
        [GRADD_RNN_CELLS] = lstm ? first_of(b, k, in[IN_MEMORY], way) : GRADD_NONE,
        [GRADD_RNN_BIAS] = ordered(b, k, biases, k->gates * k->cells),
        [GRADD_RNN_PROJ] = GRADD_NONE,
    };
    if (b->status) return;
    const gradd_emit_t node = {"Recurrence", operands, GRADD_RNN_PROJ, attrs, 2};
    b->status = b->emit(b, &node, out, x->n_out);
}

static gradd_status_t expand_layer(gradd_expand_t *x) {
    gradd_builder_t *b = x->b;
    gradd_type_t types[IN_PEEPHOLES + 1] = {{0}};
    gradd_val_t found[3][2], out[3];
    onnx_layer_t k;
    for (int i = 0; i < x->n_in; i++)
        if (x->in[i] != GRADD_NONE) types[i] = *gradd_val_type(b, x->in[i]);
    GRADD_TRY(describe(x->op, types, x->attrs, &k));
    const int64_t all[] = {k.steps, 1, k.batch, k.cells};
    for (int way = 0; way < k.ways; way++) {
        run_way(x, &k, way, out);
        for (int j = 0; j < x->n_out && !b->status; j++)
            found[j][way] = gradd_reshape_to(b, out[j], j ? all + 1 : all, j ? 3 : 4);
    }
    for (int j = 0; j < x->n_out && !b->status; j++)
        x->out[j] = gradd_cast(
            b, k.ways > 1 ? gradd_concat(b, found[j], 2, j ? 0 : 1) : found[j][0], k.dtype);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

#define TYPES                                                                                      \
    {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_DTB(I32), GRADD_T_FLOAT}
#define ATTRS(...)                                                                                 \
    GRADD_ATTR_LIST({"direction", GRADD_ATTR_STRING, false},                                       \
                    {"hidden_size", GRADD_ATTR_INT, false}, {"layout", GRADD_ATTR_INT, false},     \
                    {"clip", GRADD_ATTR_FLOAT, false}, {__VA_ARGS__})
#define CASE(...)   {.text = __VA_ARGS__}
#define VALUES(...) {.text = __VA_ARGS__, .grad_tol = -1} /* the gradient takes long */

GRADD_OPS(
    onnx_recurrent,
    GRADD_OP("LSTM", "", 7, (3, 8), (1, 3), .types = TYPES,
             .attrs = ATTRS("input_forget", GRADD_ATTR_INT, false), .infer = infer_layer,
             .expand = expand_layer,
             .cases = GRADD_CASES(
                 VALUES("f32[3,2,4] f32[1,12,4] f32[1,12,3] | hidden_size=3 -> 3"),
                 CASE("f32[2,1,1] f32[1,4,1] f32[1,4,1] | direction=\"reverse\" -> 3"),
                 VALUES("f32[2,1,2] f32[1,4,2] f32[1,4,1] f32[1,8] - f32[1,1,1] f32[1,1,1] | "
                        "hidden_size=1 direction=\"reverse\" -> 3"),
                 VALUES("f32[3,2,2] f32[2,8,2] f32[2,8,2] f32[2,16] - f32[2,2,2] f32[2,2,2] | "
                        "hidden_size=2 direction=\"bidirectional\" -> 3"))),
    GRADD_OP("GRU", "", 7, (3, 6), (1, 2), .types = TYPES,
             .attrs = ATTRS("linear_before_reset", GRADD_ATTR_INT, false), .infer = infer_layer,
             .expand = expand_layer,
             .cases = GRADD_CASES(
                 CASE("f32[2,1,2] f32[1,3,2] f32[1,3,1] f32[1,6] | hidden_size=1 "
                      "linear_before_reset=1 -> 2"),
                 VALUES("f32[3,2,2] f32[2,6,2] f32[2,6,2] f32[2,12] - f32[2,2,2] | hidden_size=2 "
                        "linear_before_reset=1 direction=\"bidirectional\" -> 2"))),
    GRADD_OP("RNN", "", 7, (3, 6), (1, 2), .types = TYPES, .attrs = ATTRS(0), .infer = infer_layer,
             .expand = expand_layer,
             .cases = GRADD_CASES(
                 CASE("f32[2,1,2] f32[1,2,2] f32[1,2,2] f32[1,4] | hidden_size=2 -> 2"),
                 VALUES("f32[2,2,2] f32[2,2,2] f32[2,2,2] f32[2,4] - f32[2,2,2] | hidden_size=2 "
                        "direction=\"bidirectional\" -> 2"))));
