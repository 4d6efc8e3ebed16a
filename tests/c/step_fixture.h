/* Two parameters with state, gradients and a journal, in memory that a fork shares, for tests of
 * the optimizer's step.
 */
#ifndef GRADD_TESTS_C_STEP_FIXTURE_H
#define GRADD_TESTS_C_STEP_FIXTURE_H

#include "server/exec/step.h"

#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/cpu/adamw.h"
#include "kernels/cpu/half.h"
#include "tests/c/tested_device.h"
#include "tests/fake/fake.h"
#include "tests/test.h"

#define N_SMALL 1000
#define N_LARGE ((int64_t)(STEP_CHUNK * 2 + 777))

#define W_SMALL 8
#define W_LARGE 563 /* 467 rows in three chunks */

/* ROWS besides: both are stepped by rows. */
typedef enum storage_e { F32, HALF, MASTERS, ROWS = 4 } storage_t;
static gradd_dtype_t half = GRADD_DT_BF16; /* of HALF and MASTERS */
static const gradd_dtype_t halves[] = {GRADD_DT_BF16, GRADD_DT_F16};
static int64_t chunk = STEP_CHUNK; /* of the journals of fixtures that are opened from here on */
static bool skipped;               /* the last step */

/* Two parameters with state and gradients, and a journal, in memory that a fork shares. */
typedef struct fixture_s {
    step_tensor_t tensors[2];
    gradd_adam_t group;
    void *journal;
    size_t journal_bytes;
    shared_t shared;
} fixture_t;

static inline gradd_device_t *open_on(const gradd_backend_t *backend) {
    const gradd_device_options_t o = {.threads = tested_threads(2)};
    gradd_device_t *device;
    CHECK_OK(device_open(backend, &o, &device));
    return device;
}

/* The fixtures that are open, so that a request finds its own. */
static fixture_t *fixtures[4];

static inline fixture_t *fixture_of(const step_request_t *r) {
    for (int i = 0; i < 4; i++)
        if (fixtures[i] && fixtures[i]->journal == r->journal) return fixtures[i];
    test_fail(__FILE__, __LINE__, "a request without a fixture");
}

/* The request with the device's addresses. */
static inline gradd_status_t run_on(gradd_device_t *device, const step_request_t *r,
                                    double *out_norm) {
    fixture_t *w = fixture_of(r);
    step_tensor_t there[2];
    step_request_t request = *r;
    shared_enter(&w->shared, device);
    for (int t = 0; t < 2; t++) {
        there[t] = w->tensors[t];
        there[t].p = shared_at(&w->shared, there[t].p),
        there[t].m = shared_at(&w->shared, there[t].m);
        there[t].v = shared_at(&w->shared, there[t].v),
        there[t].g = shared_at(&w->shared, there[t].g);
        there[t].master = shared_at(&w->shared, there[t].master);
    }
    request.tensors = there;
    request.journal = shared_at(&w->shared, r->journal);
    gradd_status_t status = step_apply(device, &request, out_norm, &skipped);
    shared_leave(&w->shared);
    return status;
}

static inline gradd_status_t run(const step_request_t *r, double *out_norm) {
    gradd_device_t *device = open_on(tested_backend());
    gradd_status_t status = run_on(device, r, out_norm);
    gradd_device_close(device);
    return status;
}

static inline float pattern(int64_t i, int salt) {
    return (float)((i * 2654435761u + (uint64_t)salt * 97) % 1999) / 999.0f - 1.0f;
}

static inline float rounded(float x) {
    uint16_t there;
    gradd_half_put(&there, half, x);
    return gradd_half_f32(&there, half);
}

static inline void write_at(gradd_dtype_t dtype, void *array, int64_t i, float x) {
    if (gradd_dtype_is_half(dtype))
        gradd_half_put((uint16_t *)array + i, dtype, x);
    else
        ((float *)array)[i] = x;
}

static inline float read_at(gradd_dtype_t dtype, const void *array, int64_t i) {
    if (gradd_dtype_is_half(dtype)) return gradd_half_f32((const uint16_t *)array + i, dtype);
    return ((const float *)array)[i];
}

/* Of the large one no row of the second chunk. */
static inline bool is_touched(int tensor, int64_t row) {
    static const int64_t small[] = {0, 7, 8, 124}, large[] = {3, 4, 5, 100, 231, 464, 466};
    const int64_t *rows = tensor ? large : small;
    for (int i = 0; i < (tensor ? 7 : 4); i++)
        if (rows[i] == row) return true;
    return false;
}

