/* Verbs graph.put, graph.plan, plan.drop: models by content, plans by the client's id.
 *
 * A graph's id is SHA-256 of its ONNX bytes and alias groups, so two clients with the same model
 * share one import and one compiled plan per set of shapes. Engine thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/exec/device.h"
#include "server/worker.h"

#define MAX_ALIAS_GROUPS 4096
#define MAX_SOURCE_BYTES (4u << 20)
#define MAX_ONNX_BYTES   (1LL << 31)
#define MAX_LIST         65536

/* ---- graph.put ---- */

enum { PUT_ALIAS, PUT_ONNX };

/* The ONNX bytes: a payload frame, or a private copy of a tensor in a segment. A segment may change
 * under our eyes, so what is hashed, scanned and parsed must be the same copy. */
static gradd_status_t onnx_bytes(const worker_t *worker, request_t *request, const void **out_data,
                                 size_t *out_bytes, void **out_copy) {
    const msgpack_object *tensor = request->args[PUT_ONNX];
    *out_copy = NULL;
    if (!tensor && request->n_payloads == 0)
        return GRADD_FAIL(MODEL, "graph.put: no ONNX bytes: neither frame 1 nor field 'onnx'");
    if (!tensor) {
        *out_data = zmq_msg_data(&request->payloads[0]);
        *out_bytes = zmq_msg_size(&request->payloads[0]);
        return GRADD_OK;
    }
    gradd_tensor_t t;
    void *address;
    gradd_handle_table_t *table = gradd_lease_table(request->session->lease);
    gradd_status_t st = wire_tensor(tensor, &t);
    if (st != GRADD_OK) return gradd_wrap(st, "graph.put: onnx");
    int64_t bytes = gradd_type_bytes(&t.type);
    if (t.type.dtype != GRADD_DT_U8 || bytes > MAX_ONNX_BYTES)
        return GRADD_FAIL(MODEL, "graph.put: onnx: expected u8 of at most %lld bytes",
                          MAX_ONNX_BYTES);
    if ((st = gradd_handle_retain(table, t.segment)) != GRADD_OK)
        return gradd_wrap(st, "graph.put: onnx");
    st = gradd_handle_tensor(table, &t, &address);
    if (st == GRADD_OK && !(*out_copy = malloc((size_t)bytes + 1)))
        st = GRADD_FAIL(NOMEM, "no memory for %lld bytes of ONNX", (long long)bytes);
    if (st == GRADD_OK) st = device_read(worker->device, *out_copy, address, (size_t)bytes);
    gradd_handle_release(table, t.segment);
    if (st != GRADD_OK) return gradd_wrap(st, "graph.put: onnx");
    *out_data = *out_copy;
    *out_bytes = (size_t)bytes;
    return GRADD_OK;
}

/* SHA-256 of the bytes, then of each alias group: its names, each followed by a zero byte, and one
 * byte 1. Names hold no zero byte, so no two lists give the same stream. */
static gradd_status_t graph_id(const void *onnx, size_t bytes, const msgpack_object *alias,
                               uint8_t out_id[GRADD_SHA256_BYTES]) {
    gradd_sha256_t hash;
    gradd_sha256_init(&hash);
    gradd_sha256_update(&hash, onnx, bytes);
    for (int g = 0; g < wire_count(alias); g++) {
        const msgpack_object *group = wire_at(alias, g);
        for (int i = 0; i < wire_count(group); i++) {
            const msgpack_object *name = wire_at(group, i);
            if (name->type != MSGPACK_OBJECT_STR ||
                memchr(name->via.str.ptr, 0, name->via.str.size))
                return GRADD_FAIL(TENSOR, "graph.put: field 'alias[%d][%d]': expected a name", g,
                                  i);
            gradd_sha256_update(&hash, name->via.str.ptr, name->via.str.size);
            gradd_sha256_update(&hash, "", 1);
        }
        gradd_sha256_update(&hash, "\1", 1);
    }
    gradd_sha256_final(&hash, out_id);
    return GRADD_OK;
}

static gradd_status_t check_source(const wire_doc_t *doc) {
    const msgpack_object *table = &doc->root;
    bool good = table->type == MSGPACK_OBJECT_ARRAY;
    for (uint32_t i = 0; good && i < table->via.array.size; i++) {
        const msgpack_object *pair = &table->via.array.ptr[i];
        good = pair->type == MSGPACK_OBJECT_ARRAY && pair->via.array.size == 2 &&
               wire_at(pair, 0)->type == MSGPACK_OBJECT_STR &&
               wire_at(pair, 1)->type == MSGPACK_OBJECT_STR;
    }
    return good ? GRADD_OK
                : GRADD_FAIL(TENSOR, "graph.put: frame 2: expected [[node, source]...] of texts");
}

