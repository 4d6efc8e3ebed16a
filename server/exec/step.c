/* Optimizer step through a redo journal. See step.h. */
#include "server/exec/step.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/bf16.h"

#define CHUNK_BITS 24
/* The number of a step shares a word with the number of a chunk. */
#define STEP_MAX ((UINT64_C(1) << (64 - CHUNK_BITS)) - 1)

static uint64_t load(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static void store(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static float *buffer(const step_request_t *r, int which) {
    return (float *)((char *)r->journal + sizeof(step_journal_t)) + which * STEP_CHUNK;
}

void (*step_crash_point)(void);

static void crash_point(void) {
    if (step_crash_point) step_crash_point();
}

static uint64_t mix(uint64_t hash, const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    return hash;
}

/* Shapes, groups, hyper-parameters and the client's mark; not addresses, which differ after a
 * restart. */
static uint64_t fingerprint(const step_request_t *r) {
    uint64_t hash = mix(14695981039346656037u, &r->max_norm, sizeof r->max_norm);
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
        hash = mix(hash, numbers, sizeof numbers);
    }
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        int64_t numbers[] = {t->n, t->group, t->g != NULL, t->dtype, t->master != NULL};
        hash = mix(hash, numbers, sizeof numbers);
    }
    if (r->once) hash = mix(hash, &r->once, sizeof r->once);
    return hash;
}

static bool clips(const step_request_t *r) {
    return r->max_norm > 0 && isfinite(r->max_norm);
}

static double tensor_squares(const step_tensor_t *t) {
    if (!t->g) return 0;
    if (t->dtype == GRADD_DT_BF16) return gradd_sum_squares_bf16(t->g, t->n);
    return gradd_sum_squares(t->g, t->n);
}

static double global_norm(const step_request_t *r) {
    double sum = 0;
    for (int i = 0; i < r->n_tensors; i++)
        sum += tensor_squares(&r->tensors[i]);
    return sqrt(sum);
}

/* As torch.nn.utils.clip_grad_norm_: min(1, max_norm / (norm + 1e-6)). */
static float clip_scale(const step_request_t *r, double norm) {
    if (!clips(r)) return 1;
    double scale = r->max_norm / (norm + 1e-6);
    return scale > 1 ? 1 : (float)scale;
}

static void write_journal(const step_request_t *r, const step_tensor_t *t, int64_t from, int64_t n,
                          float scale) {
    gradd_adam_span_t span = {.m = t->m + from,
                              .v = t->v + from,
                              .out_p = buffer(r, 0),
                              .out_m = buffer(r, 1),
                              .out_v = buffer(r, 2),
                              .n = n};
    if (t->dtype == GRADD_DT_BF16) {
        span.p16 = (const gradd_bf16_t *)t->p + from;
        span.g16 = (const gradd_bf16_t *)t->g + from;
        span.p = t->master ? t->master + from : NULL;
    } else {
        span.p = (const float *)t->p + from;
        span.g = (const float *)t->g + from;
    }
    gradd_adam_update(&r->groups[t->group], scale, &span);
}

static void commit_piece(const step_request_t *r, const step_tensor_t *t, int64_t from, int64_t at,
                         int64_t n) {
    const float *p = buffer(r, 0) + at;
    size_t bytes = sizeof(float) * (size_t)n;
    if (t->master) memcpy(t->master + from + at, p, bytes);
    if (t->dtype == GRADD_DT_BF16)
        gradd_bf16_narrow((gradd_bf16_t *)t->p + from + at, p, n);
    else
        memcpy((float *)t->p + from + at, p, bytes);
    memcpy(t->m + from + at, buffer(r, 1) + at, bytes);
    memcpy(t->v + from + at, buffer(r, 2) + at, bytes);
}

static void commit_chunk(const step_request_t *r, const step_tensor_t *t, int64_t from, int64_t n) {
    int64_t piece = 16 << 10, pieces = (n + piece - 1) / piece;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (int64_t k = 0; k < pieces; k++) {
        int64_t at = k * piece, count = n - at < piece ? n - at : piece;
        commit_piece(r, t, from, at, count);
    }
}

static void run_chunk(const step_request_t *r, const step_tensor_t *t, int64_t from, int64_t n,
                      float scale) {
    step_journal_t *j = r->journal;
    uint64_t now = load(&j->progress);
    crash_point();
    if (load(&j->sealed) != now) {
        write_journal(r, t, from, n, scale);
        crash_point();
        store(&j->sealed, now);
    }
    crash_point();
    commit_chunk(r, t, from, n);
    crash_point();
    store(&j->progress, now + 1);
}

