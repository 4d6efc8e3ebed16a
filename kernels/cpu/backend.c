/* The CPU device: synchronous, memory of the platform, kernels from the rows. See
 * kernels/contract/backend.h. */
#include "kernels/contract/backend.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/adamw.h"
#include "kernels/cpu/fingerprint.h"
#include "kernels/cpu/finite.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/linear_loss.h"
#include "platform/platform.h"

struct gradd_queue_s {
    int threads;
};

/* OpenMP's number is one of the calling thread, which a queue changes: each thread asks before its
 * first queue does, and the first answer of all stays. */
static int process_threads;

int gradd_cpu_threads(void) {
    int threads = __atomic_load_n(&process_threads, __ATOMIC_RELAXED);
    if (threads) return threads;
    const int mine = omp_get_max_threads();
    return __atomic_compare_exchange_n(&process_threads, &threads, mine, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED)
               ? mine
               : threads;
}

void gradd_cpu_enter(int threads) {
    gradd_cpu_threads();
    omp_set_dynamic(0); /* the same number of threads every time: the same bits */
    omp_set_num_threads(threads);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static gradd_status_t take(size_t bytes, void **out) {
    void *memory = gradd_platform.take(bytes);
    if (!memory) return GRADD_FAIL(NOMEM, "no memory for %zu bytes", bytes);
    *out = memory;
    return GRADD_OK;
}

static gradd_status_t cpu_alloc(gradd_queue_t *queue, size_t bytes, void **out) {
    (void)queue;
    return take(bytes, out);
}

static void cpu_free(gradd_queue_t *queue, void *memory, size_t bytes) {
    (void)queue;
    gradd_platform.give_back(memory, bytes);
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

/* In strips: the kernel's work is that of all threads. */
#define STRIP ((size_t)1 << 20)

static void cpu_touch(gradd_queue_t *queue, void *memory, size_t bytes, bool written) {
    const int64_t n = (int64_t)((bytes + STRIP - 1) / STRIP);
    (void)queue;
    if (!gradd_platform.touch) return;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < n; i++) {
        const size_t at = (size_t)i * STRIP, rest = bytes - at;
        gradd_platform.touch((char *)memory + at, rest < STRIP ? rest : STRIP, written);
    }
}

/* ---- queue ----------------------------------------------------------------------------------- */

static gradd_status_t cpu_queue_create(int threads, gradd_queue_t **out) {
    gradd_queue_t *queue = malloc(sizeof *queue);
    if (!queue) return GRADD_FAIL(NOMEM, "no memory for a queue");
    queue->threads = threads;
    *out = queue;
    return GRADD_OK;
}

static void cpu_queue_destroy(gradd_queue_t *queue) {
    free(queue);
}

static gradd_status_t cpu_queue_enter(gradd_queue_t *queue, int threads) {
    gradd_cpu_enter(threads ? threads : queue->threads);
    return GRADD_OK;
}

static gradd_status_t cpu_launch(gradd_queue_t *queue, const gradd_kernel_t *kernel,
                                 const gradd_launch_t *launch) {
    (void)queue;
    return gradd_kernel_compute(kernel, launch);
}

static gradd_status_t cpu_wait(gradd_queue_t *queue, int *out_launch) {
    (void)queue, (void)out_launch;
    return GRADD_OK;
}

/* ---- looking ----------------------------------------------------------------------------------
 */

static gradd_status_t cpu_find_nonfinite(gradd_queue_t *queue, const gradd_view_t *view,
                                         gradd_nonfinite_t *out) {
    (void)queue;
    *out = gradd_cpu_find_nonfinite(view);
    return GRADD_OK;
}

static gradd_status_t cpu_fingerprint(gradd_queue_t *queue, const gradd_bytes_t *list, int n,
                                      bool whole, uint64_t *out) {
    (void)queue;
    *out = whole ? gradd_print_sum(list, n) : gradd_print_drawn(list, n);
    return GRADD_OK;
}

/* ---- the optimizer's step ----------------------------------------------------------------------
 */

static gradd_status_t cpu_norm2(gradd_queue_t *queue, const gradd_span_t *list, int n,
                                double *out) {
    (void)queue;
    *out = gradd_sum_squares(list, n);
    return GRADD_OK;
}

static gradd_status_t cpu_adam(gradd_queue_t *queue, const gradd_adam_t *hyper, float grad_scale,
                               const gradd_adam_span_t *span) {
    (void)queue;
    gradd_adam_update(hyper, grad_scale, span);
    return GRADD_OK;
}

static gradd_status_t cpu_adam_commit(gradd_queue_t *queue, const gradd_adam_commit_t *commit) {
    (void)queue;
    gradd_adam_commit(commit);
    return GRADD_OK;
}

static gradd_status_t cpu_touched(gradd_queue_t *queue, const gradd_span_t *span, int64_t width,
                                  uint64_t *bits) {
    (void)queue;
    gradd_touched_rows(span, width, bits);
    return GRADD_OK;
}

/* Release is enough: the memory outlives the process, not the machine. */
static gradd_status_t cpu_store(gradd_queue_t *queue, uint64_t *word, uint64_t value) {
    (void)queue;
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    return GRADD_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static bool cpu_multiplies(gradd_dtype_t dtype) {
    return dtype != GRADD_DT_BF16 || gradd_gemm_bf16_native();
}

#define X(family) extern const gradd_kernels_t gradd_cpu_kernels_##family;
#include "cpu_list.inc"
#undef X

static const gradd_kernels_t *const cpu_kernels[] = {
#define X(family) &gradd_cpu_kernels_##family,
#include "cpu_list.inc"
#undef X
};

const gradd_backend_t gradd_backend_cpu = {
    .abi = GRADD_BACKEND_ABI,
    .size = sizeof(gradd_backend_t),
    .name = "cpu",
    .host = true,
    .queue_create = cpu_queue_create,
    .queue_destroy = cpu_queue_destroy,
    .queue_enter = cpu_queue_enter,
    .wait = cpu_wait,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .copy = cpu_copy,
    .zero = cpu_zero,
    .launch = cpu_launch,
    .find_nonfinite = cpu_find_nonfinite,
    .fingerprint = cpu_fingerprint,
    .norm2 = cpu_norm2,
    .adam = cpu_adam,
    .adam_commit = cpu_adam_commit,
    .store = cpu_store,
    .library = gradd_gemm_library,
    .multiplies = cpu_multiplies,
    .kernels = cpu_kernels,
    .n_kernels = sizeof cpu_kernels / sizeof cpu_kernels[0],
    .touched = cpu_touched,
    .head_rows = GRADD_CPU_HEAD_ROWS,
    .head_block = GRADD_CPU_HEAD_BLOCK,
    .touch = cpu_touch,
};

bool gradd_cpu_can(const gradd_infer_t *c) {
    return gradd_backend_kernel(&gradd_backend_cpu, c);
}

gradd_status_t gradd_cpu_call(const gradd_infer_t *c, gradd_launch_t *launch) {
    const gradd_kernel_t *kernel = gradd_backend_kernel(&gradd_backend_cpu, c);
    if (!kernel) return gradd_no_kernel(&gradd_backend_cpu, c);
    gradd_infer_t call = *c;
    gradd_prepared_t prepared;
    void *workspace = NULL;
    launch->threads = call.threads = omp_get_max_threads();
    GRADD_TRY(gradd_kernel_prepare(kernel, &call, &prepared));
    gradd_status_t status = prepared.workspace ? take(prepared.workspace, &workspace) : GRADD_OK;
    launch->workspace = workspace;
    launch->state = prepared.state;
    if (!status) status = kernel->compute(launch);
    gradd_platform.give_back(workspace, prepared.workspace);
    gradd_kernel_unprepare(kernel, &prepared);
    return status;
}