/* Keeps the optional source table: the frame and its decoded form move into the graph. */
static gradd_status_t take_source(request_t *request, struct work_graph_s *graph) {
    bool in_frame = !request->args[PUT_ONNX];
    int index = in_frame ? 1 : 0;
    if (request->n_payloads <= index) return GRADD_OK;
    zmq_msg_t *frame = &request->payloads[index];
    wire_doc_t doc;
    if (zmq_msg_size(frame) > MAX_SOURCE_BYTES)
        return GRADD_FAIL(LIMIT, "graph.put: source table of %zu bytes, more than %u",
                          zmq_msg_size(frame), MAX_SOURCE_BYTES);
    gradd_status_t st =
        wire_decode_any(zmq_msg_data(frame), zmq_msg_size(frame), WIRE_MAX_ITEMS, &doc);
    if (st == GRADD_OK && (st = check_source(&doc)) != GRADD_OK) wire_doc_finish(&doc);
    if (st != GRADD_OK) return gradd_wrap(st, "graph.put: frame 2");
    /* Texts of the doc point into the frame's memory, and a small frame keeps it inline: decode
     * again after the move. */
    wire_doc_finish(&doc);
    wire_doc_finish(&graph->source);
    zmq_msg_move(&graph->source_frame, frame);
    return wire_decode_any(zmq_msg_data(&graph->source_frame), zmq_msg_size(&graph->source_frame),
                           WIRE_MAX_ITEMS, &graph->source);
}

static void put_model(wire_out_t *out, const model_entry_t *entry) {
    const gradd_model_t *model = entry->model;
    wire_key(out, "graph");
    wire_put_bytes(out, entry->id, sizeof entry->id);
    wire_key(out, "in");
    wire_put_list(out, (uint32_t)gradd_model_n_inputs(model));
    for (int i = 0; i < gradd_model_n_inputs(model); i++) {
        gradd_type_t type = gradd_model_input_type(model, i);
        wire_put_list(out, 3);
        wire_put_text(out, gradd_model_input_name(model, i));
        wire_put_u64(out, (uint64_t)type.dtype);
        if (type.rank < 0)
            wire_put_nil(out);
        else
            wire_put_list(out, (uint32_t)type.rank);
        for (int d = 0; d < type.rank; d++)
            wire_put_i64(out, type.dims[d]);
    }
    wire_key(out, "out");
    wire_put_list(out, (uint32_t)gradd_model_n_outputs(model));
    for (int i = 0; i < gradd_model_n_outputs(model); i++)
        wire_put_text(out, gradd_model_output_name(model, i));
    wire_key(out, "unsupported");
    wire_put_list(out, (uint32_t)gradd_model_n_unsupported(model));
    for (int i = 0; i < gradd_model_n_unsupported(model); i++) {
        const char *node, *op, *domain;
        gradd_model_unsupported(model, i, &node, &op, &domain);
        wire_put_list(out, 3);
        wire_put_text(out, node);
        wire_put_text(out, op);
        wire_put_text(out, domain);
    }
}

/* [dtype, [size, name or nil...] or nil] */
static void put_declared(wire_out_t *out, const gradd_model_t *model, int i, bool is_input) {
    gradd_type_t type =
        is_input ? gradd_model_input_type(model, i) : gradd_model_output_type(model, i);
    wire_put_list(out, 2);
    wire_put_u64(out, (uint64_t)type.dtype);
    if (type.rank < 0)
        wire_put_nil(out);
    else
        wire_put_list(out, (uint32_t)type.rank);
    for (int d = 0; d < type.rank; d++) {
        const char *name = is_input ? gradd_model_input_symbol(model, i, d)
                                    : gradd_model_output_symbol(model, i, d);
        if (type.dims[d] >= 0)
            wire_put_i64(out, type.dims[d]);
        else if (name[0])
            wire_put_text(out, name);
        else
            wire_put_nil(out);
    }
}

