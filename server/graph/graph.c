/* Values and nodes of a graph: creation, folding, common subexpressions. See graph.h. */
#include "server/graph/graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/compile_time.h"
#include "server/graph/fold.h"
#include "shm/hash.h"

#define INITIAL_BUCKETS 1024
/* Longer chains than a fair hash gives come from a model made to collide: missing an equal node is
 * harmless, walking the chain for every node is not. */
#define MAX_CHAIN 64

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to compile the graph");
}

static gradd_status_t grow(void **array, int *cap, int need, size_t entry) {
    if (need <= *cap) return GRADD_OK;
    int wider = *cap ? *cap * 2 : 256;
    void *moved = realloc(*array, entry * (size_t)wider);
    if (!moved) return no_memory();
    *array = moved;
    *cap = wider;
    return GRADD_OK;
}

gradd_status_t graph_new_value(graph_t *g, const graph_value_t *value, gradd_val_t *out) {
    GRADD_TRY(grow((void **)&g->values, &g->cap_values, g->n_values + 1, sizeof g->values[0]));
    graph_value_t *copy = arena_alloc(g->arena, sizeof *copy);
    if (!copy) return no_memory();
    *copy = *value;
    copy->root = g->n_values;
    g->values[g->n_values] = copy;
    *out = g->n_values++;
    return GRADD_OK;
}

gradd_status_t graph_constant(graph_t *g, const gradd_type_t *type, const void *data,
                              gradd_val_t *out) {
    GRADD_TRY(gradd_type_check(type));
    size_t bytes = (size_t)gradd_type_bytes(type);
    void *copy = arena_alloc_aligned(g->arena, bytes, GRADD_TENSOR_ALIGN);
    if (!copy) return no_memory();
    memcpy(copy, data, bytes);
    graph_value_t value = {.type = *type, .data = copy, .kind = VALUE_CONST, .node = -1};
    return graph_new_value(g, &value, out);
}

/* ---- common subexpressions ------------------------------------------------------------------ */

/* Equal small constants count as one operand: rules make the same scalar again and again. */
static uint64_t hash_operand(const graph_t *g, gradd_val_t id) {
    if (id == GRADD_NONE) return 77;
    const graph_value_t *v = g->values[id];
    int64_t bytes = v->data ? gradd_type_bytes(&v->type) : 0;
    if (!v->data || bytes > 64) return (uint64_t)id + 1000;
    const uint64_t hash = gradd_hash_word(GRADD_HASH_START, v->type.dtype);
    return gradd_hash_bytes(hash, v->data, (size_t)bytes);
}

static bool same_operand(const graph_t *g, gradd_val_t a, gradd_val_t b) {
    if (a == b) return true;
    if (a == GRADD_NONE || b == GRADD_NONE) return false;
    const graph_value_t *va = g->values[a], *vb = g->values[b];
    if (!va->data || !vb->data || !gradd_type_equal(&va->type, &vb->type)) return false;
    int64_t bytes = gradd_type_bytes(&va->type);
    return bytes <= 64 && !memcmp(va->data, vb->data, (size_t)bytes);
}

/* Of a text or list within a chain: its length keeps neighbours apart. */
static uint64_t hash_list(uint64_t hash, const void *bytes, size_t n) {
    return gradd_hash_word(gradd_hash_bytes(hash, bytes, n), n);
}

static uint64_t hash_attr(uint64_t hash, const gradd_attr_t *a) {
    hash = hash_list(hash, a->name, strlen(a->name));
    switch (a->kind) {
    case GRADD_ATTR_FLOAT:
        return hash_list(hash, &a->f, sizeof a->f);
    case GRADD_ATTR_STRING:
        return hash_list(hash, a->s, a->n);
    case GRADD_ATTR_INTS:
        return hash_list(hash, a->ints, a->n * sizeof a->ints[0]);
    case GRADD_ATTR_FLOATS:
        return hash_list(hash, a->floats, a->n * sizeof a->floats[0]);
    default:
        return gradd_hash_word(hash, (uint64_t)a->i);
    }
}

