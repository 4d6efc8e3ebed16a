/* The CPU device: synchronous, memory from large anonymous mappings, kernels from the rows.
 * See kernels/backend.h. */
#include "kernels/backend.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* From here on memory comes straight from the kernel with huge pages, so that a large arena costs
 * few page faults and goes back when it is freed. */
#define MAP_FROM ((size_t)2 << 20)

int gradd_cpu_threads(void) {
    static int threads; /* read before the first parallel region changes it */
    if (!threads) threads = omp_get_max_threads();
    return threads;
}

static gradd_status_t cpu_alloc(size_t bytes, void **out) {
    void *memory;
    if (bytes >= MAP_FROM) {
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            memory = NULL;
        else
            madvise(memory, bytes, MADV_HUGEPAGE);
    } else {
        memory = aligned_alloc(GRADD_TENSOR_ALIGN, (bytes + 64) / 64 * 64);
    }
    if (!memory) return GRADD_FAIL(NOMEM, "no memory for %zu bytes", bytes);
    *out = memory;
    return GRADD_OK;
}

static void cpu_free(void *memory, size_t bytes) {
    if (!memory) return;
    if (bytes >= MAP_FROM)
        munmap(memory, bytes);
    else
        free(memory);
}

static gradd_status_t cpu_copy(gradd_queue_t *queue, void *to, const void *from, size_t bytes) {
    (void)queue;
    if (bytes) memcpy(to, from, bytes);
    return GRADD_OK;
}

static gradd_status_t cpu_zero(gradd_queue_t *queue, void *memory, size_t bytes) {
    (void)queue;
    if (bytes) memset(memory, 0, bytes);
    return GRADD_OK;
}

static gradd_status_t cpu_queue_create(int threads, gradd_queue_t **out) {
    (void)threads;
    *out = NULL;
    return GRADD_OK;
}

static void cpu_queue_destroy(gradd_queue_t *queue) {
    (void)queue;
}

static gradd_status_t cpu_queue_enter(gradd_queue_t *queue, int threads) {
    int all = gradd_cpu_threads();
    (void)queue;
    omp_set_dynamic(0); /* the same number of threads every time: the same bits */
    omp_set_num_threads(threads > 0 ? threads : all);
    return GRADD_OK;
}

static gradd_status_t cpu_run(gradd_queue_t *queue, const gradd_kernel_t *kernel,
                              const gradd_run_t *run) {
    (void)queue;
    return kernel->run(run);
}

static gradd_status_t cpu_wait(gradd_queue_t *queue) {
    (void)queue;
    return GRADD_OK;
}

static gradd_status_t cpu_event_create(gradd_event_t **out) {
    *out = NULL;
    return GRADD_OK;
}

static void cpu_event_destroy(gradd_event_t *event) {
    (void)event;
}

static gradd_status_t cpu_event(gradd_queue_t *queue, gradd_event_t *event) {
    (void)queue;
    (void)event;
    return GRADD_OK;
}

#define X(family) extern const gradd_kernels_t gradd_cpu_kernels_##family;
#include "op_list.inc"
#undef X

static const gradd_kernels_t *const cpu_kernels[] = {
#define X(family) &gradd_cpu_kernels_##family,
#include "op_list.inc"
#undef X
};

const gradd_backend_t gradd_backend_cpu = {
    .abi = GRADD_BACKEND_ABI,
    .size = sizeof(gradd_backend_t),
    .name = "cpu",
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .queue_create = cpu_queue_create,
    .queue_destroy = cpu_queue_destroy,
    .queue_enter = cpu_queue_enter,
    .run = cpu_run,
    .wait = cpu_wait,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event,
    .event_wait = cpu_event,
    .kernels = cpu_kernels,
    .n_kernels = sizeof cpu_kernels / sizeof cpu_kernels[0],
};

gradd_status_t gradd_cpu_call(const gradd_infer_t *c, gradd_run_t *run) {
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_cpu, c);
    if (!kernel) return gradd_no_kernel(&gradd_backend_cpu, c);
    gradd_prepared_t prepared;
    void *work = NULL;
    GRADD_TRY(gradd_kernel_prepare(kernel, c, &prepared));
    gradd_status_t status = prepared.work ? cpu_alloc(prepared.work, &work) : GRADD_OK;
    run->work = work;
    run->state = prepared.state;
    if (!status) status = kernel->run(run);
    cpu_free(work, prepared.work);
    gradd_kernel_unprepare(kernel, &prepared);
    return status;
}
