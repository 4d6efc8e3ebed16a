/* Recurrence: one layer and direction of an LSTM, a GRU or a plain RNN, in torch's order of gates.
 *
 * Math, for x = the products of the inputs (all steps at once, by a linear layer in front), h the
 * state and p = h U^T + b, s the logistic function:
 *     lstm:  i, f, g, o = s(x + p), s(x + p), tanh(x + p), s(x + p) of their parts;
 *            c = f c + i g;  h = o tanh(c), or W (o tanh(c)) with a projection W
 *     gru:   r, z = s(x + p) of their parts;  n = tanh(x + r p);  h = (1 - z) n + z h
 *     tanh, relu:  h = tanh(x + p), max(x + p, 0)
 * Shapes: kernels/describe/recurrence.h. Saved for backward: the gates, of an LSTM the cells, of a
 * GRU p of n; of halves the state is rounded at each step, the cells are not. Gradients: those of x
 * step by step, backwards; from them one product over all steps makes that of U, another one that
 * of W, and a sum that of b.
 *
 * ONNX's LSTM, GRU and RNN order the gates in another way. */
#include "kernels/describe/recurrence.h"
#include "kernels/contract/kernel.h"
#include "kernels/cpu/recurrent/recurrent.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"

/* ---- shape rules ----------------------------------------------------------------------------- */

static gradd_type_t sized(gradd_dtype_t dtype, int64_t t, int64_t b, int64_t n) {
    return (gradd_type_t){
        .dtype = dtype, .rank = 3, .dims = {t, b, n}
    };
}

static gradd_type_t of_batch(gradd_dtype_t dtype, int64_t b, int64_t n) {
    return (gradd_type_t){
        .dtype = dtype, .rank = 2, .dims = {b, n}
    };
}

static gradd_status_t infer_forward(gradd_infer_t *c) {
    gradd_rnn_t v;
    GRADD_TRY(gradd_rnn_of(c->in, c->n_in, c->attrs, &v));
    const gradd_type_t all[GRADD_RNN_OUTPUTS] = {
        [GRADD_RNN_Y] = sized(v.dtype, v.steps, v.batch, v.state),
        [GRADD_RNN_LAST] = of_batch(v.dtype, v.batch, v.state),
        [GRADD_RNN_LAST_CELLS] = of_batch(v.dtype, v.batch, v.cells),
        [GRADD_RNN_GATES] = c->in[GRADD_RNN_X].type,
        [GRADD_RNN_KEPT] = sized(v.wide, v.steps, v.batch, v.cells),
    };
    for (int j = 0; j < c->n_out; j++)
        c->out[j] = all[j];
    return GRADD_OK;
}

static gradd_status_t infer_backward(gradd_infer_t *c) {
    gradd_rnn_t v;
    GRADD_TRY(gradd_rnn_of_grad(c->in, c->n_in, c->attrs, &v));
    const gradd_type_t gates = c->in[GRADD_RNN_GRAD_GATES].type;
    const gradd_type_t all[GRADD_RNN_GRAD_OUTPUTS] = {
        [GRADD_RNN_DX] = gates,
        [GRADD_RNN_DSTATE] = of_batch(v.dtype, v.batch, v.state),
        [GRADD_RNN_DCELLS] = of_batch(v.dtype, v.batch, v.cells),
        [GRADD_RNN_DPRODUCT] = gates,
        [GRADD_RNN_DPROJECTED] = sized(v.dtype, v.steps, v.batch, v.state),
        [GRADD_RNN_PROJECTS] = sized(v.dtype, v.steps, v.batch, v.cells),
    };
    for (int j = 0; j < c->n_out; j++)
        c->out[j] = all[j];
    return GRADD_OK;
}

/* ---- gradient rule --------------------------------------------------------------------------- */

static gradd_val_t operand(const gradd_grad_t *g, int i) {
    return i < g->n_in ? g->in[i] : GRADD_NONE;
}

static bool needs(const gradd_grad_t *g, int i) {
    return operand(g, i) != GRADD_NONE && g->need[i];
}

static gradd_val_t arriving(const gradd_grad_t *g, int j) {
    return j < g->n_out ? g->dout[j] : GRADD_NONE;
}

