/* LSTM, GRU and RNN of ONNX, composites: for each direction a product over all steps and
 * Recurrence, whose gates stand in torch's order.
 *
 * X [T, B, I]; of D directions W [D, G H, I], R [D, G H, H], B [D, 2 G H], and perhaps the first
 * states and cells [D, B, H]. Y [T, D, B, H], Y_h and Y_c [D, B, H]. With layout=1 B is the first
 * axis of each. Gates of ONNX: i, o, f, c and z, r, h.
 *
 * A GRU that multiplies by the reset gate first (ONNX's default) needs that gate for a product of
 * the same step. It becomes nodes for each step, at most MAX_STEPS.
 *
 * Refused: lengths of sequences, peepholes, other functions than the usual ones (of an RNN tanh),
 * clip.
 * Source: https://onnx.ai/onnx/operators/onnx__LSTM.html
 */
#include <string.h>

#include "kernels/contract/op.h"
#include "kernels/describe/recurrence.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

enum { MAX_STEPS = 1024 };
enum { IN_SEQUENCES, IN_WEIGHT, IN_MATRIX, IN_BOTH, IN_LENGTHS, IN_FIRST, IN_MEMORY, IN_PEEPHOLES };

typedef struct onnx_layer_s {
    const char *kind;
    int gates, order[4]; /* ONNX's places of torch's gates */
    int64_t ways, steps, batch, inputs, cells;
    gradd_dtype_t dtype;
    bool batches_first; /* layout=1 */
    bool by_step;       /* a GRU with the reset gate in front of the product */
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

static gradd_status_t refuse(const gradd_type_t *in, gradd_attrs_t attrs) {
    if (in[IN_LENGTHS].dtype) return GRADD_FAIL(UNSUPPORTED, "sequence_lens is not supported");
    if (in[IN_PEEPHOLES].dtype) return GRADD_FAIL(UNSUPPORTED, "peepholes are not supported");
    if (gradd_attr_float(attrs, "clip", 0) != 0) return GRADD_FAIL(UNSUPPORTED, "clip");
    if (gradd_attr_int(attrs, "input_forget", 0)) return GRADD_FAIL(UNSUPPORTED, "input_forget=1");
    return GRADD_OK;
}

/* Sizes of states: [D, B, H], or [B, D, H]. */
static void states_of(const onnx_layer_t *k, int64_t *dims) {
    dims[k->batches_first] = k->ways;
    dims[!k->batches_first] = k->batch;
    dims[2] = k->cells;
}

/* Of all operands, absent ones without a type. */
static gradd_status_t describe(const gradd_op_t *op, const gradd_type_t *in, gradd_attrs_t attrs,
                               onnx_layer_t *out) {
    onnx_layer_t k = kind_of(op);
    const gradd_type_t *x = &in[IN_SEQUENCES], *r = &in[IN_MATRIX];
    GRADD_TRY(refuse(in, attrs));
    k.ways = strcmp(gradd_attr_string(attrs, "direction", "forward"), "bidirectional") ? 1 : 2;
    if (x->rank != 3 || r->rank != 3) return GRADD_FAIL(GRAPH, "X and R must have 3 dimensions");
    k.batches_first = gradd_attr_int(attrs, "layout", 0);
    k.by_step = !strcmp(k.kind, "gru") && !gradd_attr_int(attrs, "linear_before_reset", 0);
    k.dtype = x->dtype, k.steps = x->dims[k.batches_first];
    k.batch = x->dims[!k.batches_first], k.inputs = x->dims[2];
    if (k.by_step && (k.steps < 1 || k.steps > MAX_STEPS))
        return GRADD_FAIL(UNSUPPORTED, "linear_before_reset=0 over %lld steps, expected 1 to %d",
                          (long long)k.steps, MAX_STEPS);
    k.cells = r->dims[2];
    const int64_t rows = k.gates * k.cells;
    GRADD_TRY(check(&in[IN_WEIGHT], "W", (int64_t[]){k.ways, rows, k.inputs}, 3));
    GRADD_TRY(check(r, "R", (int64_t[]){k.ways, rows, k.cells}, 3));
    GRADD_TRY(check(&in[IN_BOTH], "B", (int64_t[]){k.ways, 2 * rows}, 2));
    int64_t states[3];
    states_of(&k, states);
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
    const gradd_type_t first = {
        k.dtype, 4, {k.steps, k.ways, k.batch, k.cells}
    };
    const gradd_type_t turned = {
        k.dtype, 4, {k.batch, k.steps, k.ways, k.cells}
    };
    c->out[0] = k.batches_first ? turned : first;
    for (int j = 1; j < c->n_out; j++) {
        c->out[j] = (gradd_type_t){k.dtype, 3, {0}};
        states_of(&k, c->out[j].dims);
    }
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

static gradd_val_t product_of(gradd_builder_t *b, gradd_val_t rows, gradd_val_t weight) {
    const gradd_attr_t transposed[] = {gradd_make_int("transA", 0), gradd_make_int("transB", 1),
                                       gradd_make_float("alpha", 1)};
    const gradd_val_t pair[2] = {rows, weight};
    return gradd_emit_attrs(b, "FusedMatMul", pair, 2, transposed, 3);
}

/* A direction of a layer: its operands, wide, of that direction alone. */
typedef struct direction_s {
    bool reverse;
    gradd_val_t rows, weight, matrix, biases, state, cells;
} direction_t;

/* The steps of a GRU, z = s(x_z + h R_z), r = s(x_r + h R_r), n = tanh(x_n + (r h) R_n),
 * h' = n + z (h - n), where x has the biases. Of [B, H] each. */
static void run_steps(gradd_builder_t *b, const onnx_layer_t *k, const direction_t *w,
                      gradd_val_t *out) {
    const int64_t n = k->cells, gates = 2 * n, sizes[] = {1, k->batch, n};
    const gradd_val_t both = gradd_slice(b, w->matrix, 0, 0, gates, 1);
    const gradd_val_t last = gradd_slice(b, w->matrix, 0, gates, 3 * n, 1);
    const int64_t row[] = {k->batch, 3 * n};
    gradd_val_t x = product_of(b, w->rows, w->weight), h = w->state, steps[MAX_STEPS];
    if (w->biases != GRADD_NONE)
        x = GRADD_EMIT(b, "Add", GRADD_EMIT(b, "Add", x, gradd_slice(b, w->biases, 0, 0, 3 * n, 1)),
                       gradd_slice(b, w->biases, 0, 3 * n, 6 * n, 1));
    for (int64_t i = 0; i < k->steps; i++) {
        const int64_t t = w->reverse ? k->steps - 1 - i : i;
        const gradd_val_t now = gradd_reshape_to(b, gradd_slice(b, x, 0, t, t + 1, 1), row, 2);
        const gradd_val_t known = gradd_slice(b, now, 1, 0, gates, 1);
        const gradd_val_t zr =
            GRADD_EMIT(b, "Sigmoid", GRADD_EMIT(b, "Add", known, product_of(b, h, both)));
        const gradd_val_t z = gradd_slice(b, zr, 1, 0, n, 1),
                          r = gradd_slice(b, zr, 1, n, gates, 1);
        const gradd_val_t kept = product_of(b, GRADD_EMIT(b, "Mul", r, h), last);
        const gradd_val_t next = GRADD_EMIT(
            b, "Tanh", GRADD_EMIT(b, "Add", gradd_slice(b, now, 1, gates, 3 * n, 1), kept));
        h = GRADD_EMIT(b, "Add", next, GRADD_EMIT(b, "Mul", z, GRADD_EMIT(b, "Sub", h, next)));
        steps[t] = gradd_reshape_to(b, h, sizes, 3);
    }
    out[0] = k->steps > 1 ? gradd_concat(b, steps, (int)k->steps, 0) : steps[0];
    out[1] = h;
}

static void run_recurrence(gradd_builder_t *b, const onnx_layer_t *k, const direction_t *w,
                           int n_out, gradd_val_t *out) {
    const gradd_attr_t attrs[] = {gradd_make_string(GRADD_RNN_KIND, k->kind),
                                  gradd_make_int(GRADD_RNN_REVERSE, w->reverse)};
    gradd_val_t product = product_of(b, w->rows, ordered(b, k, w->weight, 0));
    if (w->biases != GRADD_NONE)
        product = GRADD_EMIT(b, "Add", product, ordered(b, k, w->biases, 0));
    const gradd_val_t operands[GRADD_RNN_INPUTS] = {
        [GRADD_RNN_X] = product,
        [GRADD_RNN_U] = ordered(b, k, w->matrix, 0),
        [GRADD_RNN_STATE] = w->state,
        [GRADD_RNN_CELLS] = w->cells,
        [GRADD_RNN_BIAS] = ordered(b, k, w->biases, k->gates * k->cells),
        [GRADD_RNN_PROJ] = GRADD_NONE,
    };
    if (b->status) return;
    const gradd_emit_t node = {"Recurrence", operands, GRADD_RNN_PROJ, attrs, 2};
    b->status = b->emit(b, &node, out, n_out);
}

/* With B in front, X and the states get it behind their first axis, and back. */
static gradd_val_t turned(gradd_builder_t *b, const onnx_layer_t *k, gradd_val_t v) {
    if (v == GRADD_NONE || !k->batches_first) return v;
    return gradd_transpose(b, v, (int64_t[]){1, 0, 2}, 3);
}

static void run_way(gradd_expand_t *x, const onnx_layer_t *k, int64_t way, gradd_val_t *out) {
    gradd_builder_t *b = x->b;
    gradd_val_t in[IN_PEEPHOLES + 1];
    for (int i = 0; i <= IN_PEEPHOLES; i++)
        in[i] = i < x->n_in ? gradd_wide(b, x->in[i]) : GRADD_NONE;
    const char *direction = gradd_attr_string(x->attrs, "direction", "forward");
    const direction_t w = {
        .reverse = way || !strcmp(direction, "reverse"),
        .rows = turned(b, k, in[IN_SEQUENCES]),
        .weight = of_way(b, in[IN_WEIGHT], way),
        .matrix = of_way(b, in[IN_MATRIX], way),
        .biases = of_way(b, in[IN_BOTH], way),
        .state = first_of(b, k, turned(b, k, in[IN_FIRST]), way),
        .cells = k->gates == 4 ? first_of(b, k, turned(b, k, in[IN_MEMORY]), way) : GRADD_NONE,
    };
    if (k->by_step)
        run_steps(b, k, &w, out);
    else
        run_recurrence(b, k, &w, x->n_out, out);
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
    for (int j = 0; j < x->n_out && !b->status; j++) {
        gradd_val_t v = k.ways > 1 ? gradd_concat(b, found[j], 2, j ? 0 : 1) : found[j][0];
        if (k.batches_first)
            v = j ? turned(b, &k, v) : gradd_transpose(b, v, (int64_t[]){2, 0, 1, 3}, 4);
        x->out[j] = gradd_cast(b, v, k.dtype);
    }
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
    GRADD_OP("LSTM", "", 7, (3, 8), (0, 3), .types = TYPES,
             .attrs = ATTRS("input_forget", GRADD_ATTR_INT, false), .infer = infer_layer,
             .expand = expand_layer,
             .cases = GRADD_CASES(
                 VALUES("f32[3,2,4] f32[1,12,4] f32[1,12,3] | hidden_size=3 -> 3"),
                 CASE("f32[2,1,1] f32[1,4,1] f32[1,4,1] | direction=\"reverse\" -> 3"),
                 VALUES("f32[2,1,2] f32[1,4,2] f32[1,4,1] f32[1,8] - f32[1,1,1] f32[1,1,1] | "
                        "hidden_size=1 direction=\"reverse\" -> 3"),
                 VALUES("f32[3,2,2] f32[2,8,2] f32[2,8,2] f32[2,16] - f32[2,2,2] f32[2,2,2] | "
                        "hidden_size=2 direction=\"bidirectional\" -> 3"),
                 VALUES("f32[3,2,2] f32[1,8,2] f32[1,8,2] f32[1,16] - f32[3,1,2] f32[3,1,2] | "
                        "layout=1 -> 3"))),
    GRADD_OP("GRU", "", 7, (3, 6), (0, 2), .types = TYPES,
             .attrs = ATTRS("linear_before_reset", GRADD_ATTR_INT, false), .infer = infer_layer,
             .expand = expand_layer,
             .cases = GRADD_CASES(
                 CASE("f32[2,1,2] f32[1,3,2] f32[1,3,1] f32[1,6] | hidden_size=1 "
                      "linear_before_reset=1 -> 2"),
                 VALUES("f32[3,2,2] f32[2,6,2] f32[2,6,2] f32[2,12] - f32[2,2,2] | hidden_size=2 "
                        "linear_before_reset=1 direction=\"bidirectional\" -> 2"),
                 CASE("f32[2,1,1] f32[1,3,1] f32[1,3,1] f32[1,6] - f32[1,1,1] | -> 2"),
                 CASE("f32[2,1,2] f32[1,3,2] f32[1,3,1] | direction=\"reverse\" layout=1 -> 1"),
                 VALUES("f32[3,2,2] f32[2,6,2] f32[2,6,2] f32[2,12] - f32[3,2,2] | layout=1 "
                        "direction=\"bidirectional\" -> 2"))),
    GRADD_OP("RNN", "", 7, (3, 6), (0, 2), .types = TYPES, .attrs = ATTRS(0), .infer = infer_layer,
             .expand = expand_layer,
             .cases = GRADD_CASES(
                 CASE("f32[2,1,2] f32[1,2,2] f32[1,2,2] f32[1,4] | hidden_size=2 -> 2"),
                 VALUES("f32[2,2,2] f32[2,2,2] f32[2,2,2] f32[2,4] - f32[2,2,2] | hidden_size=2 "
                        "direction=\"bidirectional\" -> 2"))));
