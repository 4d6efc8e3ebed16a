/* The state that kernels of the emulated GPU use, and its queue. See device.h. */
#include "tests/emu/device.h"

#include <stdlib.h>
#include <time.h>

#include "kernels/cuda/product/kept.h"
#include "kernels/cuda/product/measure.h"
#include "kernels/cuda/step.h"
#include "tests/emu/lt.h"

enum { UNITS = 2 }; /* few blocks for much work: loops go round */

thread_local gpu_call_t gpu_call;

/* As at the start of each piece of work. */
static void enter(gradd_fault_t *fault, int launch) {
    static thread_local void *scratch; /* no array: stacks of small threads hold all of these */
    if (!scratch) scratch = aligned_alloc(256, GPU_SCRATCH);
    gpu_call = {nullptr, fault, launch, UNITS, scratch};
}

gradd_status_t gpu_launched(const char *what) {
    (void)what;
    return GRADD_OK;
}

gradd_status_t gpu_write(void *to, const void *from, size_t bytes) {
    emu::copy_in_turn(to, from, bytes);
    return GRADD_OK;
}

gradd_status_t gpu_read(void *to, const void *from, size_t bytes) {
    emu::copy_in_turn(to, from, bytes);
    emu::wait_in_turn();
    return GRADD_OK;
}

/* As at the end of each piece of work whose result the caller reads. */
static gradd_status_t leave(gradd_status_t status) {
    emu::end_in_turn();
    return status;
}

gradd_status_t emu_compute(const gradd_kernel_t *kernel, const gradd_launch_t *launch) {
    gradd_fault_t fault = {};
    enter(&fault, launch->launch);
    GRADD_TRY(kernel->compute(launch));
    emu::wait_in_turn(); /* copies within the device: the host looks behind a wait of the queue */
    return gradd_fault_fail(&fault);
}

static gradd_status_t launch(gradd_queue_t *, const gradd_kernel_t *kernel,
                             const gradd_launch_t *launch) {
    return emu_compute(kernel, launch);
}

static gradd_status_t scan(gradd_queue_t *, const gradd_view_t *view, gradd_scan_t *out) {
    enter(nullptr, -1);
    return leave(gpu_scan(view, out));
}

static gradd_status_t fingerprint(gradd_queue_t *, const gradd_bytes_t *list, int n, bool whole,
                                  uint64_t *out) {
    enter(nullptr, -1);
    return leave(gpu_fingerprint(list, n, whole, out));
}

static gradd_status_t norm2(gradd_queue_t *, const gradd_span_t *list, int n, double *out) {
    enter(nullptr, -1);
    return leave(gpu_norm2(list, n, out));
}

static gradd_status_t adam(gradd_queue_t *, const gradd_adam_t *hyper, float grad_scale,
                           const gradd_adam_span_t *span) {
    enter(nullptr, -1);
    return gpu_adam(hyper, grad_scale, span);
}

static gradd_status_t adam_commit(gradd_queue_t *, const gradd_adam_commit_t *commit) {
    enter(nullptr, -1);
    return gpu_adam_commit(commit);
}

static gradd_status_t store(gradd_queue_t *, uint64_t *word, uint64_t value) {
    enter(nullptr, -1);
    return gpu_store(word, value);
}

static gradd_status_t touched(gradd_queue_t *, const gradd_span_t *span, int64_t width,
                              uint64_t *bits) {
    enter(nullptr, -1);
    return leave(gpu_touched(span, width, bits));
}

/* ---- measuring ------------------------------------------------------------------------------- */

gpu_device_t gpu_device(void) {
    return {"an emulated GPU", emu_lt()->driver};
}

static void *measured;

gradd_status_t gpu_measure_begin(size_t bytes, void **out_memory) {
    measured = aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (!measured) return GRADD_FAIL(NOMEM, "no memory to measure");
    memset(measured, 0x3c, bytes);
    *out_memory = measured;
    emu_lt()->begun++;
    return GRADD_OK;
}

gradd_status_t gpu_measure(gradd_status_t (*work)(void *), void *argument, double *out_ms) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    GRADD_TRY(work(argument));
    clock_gettime(CLOCK_MONOTONIC, &to);
    *out_ms = (double)(to.tv_sec - from.tv_sec) * 1e3 + (double)(to.tv_nsec - from.tv_nsec) * 1e-6;
    const emu_lt_t *told = emu_lt();
    if (told->fastest >= 0) *out_ms = told->last == told->fastest ? 1 : 1.5;
    return GRADD_OK;
}

void gpu_measure_end(void) {
    free(measured);
    measured = nullptr;
}

/* ---- the table ---- */

const gradd_backend_t emu_here = {
    .abi = GRADD_BACKEND_ABI,
    .size = sizeof(gradd_backend_t),
    .name = "emu",
    .launch = launch,
    .scan = scan,
    .fingerprint = fingerprint,
    .norm2 = norm2,
    .adam = adam,
    .adam_commit = adam_commit,
    .store = store,
    .touched = touched,
};
