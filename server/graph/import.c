/* model_load: from bytes to a validated model. See model.h for the contract.
 *
 * Order of checks: prescan (bytes), unpack (protobuf-c, into a scratch arena), header (IR version,
 * opsets, parts that gradd refuses as a whole), graph. The scratch arena dies with this call; the
 * model keeps copies only.
 */
#include "server/graph/import.h"

#include <stdlib.h>
#include <string.h>

const model_limits_t model_default_limits = {
    .max_bytes = (size_t)2 << 30,
    .max_heap_bytes = (size_t)1 << 30,
    .max_depth = 64,
    .max_nodes = 200000,
    .max_values = 1000000,
    .max_name = 1024,
};

static void *proto_alloc(void *arena, size_t bytes) {
    return arena_alloc(arena, bytes);
}

static void proto_free(void *arena, void *p) {
    (void)arena;
    (void)p;
}

/* The prescan has bounded what unpacking needs; twice that, because the arena keeps what protobuf-c
 * frees. */
static gradd_status_t unpack(import_t *m, const void *bytes, size_t n, size_t heap) {
    GRADD_TRY(arena_create(2 * heap + 65536, &m->scratch));
    ProtobufCAllocator allocator = {proto_alloc, proto_free, m->scratch};
    gradd_error_set("");
    m->proto = onnx__model_proto__unpack(&allocator, n, bytes);
    if (m->proto) return GRADD_OK;
    if (gradd_error_message()[0]) return GRADD_E_NOMEM; /* set by the arena */
    return GRADD_FAIL(MODEL, "the bytes are not an ONNX model");
}

int import_opset(const import_t *m, const char *domain) {
    if (!strcmp(domain, "ai.onnx")) domain = "";
    for (size_t i = 0; i < m->proto->n_opset_import; i++) {
        const Onnx__OperatorSetIdProto *set = m->proto->opset_import[i];
        const char *name = import_text(set->domain);
        if (!strcmp(name, "ai.onnx")) name = "";
        if (!strcmp(name, domain)) return (int)set->version;
    }
    return 0;
}

static gradd_status_t check_opset(const import_t *m, size_t i) {
    const Onnx__OperatorSetIdProto *set = m->proto->opset_import[i];
    const char *domain = import_text(set->domain);
    GRADD_TRY(import_check_name(m, "domain of an opset import", domain, false));
    int64_t min = 1, max = INT32_MAX;
    if (!domain[0] || !strcmp(domain, "ai.onnx")) {
        min = IMPORT_OPSET_MIN;
        max = IMPORT_OPSET_MAX;
        domain = "ai.onnx";
    } else if (!strcmp(domain, "com.gradd")) {
        max = IMPORT_GRADD_OPSET;
    }
    if (set->version < min || set->version > max)
        return GRADD_FAIL(UNSUPPORTED, "opset %lld of '%.*s' is not supported, %lld to %lld are",
                          (long long)set->version, IMPORT_TEXT(domain), (long long)min,
                          (long long)max);
    if (import_opset(m, domain) != set->version)
        return GRADD_FAIL(GRAPH, "domain '%.*s' is imported twice, with opsets %d and %lld",
                          IMPORT_TEXT(domain), import_opset(m, domain), (long long)set->version);
    return GRADD_OK;
}

static gradd_status_t check_header(import_t *m) {
    const Onnx__ModelProto *p = m->proto;
    if (!p->has_ir_version || p->ir_version < 3)
        return GRADD_FAIL(MODEL, "IR version %lld, expected 3 or later: not an ONNX model?",
                          (long long)p->ir_version);
    if (!p->graph) return GRADD_FAIL(MODEL, "the model holds no graph");
    if (p->n_opset_import > IMPORT_MAX_OPSETS)
        return GRADD_FAIL(LIMIT, "%zu opset imports, the limit is %d", p->n_opset_import,
                          IMPORT_MAX_OPSETS);
    for (size_t i = 0; i < p->n_opset_import; i++)
        GRADD_TRY(check_opset(m, i));
    if (p->n_functions)
        return GRADD_FAIL(UNSUPPORTED, "the model defines %zu functions; inline them before",
                          p->n_functions);
    if (p->n_training_info)
        return GRADD_FAIL(UNSUPPORTED, "the model has training_info, which gradd does not run");
    m->model->opset = import_opset(m, "");
    if (!m->model->opset) return GRADD_FAIL(GRAPH, "the model imports no opset of 'ai.onnx'");
    m->graph = p->graph;
    return GRADD_OK;
}

static gradd_status_t create_model(import_t *m) {
    arena_t *arena;
    GRADD_TRY(arena_create(m->limits.max_heap_bytes, &arena));
    m->model = arena_alloc(arena, sizeof *m->model);
    if (!m->model) {
        arena_destroy(arena);
        return GRADD_E_NOMEM;
    }
    m->model->arena = arena;
    return GRADD_OK;
}

gradd_status_t model_load(const void *bytes, size_t n, const model_limits_t *limits,
                          model_t **out_model) {
    import_t m = {.limits = limits ? *limits : model_default_limits};
    size_t heap = 0;
    gradd_status_t status = model_prescan(bytes, n, &m.limits, &heap);
    if (status) goto out;
    if ((status = unpack(&m, bytes, n, heap))) goto out;
    if ((status = create_model(&m))) goto out;
    if ((status = check_header(&m))) goto out;
    if ((status = import_graph(&m))) goto out;
    if ((status = model_find_facts(m.model))) goto out;
    *out_model = m.model;
    m.model = NULL;
out:
    model_destroy(m.model);
    arena_destroy(m.scratch);
    return status;
}

void model_destroy(model_t *model) {
    if (model) arena_destroy(model->arena);
}
