/* Verbs reduce.id, reduce.join, reduce.leave: communicators, over which backwards average
 * gradients.
 *
 * Joining takes until the other ranks have come. A thread of the device waits for them, and the
 * request goes on when it has: the engine thread waits for no rank, here and in a backward.
 */
#include <stdlib.h>
#include <string.h>

#include "server/device/device.h"
#include "server/verbs/worker.h"

enum { JOIN_COMMUNICATOR, JOIN_ID, JOIN_RANK, JOIN_RANKS, JOIN_LIMIT_MS };

#define LIMIT_MS      600000 /* of a rank that waits for the others, unless it says another one */
#define MOST_LIMIT_MS 86400000

static gradd_status_t find_backend(const worker_t *worker, const char *verb,
                                   const gradd_backend_t **out) {
    *out = worker->device->backend;
    if ((*out)->comm_id) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED,
                      "%s: device '%s' averages no gradients over processes; "
                      "DistributedDataParallel does, over gloo",
                      verb, (*out)->name);
}

gradd_status_t communicator_find(session_objects_t *objects, uint64_t id, const char *verb,
                                 communicator_t **out) {
    communicator_t *found = id_list_get(&objects->communicators, id);
    if (!found)
        return GRADD_FAIL(STALE,
                          "%s: communicator %llu is not known: it ends with the daemon or the "
                          "session that has joined it, and all processes must join another one",
                          verb, (unsigned long long)id);
    if (!found->comm)
        return GRADD_FAIL(PEER, "%s: communicator %llu has failed before: %s", verb,
                          (unsigned long long)id, found->why);
    *out = found;
    return GRADD_OK;
}

void communicator_fail(worker_t *worker, communicator_t *communicator) {
    const gradd_failure_t failure = *gradd_failure();
    snprintf(communicator->why, sizeof communicator->why, "%.399s", failure.text);
    worker->device->backend->comm_leave(communicator->comm);
    communicator->comm = NULL;
    gradd_failure_restore(&failure);
}

static void end_communicator(worker_t *worker, communicator_t *communicator) {
    if (!communicator) return;
    if (communicator->comm) worker->device->backend->comm_leave(communicator->comm);
    free(communicator);
}

void communicators_end(worker_t *worker, session_objects_t *objects) {
    id_list_t *list = &objects->communicators;
    while (list->n > 0)
        end_communicator(worker, id_list_take(list, list->items[0].id));
}

/* ---- verbs ---- */

static gradd_status_t make_id(worker_t *worker, request_t *request) {
    const gradd_backend_t *b;
    uint8_t id[GRADD_COMM_ID_BYTES];
    GRADD_TRY(find_backend(worker, "reduce.id", &b));
    const gradd_status_t status = b->comm_id(id);
    if (status) return gradd_wrap(status, "reduce.id");
    wire_key(&request->reply, "id");
    wire_put_bytes(&request->reply, id, sizeof id);
    return GRADD_OK;
}

static gradd_status_t check_join(const session_objects_t *objects, const request_t *request,
                                 gradd_comm_options_t *out) {
    const msgpack_object *const *args = request->args;
    const msgpack_object_bin *id = &args[JOIN_ID]->via.bin;
    const uint64_t number = wire_u64(args[JOIN_COMMUNICATOR]), rank = wire_u64(args[JOIN_RANK]);
    const uint64_t ranks = wire_u64(args[JOIN_RANKS]);
    const uint64_t ms = args[JOIN_LIMIT_MS] ? wire_u64(args[JOIN_LIMIT_MS]) : LIMIT_MS;
    if (id_list_get(&objects->communicators, number))
        return GRADD_FAIL(TENSOR, "reduce.join: field 'communicator': %llu exists",
                          (unsigned long long)number);
    if (objects->communicators.n >= SESSION_MAX_COMMUNICATORS)
        return GRADD_FAIL(LIMIT, "reduce.join: this session has %d communicators, the limit",
                          objects->communicators.n);
    if (id->size != GRADD_COMM_ID_BYTES)
        return GRADD_FAIL(TENSOR, "reduce.join: field 'id': %u bytes, expected %d",
                          (unsigned)id->size, GRADD_COMM_ID_BYTES);
    if (ranks < 1 || ranks > GRADD_COMM_RANKS)
        return GRADD_FAIL(LIMIT, "reduce.join: field 'ranks': %llu, expected 1 to %d",
                          (unsigned long long)ranks, GRADD_COMM_RANKS);
    if (rank >= ranks)
        return GRADD_FAIL(TENSOR, "reduce.join: field 'rank': %llu of %llu ranks",
                          (unsigned long long)rank, (unsigned long long)ranks);
    if (ms < 1 || ms > MOST_LIMIT_MS)
        return GRADD_FAIL(LIMIT, "reduce.join: field 'limit_ms': %llu, expected 1 to %d",
                          (unsigned long long)ms, MOST_LIMIT_MS);
    *out = (gradd_comm_options_t){(const uint8_t *)id->ptr, (int)rank, (int)ranks, (int64_t)ms,
                                  &request->session->cancel};
    return GRADD_OK;
}

static gradd_status_t finish_join(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    const uint64_t id = wire_u64(request->args[JOIN_COMMUNICATOR]);
    communicator_t *found = id_list_get(&objects->communicators, id);
    const gradd_status_t status = worker->device->backend->comm_status(found->comm);
    if (!status) return GRADD_OK;
    gradd_wrap(status, "reduce.join");
    communicator_fail(worker, found);
    free(id_list_take(&objects->communicators, id));
    return status;
}

static gradd_status_t join_ranks(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    const gradd_backend_t *b;
    gradd_comm_options_t options;
    GRADD_TRY(find_backend(worker, "reduce.join", &b));
    GRADD_TRY(check_join(objects, request, &options));
    communicator_t *made = calloc(1, sizeof *made);
    if (!made) return GRADD_FAIL(NOMEM, "no memory for a communicator");
    made->id = wire_u64(request->args[JOIN_COMMUNICATOR]);
    gradd_status_t status = b->comm_join(worker->device->queue, &options, &made->comm);
    if (status) gradd_wrap(status, "reduce.join");
    if (!status) status = id_list_put(&objects->communicators, made->id, made);
    if (status)
        end_communicator(worker, made);
    else
        request_go_on(request, b->comm_ended(made->comm), 1, finish_join);
    return status;
}

static gradd_status_t leave_ranks(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    end_communicator(worker, id_list_take(&objects->communicators, wire_u64(request->args[0])));
    return GRADD_OK;
}

GRADD_COMMANDS(
    reduce,
    {
        .name = "reduce.id", .handle = make_id, .needs_session = true
},
    {.name = "reduce.join",
     .handle = join_ranks,
     .needs_session = true,
     .fields = {[JOIN_COMMUNICATOR] = {.name = "communicator", .kind = WIRE_U64},
                [JOIN_ID] = {.name = "id", .kind = WIRE_BYTES},
                [JOIN_RANK] = {.name = "rank", .kind = WIRE_U64},
                [JOIN_RANKS] = {.name = "ranks", .kind = WIRE_U64},
                [JOIN_LIMIT_MS] = {.name = "limit_ms", .kind = WIRE_U64, .optional = true}}},
    {.name = "reduce.leave",
     .handle = leave_ranks,
     .needs_session = true,
     .fields = {{.name = "communicator", .kind = WIRE_U64}}});
