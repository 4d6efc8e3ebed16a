/* Nodes of a graph: whether they behave otherwise in training, and what their subgraphs read.
 *
 * An If, a Loop or a Scan has subgraphs in attributes, whose nodes read values from around them. A
 * node that behaves otherwise in training is refused there: it would stay in that mode. */
#include "train/files/nodes.h"

#include <string.h>

enum { MAX_DEPTH = 64 }; /* as models are nested: model_limits_t */

/* What a walk through subgraphs needs. */
typedef struct walk_s {
    node_visit_t visit;
    void *context;
    int depth;
} walk_t;

gradd_status_t node_find_kind(proto_span_t node, node_kind_t *out_kind) {
    proto_span_t op, domain;
    GRADD_TRY(proto_find(node, PROTO_NODE_OP, &op));
    GRADD_TRY(proto_find(node, PROTO_NODE_DOMAIN, &domain));
    const bool onnx = domain.n == 0 || proto_is(domain, "ai.onnx");
    const bool norm = (onnx && proto_is(op, "BatchNormalization")) ||
                      (proto_is(domain, "com.microsoft") && proto_is(op, "BatchNormInternal"));
    const bool dropout = onnx && proto_is(op, "Dropout");
    *out_kind = norm ? NODE_NORM : dropout ? NODE_DROPOUT : NODE_ORDINARY;
    return GRADD_OK;
}

static gradd_status_t visit_bodies(walk_t walk, proto_span_t node);

static gradd_status_t visit_node(walk_t walk, proto_span_t node) {
    node_kind_t kind;
    proto_span_t op, rest = node;
    proto_field_t field;
    bool more = true;
    GRADD_TRY(node_find_kind(node, &kind));
    GRADD_TRY(proto_find(node, PROTO_NODE_OP, &op));
    if (kind != NODE_ORDINARY)
        return GRADD_FAIL(UNSUPPORTED,
                          "a node %.*s stands in a subgraph, where its mode is not changed",
                          (int)op.n, (const char *)op.at);
    while (more) {
        GRADD_TRY(proto_next(&rest, &field, &more));
        if (more && field.id == PROTO_NODE_INPUT) GRADD_TRY(walk.visit(walk.context, field.bytes));
    }
    return visit_bodies(walk, node);
}

static gradd_status_t visit_graph(walk_t walk, proto_span_t graph) {
    proto_field_t field;
    bool more = true;
    if (++walk.depth > MAX_DEPTH)
        return GRADD_FAIL(LIMIT, "subgraphs are nested deeper than the limit of %d", MAX_DEPTH);
    while (more) {
        GRADD_TRY(proto_next(&graph, &field, &more));
        if (more && field.id == PROTO_GRAPH_NODE) GRADD_TRY(visit_node(walk, field.bytes));
    }
    return GRADD_OK;
}

static gradd_status_t visit_bodies(walk_t walk, proto_span_t node) {
    proto_field_t field;
    proto_span_t graph;
    bool more = true;
    while (more) {
        GRADD_TRY(proto_next(&node, &field, &more));
        if (!more || field.id != PROTO_NODE_ATTRIBUTE) continue;
        GRADD_TRY(proto_find(field.bytes, PROTO_ATTRIBUTE_GRAPHS, &graph));
        if (graph.at) return GRADD_FAIL(UNSUPPORTED, "a node has a list of subgraphs");
        GRADD_TRY(proto_find(field.bytes, PROTO_ATTRIBUTE_GRAPH, &graph));
        if (graph.at) GRADD_TRY(visit_graph(walk, graph));
    }
    return GRADD_OK;
}

gradd_status_t node_visit_bodies(proto_span_t node, node_visit_t visit, void *context) {
    return visit_bodies((walk_t){visit, context, 0}, node);
}
