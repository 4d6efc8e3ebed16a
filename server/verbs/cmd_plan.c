/* Verbs graph.plan, plan.drop: plans of a session, by the client's id. Engine thread. */
#include <malloc.h>
#include <stdlib.h>

#include "server/verbs/maker.h"
#include "server/verbs/plan_ask.h"

/* Room for one more plan: the one without runs that was used least recently goes. */
static gradd_status_t make_room(worker_t *worker, session_objects_t *objects) {
    session_plan_t *oldest = NULL;
    if (objects->plans.n < SESSION_MAX_PLANS) return GRADD_OK;
    for (int i = 0; i < objects->plans.n; i++) {
        session_plan_t *plan = objects->plans.items[i].object;
        if (plan->n_runs == 0 && (!oldest || plan->used < oldest->used)) oldest = plan;
    }
    if (!oldest)
        return GRADD_FAIL(LIMIT, "graph.plan: all %d plans of this session have unreleased runs",
                          objects->plans.n);
    objects_drop_plan(worker, objects, oldest);
    return GRADD_OK;
}

/* Parts the gradients into those that the forward forms and the others. */
static gradd_status_t split_grads(session_plan_t *plan, const gradd_plan_info_t *info) {
    for (int early = 0; early < 2; early++) {
        split_t *split = early ? &plan->early : &plan->late;
        split->at = calloc((size_t)plan->n_grads + 1, sizeof split->at[0]);
        split->inputs = calloc((size_t)plan->n_grads + 1, sizeof split->inputs[0]);
        if (!split->at || !split->inputs) return GRADD_FAIL(NOMEM, "no memory for a plan");
        for (int i = 0; i < plan->n_grads; i++) {
            if (info->early[i] != (bool)early) continue;
            split->at[split->n] = i;
            split->inputs[split->n++] = plan->grads[i];
        }
    }
    return GRADD_OK;
}

static gradd_status_t add_plan(worker_t *worker, session_objects_t *objects, uint64_t id,
                               plan_ask_t *ask, compiled_t *compiled) {
    session_plan_t *old = id_list_get(&objects->plans, id);
    if (old) objects_drop_plan(worker, objects, old);
    GRADD_TRY(make_room(worker, objects));
    session_plan_t *plan = calloc(1, sizeof *plan);
    if (!plan) return GRADD_FAIL(NOMEM, "no memory for a plan");
    *plan = (session_plan_t){.id = id,
                             .serial = ++worker->serial,
                             .used = ++worker->clock,
                             .compiled = compiled,
                             .n_in = ask->n_in + ask->n_lists,
                             .n_bound = ask->n_bound,
                             .n_rest = ask->n_rest,
                             .n_out = ask->n_out,
                             .n_grads = ask->n_grads,
                             .n_gmask = ask->n_gmask};
    gradd_status_t st = id_list_put(&objects->plans, id, plan);
    if (st != GRADD_OK) {
        free(plan);
        return st;
    }
    plan->constant_bytes = gradd_plan_info(compiled->plan)->constant_bytes;
    atomic_fetch_add(&objects->session->counts.constant_bytes, plan->constant_bytes);
    plan->in = ask->in;
    plan->bound = ask->bound;
    plan->rest = ask->rest;
    plan->grads = ask->grads;
    plan->out = ask->out;
    plan->gmask = ask->gmask;
    ask->in = NULL;
    ask->bound = ask->rest = ask->grads = ask->out = ask->gmask = NULL;
    const gradd_plan_info_t *info = gradd_plan_info(compiled->plan);
    st = split_grads(plan, info);
    if (st == GRADD_OK) {
        record_plan(&objects->session->record,
                    &(plan_record_t){.id = id,
                                     .arena_bytes = info->arena_bytes,
                                     .saved_bytes = info->saved_bytes,
                                     .constant_bytes = info->constant_bytes,
                                     .compile_ms = info->compile_ms});
        return GRADD_OK;
    }
    plan->compiled = NULL; /* the caller gives it back */
    objects_drop_plan(worker, objects, plan);
    return st;
}

