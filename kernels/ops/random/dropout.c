/* Dropout and DropoutAdd.
 *
 * y = x * m / (1 - p), where the mask m is 1 with probability 1 - p; without training_mode, or with
 * the run's flag dropout_off, y = x. The mask is a function of (seed, node, element), see rng.h:
 * backward saves nothing and computes it again. DropoutGrad(dy, ratio, training_mode) is internal
 * and carries the forward node's index in the attribute "node". p = 1 gives zeros, as in PyTorch.
 * DropoutAdd(x, residual; ratio) is Dropout(x) + residual in one pass, with the mask that Dropout
 * has; dy is the gradient of the residual as it is. bf16 and f16 are scaled and added in f32,
 * rounded once.
 *
 * The last operand of each is a list of live rows (liverows.c) where x holds these rows alone, all
 * of the same size: the mask is the one that they have among all rows.
 */
#include <string.h>

#include "kernels/contract/fault.h"
#include "kernels/contract/kernel.h"
#include "kernels/contract/op.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/half.h"
#include "kernels/cpu/parts.h"
#include "kernels/cpu/pick.h"
#include "kernels/describe/dispatch.h"
#include "kernels/math/rng.h"
#include "kernels/rules/infer.h"
#include "kernels/rules/rowwise.h"
#include "kernels/rules/rules.h"

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct drop_s {
    uint64_t seed, node;
    uint64_t limit; /* an element is kept if its word is not below */
    double scale;   /* 1 / (1 - p) */
    bool active;
    const gradd_view_t *rows; /* list of live rows; NULL = all */
    int64_t size;             /* elements of a row */
} drop_t;

enum { ROWS = 3, ADD_ROWS = 2 }; /* the operand: of Dropout and DropoutGrad, of DropoutAdd */

static bool given(const gradd_view_t *in, int n_in, int input) {
    return input < n_in && in[input].type.dtype != GRADD_DT_NONE;
}

static double real_at(const gradd_view_t *v, int64_t i) {
    if (v->type.dtype == GRADD_DT_F32) return (double)((const float *)v->data)[i];
    if (v->type.dtype == GRADD_DT_F64) return ((const double *)v->data)[i];
    return (double)gradd_half_f32((const uint16_t *)v->data + i, v->type.dtype);
}

static void put_real(const gradd_view_t *v, int64_t i, double x) {
    if (v->type.dtype == GRADD_DT_F32)
        ((float *)v->data)[i] = (float)x;
    else if (v->type.dtype == GRADD_DT_F64)
        ((double *)v->data)[i] = x;
    else
        gradd_half_put((uint16_t *)v->data + i, v->type.dtype, (float)x);
}

static gradd_status_t set_drop(const gradd_launch_t *r, double p, bool training, int rows,
                               drop_t *d) {
    if (!(p >= 0 && p <= 1)) {
        gradd_fault_t fault = {.kind = GRADD_FAULT_RATIO};
        memcpy(&fault.value, &p, sizeof p);
        return gradd_fault_fail(&fault);
    }
    const gradd_drop_t by = gradd_rng_drop(p);
    *d = (drop_t){.seed = r->seed, .limit = by.limit, .scale = by.scale};
    d->node = (uint64_t)gradd_attr_int(r->attrs, "node", (int64_t)r->node);
    d->active = training && !r->dropout_off && p > 0;
    if (!given(r->in, r->n_in, rows)) return GRADD_OK;
    d->rows = &r->in[rows];
    d->size = gradd_type_count(&r->in[0].type) / gradd_type_count(&d->rows->type);
    return GRADD_OK;
}

static gradd_status_t read_drop(const gradd_launch_t *r, drop_t *d) {
    double p = given(r->in, r->n_in, 1) ? real_at(&r->in[1], 0) : 0.5;
    bool training = given(r->in, r->n_in, 2) && *(const uint8_t *)r->in[2].data;
    return set_drop(r, p, training, ROWS, d);
}

