/* If, Loop and Scan: their subgraphs as bodies of a node.
 *
 * The values of a body get numbers behind those around it, so that one table has all. A body reads
 * what is defined in front of its node; two bodies may use the same names. What a plan makes of
 * them is in region.c. Bodies are nested as deep as model_prescan lets messages be.
 */
#include <string.h>

#include "server/graph/graph.h"
#include "server/graph/import.h"

static bool is_onnx(const Onnx__NodeProto *node) {
    const char *domain = import_text(node->domain);
    return !domain[0] || !strcmp(domain, "ai.onnx");
}

bool import_is_sequence(const Onnx__NodeProto *node) {
    return is_onnx(node) && graph_knows_sequence(import_text(node->op_type));
}

bool import_is_region(const Onnx__NodeProto *node) {
    const char *type = import_text(node->op_type);
    if (!is_onnx(node)) return false;
    return !strcmp(type, "If") || !strcmp(type, "Loop") || !strcmp(type, "Scan");
}

static gradd_status_t body_inputs(import_t *m, model_body_t *body) {
    const Onnx__GraphProto *g = m->graph;
    body->inputs = arena_array(m->model->arena, g->n_input, sizeof *body->inputs);
    if (!body->inputs) return GRADD_E_NOMEM;
    for (size_t i = 0; i < g->n_input; i++) {
        const Onnx__TypeProto *type = g->input[i]->type;
        if (type && type->optional_type)
            return GRADD_FAIL(UNSUPPORTED, "input %zu '%.*s' is an optional", i,
                              IMPORT_TEXT(g->input[i]->name));
        body->inputs[body->n_inputs++] = m->defs[i].id; /* the first definitions */
    }
    return GRADD_OK;
}

static gradd_status_t import_body(import_t *outer, const Onnx__GraphProto *g, int32_t at,
                                  model_body_t *body) {
    import_t m = *outer;
    m.graph = g;
    m.outer = outer;
    m.at = at;
    m.n_defs = 0;
    if (g->n_sparse_initializer)
        return GRADD_FAIL(UNSUPPORTED, "it has %zu sparse initializers", g->n_sparse_initializer);
    GRADD_TRY(import_define_values(&m));
    GRADD_TRY(import_create_values(&m));
    GRADD_TRY(body_inputs(&m, body));
    GRADD_TRY(import_initializers(&m));
    GRADD_TRY(import_nodes(&m, &body->nodes, &body->n_nodes));
    return import_outputs(&m, &body->outputs, &body->n_outputs);
}

/* Behind its operands a node lists values with lower numbers than `first`, which its bodies read.
 */
static gradd_status_t note_reads(import_t *m, model_node_t *node, int32_t first) {
    size_t n = (size_t)node->n_in;
    for (int pass = 0; pass < 2; pass++) {
        int32_t *in = pass ? arena_array(m->model->arena, n, sizeof *in) : NULL;
        if (pass && !in) return GRADD_E_NOMEM;
        n = (size_t)node->n_in;
        if (pass && n) memcpy(in, node->in, n * sizeof *in);
        for (int k = 0; k < node->n_bodies; k++)
            for (int i = 0; i < node->bodies[k].n_nodes; i++) {
                const model_node_t *inner = &node->bodies[k].nodes[i];
                for (int j = 0; j < inner->n_in; j++) {
                    if (inner->in[j] < 0 || inner->in[j] >= first) continue;
                    if (pass) in[n] = inner->in[j];
                    n++;
                }
            }
        if (n > INT32_MAX / 2) return GRADD_FAIL(LIMIT, "the bodies read %zu values", n);
        if (pass) node->in = in, node->n_in = (int)n;
    }
    return GRADD_OK;
}

/* ---- what belongs to what: without a row there are no other checks
 * -------------------------------------------------------------------- */

static gradd_status_t expect(const char *what, int got, int wanted) {
    if (got == wanted) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "the body has %d %s, expected %d", got, what, wanted);
}