static uint64_t hash_emit(const graph_t *g, const graph_emit_t *e) {
    uint64_t hash = gradd_hash_word(GRADD_HASH_START, (uint64_t)(uintptr_t)e->op);
    for (int i = 0; i < e->n_in; i++)
        hash = gradd_hash_word(hash, hash_operand(g, e->in[i]));
    for (int i = 0; i < e->attrs.n; i++)
        hash = hash_attr(hash, &e->attrs.v[i]);
    return hash;
}

static bool same_attr(const gradd_attr_t *a, const gradd_attr_t *b) {
    if (strcmp(a->name, b->name) || a->kind != b->kind || a->n != b->n) return false;
    switch (a->kind) {
    case GRADD_ATTR_INT:
        return a->i == b->i;
    case GRADD_ATTR_FLOAT:
        return !memcmp(&a->f, &b->f, sizeof a->f);
    case GRADD_ATTR_STRING:
        return !memcmp(a->s, b->s, a->n);
    case GRADD_ATTR_INTS:
        return !a->n || !memcmp(a->ints, b->ints, a->n * sizeof a->ints[0]);
    case GRADD_ATTR_FLOATS:
        return !a->n || !memcmp(a->floats, b->floats, a->n * sizeof(double));
    case GRADD_ATTR_TENSOR:
        return gradd_type_equal(&a->tensor.type, &b->tensor.type) &&
               !memcmp(a->tensor.data, b->tensor.data, (size_t)gradd_type_bytes(&a->tensor.type));
    default:
        return false;
    }
}

bool graph_same_attrs(gradd_attrs_t a, gradd_attrs_t b) {
    if (a.n != b.n) return false;
    for (int i = 0; i < a.n; i++)
        if (!same_attr(&a.v[i], &b.v[i])) return false;
    return true;
}

static bool same_node(const graph_t *g, const graph_node_t *n, const graph_emit_t *e) {
    if (n->op != e->op || n->opset != e->opset || n->n_in != e->n_in || n->n_out < e->n_out ||
        n->dead || n->no_merge)
        return false;
    /* what is cheap to compute again is not kept alive from forward to backward */
    if ((n->op->flags & GRADD_OP_CHEAP) && n->backward != g->in_backward) return false;
    for (int i = 0; i < e->n_in; i++)
        if (!same_operand(g, n->in[i], e->in[i])) return false;
    for (int j = 0; j < e->n_out; j++)
        if (n->out[j] == GRADD_NONE) return false;
    return graph_same_attrs(n->attrs, e->attrs);
}

static gradd_status_t rehash(graph_t *g, int n_buckets) {
    int32_t *buckets = malloc(sizeof buckets[0] * (size_t)n_buckets);
    if (!buckets) return no_memory();
    for (int i = 0; i < n_buckets; i++)
        buckets[i] = -1;
    for (int i = 0; i < g->n_nodes; i++) {
        const graph_node_t *n = &g->nodes[i];
        graph_emit_t e = {n->op,   n->opset, n->attrs,  n->in,
                          n->n_in, n->n_out, n->random, n->no_merge};
        uint64_t slot = hash_emit(g, &e) & (uint64_t)(n_buckets - 1);
        g->chain[i] = buckets[slot];
        buckets[slot] = i;
    }
    free(g->buckets);
    g->buckets = buckets;
    g->n_buckets = n_buckets;
    return GRADD_OK;
}

gradd_status_t graph_rehash(graph_t *g) {
    return g->n_buckets ? rehash(g, g->n_buckets) : GRADD_OK;
}

