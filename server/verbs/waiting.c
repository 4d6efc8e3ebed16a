/* Runs that wait for memory, until other sessions give theirs back (server/session/room.h decides).
 *
 * A request that finds no room gives back all that it has taken, and begins again when the word
 * `room` rises: with each run that ends, and with the ticks of the event loop, which see the end of
 * its time and memory of other processes. Meanwhile its session waits, and no other. Engine thread.
 */
#include <stdio.h>

#include "server/device/device.h"
#include "server/session/room.h"
#include "server/verbs/worker.h"

#define ACTIVE_US 1000000

_Static_assert(ROOM_MOST >= SESSION_MAX + SESSION_MAX_SURPLUS, "room_stuck() takes all sessions");

typedef gradd_status_t (*again_t)(worker_t *worker, request_t *request);

typedef struct places_s {
    room_place_t list[ROOM_MOST];
    int n, mine;
} places_t;

void worker_tell_room(worker_t *worker) {
    if (atomic_load(&worker->n_waiting)) __atomic_fetch_add(&worker->room, 1, __ATOMIC_RELEASE);
}

void worker_end_wait(worker_t *worker, session_objects_t *objects) {
    if (!objects->wait.bytes) return;
    objects->wait = (run_wait_t){0};
    atomic_store(&objects->session->counts.wanted_bytes, 0);
    atomic_fetch_sub(&worker->n_waiting, 1);
    worker_tell_room(worker); /* others may have left room to it */
}

static int64_t wait_ms(const worker_t *worker, const request_t *request) {
    return request->wait_ms < 0 ? worker->wait_ms : request->wait_ms;
}

static void note_wait(worker_t *worker, const request_t *request, int64_t bytes, int64_t now_us) {
    session_objects_t *objects = request->session->objects;
    const int64_t ms = wait_ms(worker, request);
    if (!objects->wait.bytes) {
        atomic_fetch_add(&worker->n_waiting, 1);
        objects->wait.since_us = now_us;
        objects->wait.until_us = ms < INT64_MAX / 2000 ? now_us + ms * 1000 : INT64_MAX;
        atomic_store(&objects->session->counts.wanted_us, now_us);
    }
    objects->wait.bytes = bytes;
    atomic_store(&objects->session->counts.wanted_bytes, bytes);
}

static void go_on_later(worker_t *worker, request_t *request, again_t again) {
    const uint64_t now = __atomic_load_n(&worker->room, __ATOMIC_ACQUIRE);
    request_go_on(request, &worker->room, now + 1, again);
    request->job.told = true;
}

/* Of all sessions. */
static places_t *list_places(const worker_t *worker, const session_objects_t *objects,
                             int64_t now_us) {
    static places_t places; /* one engine thread */
    places.n = 0;
    for (session_objects_t *o = worker->objects; o && places.n < ROOM_MOST; o = o->next) {
        if (o == objects) places.mine = places.n;
        places.list[places.n++] = (room_place_t){
            .holds = atomic_load(&o->session->counts.arena_bytes),
            .wants = o->wait.bytes,
            .since_us = o->wait.since_us,
            .number = o->session->number,
            .active = atomic_load(&o->session->lane.length) || now_us - o->heard_us < ACTIVE_US,
        };
    }
    return &places;
}

static void end_wait_of(worker_t *worker, uint32_t number) {
    for (session_objects_t *o = worker->objects; o; o = o->next)
        if (o->session->number == number) o->wait.ends = true;
    worker_tell_room(worker);
}

/* The other one that holds most; NULL: none holds anything. */
static const session_t *largest_holder(const worker_t *worker, const session_t *session) {
    const session_t *found = NULL;
    int64_t most = 0;
    for (const session_objects_t *o = worker->objects; o; o = o->next) {
        const int64_t bytes = atomic_load(&o->session->counts.arena_bytes);
        if (o->session == session || bytes <= most) continue;
        most = bytes;
        found = o->session;
    }
    return found;
}

/* The failure is said with the reason why the request does not wait (any longer). */
static bool refuse(const gradd_failure_t *failure, const char *why, const session_t *behind) {
    char text[GRADD_ERROR_BYTES], holder[SESSION_HOLDER_BYTES] = "";
    if (behind) session_holder_text(behind, holder);
    snprintf(text, sizeof text, "%.600s; %s%s%s", failure->text, why, behind ? ", behind " : "",
             holder);
    gradd_failure_restore(failure);
    gradd_error_set(text);
    return false;
}

static bool refuse_for_ever(const gradd_failure_t *failure, int64_t most) {
    char why[160];
    snprintf(why, sizeof why,
             "it cannot have more than %lld MiB, also when other sessions have none: see `gradd "
             "estimate` for what a memory budget costs",
             (long long)(most > 0 ? most >> 20 : 0));
    return refuse(failure, why, NULL);
}

static bool refuse_late(const gradd_failure_t *failure, int64_t waited_us,
                        const session_t *behind) {
    char why[64];
    if (waited_us == 0) return refuse(failure, "it was not to wait", behind);
    snprintf(why, sizeof why, "it has waited for %.1f s", (double)waited_us / 1e6);
    return refuse(failure, why, behind);
}

bool worker_waits(worker_t *worker, request_t *request, again_t again) {
    const gradd_failure_t failure = *gradd_failure();
    session_objects_t *objects = request->session->objects;
    const int64_t bytes = worker->device->refused_bytes, now_us = command_now_us();
    if (!bytes || __atomic_load_n(&request->session->cancel, __ATOMIC_RELAXED)) return false;
    note_wait(worker, request, bytes, now_us);
    const run_wait_t *wait = &objects->wait;
    const int64_t free = worker_room(worker, bytes);
    const places_t *all = list_places(worker, objects, now_us);
    const int64_t most = room_most(all->list, all->n, all->mine, free);
    const session_t *behind = largest_holder(worker, request->session);
    if (bytes > most) return refuse_for_ever(&failure, most);
    if (now_us >= wait->until_us) return refuse_late(&failure, now_us - wait->since_us, behind);
    const int stuck = room_stuck(all->list, all->n, free);
    if (wait->ends || stuck == all->mine)
        return refuse(
            &failure,
            "sessions that wait for each other, of which this is the youngest, would wait "
            "for ever",
            behind);
    if (stuck >= 0) end_wait_of(worker, all->list[stuck].number);
    go_on_later(worker, request, again);
    return true;
}

bool worker_yields(worker_t *worker, request_t *request, int64_t bytes, again_t again) {
    session_objects_t *objects = request->session->objects;
    const bool waits = objects->wait.bytes;
    if (atomic_load(&worker->n_waiting) == waits) return false;
    const int64_t now_us = command_now_us();
    if (wait_ms(worker, request) == 0 || (waits && now_us >= objects->wait.until_us) ||
        __atomic_load_n(&request->session->cancel, __ATOMIC_RELAXED))
        return false;
    const int64_t free = worker_room(worker, bytes);
    places_t *all = list_places(worker, objects, now_us);
    room_place_t *mine = &all->list[all->mine];
    mine->wants = bytes;
    if (!waits) mine->since_us = now_us;
    if (!room_yields(all->list, all->n, all->mine, free)) return false;
    note_wait(worker, request, bytes, now_us);
    go_on_later(worker, request, again);
    return true;
}
