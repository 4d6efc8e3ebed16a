/* A session's objects in the engine thread, and the path of a request there. See worker.h. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/device/device.h"
#include "server/host/log.h"
#include "server/session/turns.h"
#include "server/verbs/crash.h"
#include "server/verbs/maker.h"
#include "server/verbs/worker.h"

void *id_list_get(const id_list_t *list, uint64_t id) {
    for (int i = 0; i < list->n; i++)
        if (list->items[i].id == id) return list->items[i].object;
    return NULL;
}

gradd_status_t id_list_put(id_list_t *list, uint64_t id, void *object) {
    if (list->n == list->capacity) {
        int capacity = list->capacity ? 2 * list->capacity : 16;
        struct id_item_s *items = realloc(list->items, (size_t)capacity * sizeof *items);
        if (!items) return GRADD_FAIL(NOMEM, "no memory for a list of %d", capacity);
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->n++] = (struct id_item_s){id, object};
    return GRADD_OK;
}

void *id_list_take(id_list_t *list, uint64_t id) {
    for (int i = 0; i < list->n; i++) {
        if (list->items[i].id != id) continue;
        void *object = list->items[i].object;
        list->items[i] = list->items[--list->n];
        return object;
    }
    return NULL;
}

/* Made at first use. */
static gradd_status_t find_objects(worker_t *worker, session_t *session,
                                   session_objects_t **out_objects) {
    if (!session->objects) {
        session_objects_t *objects = calloc(1, sizeof *objects);
        if (!objects) return GRADD_FAIL(NOMEM, "no memory for a session");
        objects->session = session;
        objects->worker = worker;
        objects->next = worker->objects;
        worker->objects = objects;
        session->objects = objects;
    }
    *out_objects = session->objects;
    return GRADD_OK;
}

void objects_release_binding(binding_t *binding) {
    if (!binding || --binding->refs > 0) return;
    binding->objects->n_held -= binding->tensors.n;
    tensors_finish(&binding->tensors);
    free(binding);
}

void objects_release_run(session_objects_t *objects, uint64_t id) {
    session_run_t *run = id_list_take(&objects->runs, id);
    if (!run) return;
    gradd_run_destroy(run->handle);
    atomic_fetch_sub(&objects->session->counts.arena_bytes, run->arena_bytes);
    worker_tell_room(objects->worker);
    run->plan->n_runs--;
    objects->n_held -= run->in.n + run->out.n;
    objects_release_binding(run->binding);
    objects_release_binding(run->early);
    tensors_finish(&run->in);
    tensors_finish(&run->out);
    free(run->inputs);
    free(run);
}

void objects_run_plan(session_objects_t *objects, const session_plan_t *plan, bool backward) {
    objects->subject = plan->compiled->model;
    objects->running = plan->compiled;
    objects->running_plan = plan->id;
    objects->running_backward = backward;
    crash_blame(plan->compiled->key, backward);
}

static void split_finish(split_t *split) {
    free(split->at);
    free(split->inputs);
}

void objects_drop_plan(worker_t *worker, session_objects_t *objects, session_plan_t *plan) {
    id_list_take(&objects->plans, plan->id);
    atomic_fetch_sub(&objects->session->counts.constant_bytes, plan->constant_bytes);
    record_drop_plan(&objects->session->record, plan->id);
    cache_release_compiled(worker, plan->compiled);
    free(plan->in);
    free(plan->bound);
    free(plan->rest);
    free(plan->grads);
    free(plan->out);
    free(plan->gmask);
    split_finish(&plan->early);
    split_finish(&plan->late);
    free(plan);
}

struct session_graph_s *objects_find_graph(session_objects_t *objects, const void *id) {
    for (int i = 0; i < objects->n_graphs; i++)
        if (memcmp(objects->graphs[i].model->id, id, GRADD_SHA256_BYTES) == 0)
            return &objects->graphs[i];
    return NULL;
}

void objects_finish_graph(worker_t *worker, struct session_graph_s *graph) {
    cache_release_model(worker, graph->model);
    wire_doc_finish(&graph->source);
    zmq_msg_close(&graph->source_frame);
}

static void forget(worker_t *worker, const session_objects_t *objects) {
    struct session_objects_s **link = &worker->objects;
    while (*link != objects)
        link = &(*link)->next;
    *link = objects->next;
}