static int32_t find_equal(const graph_t *g, const graph_emit_t *e, uint64_t hash) {
    if (e->op->flags & GRADD_OP_RANDOM || e->no_merge || !g->n_buckets) return -1;
    int32_t i = g->buckets[hash & (uint64_t)(g->n_buckets - 1)];
    for (int steps = 0; i >= 0 && !same_node(g, &g->nodes[i], e); steps++)
        i = steps < MAX_CHAIN ? g->chain[i] : -1;
    return i;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

gradd_status_t graph_copy_attr(graph_t *g, const gradd_attr_t *from, gradd_attr_t *to) {
    *to = *from;
    size_t bytes = 0;
    const void *source = NULL;
    if (from->kind == GRADD_ATTR_INTS) source = from->ints, bytes = from->n * sizeof(int64_t);
    if (from->kind == GRADD_ATTR_FLOATS) source = from->floats, bytes = from->n * sizeof(double);
    if (from->kind == GRADD_ATTR_STRING) source = from->s, bytes = from->n + 1;
    if (!bytes) return GRADD_OK;
    void *copy = arena_alloc(g->arena, bytes);
    if (!copy) return no_memory();
    memcpy(copy, source, bytes);
    if (from->kind == GRADD_ATTR_INTS) to->ints = copy;
    if (from->kind == GRADD_ATTR_FLOATS) to->floats = copy;
    if (from->kind == GRADD_ATTR_STRING) to->s = copy;
    return GRADD_OK;
}

static gradd_status_t fill_node(graph_t *g, const graph_emit_t *e, graph_node_t *n) {
    *n = (graph_node_t){.op = e->op,
                        .opset = e->opset,
                        .n_in = e->n_in,
                        .n_out = e->n_out,
                        .random = e->random,
                        .origin = g->origin,
                        .rows = g->rows,
                        .backward = g->in_backward,
                        .no_merge = e->no_merge};
    n->in = arena_alloc(g->arena, sizeof n->in[0] * (size_t)(e->n_in + 1));
    /* room for outputs that a gradient rule may ask for later */
    n->out = arena_alloc(g->arena, sizeof n->out[0] * (size_t)e->op->max_out);
    gradd_attr_t *attrs = arena_alloc(g->arena, sizeof attrs[0] * (size_t)(e->attrs.n + 1));
    if (!n->in || !n->out || !attrs) return no_memory();
    memcpy(n->in, e->in, sizeof n->in[0] * (size_t)e->n_in);
    for (int j = 0; j < e->op->max_out; j++)
        n->out[j] = GRADD_NONE;
    for (int i = 0; i < e->attrs.n; i++)
        GRADD_TRY(graph_copy_attr(g, &e->attrs.v[i], &attrs[i]));
    n->attrs = (gradd_attrs_t){attrs, e->attrs.n};
    return GRADD_OK;
}

static void view_inputs(const graph_t *g, const gradd_val_t *in, int n, gradd_view_t *views) {
    for (int i = 0; i < n; i++) {
        views[i] = (gradd_view_t){0};
        if (in[i] == GRADD_NONE) continue;
        views[i].type = *graph_type(g, in[i]);
        views[i].data = (void *)g->values[in[i]]->data;
    }
}

gradd_infer_t graph_describe(const graph_t *g, const graph_node_t *n, graph_operands_t *o) {
    view_inputs(g, n->in, n->n_in, o->in);
    for (int j = 0; j < n->n_out; j++)
        o->out[j] = n->out[j] == GRADD_NONE ? (gradd_type_t){0} : *graph_type(g, n->out[j]);
    return (gradd_infer_t){n->op, n->attrs, n->opset, n->n_in, n->n_out, o->in, o->out, 0, 0};
}

/* A shape that depends on data reads all of it. */
static int64_t known_bytes(const gradd_view_t *in, int n) {
    int64_t bytes = 0;
    for (int i = 0; i < n; i++)
        if (in[i].data) bytes += gradd_type_bytes(&in[i].type);
    return bytes;
}

static gradd_status_t append_node(graph_t *g, const graph_emit_t *e, const gradd_type_t *types,
                                  uint64_t hash, gradd_val_t *out) {
    int cap = g->cap_nodes;
    GRADD_TRY(grow((void **)&g->nodes, &g->cap_nodes, g->n_nodes + 1, sizeof g->nodes[0]));
    GRADD_TRY(grow((void **)&g->chain, &cap, g->n_nodes + 1, sizeof g->chain[0]));
    int32_t id = g->n_nodes;
    graph_node_t node;
    GRADD_TRY(fill_node(g, e, &node));
    for (int j = 0; j < e->n_out; j++) {
        graph_value_t value = {.type = types[j], .kind = VALUE_NODE, .node = id, .index = j};
        GRADD_TRY(graph_new_value(g, &value, &node.out[j]));
        out[j] = node.out[j];
    }
    if (e->op->flags & GRADD_OP_VIEW) g->values[out[0]]->root = g->values[e->in[0]]->root;
    g->nodes[id] = node;
    g->n_nodes++;
    if (g->n_nodes > g->n_buckets)
        return rehash(g, g->n_buckets ? g->n_buckets * 2 : INITIAL_BUCKETS);
    uint64_t slot = hash & (uint64_t)(g->n_buckets - 1);
    g->chain[id] = g->buckets[slot];
    g->buckets[slot] = id;
    return GRADD_OK;
}

/* An operator that gives back its operand when the types are equal. */
static bool is_identity(const graph_emit_t *e, const gradd_view_t *in, const gradd_type_t *out) {
    /* StopGradient and WithSlope must stay */
    if (!(e->op->flags & GRADD_OP_SAME_IS_IDENTITY) && !gradd_op_is_transparent(e->op))
        return false;
    return e->n_out == 1 && gradd_type_equal(&in[0].type, &out[0]);
}

gradd_status_t graph_emit(graph_t *g, const graph_emit_t *e, gradd_val_t *out) {
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT];
    if (e->n_in > GRADD_OP_MAX_IN || e->n_out > GRADD_OP_MAX_OUT || e->n_out > e->op->max_out)
        return GRADD_FAIL(LIMIT, "%s: %d inputs and %d outputs are too many", e->op->name, e->n_in,
                          e->n_out);
    view_inputs(g, e->in, e->n_in, in);
    GRADD_TRY(compile_time_spend(1 + known_bytes(in, e->n_in) / 1024));
    gradd_infer_t infer = {e->op, e->attrs, e->opset, e->n_in, e->n_out, in, types, 0, 0};
    if (graph_has_small(&infer)) return graph_emit_widened(g, e, out);
    if (graph_must_expand(g, &infer)) return graph_emit_expanded(g, e, &infer, out);
    if (graph_must_widen(g, &infer)) return graph_emit_widened(g, e, out);
    bool done;
    GRADD_TRY(graph_emit_wide_product(g, e, out, &done));
    if (done) return GRADD_OK;
    GRADD_TRY(gradd_op_infer(&infer));
    if (is_identity(e, in, types)) {
        out[0] = e->in[0];
        return GRADD_OK;
    }
    bool folded = false;
    GRADD_TRY(graph_fold(g, &infer, e, out, &folded));
    if (folded) return GRADD_OK;
    uint64_t hash = hash_emit(g, e);
    int32_t equal = find_equal(g, e, hash);
    if (equal >= 0) {
        memcpy(out, g->nodes[equal].out, sizeof out[0] * (size_t)e->n_out);
        return GRADD_OK;
    }
    return append_node(g, e, types, hash, out);
}

