/* Spare arenas. See pool.h. */
#include "server/exec/pool.h"

#include <pthread.h>

#include "server/api/gradd.h"

/* Two: a step of two micro-batch shapes, or two runs in flight, alternate without mapping. */
#define POOL_SPARES 2

typedef struct spare_s {
    const gradd_backend_t *backend;
    void *memory; /* Owned; NULL = free place */
    int64_t bytes;
} spare_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static spare_t spares[POOL_SPARES];

static void spare_free(spare_t *s) {
    if (s->memory) s->backend->free(s->memory, (size_t)s->bytes);
    *s = (spare_t){0};
}

/* The smallest one that is large enough. */
static spare_t *best_fit(const gradd_backend_t *backend, int64_t bytes) {
    spare_t *best = NULL;
    for (int i = 0; i < POOL_SPARES; i++) {
        spare_t *s = &spares[i];
        if (!s->memory || s->backend != backend || s->bytes < bytes) continue;
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
            spare_free(&spares[i]);
    }
    pthread_mutex_unlock(&lock);
    return found ? GRADD_OK : backend->alloc((size_t)bytes, out);
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

void gradd_trim(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < POOL_SPARES; i++)
        spare_free(&spares[i]);
    pthread_mutex_unlock(&lock);
}
