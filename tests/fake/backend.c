/* The table of the fake device. See fake.h. */
#include <stdlib.h>
#include <string.h>

#include "tests/fake/queue.h"

/* ---- memory ---------------------------------------------------------------------------------- */

static gradd_status_t fake_alloc(gradd_queue_t *q, size_t bytes, void **out) {
    if (fake_queue_hits(q, FAKE_ALLOC))
        return GRADD_FAIL(NOMEM, "the device has no memory for %zu bytes", bytes);
    *out = memory_take(&q->memory, bytes);
    return *out ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for %zu bytes", bytes);
}

static void fake_free(gradd_queue_t *q, void *memory, size_t bytes) {
    if (memory) fake_queue_add(q, &(item_t){.kind = ITEM_FREE, .to = memory, .bytes = bytes});
}

static gradd_status_t fake_map(gradd_queue_t *q, int fd, size_t bytes, void **out) {
    if (fake_queue_hits(q, FAKE_MAP))
        return GRADD_FAIL(SHM, "the device cannot map %zu bytes", bytes);
    *out = memory_map(&q->memory, fd, bytes);
    return *out ? GRADD_OK : GRADD_FAIL(NOMEM, "no addresses for %zu bytes", bytes);
}

static void fake_unmap(gradd_queue_t *q, void *memory, size_t bytes) {
    memory_drop(&q->memory, memory, bytes);
}

static gradd_status_t fake_copy(gradd_queue_t *q, void *to, const void *from, size_t bytes) {
    fake_queue_add(q, &(item_t){.kind = ITEM_COPY, .to = to, .from = from, .bytes = bytes});
    return GRADD_OK;
}

static gradd_status_t fake_zero(gradd_queue_t *q, void *memory, size_t bytes) {
    fake_queue_add(q, &(item_t){.kind = ITEM_ZERO, .to = memory, .bytes = bytes});
    return GRADD_OK;
}

/* ---- queue ----------------------------------------------------------------------------------- */

static gradd_status_t fake_create(int threads, gradd_queue_t **out) {
    if (threads != 1)
        return GRADD_FAIL(UNSUPPORTED, "the fake device computes with 1 thread, not %d", threads);
    return fake_queue_create(out);
}

static gradd_status_t fake_enter(gradd_queue_t *q, int threads) {
    (void)threads;
    fake_queue_enter(q);
    return GRADD_OK;
}

static gradd_status_t fake_launch(gradd_queue_t *q, const gradd_kernel_t *kernel,
                                  const gradd_launch_t *launch) {
    if (fake_queue_hits(q, FAKE_LAUNCH)) return fake_queue_lose(q);
    const size_t n_in = (size_t)launch->n_in, n_out = (size_t)launch->n_out;
    item_t item = {.kind = ITEM_LAUNCH, .kernel = kernel, .launch = *launch};
    item.views = malloc(sizeof *item.views * (n_in + n_out + 1));
    REQUIRE(item.views, "no memory for work");
    memcpy(item.views, launch->in, sizeof *item.views * n_in);
    memcpy(item.views + n_in, launch->out, sizeof *item.views * n_out);
    fake_queue_add(q, &item);
    return GRADD_OK;
}

/* ---- looking --------------------------------------------------------------------------------- */

static gradd_status_t fake_find_nonfinite(gradd_queue_t *q, const gradd_view_t *view,
                                          gradd_nonfinite_t *out) {
    return fake_queue_ask(q, &(item_t){.kind = ITEM_NONFINITE, .view = *view, .nonfinite = out});
}

static gradd_status_t fake_fingerprint(gradd_queue_t *q, const gradd_bytes_t *list, int n,
                                       bool whole, uint64_t *out) {
    return fake_queue_ask(
        q, &(item_t){
               .kind = ITEM_FINGERPRINT, .bytes_list = list, .n = n, .whole = whole, .print = out});
}

/* ---- the optimizer's step -------------------------------------------------------------------- */