static void run_chunks(const step_request_t *r, float scale) {
    const step_journal_t *j = r->journal;
    uint64_t done = load(&j->progress) & ((1u << CHUNK_BITS) - 1), at = 0;
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        for (int64_t from = 0; t->g && from < t->n; from += STEP_CHUNK) {
            int64_t left = t->n - from;
            if (at++ < done) continue;
            run_chunk(r, t, from, left < STEP_CHUNK ? left : STEP_CHUNK, scale);
        }
    }
}

static gradd_status_t check_request(const step_request_t *r) {
    int64_t chunks = 0;
    for (int i = 0; i < r->n_tensors; i++) {
        const step_tensor_t *t = &r->tensors[i];
        if (t->group < 0 || t->group >= r->n_groups)
            return GRADD_FAIL(TENSOR, "parameter %d: group %d of %d", i, t->group, r->n_groups);
        if (t->n < 0) return GRADD_FAIL(TENSOR, "parameter %d: negative size", i);
        if (t->dtype != GRADD_DT_F32 && t->dtype != GRADD_DT_BF16)
            return GRADD_FAIL(TENSOR, "parameter %d: neither f32 nor bf16", i);
        if (t->master && t->dtype == GRADD_DT_F32)
            return GRADD_FAIL(TENSOR, "parameter %d: f32 has no master weights", i);
        chunks += (t->n + STEP_CHUNK - 1) / STEP_CHUNK;
    }
    if (chunks >= 1 << CHUNK_BITS) return GRADD_FAIL(LIMIT, "too many parameters for one step");
    if (r->step >= STEP_MAX)
        return GRADD_FAIL(LIMIT, "step %llu, expected below %llu", (unsigned long long)r->step,
                          (unsigned long long)STEP_MAX);
    for (int i = 0; i < r->n_groups; i++)
        if (r->groups[i].mode > GRADD_ADAMW_TORCH || r->groups[i].step < 1)
            return GRADD_FAIL(TENSOR, "group %d: mode %d, step %lld", i, r->groups[i].mode,
                              (long long)r->groups[i].step);
    return GRADD_OK;
}

/* Opens the journal for this step; *out_done if it is finished already. */
static gradd_status_t open_journal(const step_request_t *r, bool *out_done) {
    step_journal_t *j = r->journal;
    uint64_t mark = fingerprint(r), progress = load(&j->progress);
    *out_done = false;
    if (j->magic && j->magic != STEP_JOURNAL_MAGIC)
        return GRADD_FAIL(SHM, "the region given as journal is not one");
    if (!j->magic) {
        store(&j->sealed, ~0ull);
        store(&j->magic, STEP_JOURNAL_MAGIC);
    }
    uint64_t current = progress >> CHUNK_BITS; /* step in progress, or the next one if chunk is 0 */
    if (r->step + 1 == current && !(progress & ((1u << CHUNK_BITS) - 1))) {
        if (j->fingerprint != mark)
            return GRADD_FAIL(STALE,
                              "step %llu was finished by another request: other parameters, "
                              "settings or gradients",
                              (unsigned long long)r->step);
        *out_done = true;
        return GRADD_OK;
    }
    if (r->step != current)
        return GRADD_FAIL(STALE, "the journal is at step %llu, the request says %llu",
                          (unsigned long long)current, (unsigned long long)r->step);
    bool begun = progress & ((1u << CHUNK_BITS) - 1) || load(&j->sealed) == progress;
    if (begun && j->fingerprint != mark)
        return GRADD_FAIL(STALE, "step %llu was begun with other parameters, settings or gradients",
                          (unsigned long long)r->step);
    j->fingerprint = mark;
    return GRADD_OK;
}

gradd_status_t step_run(const step_request_t *r, double *out_norm) {
    step_journal_t *j = r->journal;
    bool done;
    GRADD_TRY(check_request(r));
    GRADD_TRY(open_journal(r, &done));
    if (done) {
        *out_norm = j->norm;
        return GRADD_OK;
    }
    double norm = clips(r) ? global_norm(r) : 0;
    j->norm = norm;
    run_chunks(r, clip_scale(r, norm));
    crash_point();
    store(&j->progress, (r->step + 1) << CHUNK_BITS);
    *out_norm = norm;
    return GRADD_OK;
}