/* What the graph is: the rows know, and nobody else has to. */
static void put_facts(wire_out_t *out, const gradd_model_t *model) {
    int n_in = gradd_model_n_inputs(model), n_out = gradd_model_n_outputs(model);
    wire_key(out, "random");
    wire_put_u64(out, gradd_model_is_random(model));
    wire_key(out, "half");
    wire_put_u64(out, gradd_model_is_half(model));
    wire_key(out, "reach");
    wire_put_list(out, (uint32_t)n_out);
    for (int j = 0; j < n_out; j++) {
        size_t bytes;
        const uint8_t *bits = gradd_model_reach(model, j, &bytes);
        while (bytes && !bits[bytes - 1])
            bytes--;
        wire_put_bytes(out, bits, bytes);
    }
    wire_key(out, "types");
    wire_put_list(out, (uint32_t)(n_in + n_out));
    for (int i = 0; i < n_in + n_out; i++)
        put_declared(out, model, i < n_in ? i : i - n_in, i < n_in);
}

static struct work_graph_s *find_graph(work_t *work, const void *id) {
    for (int i = 0; i < work->n_graphs; i++)
        if (memcmp(work->graphs[i].model->id, id, GRADD_SHA256_BYTES) == 0) return &work->graphs[i];
    return NULL;
}

/* An entry to fill: the graph that was used least recently makes room. Its plans stay; a client
 * that wants another one is told STALE and puts the graph again. */
static struct work_graph_s *free_entry(worker_t *worker, work_t *work) {
    if (work->n_graphs < WORK_MAX_GRAPHS) return &work->graphs[work->n_graphs++];
    struct work_graph_s *oldest = &work->graphs[0];
    for (int i = 1; i < work->n_graphs; i++)
        if (work->graphs[i].used < oldest->used) oldest = &work->graphs[i];
    work_finish_graph(worker, oldest);
    return oldest;
}

static gradd_status_t add_graph(worker_t *worker, work_t *work, const uint8_t *id, const void *onnx,
                                size_t bytes, struct work_graph_s **out_graph) {
    struct work_graph_s *graph = find_graph(work, id);
    if (!graph) {
        model_entry_t *model = cache_find_model(worker, id);
        if (!model) {
            gradd_status_t st = cache_load_model(worker, id, onnx, bytes, &model);
            if (st != GRADD_OK) return gradd_wrap(st, "graph.put");
        }
        graph = free_entry(worker, work);
        *graph = (struct work_graph_s){.model = model};
        zmq_msg_init(&graph->source_frame);
    }
    graph->used = ++worker->clock;
    work->subject = graph->model;
    *out_graph = graph;
    return GRADD_OK;
}

static gradd_status_t graph_put(worker_t *worker, request_t *request) {
    const void *onnx = NULL;
    size_t bytes = 0;
    void *copy = NULL;
    uint8_t id[GRADD_SHA256_BYTES];
    struct work_graph_s *graph = NULL;
    GRADD_TRY(onnx_bytes(worker, request, &onnx, &bytes, &copy));
    gradd_status_t st = graph_id(onnx, bytes, request->args[PUT_ALIAS], id);
    if (st == GRADD_OK) st = add_graph(worker, request->session->work, id, onnx, bytes, &graph);
    free(copy);
    GRADD_TRY(st);
    GRADD_TRY(take_source(request, graph));
    put_model(&request->reply, graph->model);
    put_facts(&request->reply, graph->model->model);
    return GRADD_OK;
}

/* ---- graph.plan ---- */

enum {
    PLAN_GRAPH,
    PLAN_ID,
    PLAN_IN,
    PLAN_BOUND,
    PLAN_GRAD,
    PLAN_OUT,
    PLAN_GMASK,
    PLAN_PLAIN,
    PLAN_DEVICE
};

typedef const char *(*name_of_t)(const gradd_model_t *model, int i);

typedef struct named_s {
    const char *name;
    int position;
} named_t;

static int by_name(const void *a, const void *b) {
    const named_t *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : x->position - y->position;
}

/* The names, sorted: a list may hold as many as the model has, and each is looked up. */
static gradd_status_t sort_names(const gradd_model_t *model, name_of_t name_of, int n,
                                 named_t **out_names) {
    named_t *names = calloc((size_t)n + 1, sizeof *names);
    if (!names) return GRADD_FAIL(NOMEM, "no memory for a list");
    for (int k = 0; k < n; k++)
        names[k] = (named_t){name_of(model, k), k};
    qsort(names, (size_t)n, sizeof *names, by_name);
    *out_names = names;
    return GRADD_OK;
}

