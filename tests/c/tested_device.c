/* See tested_device.h. */
#include "tests/c/tested_device.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/contract/plugin.h"
#include "kernels/contract/registry.h"
#include "tests/test.h"

const gradd_backend_t *tested_backend(void) {
    const char *name = getenv("GRADD_TEST_DEVICE");
    for (size_t i = 0; i < gradd_backend_count; i++)
        if (!strcmp(gradd_backends[i]->name, name ? name : "cpu")) return gradd_backends[i];
    const gradd_backend_t *found;
    if (!gradd_plugin_load(name, &found)) return found;
    test_fail(__FILE__, __LINE__, "GRADD_TEST_DEVICE: %s", gradd_error_message());
}

const char *tested_op(void) {
    const char *only = getenv("GRADD_TEST_OP");
    if (!only || !*only) return NULL;
    for (size_t f = 0; f < gradd_op_family_count; f++)
        for (size_t i = 0; i < gradd_op_families[f]->n; i++)
            if (!strcmp(only, gradd_op_families[f]->v[i].name)) return only;
    test_fail(__FILE__, __LINE__, "GRADD_TEST_OP: there is no operator '%s'", only);
}

void tested_cases(int n) {
    if (n == 0 && tested_op()) test_skip("no case here is of %s", tested_op());
    CHECK(n > 0);
}

int tested_threads(int wanted) {
    return tested_backend()->host ? wanted : 1;
}

gradd_device_t *tested_device_open(int threads) {
    const gradd_device_options_t o = {.name = tested_backend()->name,
                                      .threads = tested_threads(threads)};
    gradd_device_t *device;
    CHECK_OK(gradd_device_open(&o, &device));
    return device;
}

/* ---- memory that both see -------------------------------------------------------------------- */

shared_t shared_make(size_t bytes) {
    shared_t g = {.segment = GRADD_SEGMENT_INIT};
    CHECK_OK(gradd_segment_create("test", bytes, &g.segment));
    g.host = g.segment.base;
    return g;
}

void shared_free(shared_t *g) {
    shared_leave(g);
    gradd_segment_finish(&g->segment);
}

void shared_enter(shared_t *g, const gradd_device_t *device) {
    shared_leave(g);
    g->mapper = device_mapper(device);
    g->device = g->host;
    if (g->mapper)
        CHECK_OK(g->mapper->map(g->mapper->context, g->segment.fd, g->segment.bytes, &g->device));
}

void shared_leave(shared_t *g) {
    if (g->mapper) g->mapper->unmap(g->mapper->context, g->device, g->segment.bytes);
    g->mapper = NULL;
    g->device = NULL;
}

void *shared_at(const shared_t *g, const void *host) {
    if (!host) return NULL;
    const size_t at = (size_t)((const char *)host - g->host);
    CHECK(at <= g->segment.bytes);
    return (char *)g->device + at;
}

/* ---- one call -------------------------------------------------------------------------------- */

enum { MAX_VIEWS = GRADD_OP_MAX_IN + GRADD_OP_MAX_OUT, ALIGN = 64 };

/* A call on its way to the device: its operands one behind the other in one block. */
typedef struct passage_s {
    const gradd_launch_t *launch;
    const gradd_kernel_t *kernel;
    gradd_view_t views[MAX_VIEWS];
    size_t at[MAX_VIEWS], bytes[MAX_VIEWS]; /* with what is behind; bytes 0 = stays */
    int n;
    size_t workspace_at, workspace_bytes, total;
} passage_t;

