/* Opens and closes devices. See device.h. */
#include "server/device/device.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/contract/plugin.h"

static gradd_status_t map(void *context, int fd, uint64_t bytes, void **out) {
    const gradd_device_t *d = context;
    return d->backend->map(d->queue, fd, (size_t)bytes, out);
}

static void unmap(void *context, void *base, uint64_t bytes) {
    const gradd_device_t *d = context;
    d->backend->unmap(d->queue, base, (size_t)bytes);
}

static gradd_status_t open_lent(void *context, const gradd_lent_t *lent, void **out) {
    const gradd_device_t *d = context;
    return d->backend->open(d->queue, lent, out);
}

static void close_lent(void *context, gradd_memory_t memory, void *base, uint64_t bytes) {
    const gradd_device_t *d = context;
    d->backend->close(d->queue, memory, base, (size_t)bytes);
}

gradd_status_t device_open(const gradd_backend_t *backend, const gradd_device_options_t *options,
                           gradd_device_t **out_device) {
    gradd_device_t *d = calloc(1, sizeof *d);
    if (!d) return GRADD_FAIL(NOMEM, "no memory for a device");
    d->backend = backend;
    d->info.name = backend->name;
    d->info.library = backend->library();
    d->info.native_bf16 = backend->multiplies(GRADD_DT_BF16);
    d->info.threads = options->threads > 0 ? options->threads : gradd_cpu_threads();
    d->info.memory_limit = options->memory_limit > 0 ? options->memory_limit : INT64_MAX;
    d->compile_ms = options->compile_ms;
    d->admit = options->admit;
    d->admit_context = options->admit_context;
    d->info.uuid = backend->uuid ? backend->uuid() : NULL;
    d->mapper = (gradd_mapper_t){d, map, unmap, backend->open ? open_lent : NULL, close_lent};
    gradd_status_t status = backend->queue_create(d->info.threads, &d->queue);
    if (status) {
        free(d);
        return status;
    }
    *out_device = d;
    return GRADD_OK;
}

gradd_status_t gradd_device_open(const gradd_device_options_t *options,
                                 gradd_device_t **out_device) {
    const char *name = options->name ? options->name : gradd_backends[0]->name;
    for (size_t i = 0; i < gradd_backend_count; i++)
        if (!strcmp(gradd_backends[i]->name, name))
            return device_open(gradd_backends[i], options, out_device);
    const gradd_backend_t *found;
    GRADD_TRY(gradd_plugin_load(name, &found));
    return device_open(found, options, out_device);
}

void gradd_device_close(gradd_device_t *d) {
    if (!d) return;
    gradd_device_trim(d);
    d->backend->queue_destroy(d->queue);
    free(d->present);
    free(d);
}

const gradd_device_info_t *gradd_device_info(const gradd_device_t *d) {
    return &d->info;
}

const gradd_mapper_t *device_mapper(const gradd_device_t *d) {
    return d->backend->map ? &d->mapper : NULL;
}

/* A failure of earlier work is a lost device's, which the next request reports again. */
void device_give_back(gradd_device_t *d) {
    gradd_device_trim(d);
    d->backend->wait(d->queue, NULL); /* freeing takes its turn */
}

gradd_status_t device_alloc(gradd_device_t *d, int64_t bytes, void **out) {
    const gradd_status_t status = d->backend->alloc(d->queue, (size_t)bytes, out);
    if (status != GRADD_E_NOMEM || !pool_bytes(d)) return status;
    device_give_back(d);
    return d->backend->alloc(d->queue, (size_t)bytes, out);
}

bool device_memory(gradd_device_t *d, bool trim, int64_t *out_free, int64_t *out_total) {
    if (!d->backend->memory) return false;
    if (trim) device_give_back(d);
    return d->backend->memory(out_free, out_total) == GRADD_OK;
}

gradd_status_t device_read(gradd_device_t *d, void *to, const void *from, size_t bytes) {
    GRADD_TRY(d->backend->queue_enter(d->queue, 0));
    gradd_status_t status = d->backend->copy(d->queue, to, from, bytes);
    gradd_status_t waited = d->backend->wait(d->queue, NULL);
    return status ? status : waited;
}

void device_set_hook(gradd_device_t *d, device_hook_t hook, void *context) {
    d->hook = hook;
    d->hook_context = context;
}

void device_set_way(gradd_device_t *d, bool (*makes_way)(void *context), void *context) {
    if (!d->backend->host) return;
    if (!d->present && d->backend->touch) d->present = present_create(); /* it does without, too */
    d->makes_way = makes_way;
    d->way_context = context;
}