/* Refreshes what `ps` shows. */
static void count(session_objects_t *objects) {
    session_counts_t *counts = &objects->session->counts;
    atomic_store_explicit(&counts->graphs, objects->n_graphs, memory_order_relaxed);
    atomic_store_explicit(&counts->plans, objects->plans.n, memory_order_relaxed);
    atomic_store_explicit(&counts->runs, objects->runs.n, memory_order_relaxed);
    atomic_store_explicit(&counts->bindings, objects->bindings.n, memory_order_relaxed);
    atomic_store_explicit(&counts->tensors, objects->n_held, memory_order_relaxed);
}

void objects_end(worker_t *worker, session_t *session) {
    session_objects_t *objects = session->objects;
    if (!objects) return;
    worker_end_wait(worker, objects);
    communicators_end(worker, objects); /* first: they write to the memory of the others */
    backward_end(objects);
    maker_release(worker->maker, objects->making);
    while (objects->runs.n > 0)
        objects_release_run(objects, objects->runs.items[0].id);
    while (objects->bindings.n > 0)
        objects_release_binding(id_list_take(&objects->bindings, objects->bindings.items[0].id));
    while (objects->plans.n > 0)
        objects_drop_plan(worker, objects, objects->plans.items[0].object);
    for (int i = 0; i < objects->n_graphs; i++)
        objects_finish_graph(worker, &objects->graphs[i]);
    objects->n_graphs = 0;
    count(objects);
    free(objects->communicators.items);
    free(objects->runs.items);
    free(objects->bindings.items);
    free(objects->plans.items);
    forget(worker, objects);
    free(objects);
    session->objects = NULL;
    device_forget(worker->device, NULL, 0); /* its segments go */
    gradd_device_trim(worker->device);      /* memory that a client has left comes back at once */
    worker_tell_room(worker);
}

/* "model.layers.0.self_attn, modeling_llama.py:245" from "model.layers.0.self_attn @ /path/...". */
static void format_source(const msgpack_object_str *source, char *out, size_t bytes) {
    char text[512];
    snprintf(text, sizeof text, "%.*s", source->size < 500 ? (int)source->size : 500, source->ptr);
    char *at = strstr(text, " @ ");
    if (!at) {
        snprintf(out, bytes, "%.150s", text);
        return;
    }
    const char *line = at + strlen(" @ "), *slash = strrchr(line, '/');
    *at = 0;
    snprintf(out, bytes, "%.150s, %.90s", text, slash ? slash + 1 : line);
}

/* The Python source of the node that a failure is about, if the client has told us; it follows the
 * sentence. */
static void add_source(const session_objects_t *objects, const gradd_failure_t *failure) {
    const size_t n = strlen(failure->node);
    if (!n) return;
    for (int g = 0; g < objects->n_graphs; g++) {
        const msgpack_object *table = &objects->graphs[g].source.root;
        /* Names of nodes are unique in their graph only. */
        if (!objects->graphs[g].source.decoded || objects->graphs[g].model != objects->subject)
            continue;
        const msgpack_object *nodes = wire_in(table, "nodes"), *from = wire_in(table, "sources");
        for (int i = 0; i < wire_count(nodes); i++) {
            const msgpack_object_str *name = &wire_at(nodes, i)->via.str;
            const msgpack_object_str *source = &wire_at(from, i)->via.str;
            if (name->size != n || memcmp(name->ptr, failure->node, n) != 0) continue;
            char text[GRADD_ERROR_BYTES], location[256];
            format_source(source, location, sizeof location);
            snprintf(text, sizeof text, "%.700s (from %s)", failure->text, location);
            gradd_error_set(text);
            return;
        }
    }
}

/* A device that is lost does not come back in this process. Clients find their connection gone, as
 * after any death of a daemon, and have the request done by the next one. */
static _Noreturn void end_without_device(const request_t *request) {
    log_event(LOG_ERROR, "device_lost", "verb=%s what=\"%s\"", request->command->name,
              gradd_error_message());
    _exit(DEVICE_LOST_STATUS);
}

static void note_end(worker_t *worker, const session_objects_t *objects, gradd_status_t status) {
    const uint8_t *key = objects->running->key;
    if (status == GRADD_E_DEVICE)
        lost_note(&worker->lost, key, objects->running_backward);
    else if (!status && worker->lost.n)
        lost_ran(&worker->lost, key, objects->running_backward);
}