/* Reports the rows that the plan could leave out: see gradd_live_t. */
static void put_live(wire_out_t *out, const gradd_live_t *live) {
    if (live->label_input < 0) return;
    wire_key(out, "live");
    wire_put_map(out, 12);
    wire_put_text(out, "labels");
    wire_put_i64(out, live->label_input);
    wire_put_text(out, "mask");
    wire_put_i64(out, live->mask_input);
    wire_put_text(out, "ignore");
    wire_put_i64(out, live->ignore);
    wire_put_text(out, "shift");
    wire_put_i64(out, live->shift);
    wire_put_text(out, "batch");
    wire_put_i64(out, live->batch);
    wire_put_text(out, "positions");
    wire_put_i64(out, live->positions);
    wire_put_text(out, "label_share");
    wire_put_f64(out, live->label_share);
    wire_put_text(out, "real_share");
    wire_put_f64(out, live->real_share);
    wire_put_text(out, "source");
    wire_put_i64(out, live->source_input);
    wire_put_text(out, "source_positions");
    wire_put_i64(out, live->source_positions);
    wire_put_text(out, "source_share");
    wire_put_f64(out, live->source_share);
    wire_put_text(out, "flops");
    wire_put_f64(out, live->flops);
}

static void put_plan(wire_out_t *out, const compiled_t *compiled, bool hit) {
    const gradd_plan_info_t *info = gradd_plan_info(compiled->plan);
    wire_key(out, "out");
    wire_put_types(out, info->outputs, info->n_outputs);
    wire_key(out, "has");
    wire_put_list(out, (uint32_t)info->n_grads);
    for (int i = 0; i < info->n_grads; i++)
        wire_put_u64(out, info->has_grad[i] ? 1 : 0);
    wire_key(out, "early");
    wire_put_list(out, (uint32_t)info->n_grads);
    for (int i = 0; i < info->n_grads; i++)
        wire_put_u64(out, info->early[i] ? 1 : 0);
    wire_key(out, "final");
    wire_put_list(out, info->final ? (uint32_t)info->n_grads : 0);
    for (int i = 0; info->final && i < info->n_grads; i++)
        wire_put_i64(out, info->final[i]);
    wire_key(out, "peak");
    wire_put_i64(out, info->arena_bytes);
    wire_key(out, "saved");
    wire_put_i64(out, info->saved_bytes);
    wire_key(out, "constant");
    wire_put_i64(out, info->constant_bytes);
    wire_key(out, "recomputed");
    wire_put_i64(out, info->recomputed_bytes);
    wire_key(out, "recompute_share");
    wire_put_f64(out, info->model_us > 0 ? info->recompute_us / info->model_us : 0);
    wire_key(out, "ms");
    wire_put_f64(out, info->compile_ms);
    wire_key(out, "launches");
    wire_put_map(out, 2);
    wire_put_text(out, "forward");
    wire_put_i64(out, info->n_launches_forward);
    wire_put_text(out, "backward");
    wire_put_i64(out, info->n_launches_backward);
    put_live(out, &info->live);
    wire_key(out, "cached");
    wire_put_u64(out, hit ? 1 : 0);
}

/* What is asked for; the lists are those of `ask`. */
static gradd_status_t read_options(worker_t *worker, const request_t *request,
                                   const plan_ask_t *ask, gradd_plan_options_t *out) {
    const msgpack_object *name = request->args[PLAN_DEVICE];
    *out = (gradd_plan_options_t){.inputs = ask->in,
                                  .n_inputs = ask->n_in,
                                  .grads = ask->grads,
                                  .n_grads = ask->n_grads,
                                  .outputs = ask->out,
                                  .n_outputs = ask->n_out,
                                  .grad_outputs = ask->gmask,
                                  .n_grad_outputs = ask->n_gmask,
                                  .parameters = ask->parameters,
                                  .n_parameters = ask->n_parameters,
                                  .label_rows = ask->label_rows,
                                  .real_rows = ask->real_rows,
                                  .source_rows = ask->source_rows};
    GRADD_TRY(plan_ask_memory(request->args, out));
    if (worker->plain || wire_flag(request->args[PLAN_PLAIN])) out->flags |= GRADD_PLAN_PLAIN;
    if (wire_flag(request->args[PLAN_EARLY])) out->flags |= GRADD_PLAN_EARLY;
    if (worker->dense_loss || wire_flag(request->args[PLAN_DENSE]))
        out->flags |= GRADD_PLAN_DENSE_LOSS;
    gradd_status_t st = worker_find_device(worker, name ? name->via.str.ptr : NULL,
                                           name ? name->via.str.size : 0, &out->device);
    return gradd_wrap(st, "graph.plan: field 'device'");
}