/* Position of the first of that name, or -1. */
static int find_name(const named_t *names, int n, const msgpack_object_str *text) {
    int low = 0, high = n;
    while (low < high) {
        int middle = low + (high - low) / 2;
        const char *name = names[middle].name;
        int order = strncmp(name, text->ptr, text->size);
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool same = low < n && strlen(names[low].name) == text->size &&
                memcmp(names[low].name, text->ptr, text->size) == 0;
    return same ? names[low].position : -1;
}

/* A list of positions or names of the model's inputs or outputs, each at most once. */
static gradd_status_t positions(const gradd_model_t *model, const msgpack_object *list,
                                const char *field, name_of_t name_of, int limit,
                                int32_t *out_positions) {
    uint8_t *seen = calloc((size_t)limit + 1, 1);
    named_t *names = NULL;
    gradd_status_t st = seen ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for a list");
    for (int i = 0; i < wire_count(list) && st == GRADD_OK; i++) {
        const msgpack_object *o = wire_at(list, i);
        bool named = o->type == MSGPACK_OBJECT_STR;
        int found = -1;
        if (named && !names && (st = sort_names(model, name_of, limit, &names)) != GRADD_OK) break;
        if (!named && wire_u64(o) < (uint64_t)limit) found = (int)wire_u64(o);
        if (named) found = find_name(names, limit, &o->via.str);
        if (found < 0 && named)
            st = GRADD_FAIL(TENSOR, "graph.plan: field '%s[%d]': the graph has no '%.*s'", field, i,
                            o->via.str.size < 200 ? (int)o->via.str.size : 200, o->via.str.ptr);
        else if (found < 0)
            st = GRADD_FAIL(TENSOR, "graph.plan: field '%s[%d]': position %llu, expected below %d",
                            field, i, (unsigned long long)wire_u64(o), limit);
        else if (seen[found]++)
            st = GRADD_FAIL(TENSOR, "graph.plan: field '%s[%d]': position %d comes twice", field, i,
                            found);
        else
            out_positions[i] = found;
    }
    free(names);
    free(seen);
    return st;
}

/* What the message asks for; the arrays live in one block, freed by the caller. */
typedef struct plan_ask_s {
    gradd_type_t *in;
    int32_t *bound, *rest, *grads, *out, *gmask;
    int n_in, n_bound, n_rest, n_grads, n_out, n_gmask;
} plan_ask_t;

static void ask_finish(plan_ask_t *ask) {
    free(ask->in);
    free(ask->bound);
    free(ask->rest);
    free(ask->grads);
    free(ask->out);
    free(ask->gmask);
}

static gradd_status_t ask_types(const gradd_model_t *model, const msgpack_object *list,
                                gradd_type_t *out_types) {
    for (int i = 0; i < wire_count(list); i++) {
        gradd_status_t st = wire_type(wire_at(list, i), &out_types[i]);
        if (st != GRADD_OK)
            return gradd_wrap(st, "graph.plan: input '%s'", gradd_model_input_name(model, i));
    }
    return GRADD_OK;
}

static gradd_status_t ask_fill(plan_ask_t *ask, const gradd_model_t *model,
                               const msgpack_object *const *args) {
    int n_in = gradd_model_n_inputs(model), n_out = gradd_model_n_outputs(model);
    *ask = (plan_ask_t){.n_in = n_in,
                        .n_bound = wire_count(args[PLAN_BOUND]),
                        .n_grads = wire_count(args[PLAN_GRAD]),
                        .n_out = wire_count(args[PLAN_OUT]),
                        .n_gmask = wire_count(args[PLAN_GMASK])};
    if (wire_count(args[PLAN_IN]) != n_in)
        return GRADD_FAIL(TENSOR, "graph.plan: field 'in': the graph has %d inputs, got %d types",
                          n_in, wire_count(args[PLAN_IN]));
    ask->in = calloc((size_t)n_in + 1, sizeof *ask->in);
    ask->bound = calloc((size_t)ask->n_bound + 1, sizeof *ask->bound);
    ask->rest = calloc((size_t)n_in + 1, sizeof *ask->rest);
    ask->grads = calloc((size_t)ask->n_grads + 1, sizeof *ask->grads);
    ask->out = calloc((size_t)ask->n_out + 1, sizeof *ask->out);
    ask->gmask = calloc((size_t)ask->n_gmask + 1, sizeof *ask->gmask);
    if (!ask->in || !ask->bound || !ask->rest || !ask->grads || !ask->out || !ask->gmask)
        return GRADD_FAIL(NOMEM, "no memory for a plan");
    GRADD_TRY(ask_types(model, args[PLAN_IN], ask->in));
    GRADD_TRY(
        positions(model, args[PLAN_BOUND], "bound", gradd_model_input_name, n_in, ask->bound));
    GRADD_TRY(positions(model, args[PLAN_GRAD], "grad", gradd_model_input_name, n_in, ask->grads));
    GRADD_TRY(positions(model, args[PLAN_OUT], "out", gradd_model_output_name, n_out, ask->out));
    for (int k = 0; k < ask->n_bound; k++)
        ask->rest[ask->bound[k]] = -1; /* a mark, overwritten below after it was read */
    for (int i = 0; i < n_in; i++)
        if (ask->rest[i] == 0) ask->rest[ask->n_rest++] = i;
    return positions(model, args[PLAN_GMASK], "gmask", NULL, ask->n_out, ask->gmask);
}

/* Room for one more plan: the one without runs that was used least recently goes. */
static gradd_status_t make_room(worker_t *worker, work_t *work) {
    work_plan_t *oldest = NULL;
    if (work->plans.n < WORK_MAX_PLANS) return GRADD_OK;
    for (int i = 0; i < work->plans.n; i++) {
        work_plan_t *plan = work->plans.items[i].object;
        if (plan->n_runs == 0 && (!oldest || plan->used < oldest->used)) oldest = plan;
    }
    if (!oldest)
        return GRADD_FAIL(LIMIT, "graph.plan: all %d plans of this session have unreleased runs",
                          work->plans.n);
    work_drop_plan(worker, work, oldest);
    return GRADD_OK;
}

static gradd_status_t add_plan(worker_t *worker, work_t *work, uint64_t id, plan_ask_t *ask,
                               compiled_t *compiled) {
    work_plan_t *old = id_list_get(&work->plans, id);
    if (old) work_drop_plan(worker, work, old);
    GRADD_TRY(make_room(worker, work));
    work_plan_t *plan = calloc(1, sizeof *plan);
    if (!plan) return GRADD_FAIL(NOMEM, "no memory for a plan");
    *plan = (work_plan_t){.id = id,
                          .serial = ++worker->serial,
                          .used = ++worker->clock,
                          .compiled = compiled,
                          .n_in = ask->n_in,
                          .n_bound = ask->n_bound,
                          .n_rest = ask->n_rest,
                          .n_out = ask->n_out,
                          .n_grads = ask->n_grads};
    gradd_status_t st = id_list_put(&work->plans, id, plan);
    if (st != GRADD_OK) {
        free(plan);
        return st;
    }
    plan->in = ask->in;
    plan->bound = ask->bound;
    plan->rest = ask->rest;
    plan->grads = ask->grads;
    plan->out = ask->out;
    ask->in = NULL;
    ask->bound = ask->rest = ask->grads = ask->out = NULL;
    return GRADD_OK;
}

static void put_plan(wire_out_t *out, const compiled_t *compiled, bool hit) {
    const gradd_plan_info_t *info = gradd_plan_info(compiled->plan);
    wire_key(out, "out");
    wire_put_list(out, (uint32_t)info->n_outputs);
    for (int i = 0; i < info->n_outputs; i++)
        wire_put_type(out, &info->outputs[i]);
    wire_key(out, "has");
    wire_put_list(out, (uint32_t)info->n_grads);
    for (int i = 0; i < info->n_grads; i++)
        wire_put_u64(out, info->has_grad[i] ? 1 : 0);
    wire_key(out, "peak");
    wire_put_i64(out, info->arena_bytes);
    wire_key(out, "saved");
    wire_put_i64(out, info->saved_bytes);
    wire_key(out, "constant");
    wire_put_i64(out, info->constant_bytes);
    wire_key(out, "ms");
    wire_put_f64(out, info->compile_ms);
    wire_key(out, "nodes");
    wire_put_list(out, 2);
    wire_put_i64(out, info->n_nodes_forward);
    wire_put_i64(out, info->n_nodes_backward);
    wire_key(out, "cached");
    wire_put_u64(out, hit ? 1 : 0);
}

/* Finds or compiles the plan that was asked for. */
static gradd_status_t compile(worker_t *worker, request_t *request, const plan_ask_t *ask,
                              model_entry_t *model, compiled_t **out, bool *out_hit) {
    const msgpack_object *name = request->args[PLAN_DEVICE];
    gradd_plan_options_t options = {.inputs = ask->in,
                                    .n_inputs = ask->n_in,
                                    .grads = ask->grads,
                                    .n_grads = ask->n_grads,
                                    .outputs = ask->out,
                                    .n_outputs = ask->n_out,
                                    .grad_outputs = ask->gmask,
                                    .n_grad_outputs = ask->n_gmask};
    if (worker->plain || wire_flag(request->args[PLAN_PLAIN])) options.flags |= GRADD_PLAN_PLAIN;
    gradd_status_t st = worker_find_device(worker, name ? name->via.str.ptr : NULL,
                                           name ? name->via.str.size : 0, &options.device);
    if (st != GRADD_OK) return gradd_wrap(st, "graph.plan: field 'device'");
    return cache_compile(worker, model, &options, out, out_hit);
}

static gradd_status_t graph_plan(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    const msgpack_object *id = request->args[PLAN_GRAPH];
    uint64_t plan_id = wire_u64(request->args[PLAN_ID]);
    struct work_graph_s *graph = NULL;
    if (id->via.bin.size == GRADD_SHA256_BYTES) graph = find_graph(work, id->via.bin.ptr);
    if (!graph)
        return GRADD_FAIL(STALE, "graph.plan: this session has not put that graph (graph.put)");
    graph->used = ++worker->clock;
    work->subject = graph->model;
    work_plan_t *old = id_list_get(&work->plans, plan_id);
    if (old && old->n_runs > 0)
        return GRADD_FAIL(STALE, "graph.plan: plan %llu exists and has %d unreleased runs",
                          (unsigned long long)plan_id, old->n_runs);
    plan_ask_t ask;
    compiled_t *compiled = NULL;
    bool hit = false;
    gradd_status_t st = ask_fill(&ask, graph->model->model, request->args);
    if (st == GRADD_OK) st = compile(worker, request, &ask, graph->model, &compiled, &hit);
    if (st == GRADD_OK && (st = add_plan(worker, work, plan_id, &ask, compiled)) != GRADD_OK)
        cache_release_compiled(worker, compiled);
    if (st == GRADD_OK) put_plan(&request->reply, compiled, hit);
    ask_finish(&ask);
    return st;
}

static gradd_status_t plan_drop(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    uint64_t id = wire_u64(request->args[0]);
    work_plan_t *plan = id_list_get(&work->plans, id);
    if (plan && plan->n_runs > 0)
        return GRADD_FAIL(STALE, "plan.drop: plan %llu has %d unreleased runs",
                          (unsigned long long)id, plan->n_runs);
    if (plan) work_drop_plan(worker, work, plan);
    return GRADD_OK;
}

GRADD_COMMANDS(
    graph,
    {
        .name = "graph.put",
        .run = graph_put,
        .needs_session = true,
        .max_payloads = 2,
        .fields = {[PUT_ALIAS] = {.name = "alias",
                                  .kind = WIRE_LIST,
                                  .item = WIRE_LIST,
                                  .optional = true,
                                  .max = MAX_ALIAS_GROUPS},
                   [PUT_ONNX] = {.name = "onnx", .kind = WIRE_TENSOR, .optional = true}}
},
    {.name = "graph.plan",
     .run = graph_plan,
     .needs_session = true,
     .fields =
         {[PLAN_GRAPH] = {.name = "graph", .kind = WIRE_BYTES},
          [PLAN_ID] = {.name = "plan", .kind = WIRE_U64},
          [PLAN_IN] = {.name = "in", .kind = WIRE_LIST, .item = WIRE_TYPE, .max = MAX_LIST},
          [PLAN_BOUND] = {.name = "bound",
                          .kind = WIRE_LIST,
                          .item = WIRE_INDEX,
                          .optional = true,
                          .max = MAX_LIST},
          [PLAN_GRAD] = {.name = "grad",
                         .kind = WIRE_LIST,
                         .item = WIRE_INDEX,
                         .optional = true,
                         .max = MAX_LIST},
          [PLAN_OUT] = {.name = "out", .kind = WIRE_LIST, .item = WIRE_INDEX, .max = MAX_LIST},
          [PLAN_GMASK] = {.name = "gmask",
                          .kind = WIRE_LIST,
                          .item = WIRE_U64,
                          .optional = true,
                          .max = MAX_LIST},
          [PLAN_PLAIN] = {.name = "plain", .kind = WIRE_FLAG, .optional = true},
          [PLAN_DEVICE] = {.name = "device", .kind = WIRE_TEXT, .optional = true}}},
    {.name = "plan.drop",
     .run = plan_drop,
     .needs_session = true,
     .fields = {{.name = "plan", .kind = WIRE_U64}}});