/* [T, B, n] as [T B, n]. */
static gradd_val_t as_rows(gradd_builder_t *b, gradd_val_t v) {
    if (b->status) return GRADD_NONE;
    const gradd_type_t *t = gradd_val_type(b, v);
    return gradd_reshape_to(b, v, (int64_t[]){t->dims[0] * t->dims[1], t->dims[2]}, 2);
}

/* The gradient of W for products x W^T: d^T x over all steps. */
static gradd_val_t weight_grad(gradd_builder_t *b, gradd_val_t d, gradd_val_t x) {
    const gradd_attr_t attrs[3] = {gradd_make_int("transA", 1), gradd_make_int("transB", 0),
                                   gradd_make_float("alpha", 1)};
    const gradd_val_t in[2] = {as_rows(b, d), as_rows(b, x)};
    return gradd_emit_attrs(b, "FusedMatMul", in, 2, attrs, 3);
}

/* The states in front of all steps, [T, B, P]. */
static gradd_val_t states_before(gradd_grad_t *g, const gradd_rnn_t *v) {
    gradd_builder_t *b = g->b;
    const gradd_val_t y = g->output(g, GRADD_RNN_Y);
    if (b->status || !v->steps) return y;
    const int64_t dims[] = {1, v->batch, v->state}, last = v->steps - 1;
    gradd_val_t first = gradd_reshape_to(b, g->in[GRADD_RNN_STATE], dims, 3);
    gradd_val_t rest = gradd_slice(b, y, 0, v->reverse, last + v->reverse, 1);
    const gradd_val_t in[2] = {v->reverse ? rest : first, v->reverse ? first : rest};
    return gradd_concat(b, in, 2, 0);
}

static gradd_status_t sizes_of(gradd_grad_t *g, gradd_rnn_t *out) {
    gradd_view_t in[GRADD_RNN_INPUTS] = {0};
    for (int i = 0; i < g->n_in; i++)
        if (g->in[i] != GRADD_NONE) in[i].type = *gradd_val_type(g->b, g->in[i]);
    return gradd_rnn_of(in, g->n_in, g->attrs, out);
}

static void run_back(gradd_grad_t *g, const gradd_rnn_t *v, gradd_val_t *out, int n_out) {
    gradd_builder_t *b = g->b;
    const bool lstm = v->kind == GRADD_RNN_LSTM, gru = v->kind == GRADD_RNN_GRU;
    const gradd_val_t in[GRADD_RNN_GRAD_INPUTS] = {
        [GRADD_RNN_GRAD_GATES] = g->output(g, lstm || gru ? GRADD_RNN_GATES : GRADD_RNN_Y),
        [GRADD_RNN_GRAD_U] = g->in[GRADD_RNN_U],
        [GRADD_RNN_GRAD_STATE] = g->in[GRADD_RNN_STATE],
        [GRADD_RNN_GRAD_CELLS] = lstm ? g->in[GRADD_RNN_CELLS] : GRADD_NONE,
        [GRADD_RNN_GRAD_KEPT] = lstm || gru ? g->output(g, GRADD_RNN_KEPT) : GRADD_NONE,
        [GRADD_RNN_GRAD_Y] = gru ? g->output(g, GRADD_RNN_Y) : GRADD_NONE,
        [GRADD_RNN_GRAD_PROJ] = operand(g, GRADD_RNN_PROJ),
        [GRADD_RNN_GRAD_DY] = arriving(g, GRADD_RNN_Y),
        [GRADD_RNN_GRAD_DLAST] = arriving(g, GRADD_RNN_LAST),
        [GRADD_RNN_GRAD_DLAST_CELLS] = arriving(g, GRADD_RNN_LAST_CELLS),
    };
    const gradd_emit_t node = {"RecurrenceGrad", in, GRADD_RNN_GRAD_INPUTS, g->attrs.v, g->attrs.n};
    if (!b->status) b->status = b->emit(b, &node, out, n_out);
}

