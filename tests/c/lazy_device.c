/* See lazy_device.h. */
#include "tests/c/lazy_device.h"

#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

typedef enum kind_e { COPY, ZERO, FREE, RUN, ADAM, COMMIT, STORE } kind_t;

typedef struct item_s {
    kind_t kind;
    void *to;
    const void *from;
    size_t bytes;
    const gradd_kernel_t *kernel;
    gradd_run_t run;
    gradd_view_t views[GRADD_OP_MAX_IN + GRADD_OP_MAX_OUT];
    gradd_adam_t hyper;
    float scale;
    gradd_adam_span_t span;
    gradd_adam_commit_t commit;
    uint64_t value;
} item_t;

struct gradd_queue_s {
    item_t *items; /* Owned */
    int n, capacity;
    int threads;
    bool entered;
    int64_t bytes;
};

static item_t *add(gradd_queue_t *q, kind_t kind) {
    if (q->n == q->capacity) {
        q->capacity = q->capacity ? 2 * q->capacity : 64;
        q->items = realloc(q->items, sizeof q->items[0] * (size_t)q->capacity);
        CHECK(q->items != NULL);
    }
    item_t *item = &q->items[q->n++];
    *item = (item_t){.kind = kind};
    return item;
}

static gradd_status_t lazy_queue_create(int threads, gradd_queue_t **out) {
    *out = calloc(1, sizeof **out);
    CHECK(*out != NULL);
    (*out)->threads = threads;
    return GRADD_OK;
}

static gradd_status_t carry_out(gradd_queue_t *q, item_t *item) {
    switch (item->kind) {
    case COPY:
        if (item->bytes) memcpy(item->to, item->from, item->bytes);
        return GRADD_OK;
    case ZERO:
        if (item->bytes) memset(item->to, 0, item->bytes);
        return GRADD_OK;
    case FREE:
        memset(item->to, 0xee, item->bytes);
        free(item->to);
        q->bytes -= (int64_t)item->bytes;
        return GRADD_OK;
    case RUN:
        item->run.in = item->views;
        item->run.out = item->views + item->run.n_in;
        return item->kernel->run(&item->run);
    case ADAM:
        return gradd_backend_cpu.adam(NULL, &item->hyper, item->scale, &item->span);
    case COMMIT:
        return gradd_backend_cpu.adam_commit(NULL, &item->commit);
    case STORE:
        return gradd_backend_cpu.store(NULL, item->to, item->value);
    }
    return GRADD_OK;
}

static gradd_status_t lazy_wait(gradd_queue_t *q) {
    gradd_status_t status = GRADD_OK;
    gradd_cpu_enter(q->threads);
    for (int i = 0; i < q->n; i++) {
        gradd_status_t st = carry_out(q, &q->items[i]);
        if (!status) status = st;
    }
    q->n = 0;
    q->entered = false;
    return status;
}

static void lazy_queue_destroy(gradd_queue_t *q) {
    if (!q) return;
    lazy_wait(q);
    CHECK_EQ_INT(q->bytes, 0);
    free(q->items);
    free(q);
}

static gradd_status_t lazy_enter(gradd_queue_t *q) {
    q->entered = true;
    return GRADD_OK;
}

static gradd_status_t lazy_alloc(gradd_queue_t *q, size_t bytes, void **out) {
    *out = aligned_alloc(64, (bytes / 64 + 1) * 64);
    CHECK(*out != NULL);
    memset(*out, 0xdd, bytes);
    q->bytes += (int64_t)bytes;
    return GRADD_OK;
}

static void lazy_free(gradd_queue_t *q, void *memory, size_t bytes) {
    if (!memory) return;
    item_t *item = add(q, FREE);
    item->to = memory;
    item->bytes = bytes;
}