/* A request may read what the one before it should have written. */
static gradd_status_t check_chain(const request_t *request) {
    if (!request->chain || request->chain != request->session->failed_chain) return GRADD_OK;
    return GRADD_FAIL(STALE, "%s: not done, because an earlier request has failed",
                      request->command->name);
}

static void end_turn(request_t *request, gradd_status_t status) {
    if (status && request->chain) request->session->failed_chain = request->chain;
    if (!status && request->turn) turns_done(request->session, request->turn);
}

static gradd_status_t begin_request(worker_t *worker, request_t *request,
                                    session_objects_t *objects) {
    request->started_us = request->entered_us;
    for (int i = 0; i < wire_count(request->rel); i++)
        objects_release_run(objects, wire_u64(wire_at(request->rel, i)));
    wire_reply_begin(&request->reply, request->q);
    GRADD_TRY(check_chain(request));
    return request->command->handle(worker, request);
}

static gradd_status_t continue_request(worker_t *worker, request_t *request) {
    gradd_status_t (*rest)(worker_t *, request_t *) = request->rest;
    request->rest = NULL;
    return rest(worker, request);
}

/* Of a request that is done. */
static void end_wait(worker_t *worker, const request_t *request) {
    session_objects_t *objects = request->session->objects;
    worker_end_wait(worker, objects);
    objects->heard_us = request->ended_us;
}

static bool handle_request(worker_t *worker, request_t *request) {
    session_objects_t *objects = NULL;
    request->entered_us = command_now_us();
    worker->device->refused_bytes = 0;
    gradd_status_t st = find_objects(worker, request->session, &objects);
    atomic_store(&request->session->counts.running, true);
    if (objects) {
        objects->subject = NULL;
        objects->running = NULL;
        objects->running_backward = false;
        objects->running_plan = 0;
    }
    crash_blame(NULL, false);
    if (st == GRADD_OK)
        st = request->rest ? continue_request(worker, request)
                           : begin_request(worker, request, objects);
    else
        wire_reply_begin(&request->reply, request->q);
    objects = request->session->objects; /* gone with a session that was to end */
    if (st == GRADD_OK && request->rest) {
        if (!request->job.word) crash_blame(NULL, false); /* another runs before it goes on */
        count(objects);
        request->ran_us += command_now_us() - request->entered_us;
        atomic_store(&request->session->counts.running, false);
        return false;
    }
    crash_blame(NULL, false);
    if (objects && objects->running) note_end(worker, objects, st);
    if (st == GRADD_E_DEVICE) end_without_device(request);
    if (st != GRADD_OK) {
        atomic_fetch_add(&worker->n_failed, 1);
        if (objects) add_source(objects, gradd_failure());
        record_error(&request->session->record, session_now_ms(), request->command->name, st);
        /* The client gets the sentence; the log shows it only when the fault is ours. */
        log_event(st == GRADD_E_INTERNAL ? LOG_ERROR : LOG_DEBUG, "request_failed",
                  "session=%u verb=%s code=%s what=\"%s\" where=%s", request->session->number,
                  request->command->name, gradd_status_name(st), gradd_error_message(),
                  gradd_error_where());
    }
    command_reply(request, st);
    end_turn(request, request->status);
    if (request->session->objects) count(request->session->objects);
    request->ended_us = command_now_us();
    if (request->session->objects) end_wait(worker, request);
    request->ran_us += request->ended_us - request->entered_us;
    if (objects && objects->running_plan && !request->status)
        record_ran(&request->session->record, objects->running_plan, objects->running_backward,
                   request->ran_us);
    atomic_store(&request->session->counts.running, false);
    return true;
}

/* A request from a client without a session: nothing of it is kept. */
static void handle_guest(worker_t *worker, request_t *request) {
    wire_reply_begin(&request->reply, request->q);
    command_reply(request, request->command->handle(worker, request));
}

/* Its memory last: runs use it. False: a step of it is not finished. */
static bool end_session(worker_t *worker, session_t *session) {
    if (session->objects && !update_finish(session->objects)) return false;
    objects_end(worker, session);
    gradd_lease_end(session->lease);
    return true;
}

bool worker_handle(worker_t *worker, request_t *request) {
    if (request->command && request->session) return handle_request(worker, request);
    if (!request->command) return end_session(worker, request->session);
    handle_guest(worker, request);
    return true;
}
