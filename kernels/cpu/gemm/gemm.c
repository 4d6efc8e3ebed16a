/* Matrix products: simplification, choice of the implementation, and the plain definition. See
 * gemm.h. */
#include "kernels/cpu/gemm/gemm.h"

#include "kernels/cpu/gemm/gemm_impl.h"
#include "kernels/cpu/half.h"
#include "kernels/describe/dispatch.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define TO_BF16(x) gradd_f32_bf16((float)(x))
#define TO_F16(x)  gradd_f32_f16((float)(x))
#define PLAIN_PRODUCT(T, R, ACC, READ, READ_C, WRITE)                                              \
    for (int64_t at = 0; at < batches * g->m; at++) {                                              \
        int64_t a_at, b_at;                                                                        \
        gradd_gemm_offsets(g, at / g->m, &a_at, &b_at);                                            \
        const T *x = (const T *)a + a_at + at % g->m * g->a_m, *y = (const T *)b + b_at;           \
        R *z = (R *)c + at * g->n;                                                                 \
        for (int64_t j = 0; j < g->n; j++) {                                                       \
            ACC sum = 0;                                                                           \
            for (int64_t l = 0; l < g->k; l++)                                                     \
                sum += (ACC)READ(x[l * g->a_k]) * (ACC)READ(y[l * g->b_k + j * g->b_n]);           \
            if (g->alpha != 1) sum = (ACC)(g->alpha * (double)sum);                                \
            if (g->has_bias) sum += (ACC)READ(((const T *)bias)[j]);                               \
            if (g->accumulate) sum += (ACC)READ_C(z[j]);                                           \
            z[j] = WRITE((ACC)sum);                                                                \
        }                                                                                          \
    }

gradd_status_t gradd_gemm_ref(const gradd_gemm_t *g, const void *a, const void *b, const void *bias,
                              void *c) {
    const int64_t batches = gradd_gemm_batches(g);
    switch (g->dtype) {
    case GRADD_DT_F32:
        PLAIN_PRODUCT(float, float, double, , , (float)) return GRADD_OK;
    case GRADD_DT_F64:
        PLAIN_PRODUCT(double, double, double, , , ) return GRADD_OK;
    case GRADD_DT_BF16:
        if (gradd_gemm_result(g) == GRADD_DT_F32)
            PLAIN_PRODUCT(gradd_bf16_t, float, double, gradd_bf16_f32, , (float))
        else
            PLAIN_PRODUCT(gradd_bf16_t, gradd_bf16_t, double, gradd_bf16_f32, gradd_bf16_f32,
                          TO_BF16)
        return GRADD_OK;
    case GRADD_DT_F16:
        if (gradd_gemm_result(g) == GRADD_DT_F32)
            PLAIN_PRODUCT(gradd_f16_t, float, double, gradd_f16_f32, , (float))
        else
            PLAIN_PRODUCT(gradd_f16_t, gradd_f16_t, double, gradd_f16_f32, gradd_f16_f32, TO_F16)
        return GRADD_OK;
    case GRADD_DT_I32:
        PLAIN_PRODUCT(int32_t, int32_t, uint64_t, , , (int32_t)) return GRADD_OK;
    case GRADD_DT_I64:
        PLAIN_PRODUCT(int64_t, int64_t, uint64_t, , , (int64_t)) return GRADD_OK;
    default:
        return GRADD_FAIL(UNSUPPORTED, "no matrix product of %s", gradd_dtype_name(g->dtype));
    }
}

/* ---- products that are ready ----------------------------------------------------------------- */

typedef enum way_e {
    NOTHING, /* to write */
    PLAIN,
    BLOCKED,
    WHOLE, /* one primitive */
    SPLIT, /* one after the other, along k */
    SINGLY /* one per matrix: oneDNN has none for the whole batch */
} way_t;

typedef struct product_s {
    gradd_gemm_t g; /* simplified */
    way_t way;
    gradd_primitive_t *primitive; /* Owned */
    gradd_split_t *split;         /* Owned */
} product_t;

