/* See match_rows.h. */
#include "server/graph/match/match_rows.h"

#include <string.h>

#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"

gradd_status_t match_find_trained(graph_t *g, bool **out) {
    bool *trained = arena_array(g->arena, (size_t)g->n_values + 1, sizeof trained[0]);
    if (!trained) return GRADD_FAIL(NOMEM, "no memory to compile the graph");
    GRADD_TRY(compile_time_spend(1 + g->n_nodes / 8));
    for (int v = 0; v < g->n_values; v++)
        trained[v] = g->values[v]->kind == VALUE_INPUT && graph_is_trained(g, v);
    for (int32_t id = 0; id < g->n_nodes; id++) {
        const graph_node_t *n = &g->nodes[id];
        bool any = false;
        for (int i = 0; i < n->n_in && !(n->op->flags & GRADD_OP_NO_GRAD); i++)
            any |= n->in[i] != GRADD_NONE && trained[n->in[i]];
        for (int j = 0; j < n->n_out; j++)
            if (n->out[j] != GRADD_NONE) trained[n->out[j]] |= any;
    }
    *out = trained;
    return GRADD_OK;
}

/* ---- recognition ----------------------------------------------------------------------------- */

typedef struct rows_walk_s {
    const graph_t *g;
    const bool *trained;
    match_rows_t *out;
    gradd_val_t at;
    bool reduced;
    int expected; /* operands of the node above that are `at` */
} rows_walk_t;

static bool add_part(rows_walk_t *w, gradd_val_t v, int how, const gradd_type_t *shape) {
    match_rows_t *out = w->out;
    double number;
    if (w->trained[v]) return false;
    const bool known = match_scalar(w->g, v, &number);
    for (int turn = 0; turn < 1 + out->squared; turn++) {
        if (known && how == MATCH_ROWS_TIMES) {
            out->factor *= number;
        } else if (known && how == MATCH_ROWS_OVER) {
            out->factor /= number;
        } else {
            if (out->n_parts == MATCH_ROWS_PARTS) return false;
            match_rows_part_t *part = &out->parts[out->n_parts++];
            *part = (match_rows_part_t){.value = v, .shape = *shape, .how = how};
        }
        if (how == MATCH_ROWS_WHERE || how == MATCH_ROWS_UNLESS) break;
    }
    return true;
}

static bool square(rows_walk_t *w, gradd_val_t of) {
    if (w->out->squared) return false;
    w->out->squared = true;
    w->at = of;
    return true;
}

static bool over_product(rows_walk_t *w, const graph_node_t *n, const gradd_type_t *shape) {
    if (n->in[0] == n->in[1]) {
        w->expected = 2;
        return square(w, n->in[0]);
    }
    const int other = w->trained[n->in[0]];
    w->at = n->in[!other];
    return add_part(w, n->in[other], MATCH_ROWS_TIMES, shape);
}

static bool over_choice(rows_walk_t *w, const graph_node_t *n, const gradd_type_t *shape) {
    double zero;
    const bool unless = match_scalar(w->g, n->in[1], &zero);
    if ((!unless && !match_scalar(w->g, n->in[2], &zero)) || zero != 0) return false;
    w->at = n->in[unless ? 2 : 1];
    return add_part(w, n->in[0], unless ? MATCH_ROWS_UNLESS : MATCH_ROWS_WHERE, shape);
}

/* Over all elements. */
static bool over_reduction(rows_walk_t *w, const graph_node_t *n, const gradd_type_t *y) {
    const int64_t count = gradd_type_count(graph_type(w->g, n->in[0]));
    if (w->reduced || gradd_type_count(y) != 1 || !count) return false;
    if (w->out->squared && count != 1) return false; /* the square of a sum */
    if (!strcmp(n->op->name, "ReduceMean")) w->out->factor /= (double)count;
    w->reduced = true;
    w->at = n->in[0];
    return true;
}

static bool step_over(rows_walk_t *w, const graph_node_t *n) {
    const char *name = n->op->name;
    const gradd_type_t *y = graph_type(w->g, n->out[0]);
    double power;
    w->expected = 1;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] == GRADD_NONE) return false;
    if (!strcmp(name, "ReduceSum") || !strcmp(name, "ReduceMean")) return over_reduction(w, n, y);
    if (!strcmp(name, "Pow"))
        return match_scalar(w->g, n->in[1], &power) && power == 2 && square(w, n->in[0]);
    if (gradd_op_is_transparent(n->op)) {
        w->at = n->in[0];
        return true;
    }
    bool taken = false;
    if (!strcmp(name, "Mul"))
        taken = over_product(w, n, y);
    else if (!strcmp(name, "Div"))
        taken = add_part(w, n->in[1], MATCH_ROWS_OVER, y), w->at = n->in[0];
    else if (!strcmp(name, "Where"))
        taken = over_choice(w, n, y);
    return taken && gradd_type_count(graph_type(w->g, w->at)) == gradd_type_count(y);
}