/* Elements [first, end) of groups of 64, where first starts a group; T is stored, R calculated in.
 * mask and plus (what is added) may be NULL; y may be x or plus. */
#define DROP_RANGE(T, R, READ, WRITE)                                                              \
    GRADD_MULTIARCH static void drop_group_##T(const uint32_t *words, uint32_t limit, R scale,     \
                                               int64_t n, T *y, const T *x, const T *plus) {       \
        if (plus) {                                                                                \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] =                             \
                WRITE((words[i] >= limit ? READ(x[i]) * scale : (R)0) + READ(plus[i]));            \
        } else {                                                                                   \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] =                             \
                WRITE(words[i] >= limit ? READ(x[i]) * scale : (R)0);                              \
        }                                                                                          \
    }                                                                                              \
    static void drop_range_##T(const drop_t *d, int64_t first, int64_t end, T *y, const T *x,      \
                               const T *plus, uint8_t *mask) {                                     \
        uint32_t words[GRADD_RNG_GROUP], limit = (uint32_t)d->limit;                               \
        for (int64_t base = first; base < end; base += GRADD_RNG_GROUP) {                          \
            int64_t n = end - base < GRADD_RNG_GROUP ? end - base : GRADD_RNG_GROUP;               \
            gradd_rng_group(d->seed, d->node, (uint64_t)base / GRADD_RNG_GROUP, words);            \
            drop_group_##T(words, limit, (R)d->scale, n, y + base, x + base,                       \
                           plus ? plus + base : NULL);                                             \
            for (int64_t i = 0; i < n && mask; i++)                                                \
                mask[base + i] = words[i] >= limit;                                                \
        }                                                                                          \
    }                                                                                              \
    /* A row whose first element is number `first` among all rows. */                              \
    static void drop_row_##T(const drop_t *d, uint64_t first, int64_t at, T *y, const T *x,        \
                             const T *plus) {                                                      \
        uint32_t words[GRADD_RNG_GROUP], limit = (uint32_t)d->limit;                               \
        for (int64_t done = 0, n; done < d->size; done += n, at += n) {                            \
            const uint64_t place = first + (uint64_t)done;                                         \
            const int64_t skip = (int64_t)(place % GRADD_RNG_GROUP);                               \
            n = GRADD_RNG_GROUP - skip < d->size - done ? GRADD_RNG_GROUP - skip : d->size - done; \
            gradd_rng_group(d->seed, d->node, place / GRADD_RNG_GROUP, words);                     \
            drop_group_##T(words + skip, limit, (R)d->scale, n, y + at, x + at,                    \
                           plus ? plus + at : NULL);                                               \
        }                                                                                          \
    }

DROP_RANGE(float, float, , )
DROP_RANGE(double, double, , )
DROP_RANGE(gradd_bf16_t, float, gradd_bf16_f32, gradd_f32_bf16)
DROP_RANGE(gradd_f16_t, float, gradd_f16_f32, gradd_f32_f16)

static void drop_chunk(const drop_t *d, const gradd_launch_t *r, int64_t first, int64_t end,
                       const void *plus, uint8_t *mask) {
    void *y = r->out[0].data;
    const void *x = r->in[0].data;
    if (r->in[0].type.dtype == GRADD_DT_F32)
        drop_range_float(d, first, end, y, x, plus, mask);
    else if (r->in[0].type.dtype == GRADD_DT_F64)
        drop_range_double(d, first, end, y, x, plus, mask);
    else if (r->in[0].type.dtype == GRADD_DT_F16)
        drop_range_gradd_f16_t(d, first, end, y, x, plus, mask);
    else
        drop_range_gradd_bf16_t(d, first, end, y, x, plus, mask);
}

/* Number of the first element of row i among all rows. A client may write anything there. */
static uint64_t row_at(const drop_t *d, int64_t i) {
    const int64_t row = gradd_pick_index(d->rows, i);
    return (uint64_t)(row < 0 ? ~row : row) * (uint64_t)d->size;
}