static gradd_status_t grad_recurrence(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    gradd_rnn_t v;
    gradd_val_t out[GRADD_RNN_GRAD_OUTPUTS];
    if (arriving(g, GRADD_RNN_GATES) != GRADD_NONE || arriving(g, GRADD_RNN_KEPT) != GRADD_NONE)
        return GRADD_FAIL(UNSUPPORTED, "a gradient arrives for what is kept");
    GRADD_TRY(sizes_of(g, &v));
    const bool twice =
        v.kind == GRADD_RNN_GRU && (needs(g, GRADD_RNN_U) || needs(g, GRADD_RNN_BIAS));
    const int n_out = needs(g, GRADD_RNN_PROJ)    ? GRADD_RNN_GRAD_OUTPUTS
                      : twice                     ? GRADD_RNN_DPRODUCT + 1
                      : needs(g, GRADD_RNN_CELLS) ? GRADD_RNN_DCELLS + 1
                      : needs(g, GRADD_RNN_STATE) ? GRADD_RNN_DSTATE + 1
                                                  : 1;
    run_back(g, &v, out, n_out);
    if (b->status) return b->status;
    const gradd_val_t d = out[twice ? GRADD_RNN_DPRODUCT : GRADD_RNN_DX];
    if (needs(g, GRADD_RNN_X)) g->din[GRADD_RNN_X] = out[GRADD_RNN_DX];
    if (needs(g, GRADD_RNN_U)) g->din[GRADD_RNN_U] = weight_grad(b, d, states_before(g, &v));
    if (needs(g, GRADD_RNN_BIAS))
        g->din[GRADD_RNN_BIAS] = gradd_reduce_to(b, d, g->in[GRADD_RNN_BIAS]);
    if (needs(g, GRADD_RNN_STATE)) g->din[GRADD_RNN_STATE] = out[GRADD_RNN_DSTATE];
    if (needs(g, GRADD_RNN_CELLS)) g->din[GRADD_RNN_CELLS] = out[GRADD_RNN_DCELLS];
    if (needs(g, GRADD_RNN_PROJ))
        g->din[GRADD_RNN_PROJ] = weight_grad(b, out[GRADD_RNN_DPROJECTED], out[GRADD_RNN_PROJECTS]);
    return b->status;
}

/* ---- cases and rows -------------------------------------------------------------------------- */

#define ATTRS                                                                                      \
    GRADD_ATTR_LIST({GRADD_RNN_KIND, GRADD_ATTR_STRING, true},                                     \
                    {GRADD_RNN_REVERSE, GRADD_ATTR_INT, false})
/* KEPT is f32 where others are halves. */
#define GRAD_TYPES(of) {of, of, of, of, GRADD_T_F32_F64, of}
#define CASE(...)      {.text = __VA_ARGS__, .bf16_tol = 0.02}

