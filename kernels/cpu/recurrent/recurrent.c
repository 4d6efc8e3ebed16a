/* Recurrent layers, step by step: see recurrent.h. */
#include "kernels/cpu/recurrent/recurrent.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/parts.h"
#include "kernels/describe/dispatch.h"
#include "kernels/describe/recurrence.h"
#include "kernels/math/formulas.h"

#define REAL    float
#define NAME(x) x##_f32
#include "kernels/math/recurrent.h"
#undef REAL
#undef NAME
#define REAL    double
#define NAME(x) x##_f64
#include "kernels/math/recurrent.h"
#undef REAL
#undef NAME

enum { STRETCH = 256 }; /* cells of a task */

/* One sequence at one step: memory of its cells and gates, see recurrent_of.h. */
typedef struct rnn_row_s {
    int64_t cells;
    bool relu;
    const void *x, *dy, *before, *bias;
    void *product, *cell, *dcell, *out, *gates, *dproduct;
} rnn_row_t;

typedef void (*rnn_row_fn)(const rnn_row_t *row, int64_t from, int64_t to);

typedef struct rnn_functions_s {
    rnn_row_fn forward[4], back[4]; /* by gradd_rnn_kind_t */
    void (*to_real)(void *to, const void *from, int64_t n);
    void (*from_real)(void *to, const void *from, int64_t n);
    void (*add)(void *z, const void *x, const void *y, int64_t n);
} rnn_functions_t;

#define CELL     float
#define REAL     float
#define LOAD(x)  (x)
#define STORE(x) (x)
#define NAME(x)  x##_of_f32
#define OF(x)    x##_f32
#include "kernels/cpu/recurrent/recurrent_of.h"
#undef CELL
#undef LOAD
#undef STORE
#undef NAME
#define CELL     gradd_bf16_t
#define LOAD(x)  gradd_bf16_f32(x)
#define STORE(x) gradd_f32_bf16(x)
#define NAME(x)  x##_of_bf16
#include "kernels/cpu/recurrent/recurrent_of.h"
#undef CELL
#undef LOAD
#undef STORE
#undef NAME
#define CELL     gradd_f16_t
#define LOAD(x)  gradd_f16_f32(x)
#define STORE(x) gradd_f32_f16(x)
#define NAME(x)  x##_of_f16
#include "kernels/cpu/recurrent/recurrent_of.h"
#undef CELL
#undef REAL
#undef LOAD
#undef STORE
#undef NAME
#undef OF
#define CELL     double
#define REAL     double
#define LOAD(x)  (x)
#define STORE(x) (x)
#define NAME(x)  x##_of_f64
#define OF(x)    x##_f64
#include "kernels/cpu/recurrent/recurrent_of.h"

/* ---- preparation ----------------------------------------------------------------------------- */

/* Places in the workspace, each [B, ...] but the library's, the bias and the zeros. */
typedef enum rnn_slot_e {
    LIBRARY,
    SUM,   /* of a product: [G H]; backward the state's gradient: [P] */
    CELLS, /* [H], what is not kept; backward the cells' gradient */
    FIRST, /* [H], backward the first cells */
    MADE,  /* [H], backward the gradient of what is projected */
    OUT,   /* [H] stored, what is projected */
    SPARE, /* [G H or P] stored, results without a reader */
    ADDED, /* [G H], the bias */
    ZEROS, /* [H or P] stored */
    SLOTS
} rnn_slot_t;

typedef struct rnn_ready_s {
    gradd_rnn_t v;
    const rnn_functions_t *of;
    gradd_prepared_t product, projection;
    size_t at[SLOTS + 1];
} rnn_ready_t;