/* A list of a Scan: one number for each of `n`. */
static gradd_status_t check_list(const model_node_t *node, const char *name, int n) {
    const gradd_attr_t *list = gradd_attr_find(node->attrs, name);
    if (!list) return GRADD_OK;
    if (strcmp(node->op_type, "Scan"))
        return GRADD_FAIL(UNSUPPORTED, "%s takes no attribute '%s'", node->op_type, name);
    if (list->kind == GRADD_ATTR_INTS && list->n == (size_t)n) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "attribute '%s' is not a list of %d integers", name, n);
}

static gradd_status_t check_lists(const model_node_t *node, int n_scanned, int n_stacked) {
    GRADD_TRY(check_list(node, "scan_input_axes", n_scanned));
    GRADD_TRY(check_list(node, "scan_input_directions", n_scanned));
    GRADD_TRY(check_list(node, "scan_output_axes", n_stacked));
    return check_list(node, "scan_output_directions", n_stacked);
}

static gradd_status_t check_shape(const model_node_t *node) {
    const model_body_t *body = &node->bodies[0];
    int extra = 0, states = 0; /* outputs that are no results; values that go from step to step */
    if (!strcmp(node->op_type, "If")) {
        if (node->n_given != 1) return GRADD_FAIL(GRAPH, "%d inputs, expected 1", node->n_given);
        for (int k = 0; k < 2; k++) {
            GRADD_TRY(expect("inputs", node->bodies[k].n_inputs, 0));
            if (node->bodies[k].n_outputs < node->n_out)
                GRADD_TRY(expect("outputs", node->bodies[k].n_outputs, node->n_out));
        }
        return GRADD_OK;
    }
    if (!strcmp(node->op_type, "Loop")) {
        if (node->n_given < 2)
            return GRADD_FAIL(GRAPH, "%d inputs, expected 2 or more", node->n_given);
        extra = 1, states = node->n_given - 2;
    } else {
        const int64_t scanned = gradd_attr_int(node->attrs, "num_scan_inputs", 0);
        if (scanned < 1 || scanned > node->n_given)
            return GRADD_FAIL(GRAPH, "num_scan_inputs is %lld of %d inputs", (long long)scanned,
                              node->n_given);
        states = node->n_given - (int)scanned;
    }
    GRADD_TRY(expect("inputs", body->n_inputs, node->n_given));
    if (body->n_outputs < states + extra || body->n_outputs - extra < node->n_out)
        return GRADD_FAIL(GRAPH, "the body has %d outputs for %d states and %d results",
                          body->n_outputs, states, node->n_out);
    for (int i = extra ? 2 : 0; i < node->n_given; i++)
        if (node->in[i] < 0) return GRADD_FAIL(GRAPH, "input %d has no name", i);
    return check_lists(node, node->n_given - states, body->n_outputs - extra - states);
}

static const Onnx__GraphProto *graph_named(const Onnx__NodeProto *proto, const char *name) {
    for (size_t i = 0; i < proto->n_attribute; i++) {
        const Onnx__AttributeProto *a = proto->attribute[i];
        if (a->name && !strcmp(a->name, name)) return a->g;
    }
    return NULL;
}

gradd_status_t import_bodies(import_t *m, const Onnx__NodeProto *proto, model_node_t *node) {
    static const char *const branches[] = {"then_branch", "else_branch"}, *const body[] = {"body"};
    const bool branch = !strcmp(node->op_type, "If");
    const int32_t first = m->model->n_values;
    const int n = branch ? 2 : 1;
    node->bodies = arena_array(m->model->arena, (size_t)n, sizeof *node->bodies);
    if (!node->bodies) return GRADD_E_NOMEM;
    for (; node->n_bodies < n; node->n_bodies++) {
        const char *name = (branch ? branches : body)[node->n_bodies];
        const Onnx__GraphProto *g = graph_named(proto, name);
        if (!g) return GRADD_FAIL(GRAPH, "attribute '%s' is missing", name);
        gradd_status_t status = import_body(m, g, node->index, &node->bodies[node->n_bodies]);
        if (status) return gradd_wrap(status, "%s", name);
    }
    GRADD_TRY(check_shape(node));
    return note_reads(m, node, first);
}
