/* If, Loop and Scan when a plan is made: the nodes that their bodies give, in place of the node.
 *
 * Sizes of a call decide: the condition of an If, and how often a Loop runs, have to be known by
 * then; a Scan has as many steps as its operands along the scanned axes. What depends on data is
 * refused. The nodes of a step are nodes like any others, so gradients come of themselves. Draws of
 * random numbers are refused: each step would draw the same ones.
 *
 * Source: https://onnx.ai/onnx/operators/onnx__Loop.html
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/graph.h"

enum { MAX_STEPS = 65536 };

static gradd_status_t add_body(graph_t *g, const model_body_t *body, gradd_val_t *map) {
    for (int i = 0; i < body->n_nodes; i++) {
        const model_node_t *n = &body->nodes[i];
        if (n->op && n->op->flags & GRADD_OP_RANDOM)
            return GRADD_FAIL(UNSUPPORTED, "'%.120s' (%s) draws random numbers in a body", n->name,
                              n->op->name);
        GRADD_TRY(graph_add_node(g, n, map));
    }
    return compile_time_spend(1);
}

/* A number that is known when a plan is made. */
static gradd_status_t known_number(const graph_t *g, gradd_val_t v, gradd_dtype_t dtype,
                                   const char *what, int64_t *out) {
    if (graph_is_sequence(v)) return GRADD_FAIL(GRAPH, "%s is a sequence", what);
    const graph_value_t *value = g->values[v];
    if (value->type.dtype != dtype || gradd_type_count(&value->type) != 1)
        return GRADD_FAIL(GRAPH, "%s is not one number of %s", what, gradd_dtype_name(dtype));
    if (!value->data)
        return GRADD_FAIL(UNSUPPORTED, "%s depends on data; sizes of a call have to decide it",
                          what);
    *out =
        dtype == GRADD_DT_I64 ? *(const int64_t *)value->data : *(const uint8_t *)value->data != 0;
    return GRADD_OK;
}