GRADD_OPS(
    recurrence,
    GRADD_OP(
        "Recurrence", "com.gradd", 1, (3, GRADD_RNN_INPUTS), (1, GRADD_RNN_OUTPUTS),
        .flags = GRADD_OP_COSTLY, .types = {GRADD_T_FLOAT}, .attrs = ATTRS, .infer = infer_forward,
        .grad = grad_recurrence, .ref = GRADD_REF(gradd_rnn_ref),
        .cases = GRADD_CASES(
            CASE("f32[3,2,12] f32[12,3] f32[2,3] f32[2,3] f32[12] | kind=\"lstm\" -> 3"),
            CASE("f32[4,2,8] f32[8,2] f32[2,2] f32[2,2] | kind=\"lstm\" reverse=1 -> 3"),
            CASE("f32[3,2,12] f32[12,2] f32[2,2] f32[2,3] f32[12] f32[2,3] | kind=\"lstm\" -> 3"),
            CASE("f32[3,2,12] f32[12,5] f32[2,5] f32[2,3] - f32[5,3] | kind=\"lstm\" reverse=1"),
            CASE("f32[1,3,4] f32[4,1] f32[3,1] f32[3,1] f32[4] | kind=\"lstm\""),
            CASE("f32[0,3,4] f32[4,1] f32[3,1] f32[3,1] f32[4] | kind=\"lstm\" -> 3"),
            CASE("f32[3,0,4] f32[4,1] f32[0,1] f32[0,1] f32[4] | kind=\"lstm\" -> 3"),
            CASE("f32[3,2,9] f32[9,3] f32[2,3] - f32[9] | kind=\"gru\" -> 2"),
            CASE("f32[4,2,6] f32[6,2] f32[2,2] | kind=\"gru\" reverse=1 -> 2"),
            CASE("f32[1,1,3] f32[3,1] f32[1,1] - f32[3] | kind=\"gru\""),
            CASE("f32[3,2,4] f32[4,4] f32[2,4] - f32[4] | kind=\"tanh\" -> 2"),
            CASE("f32[3,2,4] f32[4,4] f32[2,4] | kind=\"relu\" reverse=1 -> 2"),
            {.text = "f32[3,2,12] f32[12,3] f32[2,3] f32[2,3] f32[12] | kind=\"lstm\" -> 5",
             .grad_tol = -1,
             .bf16_tol = 0.02},
            {.text = "f32[3,2,9] f32[9,3] f32[2,3] - f32[9] | kind=\"gru\" -> 5",
             .grad_tol = -1,
             .bf16_tol = 0.02},
            {.text = "f32[5,33,1200]:(-1,1) f32[1200,300]:(-0.1,0.1) f32[33,300]:(-1,1) "
                     "f32[33,300] f32[1200]:(-1,1) | kind=\"lstm\"",
             .grad_tol = -1,
             .bf16_tol = 0.02},
            {.text = "f32[5,33,900]:(-1,1) f32[900,300]:(-0.1,0.1) f32[33,300]:(-1,1) - "
                     "f32[900]:(-1,1) | kind=\"gru\"",
             .grad_tol = -1,
             .bf16_tol = 0.02})),
    GRADD_OP(
        "RecurrenceGrad", "com.gradd", 1, (3, GRADD_RNN_GRAD_INPUTS), (1, GRADD_RNN_GRAD_OUTPUTS),
        .flags = GRADD_OP_INTERNAL | GRADD_OP_NO_GRAD | GRADD_OP_COSTLY,
        .types = GRAD_TYPES(GRADD_T_FLOAT), .attrs = ATTRS, .infer = infer_backward,
        .ref = GRADD_REF(gradd_rnn_grad_ref),
        .cases = GRADD_CASES(
            CASE("f32[3,2,12]:(0,1) f32[12,3] f32[2,3] f32[2,3] f32[3,2,3] - - f32[3,2,3] f32[2,3] "
                 "f32[2,3] | kind=\"lstm\" -> 3"),
            CASE("f32[3,2,12]:(0,1) f32[12,2] f32[2,2] f32[2,3] f32[3,2,3] - f32[2,3] f32[3,2,2] "
                 "| kind=\"lstm\" reverse=1 -> 6"),
            CASE("f32[0,2,4] f32[4,1] f32[2,1] f32[2,1] f32[0,2,1] - - - f32[2,1] | kind=\"lstm\" "
                 "-> 3"),
            CASE("f32[3,2,9]:(0,1) f32[9,3] f32[2,3] - f32[3,2,3] f32[3,2,3]:(-1,1) - f32[3,2,3] "
                 "| kind=\"gru\" -> 4"),
            CASE("f32[3,2,4]:(-1,1) f32[4,4] f32[2,4] - - - - f32[3,2,4] | kind=\"tanh\" -> 2"),
            CASE("f32[3,2,4] f32[4,4] f32[2,4] - - - - f32[3,2,4] f32[2,4] | kind=\"relu\" "
                 "reverse=1 -> 2"),
            CASE("f32[4,33,1200]:(0,1) f32[1200,300]:(-0.1,0.1) f32[33,300] f32[33,300] "
                 "f32[4,33,300] - - f32[4,33,300] | kind=\"lstm\" -> 2"))));

GRADD_KERNELS(cpu, recurrence,
              GRADD_KERNEL("Recurrence", "steps", .types = {GRADD_T_FLOAT},
                           .prepare = gradd_rnn_prepare, .unprepare = gradd_rnn_unprepare,
                           .makes_parts = true, .compute = gradd_rnn, .cost = gradd_rnn_cost),
              GRADD_KERNEL("RecurrenceGrad", "steps", .types = GRAD_TYPES(GRADD_T_FLOAT),
                           .inplace = 1, .prepare = gradd_rnn_grad_prepare,
                           .unprepare = gradd_rnn_unprepare, .makes_parts = true,
                           .compute = gradd_rnn_grad, .cost = gradd_rnn_grad_cost));