/* Finds the plan, or begins to make it: then *out is NULL. */
static gradd_status_t find_or_begin(worker_t *worker, request_t *request, plan_ask_t *ask,
                                    compiled_t **out, bool *out_hit) {
    session_objects_t *objects = request->session->objects;
    model_entry_t *model =
        objects_find_graph(objects, request->args[PLAN_GRAPH]->via.bin.ptr)->model;
    gradd_plan_options_t options;
    uint8_t key[GRADD_SHA256_BYTES];
    GRADD_TRY(read_options(worker, request, ask, &options));
    if (!worker->maker) return cache_compile(worker, model, &options, out, out_hit);
    cache_plan_key(model, &options, key);
    GRADD_TRY(cache_find_compiled(worker, key, options.device, out));
    *out_hit = *out;
    if (*out_hit) return GRADD_OK;
    objects->making = maker_find(worker->maker, key);
    if (objects->making) return GRADD_OK;
    return maker_begin(worker->maker, model, &options, ask, &objects->making);
}

/* The plan that was on its way; NULL if another that has waited for it has had it, and it is gone.
 */
static gradd_status_t take_made(worker_t *worker, making_t *making, compiled_t **out,
                                bool *out_hit) {
    GRADD_TRY(making_status(making));
    GRADD_TRY(cache_find_compiled(worker, making->key, making->options.device, out));
    *out_hit = *out;
    if (*out_hit) return GRADD_OK;
    gradd_plan_t *plan = making->plan;
    making->plan = NULL;
    if (!plan) return GRADD_OK;
    return cache_add_compiled(worker, making->key, making->model, plan, out);
}

static gradd_status_t end_plan(worker_t *worker, request_t *request, plan_ask_t *ask,
                               compiled_t *compiled, bool hit) {
    session_objects_t *objects = request->session->objects;
    gradd_status_t st = session_check_bytes(request->session, "graph.plan: the plan",
                                            gradd_plan_info(compiled->plan)->constant_bytes);
    if (st == GRADD_OK)
        st = add_plan(worker, objects, wire_u64(request->args[PLAN_ID]), ask, compiled);
    if (st == GRADD_OK)
        put_plan(&request->reply, compiled, hit);
    else
        cache_release_compiled(worker, compiled);
    return st;
}

static gradd_status_t graph_plan(worker_t *worker, request_t *request);

/* It is there. */
static gradd_status_t finish_plan(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    making_t *making = objects->making;
    compiled_t *compiled = NULL;
    bool hit = false;
    plan_ask_t ask;
    objects->making = NULL;
    objects->subject = making->model;
    gradd_status_t st = take_made(worker, making, &compiled, &hit);
    if (st == GRADD_OK && !compiled) {
        maker_release(worker->maker, making);
        return graph_plan(worker, request);
    }
    if (st == GRADD_OK) {
        st = plan_ask_init(&ask, making->model->model, request->args);
        if (st == GRADD_OK)
            st = end_plan(worker, request, &ask, compiled, hit);
        else
            cache_release_compiled(worker, compiled);
        plan_ask_finish(&ask);
    }
    gradd_failure_t failure = *gradd_failure();
    maker_release(worker->maker, making);
    gradd_failure_restore(&failure);
    malloc_trim(0); /* what the compilation has freed lies between what it has kept */
    return st;
}