static const rnn_functions_t *functions_of(gradd_dtype_t dtype) {
    return dtype == GRADD_DT_F32    ? &functions_of_f32
           : dtype == GRADD_DT_BF16 ? &functions_of_bf16
           : dtype == GRADD_DT_F16  ? &functions_of_f16
                                    : &functions_of_f64;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static void place(rnn_ready_t *k, bool back) {
    const gradd_rnn_t *v = &k->v;
    const int64_t real = (int64_t)gradd_dtype_bytes(v->wide), b = v->batch, h = v->cells;
    const int64_t cell = (int64_t)gradd_dtype_bytes(v->dtype), gates = v->gates * h;
    const int64_t most = larger(gates, v->state);
    const int64_t library =
        (int64_t)(k->product.workspace > k->projection.workspace ? k->product.workspace
                                                                 : k->projection.workspace);
    const int64_t bytes[SLOTS] = {
        [LIBRARY] = library,
        [SUM] = real * b * (back ? v->state : gates),
        [CELLS] = real * b * h,
        [FIRST] = back ? real * b * h : 0,
        [MADE] = back && v->has_proj ? real * b * h : 0,
        [OUT] = cell * b * h,
        [SPARE] = cell * b * most,
        [ADDED] = back ? 0 : real * gates,
        [ZEROS] = back ? cell * most : 0,
    };
    for (int i = 0; i < SLOTS; i++)
        k->at[i + 1] = k->at[i] + (((size_t)bytes[i] + 63) & ~(size_t)63);
}

static gradd_status_t prepare(rnn_ready_t *k, bool back, int threads) {
    gradd_gemm_t g = back ? gradd_rnn_product_back(&k->v) : gradd_rnn_product(&k->v);
    g.threads = threads;
    k->of = functions_of(k->v.dtype);
    GRADD_TRY(gradd_gemm_prepare(&g, &k->product));
    if (k->v.has_proj) {
        g = back ? gradd_rnn_projection_back(&k->v) : gradd_rnn_projection(&k->v);
        g.threads = threads;
        GRADD_TRY(gradd_gemm_prepare(&g, &k->projection));
    }
    place(k, back);
    return GRADD_OK;
}

void gradd_rnn_unprepare(gradd_prepared_t *prepared) {
    rnn_ready_t *k = prepared->state;
    if (k->product.state) gradd_gemm_unprepare(&k->product);
    if (k->projection.state) gradd_gemm_unprepare(&k->projection);
    free(k);
}

static gradd_status_t make_ready(const gradd_infer_t *c, bool back, gradd_prepared_t *out) {
    rnn_ready_t *k = calloc(1, sizeof *k);
    if (!k) return GRADD_FAIL(NOMEM, "recurrent layer");
    gradd_status_t status = back ? gradd_rnn_of_grad(c->in, c->n_in, c->attrs, &k->v)
                                 : gradd_rnn_of(c->in, c->n_in, c->attrs, &k->v);
    if (!status) status = prepare(k, back, c->threads);
    gradd_prepared_t made = {.workspace = k->at[SLOTS],
                             .parts = gradd_parts_of_steps(c, k->v.steps),
                             .state = k,
                             .bytes = sizeof *k + k->product.bytes + k->projection.bytes};
    if (status)
        gradd_rnn_unprepare(&made);
    else
        *out = made;
    return status;
}

gradd_status_t gradd_rnn_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    return make_ready(c, false, out);
}

