/* Admission of memory: how much runs, models and plans may take of what the machine has left. The
 * limit of all runs together is the device's.
 *
 * The engine asks before it takes new memory: an arena that no spare one serves, a wider one for a
 * backward, zeros. In the steps of a training loop that never happens, so reading the machine's
 * files here costs a request nothing; small pieces add up until reading is worth it. Promised
 * memory is not touched yet, and an operating system that runs out of memory kills a process, so
 * the answer comes first. Engine thread.
 */
#include <string.h>

#include "server/device/device.h"
#include "server/host/machine.h"
#include "server/verbs/worker.h"

#define READ_FROM ((int64_t)32 << 20) /* touching as much for the first time takes milliseconds */

static gradd_status_t ask_machine(worker_t *worker, const char *what, const char *of,
                                  int64_t bytes) {
    if (worker->unread_bytes + bytes < READ_FROM) {
        worker->unread_bytes += bytes;
        return GRADD_OK;
    }
    int64_t left = machine_memory_left(worker->root);
    if (bytes > left && pool_bytes(worker->device) > 0) {
        gradd_device_trim(worker->device);
        left = machine_memory_left(worker->root);
    }
    if (bytes > left)
        return GRADD_FAIL(NOMEM,
                          "the %s needs %lld MiB of %s; the machine, or the control group of the "
                          "daemon, has %lld MiB left",
                          what, (long long)(bytes >> 20), of, (long long)(left >> 20));
    worker->unread_bytes = 0;
    return GRADD_OK;
}

gradd_status_t worker_admit(void *context, int64_t bytes) {
    return ask_machine(context, "run", "activations", bytes);
}

gradd_status_t worker_admit_model(worker_t *worker, int64_t bytes) {
    return ask_machine(worker, "model", "memory", bytes);
}

gradd_status_t worker_admit_plan(worker_t *worker, int64_t bytes) {
    return ask_machine(worker, "plan", "memory", bytes);
}

gradd_status_t worker_open_device(worker_t *worker, const gradd_device_options_t *options) {
    gradd_device_options_t o = *options;
    if (o.memory_limit <= 0) {
        int64_t all = machine_memory(worker->root);
        o.memory_limit = all == INT64_MAX ? all : all / 10 * 9;
    }
    o.admit = worker_admit;
    o.admit_context = worker;
    return gradd_device_open(&o, &worker->device);
}

gradd_status_t worker_find_device(worker_t *worker, const char *name, size_t n,
                                  gradd_device_t **out_device) {
    const char *ours = gradd_device_info(worker->device)->name;
    if (name && (strlen(ours) != n || memcmp(ours, name, n)))
        return GRADD_FAIL(UNSUPPORTED, "there is no device '%.*s', only '%s'", n < 60 ? (int)n : 60,
                          name, ours);
    *out_device = worker->device;
    return GRADD_OK;
}