static gradd_status_t graph_plan(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    const msgpack_object *id = request->args[PLAN_GRAPH];
    uint64_t plan_id = wire_u64(request->args[PLAN_ID]);
    struct session_graph_s *graph = NULL;
    if (id->via.bin.size == GRADD_SHA256_BYTES)
        graph = objects_find_graph(objects, id->via.bin.ptr);
    if (!graph)
        return GRADD_FAIL(STALE, "graph.plan: this session has not put that graph (graph.put)");
    graph->used = ++worker->clock;
    objects->subject = graph->model;
    session_plan_t *old = id_list_get(&objects->plans, plan_id);
    if (old && old->n_runs > 0)
        return GRADD_FAIL(STALE, "graph.plan: plan %llu exists and has %d unreleased runs",
                          (unsigned long long)plan_id, old->n_runs);
    plan_ask_t ask;
    compiled_t *compiled = NULL;
    bool hit = false;
    gradd_status_t st = plan_ask_init(&ask, graph->model->model, request->args);
    if (st == GRADD_OK) st = find_or_begin(worker, request, &ask, &compiled, &hit);
    if (st == GRADD_OK && compiled) st = end_plan(worker, request, &ask, compiled, hit);
    if (st == GRADD_OK && !compiled) request_go_on(request, &objects->making->done, 1, finish_plan);
    plan_ask_finish(&ask);
    if (compiled && !hit) malloc_trim(0);
    return st;
}

static gradd_status_t plan_drop(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    uint64_t id = wire_u64(request->args[0]);
    session_plan_t *plan = id_list_get(&objects->plans, id);
    if (plan && plan->n_runs > 0)
        return GRADD_FAIL(STALE, "plan.drop: plan %llu has %d unreleased runs",
                          (unsigned long long)id, plan->n_runs);
    if (plan) objects_drop_plan(worker, objects, plan);
    return GRADD_OK;
}

GRADD_COMMANDS(
    plan,
    {
        .name = "graph.plan",
        .handle = graph_plan,
        .needs_session = true,
        .fields = {[PLAN_GRAPH] = {.name = "graph", .kind = WIRE_BYTES},
                   [PLAN_ID] = {.name = "plan", .kind = WIRE_U64},
                   [PLAN_IN] = {.name = "in", .kind = WIRE_TABLE, .keys = wire_types_keys},
                   [PLAN_BOUND] = {.name = "bound",
                                   .kind = WIRE_LIST,
                                   .item = WIRE_INDEX,
                                   .optional = true,
                                   .max = PLAN_MAX_LIST},
                   [PLAN_GRAD] = {.name = "grad",
                                  .kind = WIRE_LIST,
                                  .item = WIRE_INDEX,
                                  .optional = true,
                                  .max = PLAN_MAX_LIST},
                   [PLAN_OUT] =
                       {.name = "out", .kind = WIRE_LIST, .item = WIRE_INDEX, .max = PLAN_MAX_LIST},
                   [PLAN_GMASK] = {.name = "gmask",
                                   .kind = WIRE_LIST,
                                   .item = WIRE_U64,
                                   .optional = true,
                                   .max = PLAN_MAX_LIST},
                   [PLAN_PLAIN] = {.name = "plain", .kind = WIRE_FLAG, .optional = true},
                   [PLAN_DEVICE] = {.name = "device", .kind = WIRE_TEXT, .optional = true},
                   [PLAN_PARAMETERS] = {.name = "parameters",
                                        .kind = WIRE_LIST,
                                        .item = WIRE_INDEX,
                                        .optional = true,
                                        .max = PLAN_MAX_LIST},
                   [PLAN_EARLY] = {.name = "early", .kind = WIRE_FLAG, .optional = true},
                   [PLAN_DENSE] = {.name = "dense", .kind = WIRE_FLAG, .optional = true},
                   [PLAN_LABEL_ROWS] = {.name = "label_rows", .kind = WIRE_U64, .optional = true},
                   [PLAN_REAL_ROWS] = {.name = "real_rows", .kind = WIRE_U64, .optional = true},
                   [PLAN_SOURCE_ROWS] = {.name = "source_rows", .kind = WIRE_U64, .optional = true},
                   [PLAN_MEMORY_BUDGET] = {.name = "memory_budget",
                                           .kind = WIRE_U64,
                                           .optional = true},
                   [PLAN_RECOMPUTE] = {.name = "recompute", .kind = WIRE_TEXT, .optional = true}}
},
    {.name = "plan.drop",
     .handle = plan_drop,
     .needs_session = true,
     .fields = {{.name = "plan", .kind = WIRE_U64}}});