static gradd_status_t add_if(graph_t *g, const model_node_t *n, gradd_val_t *map) {
    int64_t taken = 0;
    if (n->in[0] < 0) return GRADD_FAIL(GRAPH, "the condition has no name");
    GRADD_TRY(known_number(g, map[n->in[0]], GRADD_DT_BOOL, "the condition", &taken));
    const model_body_t *body = &n->bodies[taken ? 0 : 1];
    GRADD_TRY(add_body(g, body, map));
    for (int j = 0; j < n->n_out; j++)
        if (n->out[j] >= 0) map[n->out[j]] = map[body->outputs[j]];
    return GRADD_OK;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* What the steps of a Loop or a Scan give, to be stacked: `each` values for every step. */
typedef struct steps_s {
    gradd_val_t *v; /* Owned */
    int each, n_steps, cap;
} steps_t;

static gradd_status_t push(steps_t *s, const int32_t *ids, const gradd_val_t *map) {
    if (s->n_steps == s->cap) {
        const int cap = s->cap ? 2 * s->cap : 16;
        gradd_val_t *v = realloc(s->v, sizeof *v * ((size_t)cap * (size_t)s->each + 1));
        if (!v) return GRADD_FAIL(NOMEM, "no memory for %d steps", cap);
        s->v = v, s->cap = cap;
    }
    for (int k = 0; k < s->each; k++)
        s->v[(size_t)s->n_steps * (size_t)s->each + (size_t)k] = map[ids[k]];
    s->n_steps++;
    return GRADD_OK;
}

/* Values k of all steps, along a new axis. */
static gradd_status_t stacked(graph_t *g, const steps_t *s, int k, int64_t axis, bool backwards,
                              gradd_val_t *out) {
    gradd_builder_t *b = &g->builder;
    gradd_val_t *parts = calloc((size_t)s->n_steps + 1, sizeof *parts);
    gradd_status_t status = parts ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for the steps");
    int at = 0;
    for (int i = 0; i < s->n_steps && !status; i++) {
        const int step = backwards ? s->n_steps - 1 - i : i;
        const gradd_val_t v = s->v[(size_t)step * (size_t)s->each + (size_t)k];
        int64_t dims[GRADD_MAX_RANK + 1];
        if (graph_is_sequence(v)) {
            status = GRADD_FAIL(GRAPH, "result %d of a step is a sequence", k);
            break;
        }
        const gradd_type_t t = *graph_type(g, v);
        if (t.rank == GRADD_MAX_RANK)
            status = GRADD_FAIL(LIMIT, "results of rank %d are stacked", t.rank);
        else
            status = gradd_axis(axis, t.rank + 1, false, &at);
        for (int a = 0; a <= t.rank && !status; a++)
            dims[a] = a == at ? 1 : t.dims[a - (a > at)];
        if (!status) parts[i] = gradd_reshape_to(b, v, dims, t.rank + 1);
        if (!status) status = b->status;
    }
    if (!status) *out = s->n_steps > 1 ? gradd_concat(b, parts, s->n_steps, at) : parts[0];
    free(parts);
    return status ? status : b->status;
}

/* The results of a node: the last states, then stacks. */
static gradd_status_t finish(graph_t *g, const model_node_t *n, const gradd_val_t *states,
                             int n_states, const steps_t *s, gradd_val_t *map) {
    const gradd_attr_t *axes = gradd_attr_find(n->attrs, "scan_output_axes");
    const gradd_attr_t *ways = gradd_attr_find(n->attrs, "scan_output_directions");
    for (int j = 0; j < n->n_out; j++) {
        if (n->out[j] < 0) continue;
        const int k = j - n_states;
        if (k >= 0 && !s->n_steps)
            return GRADD_FAIL(UNSUPPORTED, "output %d has no step, so its sizes are unknown", j);
        if (k < 0)
            map[n->out[j]] = states[j];
        else
            GRADD_TRY(
                stacked(g, s, k, axes ? axes->ints[k] : 0, ways && ways->ints[k], &map[n->out[j]]));
    }
    return GRADD_OK;
}

static void keep_states(const int32_t *ids, int n, const gradd_val_t *map, gradd_val_t *states) {
    for (int i = 0; i < n; i++)
        states[i] = map[ids[i]];
}

/* Steps of a Loop until its number or its condition ends them. */
static gradd_status_t run_loop(graph_t *g, const model_node_t *n, gradd_val_t *map,
                               gradd_val_t *states, steps_t *s) {
    const model_body_t *body = &n->bodies[0];
    const int n_states = n->n_given - 2;
    int64_t most = INT64_MAX, goes_on = 1;
    const gradd_type_t number = {.dtype = GRADD_DT_I64}, answer = {.dtype = GRADD_DT_BOOL};
    const uint8_t yes = 1;
    if (n->in[0] >= 0)
        GRADD_TRY(known_number(g, map[n->in[0]], GRADD_DT_I64, "the number of steps", &most));
    if (n->in[1] >= 0)
        GRADD_TRY(known_number(g, map[n->in[1]], GRADD_DT_BOOL, "the condition", &goes_on));
    for (int64_t i = 0; i < most && goes_on; i++) {
        if (i == MAX_STEPS) return GRADD_FAIL(LIMIT, "more than %d steps", MAX_STEPS);
        GRADD_TRY(graph_constant(g, &number, &i, &map[body->inputs[0]]));
        GRADD_TRY(graph_constant(g, &answer, &yes, &map[body->inputs[1]]));
        for (int k = 0; k < n_states; k++)
            map[body->inputs[2 + k]] = states[k];
        GRADD_TRY(add_body(g, body, map));
        keep_states(body->outputs + 1, n_states, map, states);
        GRADD_TRY(push(s, body->outputs + 1 + n_states, map));
        GRADD_TRY(known_number(g, map[body->outputs[0]], GRADD_DT_BOOL, "the condition of a step",
                               &goes_on));
    }
    return GRADD_OK;
}

/* Operand k of those that are scanned: the axis and whether it goes from the end. */
static gradd_status_t scanned_axis(const graph_t *g, const model_node_t *n, int k, gradd_val_t v,
                                   int *out_axis, bool *out_backwards) {
    const gradd_attr_t *axes = gradd_attr_find(n->attrs, "scan_input_axes");
    const gradd_attr_t *ways = gradd_attr_find(n->attrs, "scan_input_directions");
    *out_backwards = ways && ways->ints[k];
    if (!graph_type(g, v)->rank) return GRADD_FAIL(GRAPH, "scan input %d is a number", k);
    return gradd_axis(axes ? axes->ints[k] : 0, graph_type(g, v)->rank, false, out_axis);
}

static gradd_status_t run_scan(graph_t *g, const model_node_t *n, gradd_val_t *map,
                               gradd_val_t *states, steps_t *s) {
    const model_body_t *body = &n->bodies[0];
    gradd_builder_t *b = &g->builder;
    const int n_scanned = (int)gradd_attr_int(n->attrs, "num_scan_inputs", 1);
    const int n_states = n->n_given - n_scanned;
    int64_t steps = -1;
    for (int64_t i = 0; steps < 0 || i < steps; i++) {
        for (int k = 0; k < n_states; k++)
            map[body->inputs[k]] = states[k];
        for (int k = 0; k < n_scanned; k++) {
            const gradd_val_t v = map[n->in[n_states + k]];
            if (graph_is_sequence(v)) return GRADD_FAIL(GRAPH, "scan input %d is a sequence", k);
            const gradd_type_t t = *graph_type(g, v);
            bool backwards;
            int axis;
            int64_t dims[GRADD_MAX_RANK];
            GRADD_TRY(scanned_axis(g, n, k, v, &axis, &backwards));
            if (steps >= 0 && steps != t.dims[axis])
                return GRADD_FAIL(GRAPH, "scan input %d has %lld steps, others %lld", k,
                                  (long long)t.dims[axis], (long long)steps);
            steps = t.dims[axis];
            if (steps > MAX_STEPS) return GRADD_FAIL(LIMIT, "more than %d steps", MAX_STEPS);
            if (!steps) continue;
            const int64_t at = backwards ? steps - 1 - i : i;
            for (int a = 0; a < t.rank - 1; a++)
                dims[a] = t.dims[a + (a >= axis)];
            map[body->inputs[n_states + k]] =
                gradd_reshape_to(b, gradd_slice(b, v, axis, at, at + 1, 1), dims, t.rank - 1);
            if (b->status) return b->status;
        }
        if (!steps) break;
        GRADD_TRY(add_body(g, body, map));
        keep_states(body->outputs, n_states, map, states);
        GRADD_TRY(push(s, body->outputs + n_states, map));
    }
    return GRADD_OK;
}

static gradd_status_t add_steps(graph_t *g, const model_node_t *n, gradd_val_t *map) {
    const bool loop = !strcmp(n->op_type, "Loop");
    const int first = loop ? 2 : 0;
    const int scanned = loop ? 0 : (int)gradd_attr_int(n->attrs, "num_scan_inputs", 1);
    const int n_states = n->n_given - first - scanned;
    gradd_val_t *states = calloc((size_t)n_states + 1, sizeof *states);
    steps_t s = {.each = n->bodies[0].n_outputs - n_states - loop};
    if (!states) return GRADD_FAIL(NOMEM, "no memory for %d states", n_states);
    keep_states(n->in + first, n_states, map, states);
    gradd_status_t status =
        loop ? run_loop(g, n, map, states, &s) : run_scan(g, n, map, states, &s);
    if (!status) status = finish(g, n, states, n_states, &s, map);
    free(s.v);
    free(states);
    return status;
}

gradd_status_t graph_add_region(graph_t *g, const model_node_t *n, gradd_val_t *map) {
    return strcmp(n->op_type, "If") ? add_steps(g, n, map) : add_if(g, n, map);
}
