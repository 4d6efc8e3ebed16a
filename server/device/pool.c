/* The arenas of a device: admission, and the spare ones. See device.h. */
#include "server/device/device.h"

/* A run holds at most twice the arena it asked for, or this much more: a small run must not sit on
 * the arena of a large one, which would then be allocated a second time. */
#define POOL_WASTE ((int64_t)64 << 20)

static gradd_status_t admit(gradd_device_t *d, int64_t bytes) {
    const int64_t room = d->info.memory_limit - d->arena_bytes;
    /* what finished runs left behind counts, too, unless it is in the way */
    if (bytes > room - pool_bytes(d)) gradd_device_trim(d);
    if (bytes > room)
        return GRADD_FAIL(NOMEM,
                          "the run needs %lld MiB of activations; %lld of %lld MiB are in use by "
                          "unreleased runs",
                          (long long)(bytes >> 20), (long long)(d->arena_bytes >> 20),
                          (long long)(d->info.memory_limit >> 20));
    return d->admit ? d->admit(d->admit_context, bytes) : GRADD_OK;
}

/* Notes how much there was no room for. */
static gradd_status_t note_refusal(gradd_device_t *d, int64_t bytes, gradd_status_t status) {
    if (status == GRADD_E_NOMEM) d->refused_bytes = bytes;
    return status;
}

gradd_status_t pool_admit(gradd_device_t *d, int64_t bytes) {
    return bytes > 0 ? note_refusal(d, bytes, admit(d, bytes)) : GRADD_OK;
}

static void spare_free(gradd_device_t *d, spare_t *s) {
    if (s->memory) {
        device_forget(d, s->memory, s->bytes);
        d->backend->free(d->queue, s->memory, (size_t)s->bytes);
    }
    *s = (spare_t){0};
}

static bool fits(const gradd_device_t *d, const spare_t *s, int64_t bytes) {
    int64_t waste = s->bytes - bytes;
    return waste >= 0 && (d->any_spare || waste <= bytes || waste <= POOL_WASTE);
}

/* The smallest one that is large enough, but not far too large. */
static spare_t *best_fit(gradd_device_t *d, int64_t bytes) {
    spare_t *best = NULL;
    for (int i = 0; i < DEVICE_SPARES; i++) {
        spare_t *s = &d->spares[i];
        if (!s->memory || !fits(d, s, bytes)) continue;
        if (!best || s->bytes < best->bytes) best = s;
    }
    return best;
}

static gradd_status_t new_arena(gradd_device_t *d, int64_t bytes, void **out) {
    /* what is too small now makes room for what is needed */
    for (int i = 0; i < DEVICE_SPARES; i++)
        if (d->spares[i].bytes < bytes) spare_free(d, &d->spares[i]);
    GRADD_TRY(pool_admit(d, bytes));
    return note_refusal(d, bytes, device_alloc(d, bytes, out));
}

gradd_status_t pool_take(gradd_device_t *d, int64_t bytes, void **out, int64_t *out_bytes) {
    spare_t taken = {.bytes = bytes};
    spare_t *found = bytes ? best_fit(d, bytes) : NULL;
    if (found) {
        taken = *found;
        *found = (spare_t){0};
    } else if (bytes) {
        GRADD_TRY(new_arena(d, bytes, &taken.memory));
    }
    d->arena_bytes += taken.bytes;
    *out = taken.memory;
    *out_bytes = taken.bytes;
    return GRADD_OK;
}

gradd_status_t pool_grow(gradd_device_t *d, int64_t bytes, void **memory, int64_t *memory_bytes) {
    void *wider;
    if (bytes <= *memory_bytes) return GRADD_OK;
    GRADD_TRY(note_refusal(d, bytes, device_alloc(d, bytes, &wider)));
    gradd_status_t status = d->backend->copy(d->queue, wider, *memory, (size_t)*memory_bytes);
    if (status) {
        d->backend->free(d->queue, wider, (size_t)bytes);
        return status;
    }
    pool_drop(d, *memory, *memory_bytes);
    d->arena_bytes += bytes;
    *memory = wider;
    *memory_bytes = bytes;
    return GRADD_OK;
}

void pool_give(gradd_device_t *d, void *memory, int64_t bytes) {
    spare_t given = {memory, bytes};
    d->arena_bytes -= bytes;
    for (int i = 0; i < DEVICE_SPARES && given.memory; i++) {
        if (d->spares[i].memory && d->spares[i].bytes >= given.bytes) continue;
        spare_t smaller = d->spares[i]; /* the larger ones stay */
        d->spares[i] = given;
        given = smaller;
    }
    spare_free(d, &given);
}

void pool_drop(gradd_device_t *d, void *memory, int64_t bytes) {
    spare_t dropped = {memory, bytes};
    d->arena_bytes -= bytes;
    spare_free(d, &dropped);
}

int64_t pool_bytes(const gradd_device_t *d) {
    int64_t bytes = 0;
    for (int i = 0; i < DEVICE_SPARES; i++)
        bytes += d->spares[i].bytes;
    return bytes;
}

void gradd_device_trim(gradd_device_t *d) {
    for (int i = 0; i < DEVICE_SPARES; i++)
        spare_free(d, &d->spares[i]);
}
