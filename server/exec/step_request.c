/* See step_request.h. */
#include "server/exec/step_request.h"

#include "shm/hash.h"

/* The number of a step shares a word with the number of a chunk. */
#define STEP_MAX ((UINT64_C(1) << (64 - STEP_CHUNK_BITS)) - 1)

uint64_t step_fingerprint(const step_request_t *r) {
    uint64_t hash = gradd_hash_bytes(GRADD_HASH_START, &r->max_norm, sizeof r->max_norm);
    for (int i = 0; i < r->n_groups; i++) {
        const gradd_adam_t *g = &r->groups[i];
        double numbers[] = {g->lr,
                            g->beta1,
                            g->beta2,
                            g->eps,
                            g->weight_decay,
                            (double)g->mode,
                            (double)g->bias_correction,
                            (double)g->step};
        hash = gradd_hash_bytes(hash, numbers, sizeof numbers);
    }
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        int64_t numbers[] = {t->n, t->group, t->g != NULL, t->dtype, t->master != NULL};
        hash = gradd_hash_bytes(hash, numbers, sizeof numbers);
        /* not in steps of all rows, which another version may have begun */
        if (t->width) hash = gradd_hash_bytes(hash, &t->width, sizeof t->width);
    }
    if (r->grad_scale) hash = gradd_hash_bytes(hash, &r->grad_scale, sizeof r->grad_scale);
    if (r->finite) hash = gradd_hash_bytes(hash, "finite", 6);
    if (r->once) hash = gradd_hash_bytes(hash, &r->once, sizeof r->once);
    return hash;
}

int64_t step_chunk_elements(const step_tensor_t *t, int64_t chunk) {
    if (!t->width) return chunk;
    const int64_t rows = chunk / t->width;
    return (rows < STEP_ROW_WORDS * 64 ? rows : STEP_ROW_WORDS * 64) * t->width;
}

static gradd_status_t check_width(const step_tensor_t *t, int64_t chunk, int i) {
    if (t->width < 0 || (t->width && t->n % t->width))
        return GRADD_FAIL(TENSOR, "parameter %d: %lld elements in rows of %lld", i, (long long)t->n,
                          (long long)t->width);
    if (t->width > chunk)
        return GRADD_FAIL(LIMIT, "parameter %d: rows of %lld elements, expected at most %lld", i,
                          (long long)t->width, (long long)chunk);
    return GRADD_OK;
}

gradd_status_t step_check(const step_request_t *r, int64_t chunk) {
    int64_t chunks = 0;
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        if (t->group < 0 || t->group >= r->n_groups)
            return GRADD_FAIL(TENSOR, "parameter %d: group %d of %d", i, t->group, r->n_groups);
        if (t->n < 0) return GRADD_FAIL(TENSOR, "parameter %d: negative size", i);
        if (t->dtype != GRADD_DT_F32 && !gradd_dtype_is_half(t->dtype))
            return GRADD_FAIL(TENSOR, "parameter %d: neither f32 nor bf16 nor f16", i);
        if (t->master && t->dtype == GRADD_DT_F32)
            return GRADD_FAIL(TENSOR, "parameter %d: f32 has no master weights", i);
        GRADD_TRY(check_width(t, chunk, i));
        chunks += (t->n + step_chunk_elements(t, chunk) - 1) / step_chunk_elements(t, chunk);
    }
    if (chunks >= 1 << STEP_CHUNK_BITS)
        return GRADD_FAIL(LIMIT, "too many parameters for one step");
    if (r->step >= STEP_MAX)
        return GRADD_FAIL(LIMIT, "step %llu, expected below %llu", (unsigned long long)r->step,
                          (unsigned long long)STEP_MAX);
    for (int i = 0; i < r->n_groups; i++)
        if (r->groups[i].mode > GRADD_ADAMW_TORCH || r->groups[i].step < 1)
            return GRADD_FAIL(TENSOR, "group %d: mode %d, step %lld", i, r->groups[i].mode,
                              (long long)r->groups[i].step);
    return GRADD_OK;
}
