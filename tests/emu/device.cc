/* The plug-in's table as a device of the tests, and its work in memory of the process. See
 * device.h. */
#include "tests/emu/device.h"

#include <stdio.h>
#include <stdlib.h>

#include "tests/sim/sim.h"

extern "C" {
gradd_status_t gradd_plugin(uint32_t abi, const gradd_backend_t **out);
/* Elsewhere it is constant: the plug-in gives it before main(). */
gradd_backend_t gradd_backend_emu;
}

__attribute__((constructor)) static void load(void) {
    const gradd_backend_t *table;
    if (gradd_plugin(GRADD_BACKEND_ABI, &table)) {
        fprintf(stderr, "emulated GPU: %s\n", gradd_error_message());
        abort();
    }
    gradd_backend_emu = *table;
    gradd_backend_emu.name = "emu";
}

/* The queue of the functions below. A product that the library refuses ends one. */
static gradd_queue_t *queue(bool blocking) {
    static thread_local gradd_queue_t *q;
    sim_settings()->blocking = blocking;
    if (q && !gradd_backend_emu.queue_enter(q, 1)) return q;
    gradd_backend_emu.queue_destroy(q);
    if (gradd_backend_emu.queue_create(1, &q)) abort();
    return q;
}

/* Work that is done at once: memory of the process is none of the device, so that a copy from there
 * does not wait for its turn. */
static gradd_queue_t *here(void) {
    return queue(true);
}

static gradd_status_t done(gradd_status_t status) {
    const gradd_status_t later = gradd_backend_emu.wait(queue(true), nullptr);
    sim_settings()->blocking = false;
    return status ? status : later;
}

/* Work that waits for its end by itself, for its result. */
static gradd_queue_t *late(void) {
    return queue(false);
}

gradd_status_t emu_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch) {
    return done(gradd_backend_emu.launch(here(), kernel, launch));
}

static gradd_status_t find_nonfinite(gradd_queue_t *, const gradd_view_t *view,
                                     gradd_nonfinite_t *out) {
    return gradd_backend_emu.find_nonfinite(late(), view, out);
}

static gradd_status_t fingerprint(gradd_queue_t *, const gradd_bytes_t *list, int n, bool whole,
                                  uint64_t *out) {
    return gradd_backend_emu.fingerprint(late(), list, n, whole, out);
}

static gradd_status_t norm2(gradd_queue_t *, const gradd_span_t *list, int n, double *out) {
    return gradd_backend_emu.norm2(late(), list, n, out);
}

static gradd_status_t adam(gradd_queue_t *, const gradd_adam_t *hyper, float grad_scale,
                           const gradd_adam_span_t *span) {
    return done(gradd_backend_emu.adam(here(), hyper, grad_scale, span));
}

static gradd_status_t adam_commit(gradd_queue_t *, const gradd_adam_commit_t *commit) {
    return done(gradd_backend_emu.adam_commit(here(), commit));
}

static gradd_status_t store(gradd_queue_t *, uint64_t *word, uint64_t value) {
    return done(gradd_backend_emu.store(here(), word, value));
}

static gradd_status_t touched(gradd_queue_t *, const gradd_span_t *span, int64_t width,
                              uint64_t *bits) {
    return gradd_backend_emu.touched(late(), span, width, bits);
}

const gradd_backend_t emu_here = {
    .abi = GRADD_BACKEND_ABI,
    .size = sizeof(gradd_backend_t),
    .name = "emu",
    .find_nonfinite = find_nonfinite,
    .fingerprint = fingerprint,
    .norm2 = norm2,
    .adam = adam,
    .adam_commit = adam_commit,
    .store = store,
    .touched = touched,
};
