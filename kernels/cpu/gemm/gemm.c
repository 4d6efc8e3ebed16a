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

typedef struct gemm_ready_s {
    gradd_gemm_t g; /* simplified */
    way_t way;
    gradd_primitive_t *primitive; /* Owned */
    gradd_split_t *split;         /* Owned */
} gemm_ready_t;

static bool is_fast(gradd_dtype_t dtype) {
    if (dtype == GRADD_DT_BF16) return gradd_gemm_bf16_native();
    return dtype == GRADD_DT_F32 && !strncmp(gradd_gemm_library(), "oneDNN", 6);
}

static gradd_status_t find_way(gemm_ready_t *r) {
    r->way = NOTHING;
    if (!gradd_gemm_batches(&r->g) || !r->g.m || !r->g.n) return GRADD_OK;
    r->way = PLAIN;
    if (!r->g.k || !gradd_dtype_is_float(r->g.dtype)) return GRADD_OK;
    r->way = BLOCKED;
    if (!is_fast(r->g.dtype)) return GRADD_OK;
    if (gradd_split_pays(&r->g)) GRADD_TRY(gradd_split_create(&r->g, &r->split));
    if (r->split) r->way = SPLIT;
    if (r->split) return GRADD_OK;
    GRADD_TRY(gradd_primitive_create(&r->g, &r->primitive));
    if (r->primitive) {
        r->way = WHOLE;
    } else if (r->g.batch_rank) {
        gradd_gemm_t single = r->g;
        single.batch_rank = 0;
        gradd_gemm_simplify(&single);
        GRADD_TRY(gradd_primitive_create(&single, &r->primitive));
        if (r->primitive) r->way = SINGLY;
    }
    return GRADD_OK;
}

gradd_status_t gradd_gemm_prepare(const gradd_gemm_t *g, gradd_prepared_t *out) {
    if (g->has_bias && g->alpha != 1) return GRADD_FAIL(INTERNAL, "bias with alpha %g", g->alpha);
    gemm_ready_t *r = calloc(1, sizeof *r);
    if (!r) return GRADD_FAIL(NOMEM, "matrix product");
    r->g = *g;
    gradd_gemm_simplify(&r->g);
    if (!r->g.threads) r->g.threads = omp_get_max_threads();
    gradd_status_t status = find_way(r);
    if (status) {
        free(r);
        return status;
    }
    *out = (gradd_prepared_t){.state = r, .bytes = sizeof *r};
    if (r->way == BLOCKED) out->workspace = gradd_gemm_blocked_workspace(&r->g);
    if (r->split) {
        out->workspace = gradd_split_workspace(r->split, &r->g);
        out->bytes += gradd_split_bytes(r->split);
    }
    if (r->primitive) {
        out->workspace = gradd_primitive_workspace(r->primitive);
        out->bytes += GRADD_PRIMITIVE_BYTES;
    }
    return GRADD_OK;
}

void gradd_gemm_unprepare(gradd_prepared_t *prepared) {
    gemm_ready_t *r = prepared->state;
    gradd_primitive_destroy(r->primitive);
    gradd_split_destroy(r->split);
    free(r);
}

static gradd_status_t one_by_one(const gemm_ready_t *r, const char *a, const char *b,
                                 const void *bias, char *c, void *workspace) {
    const gradd_gemm_t *g = &r->g;
    const int64_t size = (int64_t)gradd_dtype_bytes(g->dtype);
    const int64_t step = g->m * g->n * (int64_t)gradd_dtype_bytes(gradd_gemm_result(g));
    for (int64_t i = 0, n = gradd_gemm_batches(g); i < n; i++) {
        int64_t a_at, b_at;
        gradd_gemm_offsets(g, i, &a_at, &b_at);
        GRADD_TRY(gradd_primitive_compute(r->primitive, a + a_at * size, b + b_at * size, bias,
                                          c + i * step, workspace));
    }
    return GRADD_OK;
}

gradd_status_t gradd_gemm(const void *state, const void *a, const void *b, const void *bias,
                          void *c, void *workspace) {
    const gemm_ready_t *r = state;
    switch (r->way) {
    case NOTHING:
        return GRADD_OK;
    case PLAIN:
        return gradd_gemm_ref(&r->g, a, b, bias, c);
    case BLOCKED:
        return gradd_gemm_blocked(&r->g, a, b, bias, c, workspace);
    case WHOLE:
        return gradd_primitive_compute(r->primitive, a, b, bias, c, workspace);
    case SPLIT:
        return gradd_split_compute(r->split, &r->g,
                                   &(gradd_split_operands_t){a, b, bias, c, workspace});
    case SINGLY:
        return one_by_one(r, a, b, bias, c, workspace);
    }
    return GRADD_FAIL(INTERNAL, "matrix product");
}

bool gradd_gemm_accepts(const gradd_infer_t *c) {
    return is_fast(c->in[0].type.dtype);
}