gradd_status_t graph_node_output(graph_t *g, int32_t node, int j, gradd_val_t *out) {
    graph_node_t *n = &g->nodes[node];
    if (j < n->n_out && n->out[j] != GRADD_NONE) {
        *out = n->out[j];
        return GRADD_OK;
    }
    if (j >= n->op->max_out) return GRADD_FAIL(INTERNAL, "%s has no output %d", n->op->name, j);
    gradd_view_t in[GRADD_OP_MAX_IN];
    gradd_type_t types[GRADD_OP_MAX_OUT];
    view_inputs(g, n->in, n->n_in, in);
    int n_out = j + 1 > n->n_out ? j + 1 : n->n_out;
    gradd_infer_t infer = {n->op, n->attrs, n->opset, n->n_in, n_out, in, types, 0, 0};
    GRADD_TRY(gradd_op_infer(&infer));
    graph_value_t value = {.type = types[j], .kind = VALUE_NODE, .node = node, .index = j};
    GRADD_TRY(graph_new_value(g, &value, out));
    n->n_out = n_out;
    n->out[j] = *out;
    return GRADD_OK;
}

void graph_destroy(graph_t *g) {
    if (!g) return;
    free(g->values);
    free(g->nodes);
    free(g->buckets);
    free(g->chain);
    arena_destroy(g->arena);
    free(g);
}