static void drop_row(const drop_t *d, const gradd_launch_t *r, int64_t i, const void *plus) {
    void *y = r->out[0].data;
    const void *x = r->in[0].data;
    const uint64_t first = row_at(d, i);
    const int64_t at = i * d->size;
    if (r->in[0].type.dtype == GRADD_DT_F32)
        drop_row_float(d, first, at, y, x, plus);
    else if (r->in[0].type.dtype == GRADD_DT_F64)
        drop_row_double(d, first, at, y, x, plus);
    else if (r->in[0].type.dtype == GRADD_DT_F16)
        drop_row_gradd_f16_t(d, first, at, y, x, plus);
    else
        drop_row_gradd_bf16_t(d, first, at, y, x, plus);
}

#define CHUNK (64 * GRADD_RNG_GROUP)

static int64_t chunk_count(int64_t n) {
    return (n + CHUNK - 1) / CHUNK;
}

static gradd_range_t part_elements(const gradd_launch_t *r) {
    const int64_t n = gradd_type_count(&r->in[0].type);
    const gradd_range_t chunks = gradd_part_of(r, chunk_count(n));
    return (gradd_range_t){chunks.from * CHUNK, chunks.to * CHUNK < n ? chunks.to * CHUNK : n};
}

static void drop_all(const drop_t *d, const gradd_launch_t *r, const void *plus, uint8_t *mask) {
    int64_t n = gradd_type_count(&r->in[0].type);
    const gradd_range_t rows = gradd_part_of(r, d->rows ? gradd_type_count(&d->rows->type) : 0);
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t i = rows.from; i < rows.to; i++)
        drop_row(d, r, i, plus);
    if (d->rows) return;
    const gradd_range_t part = part_elements(r);
#pragma omp parallel for schedule(static) if (n >= GRADD_PARALLEL_MIN)
    for (int64_t first = part.from; first < part.to; first += CHUNK)
        drop_chunk(d, r, first, first + CHUNK < n ? first + CHUNK : n, plus, mask);
}

/* Elements of the launch's part as they are in `from`, or zeros; in the mask, if there is one, the
 * same for all. */
static void fill(const gradd_launch_t *r, const void *from, uint8_t *mask, bool kept) {
    const gradd_range_t part = part_elements(r);
    const size_t each = gradd_dtype_bytes(r->in[0].type.dtype), n = (size_t)(part.to - part.from);
    const size_t at = (size_t)part.from * each;
    if (from)
        gradd_copy_bytes((char *)r->out[0].data + at, (const char *)from + at, n * each);
    else
        gradd_copy_zero((char *)r->out[0].data + at, n * each);
    if (mask && n) memset(mask + part.from, kept, n);
}

static int parts_of(const gradd_infer_t *c, int rows) {
    const bool listed = given(c->in, c->n_in, rows);
    const int64_t n = gradd_type_count(&c->in[listed ? rows : 0].type);
    return gradd_parts_of_tasks(c, listed ? n : chunk_count(n));
}

static int parts_dropout(const gradd_infer_t *c) {
    return parts_of(c, ROWS);
}

static int parts_dropout_add(const gradd_infer_t *c) {
    return parts_of(c, ADD_ROWS);
}

static gradd_status_t compute_dropout(const gradd_launch_t *r) {
    uint8_t *mask = r->n_out > 1 ? r->out[1].data : NULL;
    drop_t d;
    GRADD_TRY(read_drop(r, &d));
    if (!d.active)
        fill(r, r->in[0].data, mask, true);
    else if (d.limit > UINT32_MAX) /* p = 1 */
        fill(r, NULL, mask, false);
    else
        drop_all(&d, r, NULL, mask);
    return GRADD_OK;
}

static gradd_status_t compute_dropout_add(const gradd_launch_t *r) {
    const void *residual = r->in[1].data;
    drop_t d;
    GRADD_TRY(set_drop(r, gradd_attr_float(r->attrs, "ratio", 0.5), true, ADD_ROWS, &d));
    if (!d.active) d.limit = 0, d.scale = 1; /* every word is kept */
    if (d.limit > UINT32_MAX)
        fill(r, residual, NULL, false);
    else
        drop_all(&d, r, residual, NULL);
    return GRADD_OK;
}

