/* The fake device's handling of a piece of work: functions of the CPU's table, where the bytes are
 * mapped. See fake.h. */
#include <stdlib.h>
#include <string.h>

#include "tests/fake/queue.h"

/* Memory of the device; any other address is an error. NULL stays NULL. */
static void *here(gradd_queue_t *q, const void *address, size_t bytes, const char *what) {
    if (!address) return NULL;
    void *found = memory_find(&q->memory, address);
    REQUIRE(found || !bytes, "%s: %p is not of the device", what, address);
    return found || bytes ? found : (void *)address; /* nothing is read there */
}

/* Either side's. */
static void *anywhere(gradd_queue_t *q, const void *address) {
    void *found = memory_find(&q->memory, address);
    return found ? found : (void *)address;
}

static gradd_status_t copy(gradd_queue_t *q, const item_t *item) {
    if (item->bytes) memcpy(anywhere(q, item->to), anywhere(q, item->from), item->bytes);
    return GRADD_OK;
}

static gradd_status_t zero(gradd_queue_t *q, const item_t *item) {
    if (item->bytes) memset(here(q, item->to, item->bytes, "zero"), 0, item->bytes);
    return GRADD_OK;
}

static gradd_status_t launch(gradd_queue_t *q, item_t *item) {
    const char *name = item->launch.op->name;
    gradd_view_t *v = item->views;
    for (int i = 0; i < item->launch.n_in + item->launch.n_out; i++) {
        const size_t bytes = v[i].type.dtype ? (size_t)gradd_type_bytes(&v[i].type) : 0;
        const bool host = i < item->launch.n_in && item->kernel->host_in >> i & 1;
        if (!host) v[i].data = here(q, v[i].data, bytes, name);
        if (host && bytes)
            REQUIRE(!memory_find(&q->memory, v[i].data), "%s reads input %d on the host", name, i);
    }
    item->launch.in = v;
    item->launch.out = v + item->launch.n_in;
    item->launch.workspace = here(q, item->launch.workspace, 1, name);
    return gradd_backend_cpu.launch(NULL, item->kernel, &item->launch);
}

static gradd_status_t adam(gradd_queue_t *q, const item_t *item) {
    gradd_adam_span_t s = item->span;
    s.p = here(q, s.p, 1, "adam"), s.p16 = here(q, s.p16, 1, "adam");
    s.g = here(q, s.g, 1, "adam"), s.g16 = here(q, s.g16, 1, "adam");
    s.m = here(q, s.m, 1, "adam"), s.v = here(q, s.v, 1, "adam");
    s.out_p = here(q, s.out_p, 1, "adam"), s.out_m = here(q, s.out_m, 1, "adam");
    s.out_v = here(q, s.out_v, 1, "adam");
    return gradd_backend_cpu.adam(NULL, &item->hyper, item->scale, &s);
}

static gradd_status_t commit(gradd_queue_t *q, const item_t *item) {
    gradd_adam_commit_t c = item->commit;
    c.p = here(q, c.p, 1, "commit"), c.m = here(q, c.m, 1, "commit");
    c.v = here(q, c.v, 1, "commit"), c.out_p = here(q, c.out_p, 1, "commit");
    c.out_master = here(q, c.out_master, 1, "commit"), c.out_m = here(q, c.out_m, 1, "commit");
    c.out_v = here(q, c.out_v, 1, "commit");
    return gradd_backend_cpu.adam_commit(NULL, &c);
}

static gradd_status_t find_nonfinite(gradd_queue_t *q, const item_t *item) {
    const gradd_view_t v = {item->view.type, here(q, item->view.data, 0, "the finite check")};
    return gradd_backend_cpu.find_nonfinite(NULL, &v, item->nonfinite);
}

static gradd_status_t fingerprint(gradd_queue_t *q, const item_t *item) {
    gradd_bytes_t *list = calloc((size_t)item->n + 1, sizeof *list);
    REQUIRE(list, "no memory");
    for (int i = 0; i < item->n; i++) {
        const gradd_bytes_t *from = &item->bytes_list[i];
        list[i] = (gradd_bytes_t){here(q, from->data, from->bytes, "fingerprint"), from->bytes};
    }
    gradd_status_t status =
        gradd_backend_cpu.fingerprint(NULL, list, item->n, item->whole, item->print);
    free(list);
    return status;
}

static gradd_status_t norm2(gradd_queue_t *q, const item_t *item) {
    gradd_span_t *list = calloc((size_t)item->n + 1, sizeof *list);
    REQUIRE(list, "no memory");
    for (int i = 0; i < item->n; i++) {
        list[i] = item->span_list[i];
        list[i].data = here(q, list[i].data, (size_t)list[i].n, "norm2");
    }
    gradd_status_t status = gradd_backend_cpu.norm2(NULL, list, item->n, item->sum);
    free(list);
    return status;
}

static gradd_status_t touched(gradd_queue_t *q, const item_t *item) {
    gradd_span_t span = *item->span_list;
    span.data = here(q, span.data, (size_t)span.n, "touched");
    return gradd_backend_cpu.touched(NULL, &span, item->width, item->bits);
}

gradd_status_t item_carry_out(gradd_queue_t *q, item_t *item) {
    switch (item->kind) {
    case ITEM_COPY:
        return copy(q, item);
    case ITEM_ZERO:
        return zero(q, item);
    case ITEM_FREE:
        memory_drop(&q->memory, item->to, item->bytes);
        return GRADD_OK;
    case ITEM_LAUNCH:
        return launch(q, item);
    case ITEM_ADAM:
        return adam(q, item);
    case ITEM_COMMIT:
        return commit(q, item);
    case ITEM_STORE:
        return gradd_backend_cpu.store(NULL, here(q, item->to, 8, "store"), item->value);
    case ITEM_NONFINITE:
        return find_nonfinite(q, item);
    case ITEM_FINGERPRINT:
        return fingerprint(q, item);
    case ITEM_NORM2:
        return norm2(q, item);
    case ITEM_TOUCHED:
        return touched(q, item);
    }
    return GRADD_OK;
}