static gradd_status_t lazy_copy(gradd_queue_t *q, void *to, const void *from, size_t bytes) {
    CHECK(q->entered);
    item_t *item = add(q, COPY);
    item->to = to;
    item->from = from;
    item->bytes = bytes;
    return GRADD_OK;
}

static gradd_status_t lazy_zero(gradd_queue_t *q, void *memory, size_t bytes) {
    CHECK(q->entered);
    item_t *item = add(q, ZERO);
    item->to = memory;
    item->bytes = bytes;
    return GRADD_OK;
}

static gradd_status_t lazy_run(gradd_queue_t *q, const gradd_kernel_t *kernel,
                               const gradd_run_t *run) {
    CHECK(q->entered);
    item_t *item = add(q, RUN);
    item->kernel = kernel;
    item->run = *run;
    memcpy(item->views, run->in, sizeof run->in[0] * (size_t)run->n_in);
    memcpy(item->views + run->n_in, run->out, sizeof run->out[0] * (size_t)run->n_out);
    return GRADD_OK;
}

static gradd_status_t lazy_adam(gradd_queue_t *q, const gradd_adam_t *hyper, float scale,
                                const gradd_adam_span_t *span) {
    CHECK(q->entered);
    item_t *item = add(q, ADAM);
    item->hyper = *hyper;
    item->scale = scale;
    item->span = *span;
    return GRADD_OK;
}

static gradd_status_t lazy_commit(gradd_queue_t *q, const gradd_adam_commit_t *commit) {
    CHECK(q->entered);
    add(q, COMMIT)->commit = *commit;
    return GRADD_OK;
}

static gradd_status_t lazy_store(gradd_queue_t *q, uint64_t *word, uint64_t value) {
    CHECK(q->entered);
    item_t *item = add(q, STORE);
    item->to = word;
    item->value = value;
    return GRADD_OK;
}

/* In the middle of a sequence. */
static gradd_status_t wait_for_result(gradd_queue_t *q) {
    CHECK(q->entered);
    gradd_status_t status = lazy_wait(q);
    q->entered = true;
    return status;
}

static gradd_status_t lazy_scan(gradd_queue_t *q, const gradd_view_t *view, gradd_scan_t *out) {
    GRADD_TRY(wait_for_result(q));
    return gradd_backend_cpu.scan(NULL, view, out);
}

static gradd_status_t lazy_fingerprint(gradd_queue_t *q, const gradd_bytes_t *list, int n,
                                       bool whole, uint64_t *out) {
    GRADD_TRY(wait_for_result(q));
    return gradd_backend_cpu.fingerprint(NULL, list, n, whole, out);
}

static gradd_status_t lazy_norm2(gradd_queue_t *q, const gradd_span_t *list, int n, double *out) {
    GRADD_TRY(wait_for_result(q));
    return gradd_backend_cpu.norm2(NULL, list, n, out);
}

gradd_device_t *lazy_open(void) {
    static gradd_backend_t backend;
    const gradd_device_options_t o = {.threads = 1};
    gradd_device_t *device;
    backend = gradd_backend_cpu;
    backend.name = "lazy";
    backend.host = false;
    backend.queue_create = lazy_queue_create;
    backend.queue_destroy = lazy_queue_destroy;
    backend.queue_enter = lazy_enter;
    backend.wait = lazy_wait;
    backend.alloc = lazy_alloc;
    backend.free = lazy_free;
    backend.copy = lazy_copy;
    backend.zero = lazy_zero;
    backend.run = lazy_run;
    backend.scan = lazy_scan;
    backend.fingerprint = lazy_fingerprint;
    backend.norm2 = lazy_norm2;
    backend.adam = lazy_adam;
    backend.adam_commit = lazy_commit;
    backend.store = lazy_store;
    CHECK_OK(device_open(&backend, &o, &device));
    return device;
}

int lazy_waiting(const gradd_device_t *device) {
    return device->queue->n;
}

int64_t lazy_bytes(const gradd_device_t *device) {
    return device->queue->bytes;
}