gradd_status_t gradd_rnn_grad_prepare(const gradd_infer_t *c, gradd_prepared_t *out) {
    return make_ready(c, true, out);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* A launch. */
typedef struct rnn_call_s {
    const gradd_launch_t *r;
    const rnn_ready_t *k;
    size_t cell, real; /* bytes of an element */
} rnn_call_t;

static rnn_call_t call_of(const gradd_launch_t *r) {
    const rnn_ready_t *k = r->state;
    return (rnn_call_t){r, k, gradd_dtype_bytes(k->v.dtype), gradd_dtype_bytes(k->v.wide)};
}

static char *slot(const rnn_call_t *c, rnn_slot_t at) {
    return (char *)c->r->workspace + c->k->at[at];
}

static const char *operand(const rnn_call_t *c, int i) {
    const gradd_launch_t *r = c->r;
    return i < r->n_in && r->in[i].type.dtype ? r->in[i].data : NULL;
}

static char *result(const rnn_call_t *c, int j) {
    return j < c->r->n_out ? c->r->out[j].data : NULL;
}

/* A row of `n` elements of `bytes`; of NULL NULL. */
static void *row_at(const char *p, int64_t row, int64_t n, size_t bytes) {
    return p ? (char *)(uintptr_t)p + (size_t)(row * n) * bytes : NULL;
}

/* The same, of memory that holds all steps, or else of what holds one. */
static void *row_or(const char *p, int64_t row, int64_t n, size_t bytes, void *otherwise) {
    return p ? row_at(p, row, n, bytes) : otherwise;
}

static void each_row(const rnn_call_t *c, int64_t i, rnn_row_fn fn,
                     rnn_row_t (*row_of)(const rnn_call_t *c, int64_t i, int64_t b)) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t parts = (v->cells + STRETCH - 1) / STRETCH, tasks = v->batch * parts;
#pragma omp parallel for schedule(static) if (tasks > 1 && v->batch * v->gates * v->cells >=       \
                                                                   GRADD_PARALLEL_MIN / 2)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t from = task % parts * STRETCH, left = v->cells - from;
        const rnn_row_t row = row_of(c, i, task / parts);
        fn(&row, from, from + (left < STRETCH ? left : STRETCH));
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Where the state of step i lies, [B, P]; -1: the first. */
static const char *state_at(const rnn_call_t *c, int64_t i) {
    const gradd_rnn_t *v = &c->k->v;
    if (i < 0) return operand(c, GRADD_RNN_STATE);
    return row_at(result(c, GRADD_RNN_Y), gradd_rnn_at(v, i) * v->batch, v->state, c->cell);
}

/* The cells of step i, [B, H] in the type of sums. */
static char *cells_at(const rnn_call_t *c, int64_t i) {
    const gradd_rnn_t *v = &c->k->v;
    if (i < 0) return slot(c, CELLS);
    return row_or(result(c, GRADD_RNN_KEPT), gradd_rnn_at(v, i) * v->batch, v->cells, c->real,
                  slot(c, CELLS));
}

static rnn_row_t forward_row(const rnn_call_t *c, int64_t i, int64_t b) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t h = v->cells, gates = v->gates * h, row = gradd_rnn_at(v, i) * v->batch + b;
    rnn_row_t w = {.cells = h, .relu = v->kind == GRADD_RNN_RELU, .bias = slot(c, ADDED)};
    w.x = row_at(operand(c, GRADD_RNN_X), row, gates, c->cell);
    w.product = row_at(slot(c, SUM), b, gates, c->real);
    w.cell = row_at(cells_at(c, i), b, h, c->real);
    w.gates = row_or(result(c, GRADD_RNN_GATES), row, gates, c->cell,
                     row_at(slot(c, SPARE), b, gates, c->cell));
    w.before = v->kind == GRADD_RNN_LSTM ? row_at(cells_at(c, i - 1), b, h, c->real)
                                         : row_at(state_at(c, i - 1), b, v->state, c->cell);
    w.out = v->has_proj ? row_at(slot(c, OUT), b, h, c->cell)
                        : row_at(state_at(c, i), b, v->state, c->cell);
    return w;
}

static gradd_status_t forward_step(const rnn_call_t *c, int64_t i) {
    const rnn_ready_t *k = c->k;
    const gradd_rnn_t *v = &k->v;
    GRADD_TRY(gradd_gemm(k->product.state, state_at(c, i - 1), operand(c, GRADD_RNN_U), NULL,
                         slot(c, SUM), slot(c, LIBRARY)));
    each_row(c, i, k->of->forward[v->kind], forward_row);
    if (!v->has_proj) return GRADD_OK;
    GRADD_TRY(gradd_gemm(k->projection.state, slot(c, OUT), operand(c, GRADD_RNN_PROJ), NULL,
                         slot(c, SUM), slot(c, LIBRARY)));
    k->of->from_real((void *)(uintptr_t)state_at(c, i), slot(c, SUM), v->batch * v->state);
    return GRADD_OK;
}

