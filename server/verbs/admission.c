/* Admission of memory: how much runs and plans may take of what the device has left, and models of
 * what the machine has. A device without memory of its own has the machine's. The limit of all runs
 * together is the device's.
 *
 * The engine asks before it takes new memory: an arena that no spare one serves, a wider one for a
 * backward, zeros. In the steps of a training loop that never happens, so reading the machine's
 * files here costs a request nothing; small pieces add up until reading is worth it. Promised
 * memory is not touched yet, and an operating system that runs out of memory kills a process, so
 * the answer comes first. Engine thread.
 */
#include <string.h>

#include "server/device/device.h"
#include "server/host/log.h"
#include "server/host/machine.h"
#include "server/verbs/worker.h"
#include "shm/discard.h"

#define READ_FROM ((int64_t)32 << 20) /* touching as much for the first time takes milliseconds */

typedef struct need_s {
    const char *what, *of; /* for the message: a run, of activations */
    int64_t bytes;
    bool on_device;
} need_t;

static int64_t memory_left(worker_t *worker, const need_t *need, const char **out_place) {
    const bool trim = pool_bytes(worker->device) > 0;
    int64_t left, total;
    *out_place = "the device";
    if (need->on_device && device_memory(worker->device, false, &left, &total)) {
        if (need->bytes > left && trim) device_memory(worker->device, true, &left, &total);
        return left;
    }
    *out_place = "the machine, or the control group of the daemon,";
    left = machine_memory_left(worker->root);
    if (need->bytes <= left) return left;
    if (trim) gradd_device_trim(worker->device);
    gradd_discard_wait(); /* what is on its way back counts */
    return machine_memory_left(worker->root);
}

static gradd_status_t admit(worker_t *worker, const need_t *need) {
    const char *place;
    if (worker->unread_bytes + need->bytes < READ_FROM) {
        worker->unread_bytes += need->bytes;
        return GRADD_OK;
    }
    const int64_t left = memory_left(worker, need, &place);
    if (need->bytes > left)
        return GRADD_FAIL(NOMEM, "the %s needs %lld MiB of %s; %s has %lld MiB left", need->what,
                          (long long)(need->bytes >> 20), need->of, place, (long long)(left >> 20));
    worker->unread_bytes = 0;
    return GRADD_OK;
}

gradd_status_t worker_admit(void *context, int64_t bytes) {
    return admit(context, &(need_t){"run", "activations", bytes, true});
}

gradd_status_t worker_admit_model(worker_t *worker, int64_t bytes) {
    return admit(worker, &(need_t){"model", "memory", bytes, false});
}

gradd_status_t worker_admit_plan(worker_t *worker, int64_t bytes) {
    return admit(worker, &(need_t){"plan", "memory", bytes, true});
}

int64_t worker_room(worker_t *worker, int64_t bytes) {
    const char *place;
    const int64_t left = memory_left(worker, &(need_t){.bytes = bytes, .on_device = true}, &place);
    const int64_t room = worker->device->info.memory_limit - worker->device->arena_bytes;
    return room < left ? room : left;
}

static void limit_memory(worker_t *worker) {
    int64_t left, all;
    if (!device_memory(worker->device, false, &left, &all)) all = machine_memory(worker->root);
    worker->device->info.memory_limit = all == INT64_MAX ? all : all / 10 * 9;
}

gradd_status_t worker_open_device(worker_t *worker, const gradd_device_options_t *options) {
    gradd_device_options_t o = *options;
    o.admit = worker_admit;
    o.admit_context = worker;
    GRADD_TRY(gradd_device_open(&o, &worker->device));
    if (options->memory_limit <= 0) limit_memory(worker);
    return GRADD_OK;
}

void worker_trim(worker_t *worker) {
    const int64_t bytes = pool_bytes(worker->device);
    if (!bytes) return;
    device_give_back(worker->device);
    log_event(LOG_INFO, "idle_trim", "mib=%lld", (long long)(bytes >> 20));
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
