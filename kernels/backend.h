/* Device table: what the executor asks of a device, and nothing else.
 *
 * One append-only struct with version and size, so that a plug-in (CUDA) and the host may differ in
 * age. The CPU device runs synchronously: its queue is the calling thread, its events are always
 * complete. What a device can run, its kernel rows say (kernels/kernel.h).
 */
#ifndef GRADD_KERNELS_BACKEND_H
#define GRADD_KERNELS_BACKEND_H

#include "kernels/kernel.h"

#define GRADD_BACKEND_ABI 2u

typedef struct gradd_queue_s gradd_queue_t; /* device's own: a stream; NULL on the CPU */
typedef struct gradd_event_s gradd_event_t;

typedef struct gradd_backend_s {
    uint32_t abi;  /* GRADD_BACKEND_ABI of the table's author */
    uint32_t size; /* sizeof of the table's author */
    const char *name;

    /* Memory of the device, aligned to at least 64 bytes. Errors: NOMEM. bytes may be 0. */
    gradd_status_t (*alloc)(size_t bytes, void **out);
    void (*free)(void *memory, size_t bytes);
    gradd_status_t (*copy)(gradd_queue_t *queue, void *to, const void *from, size_t bytes);
    gradd_status_t (*zero)(gradd_queue_t *queue, void *memory, size_t bytes);

    gradd_status_t (*queue_create)(int threads, gradd_queue_t **out);
    void (*queue_destroy)(gradd_queue_t *queue);
    /* Enters the queue's thread count for the calling thread; called once before a sequence of
     * runs. */
    gradd_status_t (*queue_enter)(gradd_queue_t *queue, int threads);
    /* Runs one operator by a kernel of this device; returns when it is enqueued (CPU: when it is
     * done). */
    gradd_status_t (*run)(gradd_queue_t *queue, const gradd_kernel_t *kernel,
                          const gradd_run_t *run);
    /* Waits for all that was enqueued; reports what failed on the device. */
    gradd_status_t (*wait)(gradd_queue_t *queue);

    gradd_status_t (*event_create)(gradd_event_t **out);
    void (*event_destroy)(gradd_event_t *event);
    gradd_status_t (*event_record)(gradd_queue_t *queue, gradd_event_t *event);
    gradd_status_t (*event_wait)(gradd_queue_t *queue, gradd_event_t *event);

    const gradd_kernels_t *const *kernels; /* by family; those of one operator: fastest first */
    size_t n_kernels;
} gradd_backend_t;

/* The device's kernel for a call: the first that takes it. c->out need not be known, and the choice
 * does not depend on it. NULL: there is none; the second function is the failure that says so. */
const gradd_kernel_t *gradd_backend_kernel(const gradd_backend_t *backend, const gradd_infer_t *c);
gradd_status_t gradd_no_kernel(const gradd_backend_t *backend, const gradd_infer_t *c);
/* Checks that every kernel row is complete and runs an operator of its family, and, for a
 * `complete` device, that every operator has a kernel; the failure names the row. */
gradd_status_t gradd_kernel_audit(const gradd_backend_t *backend, bool complete);

extern const gradd_backend_t gradd_backend_cpu;

/* Number of threads a CPU queue gets for the request 0: OMP_NUM_THREADS, else the processor set of
 * the process. A plan knows its own number; this one is for callers without a plan. */
int gradd_cpu_threads(void);

/* Runs one call on the CPU here and now; for folding and tests. c->out is set, run holds operands
 * and coordinates, scratch and state are set here. */
gradd_status_t gradd_cpu_call(const gradd_infer_t *c, gradd_run_t *run);

#endif