static gradd_status_t fake_norm2(gradd_queue_t *q, const gradd_span_t *list, int n, double *out) {
    return fake_queue_ask(q, &(item_t){.kind = ITEM_NORM2, .span_list = list, .n = n, .sum = out});
}

static gradd_status_t fake_touched(gradd_queue_t *q, const gradd_span_t *span, int64_t width,
                                   uint64_t *bits) {
    return fake_queue_ask(
        q, &(item_t){.kind = ITEM_TOUCHED, .span_list = span, .width = width, .bits = bits});
}

static gradd_status_t fake_adam(gradd_queue_t *q, const gradd_adam_t *hyper, float scale,
                                const gradd_adam_span_t *span) {
    fake_queue_add(q, &(item_t){.kind = ITEM_ADAM, .hyper = *hyper, .scale = scale, .span = *span});
    return GRADD_OK;
}

static gradd_status_t fake_commit(gradd_queue_t *q, const gradd_adam_commit_t *commit) {
    fake_queue_add(q, &(item_t){.kind = ITEM_COMMIT, .commit = *commit});
    return GRADD_OK;
}

static gradd_status_t fake_store(gradd_queue_t *q, uint64_t *word, uint64_t value) {
    fake_queue_add(q, &(item_t){.kind = ITEM_STORE, .to = word, .value = value});
    return GRADD_OK;
}

/* ---- for people ------------------------------------------------------------------------------ */

static const char *fake_library(void) {
    return gradd_backend_cpu.library();
}

static bool fake_multiplies(gradd_dtype_t dtype) {
    return gradd_backend_cpu.multiplies(dtype);
}

/* ---- kernels: the CPU's, but for operands that are read on the host ---------------------------
 */

typedef struct host_read_s {
    const char *op;
    uint32_t inputs;
} host_read_t;

static const host_read_t host_reads[] = {
    {"CumSum", 1 << 1},
    {"Trilu",  1 << 1}
};

enum {
#define X(family) FAMILY_##family,
#include "cpu_list.inc"
#undef X
    N_FAMILIES
};

static gradd_kernels_t families[N_FAMILIES];
static const gradd_kernels_t *const family_list[] = {
#define X(family) &families[FAMILY_##family],
#include "cpu_list.inc"
#undef X
};

static uint32_t read_on_host(const char *op) {
    for (size_t i = 0; i < sizeof host_reads / sizeof host_reads[0]; i++)
        if (!strcmp(host_reads[i].op, op)) return host_reads[i].inputs;
    return 0;
}

__attribute__((constructor)) static void copy_rows(void) {
    for (int f = 0; f < N_FAMILIES; f++) {
        const gradd_kernels_t *from = gradd_backend_cpu.kernels[f];
        gradd_kernel_t *rows = malloc(sizeof *rows * (from->n + 1));
        REQUIRE(rows, "no memory for the rows of %s", from->file);
        memcpy(rows, from->v, sizeof *rows * from->n);
        for (size_t i = 0; i < from->n; i++)
            rows[i].host_in = read_on_host(rows[i].op);
        families[f] = (gradd_kernels_t){from->file, rows, from->n};
    }
}

const gradd_backend_t gradd_backend_fake = {
    .abi = GRADD_BACKEND_ABI,
    .size = sizeof(gradd_backend_t),
    .name = "fake",
    .map = fake_map,
    .unmap = fake_unmap,
    .queue_create = fake_create,
    .queue_destroy = fake_queue_destroy,
    .queue_enter = fake_enter,
    .wait = fake_queue_wait,
    .alloc = fake_alloc,
    .free = fake_free,
    .copy = fake_copy,
    .zero = fake_zero,
    .launch = fake_launch,
    .find_nonfinite = fake_find_nonfinite,
    .fingerprint = fake_fingerprint,
    .norm2 = fake_norm2,
    .adam = fake_adam,
    .adam_commit = fake_commit,
    .store = fake_store,
    .library = fake_library,
    .multiplies = fake_multiplies,
    .kernels = family_list,
    .n_kernels = sizeof family_list / sizeof family_list[0],
    .touched = fake_touched,
    .head_rows = 128,
    .head_block = 1 << 20,
};