bool match_rows(const graph_t *g, gradd_val_t v, const char *leaf, const int32_t *readers,
                const bool *trained, match_rows_t *out) {
    *out = (match_rows_t){.factor = 1};
    rows_walk_t w = {.g = g, .trained = trained, .out = out, .at = v, .expected = 1};
    const gradd_dtype_t dtype = graph_type(g, v)->dtype;
    for (int step = 0; step < MATCH_MAX_WALK; step++) {
        const graph_value_t *value = g->values[w.at];
        if (value->kind != VALUE_NODE || value->data || value->type.dtype != dtype ||
            readers[w.at] != w.expected)
            return false;
        const graph_node_t *n = &g->nodes[value->node];
        if (n->backward) return false;
        if (!strcmp(n->op->name, leaf)) {
            out->leaf = n;
            return w.reduced || gradd_type_count(&value->type) == 1;
        }
        if (!step_over(&w, n)) return false;
    }
    return false;
}

/* ---- weights --------------------------------------------------------------------------------- */

typedef struct maker_s {
    graph_t *g;
    int32_t like;
    gradd_dtype_t dtype;
    int64_t rows;
} maker_t;

static gradd_status_t emit(const maker_t *m, const char *op, gradd_val_t a, gradd_val_t b,
                           gradd_val_t *out) {
    const gradd_val_t in[2] = {a, b};
    const graph_node_t like = m->g->nodes[m->like]; /* the list may move */
    return match_emit(m->g, &like,
                      &(match_fused_t){.op = op, .in = in, .n_in = 1 + (b != GRADD_NONE)}, out, 1);
}

static gradd_status_t sizes(const maker_t *m, const gradd_type_t *t, gradd_val_t *out) {
    *out = gradd_const_i64s(&m->g->builder, t->dims, t->rank);
    return m->g->builder.status;
}

static gradd_status_t cast(const maker_t *m, gradd_val_t *v) {
    const gradd_attr_t to = gradd_make_int("to", m->dtype);
    if (graph_type(m->g, *v)->dtype == m->dtype) return GRADD_OK;
    const match_fused_t fused = {.op = "Cast", .in = v, .n_in = 1, .attrs = &to, .n_attrs = 1};
    gradd_val_t done;
    const graph_node_t like = m->g->nodes[m->like];
    GRADD_TRY(match_emit(m->g, &like, &fused, &done, 1));
    *v = done;
    return GRADD_OK;
}

/* A factor, with an element per row or one for all. */
static gradd_status_t factor_of(const maker_t *m, const match_rows_part_t *p, gradd_val_t *out) {
    const gradd_type_t all = {m->dtype, 1, {m->rows}}, one = {m->dtype, 1, {1}};
    const bool single = gradd_type_count(graph_type(m->g, p->value)) == 1;
    gradd_val_t v = p->value, shape;
    if (p->how == MATCH_ROWS_UNLESS) GRADD_TRY(emit(m, "Not", v, GRADD_NONE, &v));
    if (!single && !gradd_type_equal(graph_type(m->g, v), &p->shape)) {
        GRADD_TRY(sizes(m, &p->shape, &shape));
        GRADD_TRY(emit(m, "Expand", v, shape, &v));
    }
    GRADD_TRY(sizes(m, single ? &one : &all, &shape));
    GRADD_TRY(emit(m, "Reshape", v, shape, &v));
    GRADD_TRY(cast(m, &v));
    *out = v;
    return GRADD_OK;
}

gradd_status_t match_rows_weights(graph_t *g, int32_t like, const match_rows_t *rows,
                                  gradd_dtype_t dtype, gradd_val_t *out) {
    const int64_t n = gradd_type_count(graph_type(g, rows->leaf->out[0]));
    const maker_t m = {g, like, dtype, n};
    const gradd_type_t all = {dtype, 1, {n}};
    gradd_val_t weights = gradd_const_scalar(&g->builder, dtype, rows->factor), shape, part;
    GRADD_TRY(g->builder.status);
    GRADD_TRY(sizes(&m, &all, &shape));
    GRADD_TRY(emit(&m, "Expand", weights, shape, &weights));
    for (int i = 0; i < rows->n_parts; i++) {
        const bool over = rows->parts[i].how == MATCH_ROWS_OVER;
        GRADD_TRY(factor_of(&m, &rows->parts[i], &part));
        GRADD_TRY(emit(&m, over ? "Div" : "Mul", weights, part, &weights));
    }
    *out = weights;
    return GRADD_OK;
}
