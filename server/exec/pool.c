/* Spare arenas. See pool.h. */
#include "server/exec/pool.h"

#include <pthread.h>

#include "server/api/gradd.h"

/* Two: a step of two micro-batch shapes, or two runs in flight, alternate without mapping. */
#define POOL_SPARES 2

/* A run holds at most twice the arena it asked for, or this much more: a small run must not sit on
 * the arena of a large one, which would then be allocated a second time. */
#define POOL_WASTE ((int64_t)64 << 20)

typedef struct spare_s {
    const gradd_backend_t *backend;
    void *memory; /* Owned; NULL = free place */
    int64_t bytes;
} spare_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static spare_t spares[POOL_SPARES];
static gradd_admit_t admit;
static void *admit_context;

void gradd_set_admit(gradd_admit_t call, void *context) {
    admit = call;
    admit_context = context;
}

gradd_status_t pool_admit(int64_t bytes) {
    return admit && bytes > 0 ? admit(admit_context, bytes) : GRADD_OK;
}

static void spare_free(spare_t *s) {
    if (s->memory) s->backend->free(s->memory, (size_t)s->bytes);
    *s = (spare_t){0};
}

static bool fits(const spare_t *s, int64_t bytes) {
    int64_t waste = s->bytes - bytes;
    return waste >= 0 && (waste <= bytes || waste <= POOL_WASTE);
}

/* The smallest one that is large enough, but not far too large. */
static spare_t *best_fit(const gradd_backend_t *backend, int64_t bytes) {
    spare_t *best = NULL;
    for (int i = 0; i < POOL_SPARES; i++) {
        spare_t *s = &spares[i];
        if (!s->memory || s->backend != backend || !fits(s, bytes)) continue;
        if (!best || s->bytes < best->bytes) best = s;
    }
    return best;
}

gradd_status_t pool_take(const gradd_backend_t *backend, int64_t bytes, void **out,
                         int64_t *out_bytes) {
    *out = NULL;
    *out_bytes = bytes;
    if (!bytes) return GRADD_OK;
    pthread_mutex_lock(&lock);
    spare_t *found = best_fit(backend, bytes);
    if (found) {
        *out = found->memory;
        *out_bytes = found->bytes;
        *found = (spare_t){0};
    } else {
        /* what is too small now makes room for what is needed */
        for (int i = 0; i < POOL_SPARES; i++)
            if (spares[i].bytes < bytes) spare_free(&spares[i]);
    }
    pthread_mutex_unlock(&lock);
    if (found) return GRADD_OK;
    GRADD_TRY(pool_admit(bytes)); /* may trim, so not under the lock */
    return backend->alloc((size_t)bytes, out);
}

void pool_give(const gradd_backend_t *backend, void *memory, int64_t bytes) {
    if (!memory) return;
    spare_t given = {backend, memory, bytes};
    pthread_mutex_lock(&lock);
    for (int i = 0; i < POOL_SPARES && given.memory; i++) {
        if (spares[i].memory && spares[i].bytes >= given.bytes) continue;
        spare_t smaller = spares[i]; /* the larger ones stay */
        spares[i] = given;
        given = smaller;
    }
    pthread_mutex_unlock(&lock);
    spare_free(&given);
}

int64_t pool_bytes(void) {
    int64_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < POOL_SPARES; i++)
        bytes += spares[i].bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

void gradd_trim(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < POOL_SPARES; i++)
        spare_free(&spares[i]);
    pthread_mutex_unlock(&lock);
}