/* The definition: one element after the other, in double. */
static void define(const drop_t *d, const gradd_launch_t *r, const gradd_view_t *plus,
                   uint8_t *mask) {
    int64_t n = gradd_type_count(&r->in[0].type);
    for (int64_t i = 0; i < n; i++) {
        const uint64_t place =
            d->rows ? row_at(d, i / d->size) + (uint64_t)(i % d->size) : (uint64_t)i;
        bool keep = !d->active || gradd_rng_word(d->seed, d->node, place) >= d->limit;
        double y = keep ? real_at(&r->in[0], i) * (d->active ? d->scale : 1) : 0;
        put_real(&r->out[0], i, y + (plus ? real_at(plus, i) : 0));
        if (mask) mask[i] = keep;
    }
}

static gradd_status_t ref_dropout(const gradd_launch_t *r) {
    drop_t d;
    GRADD_TRY(read_drop(r, &d));
    define(&d, r, NULL, r->n_out > 1 ? r->out[1].data : NULL);
    return GRADD_OK;
}

static gradd_status_t ref_dropout_add(const gradd_launch_t *r) {
    drop_t d;
    GRADD_TRY(set_drop(r, gradd_attr_float(r->attrs, "ratio", 0.5), true, ADD_ROWS, &d));
    define(&d, r, &r->in[1], NULL);
    return GRADD_OK;
}

/* ---- shape rules ----------------------------------------------------------------------------- */

/* The list divides the elements into rows, and there is no mask for people then. */
static gradd_status_t check_rows(const gradd_infer_t *c, int at) {
    if (!given(c->in, c->n_in, at)) return GRADD_OK;
    const int64_t n = gradd_type_count(&c->in[at].type);
    if (!n || gradd_type_count(&c->in[0].type) % n || c->n_out > 1)
        return GRADD_FAIL(GRAPH, "a list of %lld live rows does not divide x", (long long)n);
    return GRADD_OK;
}

/* Behind all others comes the list. */
static bool rowwise_dropout(gradd_rowwise_t *r) {
    r->takes_rows = ROWS;
    for (int i = 1; i < r->n_in; i++)
        r->use[i] = GRADD_USE_WHOLE;
    return r->n_in <= ROWS && r->n_out < 2 && gradd_rowwise_leads(r, 0);
}

static bool rowwise_dropout_add(gradd_rowwise_t *r) {
    r->takes_rows = ADD_ROWS;
    return r->n_in <= ADD_ROWS && gradd_rowwise_leads(r, 0) && gradd_rowwise_leads(r, 1);
}

static gradd_status_t infer_dropout(gradd_infer_t *c) {
    for (int i = 1; i < 3; i++)
        if (given(c->in, c->n_in, i) && gradd_type_count(&c->in[i].type) != 1)
            return GRADD_FAIL(GRAPH, "ratio and training_mode must be scalars");
    GRADD_TRY(check_rows(c, ROWS));
    c->out[0] = c->in[0].type;
    if (c->n_out > 1) {
        c->out[1] = c->in[0].type;
        c->out[1].dtype = GRADD_DT_BOOL;
    }
    return GRADD_OK;
}

static gradd_status_t infer_dropout_add(gradd_infer_t *c) {
    if (!gradd_type_equal(&c->in[0].type, &c->in[1].type))
        return GRADD_FAIL(GRAPH, "the residual does not have the type of x");
    GRADD_TRY(check_rows(c, ADD_ROWS));
    c->out[0] = c->in[0].type;
    return GRADD_OK;
}

/* ---- gradient rules -------------------------------------------------------------------------- */