static void begin_forward(const rnn_call_t *c) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t gates = v->gates * v->cells;
    memset(slot(c, ADDED), 0, c->real * (size_t)gates);
    if (v->has_bias) c->k->of->to_real(slot(c, ADDED), operand(c, GRADD_RNN_BIAS), gates);
    if (v->kind == GRADD_RNN_LSTM)
        c->k->of->to_real(slot(c, CELLS), operand(c, GRADD_RNN_CELLS), v->batch * v->cells);
}

static void end_forward(const rnn_call_t *c) {
    const gradd_rnn_t *v = &c->k->v;
    char *last = result(c, GRADD_RNN_LAST), *cells = result(c, GRADD_RNN_LAST_CELLS);
    if (last) memcpy(last, state_at(c, v->steps - 1), c->cell * (size_t)(v->batch * v->state));
    if (!cells) return;
    if (v->kind == GRADD_RNN_LSTM)
        c->k->of->from_real(cells, cells_at(c, v->steps - 1), v->batch * v->cells);
    else
        memset(cells, 0, c->cell * (size_t)(v->batch * v->cells));
}

/* A part has some of the steps; what goes from one to the next is in results and workspace. */
gradd_status_t gradd_rnn(const gradd_launch_t *r) {
    const rnn_call_t c = call_of(r);
    const gradd_range_t steps = gradd_part_of(r, c.k->v.steps);
    if (!r->part) begin_forward(&c);
    for (int64_t i = steps.from; i < steps.to; i++)
        GRADD_TRY(forward_step(&c, i));
    if (gradd_part_is_last(r)) end_forward(&c);
    return GRADD_OK;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* What stands in front of step i: cells in the type of sums, or the state. */
static const void *before_of(const rnn_call_t *c, int64_t i, int64_t b) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t h = v->cells, row = i ? gradd_rnn_at(v, i - 1) * v->batch + b : b;
    if (v->kind == GRADD_RNN_LSTM)
        return row_at(i ? operand(c, GRADD_RNN_GRAD_KEPT) : slot(c, FIRST), row, h, c->real);
    if (v->kind != GRADD_RNN_GRU) return NULL;
    return row_at(operand(c, i ? GRADD_RNN_GRAD_Y : GRADD_RNN_GRAD_STATE), row, h, c->cell);
}

static rnn_row_t back_row(const rnn_call_t *c, int64_t i, int64_t b) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t h = v->cells, gates = v->gates * h, row = gradd_rnn_at(v, i) * v->batch + b;
    rnn_row_t w = {.cells = h, .relu = v->kind == GRADD_RNN_RELU, .before = before_of(c, i, b)};
    w.x = row_at(operand(c, GRADD_RNN_GRAD_GATES), row, gates, c->cell);
    w.dy = v->has_proj ? slot(c, ZEROS)
                       : row_or(operand(c, GRADD_RNN_GRAD_DY), row, h, c->cell, slot(c, ZEROS));
    w.product = row_at(slot(c, v->has_proj ? MADE : SUM), b, h, c->real);
    w.cell = row_at(operand(c, GRADD_RNN_GRAD_KEPT), row, h, c->real);
    w.dcell = row_at(slot(c, CELLS), b, h, c->real);
    w.gates = row_at(result(c, GRADD_RNN_DX), row, gates, c->cell);
    w.out =
        row_or(result(c, GRADD_RNN_PROJECTS), row, h, c->cell, row_at(slot(c, OUT), b, h, c->cell));
    w.dproduct = row_or(result(c, GRADD_RNN_DPRODUCT), row, gates, c->cell,
                        row_at(slot(c, SPARE), b, gates, c->cell));
    return w;
}

