/* Verb graph.put: models by content.
 *
 * A graph's id is SHA-256 of its ONNX bytes and alias groups, so two clients with the same model
 * share one import and one compiled plan per set of shapes. Engine thread.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/device/device.h"
#include "server/verbs/maker.h"

#define MAX_ALIAS_GROUPS 4096
#define MAX_SOURCE_BYTES (4u << 20)
#define MAX_ONNX_BYTES   (1LL << 31)

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

/* Frame 2: the source of each of these nodes. */
static const wire_field_t source_keys[] = {
    {.name = "nodes", .kind = WIRE_LIST, .item = WIRE_TEXT},
    {.name = "sources", .kind = WIRE_LIST, .item = WIRE_TEXT},
    {0},
};

/* Keeps the optional source table: the frame and its decoded form move into the graph. */
static gradd_status_t take_source(request_t *request, struct session_graph_s *graph) {
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
    if (st != GRADD_OK) return gradd_wrap(st, "graph.put: frame 2");
    if ((st = wire_check_table(&doc.root, "graph.put", "frame 2", source_keys)) != GRADD_OK) {
        wire_doc_finish(&doc);
        return st;
    }
    /* Texts of the doc point into the frame's memory, and a small frame keeps it inline: decode
     * again after the move. */
    wire_doc_finish(&doc);
    wire_doc_finish(&graph->source);
    zmq_msg_move(&graph->source_frame, frame);
    return wire_decode_any(zmq_msg_data(&graph->source_frame), zmq_msg_size(&graph->source_frame),
                           WIRE_MAX_ITEMS, &graph->source);
}

/* Key and value: a list of sizes, of which a dynamic one is its name, or nil if it has none; nil if
 * the rank is not declared. */
static void put_sizes(wire_out_t *out, const gradd_model_t *model, int i, bool is_input) {
    gradd_type_t type =
        is_input ? gradd_model_input_type(model, i) : gradd_model_output_type(model, i);
    wire_put_text(out, "sizes");
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

static void put_inputs(wire_out_t *out, const gradd_model_t *model) {
    int n = gradd_model_n_inputs(model);
    wire_key(out, "in");
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++) {
        wire_put_map(out, 3);
        wire_put_text(out, "name");
        wire_put_text(out, gradd_model_input_name(model, i));
        wire_put_text(out, "dtype");
        wire_put_u64(out, (uint64_t)gradd_model_input_type(model, i).dtype);
        put_sizes(out, model, i, true);
    }
}

static void put_outputs(wire_out_t *out, const gradd_model_t *model) {
    int n = gradd_model_n_outputs(model);
    wire_key(out, "out");
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++) {
        size_t bytes;
        const uint8_t *bits = gradd_model_reach(model, i, &bytes);
        while (bytes && !bits[bytes - 1])
            bytes--;
        wire_put_map(out, 4);
        wire_put_text(out, "name");
        wire_put_text(out, gradd_model_output_name(model, i));
        wire_put_text(out, "dtype");
        wire_put_u64(out, (uint64_t)gradd_model_output_type(model, i).dtype);
        put_sizes(out, model, i, false);
        wire_put_text(out, "reach");
        wire_put_bytes(out, bits, bytes);
    }
}

/* Describes the model by what its operator rows say, so that no client needs rows of its own. */
static void put_model(wire_out_t *out, const model_entry_t *entry) {
    const gradd_model_t *model = entry->model;
    int n = gradd_model_n_unsupported(model);
    wire_key(out, "graph");
    wire_put_bytes(out, entry->id, sizeof entry->id);
    put_inputs(out, model);
    put_outputs(out, model);
    wire_key(out, "unsupported");
    wire_put_list(out, (uint32_t)n);
    for (int i = 0; i < n; i++) {
        const char *node, *op, *domain;
        gradd_model_unsupported(model, i, &node, &op, &domain);
        wire_put_map(out, 3);
        wire_put_text(out, "node");
        wire_put_text(out, node);
        wire_put_text(out, "op");
        wire_put_text(out, op);
        wire_put_text(out, "domain");
        wire_put_text(out, domain);
    }
    wire_key(out, "random");
    wire_put_u64(out, gradd_model_is_random(model));
    wire_key(out, "half");
    wire_put_u64(out, (uint64_t)gradd_model_half(model));
}

/* An entry to fill: the graph that was used least recently makes room. Its plans stay; a client
 * that wants another one is told STALE and puts the graph again. */
static struct session_graph_s *free_entry(worker_t *worker, session_objects_t *objects) {
    if (objects->n_graphs < SESSION_MAX_GRAPHS) return &objects->graphs[objects->n_graphs++];
    struct session_graph_s *oldest = &objects->graphs[0];
    for (int i = 1; i < objects->n_graphs; i++)
        if (objects->graphs[i].used < oldest->used) oldest = &objects->graphs[i];
    objects_finish_graph(worker, oldest);
    return oldest;
}