typedef struct gemm_ready_s {
    int parts;            /* 1 = the whole, as `each` */
    int64_t a, b, c;      /* bytes from the operands of a part to those of the next one */
    product_t each, last; /* `last` only where it has fewer rows */
} gemm_ready_t;

static bool is_fast(gradd_dtype_t dtype) {
    if (dtype == GRADD_DT_BF16) return gradd_gemm_bf16_native();
    return dtype == GRADD_DT_F32 && !strncmp(gradd_gemm_library(), "oneDNN", 6);
}

static gradd_status_t find_way(product_t *p) {
    p->way = NOTHING;
    if (!gradd_gemm_batches(&p->g) || !p->g.m || !p->g.n) return GRADD_OK;
    p->way = PLAIN;
    if (!p->g.k || !gradd_dtype_is_float(p->g.dtype)) return GRADD_OK;
    p->way = BLOCKED;
    if (!is_fast(p->g.dtype)) return GRADD_OK;
    if (gradd_split_pays(&p->g)) GRADD_TRY(gradd_split_create(&p->g, &p->split));
    if (p->split) p->way = SPLIT;
    if (p->split) return GRADD_OK;
    GRADD_TRY(gradd_primitive_create(&p->g, &p->primitive));
    if (p->primitive) {
        p->way = WHOLE;
    } else if (p->g.batch_rank) {
        gradd_gemm_t single = p->g;
        single.batch_rank = 0;
        gradd_gemm_simplify(&single);
        GRADD_TRY(gradd_primitive_create(&single, &p->primitive));
        if (p->primitive) p->way = SINGLY;
    }
    return GRADD_OK;
}

static gradd_status_t product_init(product_t *p, const gradd_gemm_t *g) {
    p->g = *g;
    gradd_gemm_simplify(&p->g);
    return find_way(p);
}

/* Adds what it holds; the workspace serves one at a time. */
static void count_bytes(const product_t *p, gradd_prepared_t *out) {
    size_t workspace = 0;
    if (p->way == BLOCKED) workspace = gradd_gemm_blocked_workspace(&p->g);
    if (p->split) workspace = gradd_split_workspace(p->split, &p->g);
    if (p->split) out->bytes += gradd_split_bytes(p->split);
    if (p->primitive) workspace = gradd_primitive_workspace(p->primitive);
    if (p->primitive) out->bytes += GRADD_PRIMITIVE_BYTES;
    if (workspace > out->workspace) out->workspace = workspace;
}

static void product_finish(product_t *p) {
    gradd_primitive_destroy(p->primitive);
    gradd_split_destroy(p->split);
}

/* Parts have this many rows, or a multiple: then the implementations have full tiles. */
#define PART_ROWS 64

/* g has more than one part: cuts it along its outermost batch dimension, or its rows. */
static gradd_status_t cut(gemm_ready_t *r, const gradd_gemm_t *g) {
    const bool by_batch = g->batch_rank;
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    const int64_t n = by_batch ? g->batch[0] : g->m;
    int64_t each = (n + g->parts - 1) / g->parts;
    if (!by_batch) each = (each + PART_ROWS - 1) / PART_ROWS * PART_ROWS;
    r->parts = (int)((n + each - 1) / each);
    gradd_gemm_t part = *g;
    *(by_batch ? &part.batch[0] : &part.m) = each < n ? each : n;
    r->a = size * each * (by_batch ? g->a_batch[0] : g->a_m);
    r->b = size * each * (by_batch ? g->b_batch[0] : 0);
    r->c = (int64_t)gradd_dtype_bytes(gradd_gemm_result(g)) * g->n *
           (by_batch ? g->m * gradd_gemm_batches(&part) : each);
    GRADD_TRY(product_init(&r->each, &part));
    const int64_t rest = n - each * (r->parts - 1);
    if (rest == each || r->parts == 1) return GRADD_OK;
    *(by_batch ? &part.batch[0] : &part.m) = rest;
    return product_init(&r->last, &part);
}