static gradd_status_t grad_dropout(gradd_grad_t *g) {
    gradd_builder_t *b = g->b;
    if (!g->need[0]) return GRADD_OK;
    bool has_mode = g->n_in > 2 && g->in[2] != GRADD_NONE;
    const uint8_t *training = has_mode ? b->data(b, g->in[2]) : NULL;
    if (!has_mode || (training && !*training)) {
        g->din[0] = g->dout[0];
        return b->status;
    }
    gradd_val_t in[4] = {g->dout[0], g->in[1], g->in[2], g->n_in > ROWS ? g->in[ROWS] : GRADD_NONE};
    int64_t node = gradd_attr_int(g->attrs, "node", (int64_t)g->node);
    gradd_attr_t attr = gradd_make_int("node", node);
    g->din[0] = gradd_emit_attrs(b, "DropoutGrad", in, in[ROWS] == GRADD_NONE ? 3 : 4, &attr, 1);
    return b->status;
}

static gradd_status_t grad_dropout_add(gradd_grad_t *g) {
    static const gradd_type_t flag = {.dtype = GRADD_DT_BOOL};
    static const uint8_t yes = 1;
    gradd_builder_t *b = g->b;
    if (g->dout[0] == GRADD_NONE) return GRADD_OK;
    if (g->need[1]) g->din[1] = g->dout[0];
    if (!g->need[0]) return b->status;
    double ratio =
        gradd_attr_float(g->attrs, "ratio", 0.5); /* not rounded: the mask depends on it */
    gradd_val_t in[4] = {g->dout[0], gradd_const_scalar(b, GRADD_DT_F64, ratio), GRADD_NONE,
                         g->n_in > ADD_ROWS ? g->in[ADD_ROWS] : GRADD_NONE};
    if (!b->status) in[2] = b->constant(b, &flag, &yes);
    gradd_attr_t attr = gradd_make_int("node", (int64_t)g->node);
    g->din[0] = gradd_emit_attrs(b, "DropoutGrad", in, in[ROWS] == GRADD_NONE ? 3 : 4, &attr, 1);
    return b->status;
}

/* ---- expansion ------------------------------------------------------------------------------- */