static size_t reserve(passage_t *p, size_t bytes) {
    const size_t at = p->total;
    p->total += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

static void place(passage_t *p, int i, size_t behind) {
    const gradd_view_t *v = &p->views[i];
    if (!v->data) return;
    if (i < p->launch->n_in && i < 32 && p->kernel->host_in >> i & 1) return;
    for (int k = 0; k < i; k++)
        if (p->bytes[k] && p->views[k].data == v->data) { /* it is overwritten */
            p->at[i] = p->at[k];
            p->bytes[i] = p->bytes[k];
            return;
        }
    /* inputs of a case have nothing behind them that counts */
    p->bytes[i] = (size_t)gradd_type_bytes(&v->type) + (i < p->launch->n_in ? 0 : behind);
    p->at[i] = reserve(p, p->bytes[i] + behind + 1);
}

static void place_all(passage_t *p, size_t behind) {
    const gradd_launch_t *r = p->launch;
    p->n = r->n_in + r->n_out;
    memcpy(p->views, r->in, sizeof r->in[0] * (size_t)r->n_in);
    memcpy(p->views + r->n_in, r->out, sizeof r->out[0] * (size_t)r->n_out);
    for (int i = 0; i < p->n; i++)
        place(p, i, behind);
    if (r->workspace) {
        p->workspace_bytes += behind;
        p->workspace_at = reserve(p, p->workspace_bytes);
    }
}

static void carry(const passage_t *p, char *block, bool there) {
    for (int i = 0; i < p->n; i++) {
        char *mine = p->views[i].data, *its = block + p->at[i];
        if (p->bytes[i] && there) memcpy(its, mine, p->bytes[i]);
        if (p->bytes[i] && !there && i >= p->launch->n_in) memcpy(mine, its, p->bytes[i]);
    }
    if (p->launch->workspace && there)
        memcpy(block + p->workspace_at, p->launch->workspace, p->workspace_bytes);
    if (p->launch->workspace && !there)
        memcpy(p->launch->workspace, block + p->workspace_at, p->workspace_bytes);
}

static gradd_status_t run_there(gradd_device_t *d, passage_t *p, char *block) {
    const gradd_backend_t *b = d->backend;
    gradd_launch_t r = *p->launch;
    gradd_view_t views[MAX_VIEWS];
    void *memory;
    memcpy(views, p->views, sizeof views[0] * (size_t)p->n);
    CHECK_OK(b->alloc(d->queue, p->total, &memory));
    for (int i = 0; i < p->n; i++)
        if (p->bytes[i]) views[i].data = (char *)memory + p->at[i];
    r.in = views;
    r.out = views + r.n_in;
    if (r.workspace) r.workspace = (char *)memory + p->workspace_at;
    CHECK_OK(b->queue_enter(d->queue, 0));
    CHECK_OK(b->copy(d->queue, memory, block, p->total));
    gradd_status_t status = b->launch(d->queue, p->kernel, &r);
    gradd_status_t waited = b->wait(d->queue, NULL);
    if (!status && !waited) CHECK_OK(device_read(d, block, memory, p->total));
    b->free(d->queue, memory, p->total);
    return status ? status : waited;
}

gradd_status_t tested_call_on(const gradd_backend_t *backend, const gradd_kernel_t *kernel,
                              const gradd_launch_t *launch, size_t workspace, size_t behind) {
    static gradd_device_t *device; /* of the process of one test */
    passage_t p = {.launch = launch, .kernel = kernel, .workspace_bytes = workspace};
    if (backend->host) return gradd_kernel_compute(kernel, launch);
    if (!device) {
        const gradd_device_options_t o = {.threads = 1};
        setenv("GRADD_FAKE_DELAY_US", "0", 0); /* thousands of calls, each of which is waited for */
        CHECK_OK(device_open(backend, &o, &device));
    }
    CHECK(device->backend == backend);
    place_all(&p, behind);
    char *block = calloc(1, p.total + ALIGN);
    CHECK(block != NULL);
    carry(&p, block, true);
    gradd_status_t status = run_there(device, &p, block);
    if (!status) carry(&p, block, false);
    free(block);
    if (status == GRADD_E_DEVICE) { /* it is lost; what comes next has another one */
        const gradd_failure_t failure = *gradd_failure();
        gradd_device_close(device);
        device = NULL;
        gradd_failure_restore(&failure);
    }
    return status;
}

gradd_status_t tested_call(const gradd_kernel_t *kernel, const gradd_launch_t *launch,
                           size_t workspace, size_t behind) {
    return tested_call_on(tested_backend(), kernel, launch, workspace, behind);
}