/* The state's gradient at step i through the projection. */
static gradd_status_t back_projection(const rnn_call_t *c, int64_t i) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t p = v->state, first = gradd_rnn_at(v, i) * v->batch;
    char *whole = row_or(result(c, GRADD_RNN_DPROJECTED), first, p, c->cell, slot(c, SPARE));
    for (int64_t b = 0; b < v->batch; b++)
        c->k->of->add(row_at(whole, b, p, c->cell), row_at(slot(c, SUM), b, p, c->real),
                      row_or(operand(c, GRADD_RNN_GRAD_DY), first + b, p, c->cell, slot(c, ZEROS)),
                      p);
    return gradd_gemm(c->k->projection.state, whole, operand(c, GRADD_RNN_GRAD_PROJ), NULL,
                      slot(c, MADE), slot(c, LIBRARY));
}

static gradd_status_t back_step(const rnn_call_t *c, int64_t i) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t gates = v->gates * v->cells, first = gradd_rnn_at(v, i) * v->batch;
    if (v->has_proj) GRADD_TRY(back_projection(c, i));
    each_row(c, i, c->k->of->back[v->kind], back_row);
    const void *d = row_at(result(c, GRADD_RNN_DX), first, gates, c->cell);
    if (v->kind == GRADD_RNN_GRU)
        d = row_or(result(c, GRADD_RNN_DPRODUCT), first, gates, c->cell, slot(c, SPARE));
    if (!i && !result(c, GRADD_RNN_DSTATE)) return GRADD_OK;
    return gradd_gemm(c->k->product.state, d, operand(c, GRADD_RNN_GRAD_U), NULL, slot(c, SUM),
                      slot(c, LIBRARY));
}

/* Gradients that arrive for what is behind the last step, or zeros. */
static void begin(const rnn_call_t *c, int i, rnn_slot_t to, int64_t n) {
    if (operand(c, i))
        c->k->of->to_real(slot(c, to), operand(c, i), n);
    else
        memset(slot(c, to), 0, c->real * (size_t)n);
}

static void begin_back(const rnn_call_t *c) {
    const gradd_rnn_t *v = &c->k->v;
    const int64_t cells = v->batch * v->cells;
    memset(slot(c, ZEROS), 0, c->k->at[ZEROS + 1] - c->k->at[ZEROS]);
    begin(c, GRADD_RNN_GRAD_DLAST, SUM, v->batch * v->state);
    begin(c, GRADD_RNN_GRAD_DLAST_CELLS, CELLS, cells);
    if (v->kind == GRADD_RNN_LSTM)
        c->k->of->to_real(slot(c, FIRST), operand(c, GRADD_RNN_GRAD_CELLS), cells);
}

static void end_back(const rnn_call_t *c) {
    const gradd_rnn_t *v = &c->k->v;
    char *dstate = result(c, GRADD_RNN_DSTATE), *dcells = result(c, GRADD_RNN_DCELLS);
    if (dstate) c->k->of->from_real(dstate, slot(c, SUM), v->batch * v->state);
    if (dcells) c->k->of->from_real(dcells, slot(c, CELLS), v->batch * v->cells);
}

/* Of all but a GRU, whose product has another gradient. */
static void copy_gates(const rnn_call_t *c, int64_t i) {
    const gradd_rnn_t *v = &c->k->v;
    char *same = v->kind == GRADD_RNN_GRU ? NULL : result(c, GRADD_RNN_DPRODUCT);
    const size_t bytes = c->cell * (size_t)(v->batch * v->gates * v->cells);
    const size_t at = bytes * (size_t)gradd_rnn_at(v, i);
    if (same) memcpy(same + at, result(c, GRADD_RNN_DX) + at, bytes);
}

gradd_status_t gradd_rnn_grad(const gradd_launch_t *r) {
    const rnn_call_t c = call_of(r);
    const int64_t last = c.k->v.steps - 1;
    const gradd_range_t steps = gradd_part_of(r, c.k->v.steps);
    if (!r->part) begin_back(&c);
    for (int64_t i = steps.from; i < steps.to; i++) {
        GRADD_TRY(back_step(&c, last - i));
        copy_gates(&c, last - i);
    }
    if (gradd_part_is_last(r)) end_back(&c);
    return GRADD_OK;
}
