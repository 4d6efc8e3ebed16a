/* See match_modest.h. */
#include "server/graph/match/match_modest.h"

#include <math.h>
#include <string.h>

#include "kernels/describe/attention.h"
#include "kernels/math/formulas.h"

enum { MOST_ABOVE = 256 };

static double number_at(const graph_value_t *v, int64_t i) {
    if (!gradd_dtype_is_float(v->type.dtype)) return NAN;
    return gradd_real_at(v->data, i, (int)v->type.dtype);
}

/* Of what is known, a float: no infinity, nothing near a fill. */
static bool is_modest(const graph_value_t *v) {
    const int64_t n = gradd_type_count(&v->type);
    for (int64_t i = 0; i < n; i++)
        if (!(fabs(number_at(v, i)) < -GRADD_ATTN_MASKED)) return false;
    return true;
}

bool match_is_zero(const graph_t *g, gradd_val_t v) {
    const graph_value_t *value = g->values[v];
    const int64_t n = gradd_type_count(&value->type);
    if (!value->data || !gradd_dtype_is_float(value->type.dtype)) return false;
    for (int64_t i = 0; i < n; i++)
        if (number_at(value, i) != 0) return false;
    return n > 0;
}

static bool keeps_modest(const gradd_op_t *op) {
    static const char *const names[] = {
        "Add",       "Sub",         "Mul",       "Neg",         "Cast",
        "Transpose", "Expand",      "Gather",    "GatherND",    "GatherElements",
        "Slice",     "Split",       "Concat",    "Where",       "Linear",
        "MatMul",    "FusedMatMul", "ReduceSum", "EmbeddingSum"};
    if (gradd_op_is_transparent(op)) return true;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (!strcmp(op->name, names[i])) return true;
    return false;
}

bool match_is_modest(const graph_t *g, gradd_val_t bias) {
    gradd_val_t stack[MOST_ABOVE];
    int depth = 0, seen = 0;
    stack[depth++] = bias;
    while (depth) {
        const gradd_val_t at = stack[--depth];
        const graph_value_t *v = g->values[at];
        if (!gradd_dtype_is_float(v->type.dtype)) continue;
        if (v->data) {
            if (!is_modest(v)) return false;
            continue;
        }
        if (v->kind == VALUE_INPUT && graph_is_parameter(g, at)) continue;
        if (v->kind != VALUE_NODE) return false;
        const graph_node_t *n = &g->nodes[v->node];
        if (!keeps_modest(n->op) || ++seen > MOST_ABOVE) return false;
        for (int i = 0; i < n->n_in; i++) {
            if (n->in[i] == GRADD_NONE) continue;
            if (depth == MOST_ABOVE) return false;
            stack[depth++] = n->in[i];
        }
    }
    return true;
}