/* Rows of zeros, of both signs; one row has a gradient in its last element alone. */
static inline void make_rows(step_tensor_t *t, int tensor) {
    t->width = tensor ? W_LARGE : W_SMALL;
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t row = i / t->width, at = i % t->width;
        const bool alone = row == (tensor ? 231 : 8);
        if (!is_touched(tensor, row) || (alone && at + 1 < t->width))
            write_at(t->dtype, (void *)(uintptr_t)t->g, i, at % 3 ? 0.0f : -0.0f);
        else if (alone)
            write_at(t->dtype, (void *)(uintptr_t)t->g, i, 0.5f);
    }
}

/* As a client makes it in memory of zeros. */
static inline void make_journal(step_journal_t *journal) {
    if (chunk == STEP_CHUNK) return;
    journal->magic = STEP_JOURNAL_LONG << 32 | (uint64_t)chunk;
    journal->sealed = ~UINT64_C(0);
}

static inline void fixture_open_as(fixture_t *w, gradd_adam_mode_t mode, storage_t storage) {
    int64_t sizes[2] = {N_SMALL, N_LARGE};
    const bool by_rows = storage & ROWS;
    storage &= ~(unsigned)ROWS;
    gradd_dtype_t dtype = storage == F32 ? GRADD_DT_F32 : half;
    w->journal_bytes = STEP_JOURNAL_BYTES_OF(chunk);
    w->shared = shared_make(w->journal_bytes + 5 * sizeof(float) * (size_t)(N_SMALL + N_LARGE));
    w->journal = w->shared.host;
    make_journal(w->journal);
    int free_place = 0;
    while (fixtures[free_place])
        free_place++;
    fixtures[free_place] = w;
    w->group = (gradd_adam_t){1e-2, 0.9, 0.999, 1e-6, 0.1, mode, true, 1};
    float *at = (float *)(w->shared.host + w->journal_bytes);
    for (int t = 0; t < 2; t++) {
        int64_t n = sizes[t];
        float *p = at, *m = p + n, *v = m + n, *g = v + n, *master = g + n;
        for (int64_t i = 0; i < n; i++) {
            write_at(dtype, p, i, pattern(i, t));
            write_at(dtype, g, i, pattern(i, t + 7));
            master[i] = rounded(pattern(i, t));
        }
        w->tensors[t] =
            (step_tensor_t){p, m, v, g, n, 0, dtype, storage == MASTERS ? master : NULL, 0};
        if (by_rows) make_rows(&w->tensors[t], t);
        at = master + n;
    }
}

static inline void fixture_open(fixture_t *w, gradd_adam_mode_t mode) {
    fixture_open_as(w, mode, F32);
}

static inline float parameter(const fixture_t *w, int tensor, int64_t i) {
    return read_at(w->tensors[tensor].dtype, w->tensors[tensor].p, i);
}

static inline float gradient(const fixture_t *w, int tensor, int64_t i) {
    return read_at(w->tensors[tensor].dtype, w->tensors[tensor].g, i);
}

static inline void fixture_close(fixture_t *w) {
    for (int i = 0; i < 4; i++)
        if (fixtures[i] == w) fixtures[i] = NULL;
    shared_free(&w->shared);
}

static inline bool same_parameters(const fixture_t *a, const fixture_t *b) {
    for (int t = 0; t < 2; t++) {
        const step_tensor_t *x = &a->tensors[t], *y = &b->tensors[t];
        size_t bytes = sizeof(float) * (size_t)x->n;
        if (memcmp(x->p, y->p, gradd_dtype_bytes(x->dtype) * (size_t)x->n) ||
            memcmp(x->m, y->m, bytes) || memcmp(x->v, y->v, bytes) ||
            (x->master && memcmp(x->master, y->master, bytes)))
            return false;
    }
    return true;
}

static inline step_request_t request(fixture_t *w, uint64_t step, double max_norm) {
    w->group.step = (int64_t)step + 1;
    return (step_request_t){.tensors = w->tensors,
                            .n_tensors = 2,
                            .groups = &w->group,
                            .n_groups = 1,
                            .max_norm = max_norm,
                            .step = step,
                            .journal = w->journal,
                            .journal_bytes = (int64_t)w->journal_bytes,
                            .once = 77 + step};
}

#endif