static gradd_status_t expand_dropout_add(gradd_expand_t *x) {
    static const gradd_type_t flag = {.dtype = GRADD_DT_BOOL};
    static const uint8_t yes = 1;
    gradd_builder_t *b = x->b;
    const gradd_dtype_t dtype = gradd_val_type(b, x->in[0])->dtype;
    const double ratio = gradd_attr_float(x->attrs, "ratio", 0.5);
    gradd_val_t in[4] = {gradd_wide(b, x->in[0]), gradd_const_scalar(b, GRADD_DT_F64, ratio),
                         GRADD_NONE, x->n_in > ADD_ROWS ? x->in[ADD_ROWS] : GRADD_NONE};
    if (!b->status) in[2] = b->constant(b, &flag, &yes);
    gradd_val_t y = gradd_emit_n(b, "Dropout", in[ROWS] == GRADD_NONE ? 3 : 4, in);
    y = GRADD_EMIT(b, "Add", y, gradd_wide(b, x->in[1]));
    x->out[0] = gradd_cast(b, y, dtype);
    return b->status;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* PyTorch's exporter writes no seed; one that is given would make every step alike: ignored. */
static const gradd_attr_spec_t dropout_attrs[] = {
    {"seed", GRADD_ATTR_INT, false},
    {0}
};

#define DROPOUT_TYPES {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_T_BOOL, GRADD_DTB(I64)}

GRADD_OPS(
    dropout,
    GRADD_OP("Dropout", "", 12, (1, 4), (1, 2), .flags = GRADD_OP_RANDOM, .no_rule = 2, .counts = 2,
             .types = DROPOUT_TYPES, .attrs = dropout_attrs, .infer = infer_dropout,
             .rowwise = rowwise_dropout, .grad = grad_dropout, .ref = GRADD_REF(ref_dropout),
             .cases = GRADD_CASES({.text = "f32[3,45] f32[]={0.3} bool[]={1}"},
                                  {.text = "f32[3,45] f32[]={0.3} bool[]={1} -> 2"},
                                  {.text = "f32[9,31] - bool[]={1} -> 2"},
                                  {.text = "f32[5] f32[]={0.3}"}, {.text = "f32[5] -> 2"},
                                  {.text = "f32[70] f32[]={0.9} bool[]={0} -> 2"},
                                  {.text = "f32[70] f32[]={1} bool[]={1} -> 2"},
                                  {.text = "f32[2,2] f32[]={0} bool[]={1}"},
                                  {.text = "f32[50001] f32[]={0.1} bool[]={1} -> 2"},
                                  {.text = "f32[9,1000] f32[]={0.1} bool[]={1} -> 2"},
                                  {.text = "f32[9,40] f32[]={0.1} bool[] -> 2"},
                                  {.text = "f32[65]={nan} f32[]={1} bool[]={1}", .grad_tol = -1},
                                  {.text = "f32[0,3] f32[]={0.5} bool[]={1}"},
                                  {.text = "f32[1,4,45] f32[]={0.3} bool[]={1} "
                                           "i64[4]={0,2,70,-71}"},
                                  {.text = "f32[3,301] f32[]={0.3} bool[]={1} "
                                           "i64[3]={1,2,-1}"})),
    GRADD_OP("DropoutGrad", "com.gradd", 1, (1, 4), (1, 1),
             .flags = GRADD_OP_RANDOM | GRADD_OP_INTERNAL, .no_diff = 6, .types = DROPOUT_TYPES,
             .attrs = GRADD_ATTR_LIST({"node", GRADD_ATTR_INT, true}), .infer = infer_dropout,
             .grad = grad_dropout, .ref = GRADD_REF(ref_dropout),
             .cases = GRADD_CASES({.text = "f32[3,45] f32[]={0.3} bool[]={1} | node=7"},
                                  {.text = "f32[200] - bool[]={1} | node=0"},
                                  {.text = "f32[2,100] - bool[]={1} i64[2]={3,8} | node=0"})),
    GRADD_OP("DropoutAdd", "com.gradd", 1, (2, 3), (1, 1),
             .flags = GRADD_OP_RANDOM | GRADD_OP_INTERNAL,
             .types = {GRADD_T_FLOAT, GRADD_T_FLOAT, GRADD_DTB(I64)},
             .attrs = GRADD_ATTR_LIST({"ratio", GRADD_ATTR_FLOAT, true}),
             .infer = infer_dropout_add, .rowwise = rowwise_dropout_add, .grad = grad_dropout_add,
             .expand = expand_dropout_add, .ref = GRADD_REF(ref_dropout_add),
             .cases = GRADD_CASES({.text = "f32[3,45] f32[3,45] | ratio=0.3"},
                                  {.text = "f32[2,2] f32[2,2] | ratio=0.0"},
                                  {.text = "f32[70] f32[70] | ratio=1.0"},
                                  {.text = "f32[5,10001] f32[5,10001] | ratio=0.1"},
                                  {.text = "f32[0,3] f32[0,3] | ratio=0.5"},
                                  {.text = "f32[9,1000] f32[9,1000] | ratio=0.1"},
                                  {.text = "f32[64]={nan} f32[64] | ratio=1.0", .grad_tol = -1},
                                  {.text = "f32[1,2,65] f32[1,2,65] i64[2]={5,9} | "
                                           "ratio=0.4"})));

GRADD_KERNELS(cpu, dropout,
              GRADD_KERNEL("Dropout", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_dropout, .parts = parts_dropout),
              GRADD_KERNEL("DropoutGrad", "loop", .types = {GRADD_T_ANY}, .inplace = 1,
                           .compute = compute_dropout, .parts = parts_dropout),
              GRADD_KERNEL("DropoutAdd", "loop", .types = {GRADD_T_ANY}, .inplace = 3,
                           .compute = compute_dropout_add, .parts = parts_dropout_add));
