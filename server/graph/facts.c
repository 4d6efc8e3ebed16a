/* Facts about a model that the operator rows give before any shape is known. See model.h.
 *
 * A gradient walks from outputs to inputs: 64 outputs at a time, one bit each, in one sweep over
 * the nodes in reverse. Where only shapes would tell, the answer is yes.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/contract/registry.h"
#include "server/graph/arena.h"
#include "server/graph/model.h"

#define REACH_MAX_BYTES ((size_t)2 << 20) /* it travels in one reply */
#define REACH_MAX_STEPS ((int64_t)1 << 28)
#define PER_SWEEP       64

/* The element type that a node asks for by an attribute of this name, or NONE. */
static int64_t asked_type(const model_node_t *n, const char *name) {
    const gradd_attr_t *attr = gradd_attr_find(n->attrs, name);
    return attr && attr->kind == GRADD_ATTR_INT ? attr->i : GRADD_DT_NONE;
}

/* Keeps the coarser. */
static void note(gradd_dtype_t *half, int64_t dtype) {
    if (dtype == GRADD_DT_BF16 || (dtype == GRADD_DT_F16 && !*half)) *half = (gradd_dtype_t)dtype;
}

static void note_nodes(gradd_dtype_t *half, const model_node_t *nodes, int n_nodes) {
    for (int k = 0; k < n_nodes; k++) {
        const gradd_attrs_t attrs = nodes[k].attrs;
        for (int i = 0; i < attrs.n; i++)
            if (attrs.v[i].kind == GRADD_ATTR_TENSOR) note(half, attrs.v[i].tensor.type.dtype);
        note(half, asked_type(&nodes[k], "to"));
        note(half, asked_type(&nodes[k], "dtype"));
        for (int b = 0; b < nodes[k].n_bodies; b++)
            note_nodes(half, nodes[k].bodies[b].nodes, nodes[k].bodies[b].n_nodes);
    }
}

static gradd_dtype_t find_half(const model_t *m) {
    gradd_dtype_t half = GRADD_DT_NONE;
    for (int v = 0; v < m->n_values; v++) {
        note(&half, m->values[v].dtype);
        note(&half, m->values[v].known.type.dtype);
    }
    note_nodes(&half, m->nodes, m->n_nodes);
    for (int j = 0; j < m->n_outputs; j++)
        note(&half, m->declared[j].dtype);
    return half;
}

/* Whether a gradient of the node's results goes on to some of its inputs. */
static bool passes(const model_node_t *n) {
    if (!n->op) return true;
    if (n->op->flags & GRADD_OP_NO_GRAD && !(n->op->flags & GRADD_OP_FLAT)) return false;
    int64_t to = asked_type(n, "to"); /* a conversion to integers is the end */
    return to == GRADD_DT_NONE || gradd_dtype_is_float((gradd_dtype_t)to);
}

static bool is_count(const gradd_op_t *op, int output) {
    return output < 32 && op->counts >> output & 1;
}

static void sweep(const model_t *m, uint64_t *marks) {
    for (int k = m->n_nodes - 1; k >= 0; k--) {
        const model_node_t *n = &m->nodes[k];
        uint64_t bits = 0;
        for (int j = 0; j < n->n_out; j++)
            if (n->out[j] >= 0 && !(n->op && is_count(n->op, j))) bits |= marks[n->out[j]];
        if (!bits || !passes(n)) continue;
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] >= 0 && (!n->op || gradd_op_carries(n->op, i))) marks[n->in[i]] |= bits;
    }
}

/* Rows [first, first + n) of the table. */
static void reach_of(const model_t *m, int first, int n, uint64_t *marks, uint8_t *reach) {
    memset(marks, 0, sizeof marks[0] * (size_t)m->n_values);
    for (int j = 0; j < n; j++)
        marks[m->outputs[first + j]] |= UINT64_C(1) << j;
    sweep(m, marks);
    for (int i = 0; i < m->n_inputs; i++) {
        gradd_dtype_t dtype = m->values[m->inputs[i]].dtype;
        uint64_t bits = marks[m->inputs[i]];
        if (dtype != GRADD_DT_NONE && !gradd_dtype_is_float(dtype)) continue;
        for (int j = 0; j < n; j++)
            if (bits >> j & 1)
                reach[(size_t)(first + j) * m->reach_bytes + (size_t)i / 8] |=
                    (uint8_t)(1 << i % 8);
    }
}

static int64_t count_edges(const model_t *m) {
    int64_t edges = m->n_values + m->n_inputs;
    for (int k = 0; k < m->n_nodes; k++)
        edges += m->nodes[k].n_in + m->nodes[k].n_out;
    return edges;
}

static gradd_status_t find_reach(model_t *m) {
    int64_t sweeps = ((int64_t)m->n_outputs + PER_SWEEP - 1) / PER_SWEEP;
    m->reach_bytes = ((size_t)m->n_inputs + 7) / 8;
    if (m->reach_bytes * (size_t)m->n_outputs > REACH_MAX_BYTES ||
        count_edges(m) * sweeps > REACH_MAX_STEPS)
        return GRADD_FAIL(LIMIT,
                          "%d graph outputs of %d inputs and %d nodes are too many to say which "
                          "output depends on which input",
                          m->n_outputs, m->n_inputs, m->n_nodes);
    uint8_t *reach = arena_array(m->arena, (size_t)m->n_outputs, m->reach_bytes);
    uint64_t *marks = calloc((size_t)m->n_values + 1, sizeof marks[0]);
    for (int first = 0; reach && marks && first < m->n_outputs; first += PER_SWEEP) {
        int rest = m->n_outputs - first;
        reach_of(m, first, rest < PER_SWEEP ? rest : PER_SWEEP, marks, reach);
    }
    m->reach = reach;
    bool failed = !reach || !marks;
    free(marks);
    return failed ? GRADD_FAIL(NOMEM, "no memory to look at the graph") : GRADD_OK;
}

gradd_status_t model_find_facts(model_t *m) {
    for (int k = 0; k < m->n_nodes && !m->random; k++)
        m->random = m->nodes[k].op && m->nodes[k].op->flags & GRADD_OP_RANDOM;
    m->half = find_half(m);
    return find_reach(m);
}
