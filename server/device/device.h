/* An open device: one queue of a backend, and the state that plans and runs on it share. The
 * functions of gradd.h that begin with gradd_device_ are here.
 *
 * Arenas of finished runs are kept for the next one: mapping and first touching some hundred
 * megabytes costs more than a small step. Few are kept, however many plans there are, so that many
 * sequence lengths do not hold many arenas. An arena that is given back may still be in use by work
 * in the queue: the next run is queued behind that work.
 *
 * One thread at a time uses a device, its plans and its runs.
 */
#ifndef GRADD_SERVER_DEVICE_DEVICE_H
#define GRADD_SERVER_DEVICE_DEVICE_H

#include "kernels/contract/backend.h"
#include "server/api/gradd.h"
#include "shm/segment.h"

/* Two: a step of two micro-batch shapes, or two runs in flight, alternate without mapping. */
#define DEVICE_SPARES 2

struct plan_s;
struct plan_launch_s;

/* Called after each launch when set; `seconds` is its own time on a synchronous device. */
typedef void (*device_hook_t)(void *context, const struct plan_s *plan,
                              const struct plan_launch_s *launch, double seconds);

typedef struct spare_s {
    void *memory; /* Owned; NULL = free place */
    int64_t bytes;
} spare_t;

/* Of memory that was used. */
typedef struct present_s present_t;

struct device_s {
    const gradd_backend_t *backend;
    gradd_queue_t *queue; /* Owned */
    gradd_device_info_t info;
    int64_t compile_ms;
    gradd_admit_t admit;
    void *admit_context;
    int64_t arena_bytes;   /* of the runs that exist */
    int64_t refused_bytes; /* for which there was no room last; the caller clears it */
    spare_t spares[DEVICE_SPARES];
    bool any_spare; /* however large, it serves a small run: of a device with one run at a time */
    device_hook_t hook;
    void *hook_context;
    bool (*makes_way)(void *context); /* see device_set_way; NULL = never */
    void *way_context;
    present_t *present; /* Owned; NULL = nothing makes way, or memory always is there */
    gradd_mapper_t mapper;
};

/* For tracing and tests; NULL = none. */
void device_set_hook(gradd_device_t *device, device_hook_t hook, void *context);
/* From now on programs and optimizer steps ask between two launches or chunks whether they make way
 * for something else: see run_is_aside and step_continue. Of a device with a queue of its own,
 * whose work goes on, nothing is put aside, and this does nothing. */
void device_set_way(gradd_device_t *device, bool (*makes_way)(void *context), void *context);
static inline bool device_makes_way(const gradd_device_t *device) {
    return device->makes_way && device->makes_way(device->way_context);
}
/* ---- memory that is used for the first time (present.c) ---- */

#define DEVICE_MUCH ((int64_t)4 << 20) /* bytes: the first use of less is short */

present_t *present_create(void); /* NULL: no memory */
/* Makes a piece of what a launch is going to read or write present; false: all of it has been. Only
 * on a device that makes way. */
bool device_touch(gradd_device_t *device, const void *memory, int64_t bytes, bool written);
/* The memory is going to be unmapped; NULL: any may be. */
void device_forget(gradd_device_t *device, const void *memory, int64_t bytes);

/* A device of that backend, which need not be in the list. */
gradd_status_t device_open(const gradd_backend_t *backend, const gradd_device_options_t *options,
                           gradd_device_t **out_device);

/* Maps segments into the device's memory, as long as it is open; NULL: it takes the process's
 * mappings. */
const gradd_mapper_t *device_mapper(const gradd_device_t *device);
/* Whether the device has memory of its own; if so, how much of it is free. Spare arenas are not,
 * unless they are trimmed first. */
bool device_memory(gradd_device_t *device, bool trim, int64_t *out_free, int64_t *out_total);
/* Gives back the spare arenas, and waits: after that their memory is free for any process. */
void device_give_back(gradd_device_t *device);
/* Memory of the device, as the table's alloc; spare arenas make room if there is none. */
gradd_status_t device_alloc(gradd_device_t *device, int64_t bytes, void **out);
/* Copies what lies in memory of the device, or in the process's, to the process's. Waits. */
gradd_status_t device_read(gradd_device_t *device, void *to, const void *from, size_t bytes);

/* ---- arenas (pool.c) ---- */

/* Whether runs may take `bytes` of new memory: below the limit, and admitted. Errors: NOMEM. */
gradd_status_t pool_admit(gradd_device_t *device, int64_t bytes);
/* An arena of at least `bytes`; *out_bytes is its true size. New memory is admitted first. Errors:
 * NOMEM. */
gradd_status_t pool_take(gradd_device_t *device, int64_t bytes, void **out, int64_t *out_bytes);
/* Moves an arena with all that it holds into a wider one, which was admitted. */
gradd_status_t pool_grow(gradd_device_t *device, int64_t bytes, void **memory,
                         int64_t *memory_bytes);
/* Keeps the arena for the next run, or gives it back to the system. */
void pool_give(gradd_device_t *device, void *memory, int64_t bytes);
void pool_drop(gradd_device_t *device, void *memory, int64_t bytes);
/* Of the spare ones. */
int64_t pool_bytes(const gradd_device_t *device);

#endif