/* The bytes of a graph that a request brings. */
typedef struct put_s {
    const void *onnx;
    size_t bytes;
    void *copy; /* Owned: what `onnx` points to, or NULL */
    uint8_t id[GRADD_SHA256_BYTES];
} put_t;

/* Adds the model, which is taken over, to the session's graphs unless it is there. */
static gradd_status_t end_put(worker_t *worker, request_t *request, const uint8_t *id,
                              model_entry_t *model) {
    session_objects_t *objects = request->session->objects;
    struct session_graph_s *graph = objects_find_graph(objects, id);
    if (graph) {
        cache_release_model(worker, model);
    } else {
        graph = free_entry(worker, objects);
        *graph = (struct session_graph_s){.model = model};
        zmq_msg_init(&graph->source_frame);
    }
    graph->used = ++worker->clock;
    objects->subject = graph->model;
    GRADD_TRY(take_source(request, graph));
    put_model(&request->reply, graph->model);
    return GRADD_OK;
}

static gradd_status_t graph_put(worker_t *worker, request_t *request);

/* It is loaded. Others may have waited for it, too. */
static gradd_status_t finish_put(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    making_t *making = objects->making;
    model_entry_t *model = cache_find_model(worker, making->key);
    gradd_model_t *loaded = making->loaded;
    gradd_status_t st = model ? GRADD_OK : making_status(making);
    if (st == GRADD_OK && !model && !loaded)
        return graph_put(worker, request); /* another has had it, and it is gone */
    if (st == GRADD_OK && !model) {
        making->loaded = NULL;
        st = cache_add_model(worker, making->key, loaded, &model);
    }
    if (st == GRADD_OK)
        st = end_put(worker, request, making->key, model);
    else
        gradd_wrap(st, "graph.put");
    gradd_failure_t failure = *gradd_failure();
    objects->making = NULL;
    maker_release(worker->maker, making);
    gradd_failure_restore(&failure);
    return st;
}

/* Where there is a thread for it, the request waits until that has loaded the model. */
static gradd_status_t begin_load(worker_t *worker, request_t *request, put_t *put) {
    session_objects_t *objects = request->session->objects;
    void *onnx = put->copy;
    put->copy = NULL;
    objects->making = maker_find(worker->maker, put->id);
    if (objects->making) {
        free(onnx);
    } else {
        if (!onnx && (onnx = malloc(put->bytes + 1))) memcpy(onnx, put->onnx, put->bytes);
        if (!onnx) return GRADD_FAIL(NOMEM, "graph.put: no memory for %zu bytes", put->bytes);
        GRADD_TRY(maker_load(worker->maker, put->id, onnx, put->bytes, &objects->making));
    }
    request_go_on(request, &objects->making->done, 1, finish_put);
    return GRADD_OK;
}

static gradd_status_t find_or_load(worker_t *worker, request_t *request, put_t *put) {
    model_entry_t *model = cache_find_model(worker, put->id);
    if (!model) {
        gradd_status_t st = worker->maker
                                ? worker_admit_model(worker, 2 * (int64_t)put->bytes)
                                : cache_load_model(worker, put->id, put->onnx, put->bytes, &model);
        if (st == GRADD_OK && worker->maker) return begin_load(worker, request, put);
        if (st != GRADD_OK) return gradd_wrap(st, "graph.put");
    }
    return end_put(worker, request, put->id, model);
}

static gradd_status_t graph_put(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    put_t put = {0};
    maker_release(worker->maker, objects->making);
    objects->making = NULL;
    GRADD_TRY(onnx_bytes(worker, request, &put.onnx, &put.bytes, &put.copy));
    gradd_status_t st = graph_id(put.onnx, put.bytes, request->args[PUT_ALIAS], put.id);
    if (st == GRADD_OK) st = find_or_load(worker, request, &put);
    free(put.copy);
    return st;
}

GRADD_COMMANDS(graph, {
                          .name = "graph.put",
                          .handle = graph_put,
                          .needs_session = true,
                          .max_payloads = 2,
                          .fields = {[PUT_ALIAS] = {.name = "alias",
                                                    .kind = WIRE_LIST,
                                                    .item = WIRE_LIST,
                                                    .optional = true,
                                                    .max = MAX_ALIAS_GROUPS},
                                     [PUT_ONNX] = {.name = "onnx",
                                                   .kind = WIRE_MAP,
                                                   .keys = wire_tensor_keys,
                                                   .optional = true}}
});