static void finish(gemm_ready_t *r) {
    product_finish(&r->each);
    product_finish(&r->last);
    free(r);
}

gradd_status_t gradd_gemm_prepare(const gradd_gemm_t *description, gradd_prepared_t *out) {
    gradd_gemm_t g = *description;
    if (g.has_bias && g.alpha != 1) return GRADD_FAIL(INTERNAL, "bias with alpha %g", g.alpha);
    gemm_ready_t *r = calloc(1, sizeof *r);
    if (!r) return GRADD_FAIL(NOMEM, "matrix product");
    gradd_gemm_simplify(&g);
    if (!g.threads) g.threads = omp_get_max_threads();
    r->parts = 1;
    const bool cuts = g.parts > 1 && gradd_gemm_batches(&g) && g.m;
    gradd_status_t status = cuts ? cut(r, &g) : product_init(&r->each, &g);
    if (status) {
        finish(r);
        return status;
    }
    *out = (gradd_prepared_t){.state = r, .bytes = sizeof *r, .parts = r->parts};
    count_bytes(&r->each, out);
    count_bytes(&r->last, out);
    return GRADD_OK;
}

void gradd_gemm_unprepare(gradd_prepared_t *prepared) {
    finish(prepared->state);
}

static gradd_status_t one_by_one(const product_t *p, const gradd_gemm_operands_t *o) {
    const gradd_gemm_t *g = &p->g;
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    const int64_t step = g->m * g->n * (int64_t)gradd_dtype_bytes(gradd_gemm_result(g));
    for (int64_t i = 0, n = gradd_gemm_batches(g); i < n; i++) {
        int64_t a_at, b_at;
        gradd_gemm_offsets(g, i, &a_at, &b_at);
        GRADD_TRY(gradd_primitive_compute(p->primitive, (const char *)o->a + a_at * size,
                                          (const char *)o->b + b_at * size, o->bias,
                                          (char *)o->c + i * step, o->workspace));
    }
    return GRADD_OK;
}

static gradd_status_t compute(const product_t *p, const gradd_gemm_operands_t *o) {
    switch (p->way) {
    case NOTHING:
        return GRADD_OK;
    case PLAIN:
        return gradd_gemm_ref(&p->g, o->a, o->b, o->bias, o->c);
    case BLOCKED:
        return gradd_gemm_blocked(&p->g, o->a, o->b, o->bias, o->c, o->workspace);
    case WHOLE:
        return gradd_primitive_compute(p->primitive, o->a, o->b, o->bias, o->c, o->workspace);
    case SPLIT:
        return gradd_split_compute(p->split, &p->g, o);
    case SINGLY:
        return one_by_one(p, o);
    }
    return GRADD_FAIL(INTERNAL, "matrix product");
}

gradd_status_t gradd_gemm_part(const void *state, int part, const gradd_gemm_operands_t *o) {
    const gemm_ready_t *r = state;
    const gradd_gemm_operands_t at = {(const char *)o->a + part * r->a,
                                      (const char *)o->b + part * r->b, o->bias,
                                      (char *)o->c + part * r->c, o->workspace};
    const bool is_last = part == r->parts - 1 && r->last.g.n;
    return compute(is_last ? &r->last : &r->each, &at);
}

gradd_status_t gradd_gemm(const void *state, const void *a, const void *b, const void *bias,
                          void *c, void *workspace) {
    const gemm_ready_t *r = state;
    const gradd_gemm_operands_t o = {a, b, bias, c, workspace};
    for (int part = 0; part < r->parts; part++)
        GRADD_TRY(gradd_gemm_part(state, part, &o));
    return GRADD_OK;
}

bool gradd_gemm_accepts(const gradd_infer_t *c) {
    return is_fast(c->in[0].type.dtype);
}
