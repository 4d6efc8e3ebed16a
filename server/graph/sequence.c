/* Sequences of tensors when a plan is made: lists of values, which no launch sees.
 *
 * SplitToSequence, SequenceAt and their like take and give lists, of which positions, lengths and
 * sizes of parts are known by then, as for the bodies of region.c; what depends on data is refused.
 * In the map of a model's values a list is a number below GRADD_NONE, so it goes through If and
 * Loop as a value does. Lists are never changed: an insertion makes another.
 *
 * Source: https://onnx.ai/onnx/operators/onnx__SplitToSequence.html and its neighbours
 */
#include <string.h>

#include "kernels/rules/infer.h"
#include "kernels/rules/rules.h"
#include "server/graph/compile_time.h"
#include "server/graph/graph.h"

typedef struct tensor_list_s {
    const gradd_val_t *v; /* in the arena of the graph */
    int n;
} tensor_list_t;

/* What a node works on. */
typedef struct sequence_node_s {
    graph_t *g;
    const model_node_t *n;
    gradd_val_t *map;
} sequence_node_t;

/* ---- lists ----------------------------------------------------------------------------------- */

/* The list of `n` values, and its number. */
static gradd_status_t add_list(graph_t *g, const gradd_val_t *v, int n, gradd_val_t *out) {
    if (g->n_sequences == g->cap_sequences) {
        const int cap = g->cap_sequences ? 2 * g->cap_sequences : 16;
        tensor_list_t *wider = arena_alloc(g->arena, sizeof *wider * (size_t)cap);
        if (!wider) return GRADD_FAIL(NOMEM, "no memory for %d sequences", cap);
        if (g->n_sequences) memcpy(wider, g->sequences, sizeof *wider * (size_t)g->n_sequences);
        g->sequences = wider;
        g->cap_sequences = cap;
    }
    g->sequences[g->n_sequences] = (tensor_list_t){v, n};
    *out = GRADD_NONE - 1 - g->n_sequences++;
    return GRADD_OK;
}

/* Memory for n values; the bytes count as time, since a Loop may copy a list in each step. */
static gradd_status_t new_values(graph_t *g, int n, gradd_val_t **out) {
    GRADD_TRY(compile_time_spend(1 + n / 256));
    *out = arena_alloc(g->arena, sizeof **out * ((size_t)n + 1));
    return *out ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for a sequence of %d tensors", n);
}

static gradd_val_t operand(const sequence_node_t *c, int i) {
    return i < c->n->n_in && c->n->in[i] >= 0 ? c->map[c->n->in[i]] : GRADD_NONE;
}

static gradd_status_t list_operand(const sequence_node_t *c, const tensor_list_t **out) {
    const gradd_val_t v = operand(c, 0);
    if (!graph_is_sequence(v)) return GRADD_FAIL(GRAPH, "input 0 is no sequence");
    *out = &c->g->sequences[GRADD_NONE - 1 - v];
    return GRADD_OK;
}

static gradd_status_t tensor_operand(const sequence_node_t *c, int i, gradd_val_t *out) {
    *out = operand(c, i);
    if (*out == GRADD_NONE) return GRADD_FAIL(GRAPH, "input %d is missing", i);
    return graph_is_sequence(*out) ? GRADD_FAIL(GRAPH, "input %d is a sequence", i) : GRADD_OK;
}

/* Elements of an operand of integers that is known; at most `max`. */
static gradd_status_t known_integers(const sequence_node_t *c, int i, int64_t *out, int max,
                                     int *out_n) {
    gradd_val_t v;
    GRADD_TRY(tensor_operand(c, i, &v));
    const graph_value_t *value = c->g->values[v];
    const int64_t n = gradd_type_count(&value->type);
    const bool wide = value->type.dtype == GRADD_DT_I64;
    if ((!wide && value->type.dtype != GRADD_DT_I32) || value->type.rank > 1)
        return GRADD_FAIL(GRAPH, "input %d is no integer or list of integers", i);
    if (!value->data)
        return GRADD_FAIL(UNSUPPORTED,
                          "input %d depends on data; sizes of a call have to decide it", i);
    if (n > max) return GRADD_FAIL(LIMIT, "input %d has %lld integers", i, (long long)n);
    for (int64_t k = 0; k < n; k++)
        out[k] = wide ? ((const int64_t *)value->data)[k] : ((const int32_t *)value->data)[k];
    *out_n = (int)n;
    return GRADD_OK;
}

/* The position that an operand says, of -n to last; `absent` if there is none. */
static gradd_status_t position(const sequence_node_t *c, int i, const tensor_list_t *s, int last,
                               int absent, int *out) {
    int64_t at;
    int n;
    *out = absent;
    if (operand(c, i) == GRADD_NONE) return GRADD_OK;
    GRADD_TRY(known_integers(c, i, &at, 1, &n));
    if (n != 1 || at < -s->n || at > last)
        return GRADD_FAIL(GRAPH, "position %lld in a sequence of %d tensors",
                          n == 1 ? (long long)at : 0, s->n);
    *out = (int)(at < 0 ? at + s->n : at);
    return GRADD_OK;
}

/* An attribute; no row has checked its kind. */
static gradd_status_t number(const sequence_node_t *c, const char *name, int64_t otherwise,
                             int64_t *out) {
    const gradd_attr_t *attr = gradd_attr_find(c->n->attrs, name);
    if (attr && attr->kind != GRADD_ATTR_INT)
        return GRADD_FAIL(GRAPH, "attribute '%s' is no integer", name);
    *out = attr ? attr->i : otherwise;
    return GRADD_OK;
}

/* ---- operators ------------------------------------------------------------------------------- */

enum { MAX_PARTS = 65536 };

static gradd_status_t new_sizes(const sequence_node_t *c, int64_t n, int64_t **out) {
    if (n > MAX_PARTS) return GRADD_FAIL(LIMIT, "%lld parts", (long long)n);
    GRADD_TRY(compile_time_spend(1 + n / 128));
    *out = arena_alloc(c->g->arena, sizeof **out * ((size_t)n + 1));
    return *out ? GRADD_OK
                : GRADD_FAIL(NOMEM, "no memory for the sizes of %lld parts", (long long)n);
}

/* Parts of the sizes that operand 1 lists. */
static gradd_status_t listed_sizes(const sequence_node_t *c, int64_t size, int64_t **out,
                                   int *out_n) {
    int64_t left = size;
    GRADD_TRY(new_sizes(c, gradd_type_count(graph_type(c->g, operand(c, 1))), out));
    GRADD_TRY(known_integers(c, 1, *out, MAX_PARTS, out_n));
    for (int i = 0; i < *out_n; i++) {
        const int64_t part = (*out)[i];
        if (part < 0 || part > left)
            return GRADD_FAIL(GRAPH, "part %d has %lld elements of %lld", i, (long long)part,
                              (long long)left);
        left -= part;
    }
    if (!left) return GRADD_OK;
    return GRADD_FAIL(GRAPH, "the parts leave %lld elements of %lld", (long long)left,
                      (long long)size);
}

/* Parts of one size, the last of what is left: of one element where operand 1 is absent. */
static gradd_status_t even_sizes(const sequence_node_t *c, int64_t size, int64_t **out,
                                 int *out_n) {
    int64_t each = 1;
    int n = 1;
    if (operand(c, 1) != GRADD_NONE) GRADD_TRY(known_integers(c, 1, &each, 1, &n));
    if (n != 1 || each < 1) return GRADD_FAIL(GRAPH, "parts of %lld elements", (long long)each);
    const int64_t whole = size / each, parts = whole + (size % each != 0);
    GRADD_TRY(new_sizes(c, parts, out));
    for (int64_t i = 0; i < parts; i++)
        (*out)[i] = i < whole ? each : size % each;
    *out_n = (int)parts;
    return GRADD_OK;
}

static gradd_status_t part_sizes(const sequence_node_t *c, int64_t size, int64_t **out,
                                 int *out_n) {
    const gradd_val_t v = operand(c, 1);
    const bool listed = v >= 0 && graph_type(c->g, v)->rank == 1;
    return listed ? listed_sizes(c, size, out, out_n) : even_sizes(c, size, out, out_n);
}

static gradd_status_t emit_parts(const sequence_node_t *c, gradd_val_t v, int axis,
                                 const int64_t *sizes, int n, gradd_val_t *out) {
    gradd_builder_t *b = &c->g->builder;
    if (n && n <= GRADD_OP_MAX_OUT) {
        const gradd_val_t in[] = {v, gradd_const_i64s(b, sizes, n)};
        const gradd_attr_t attr = gradd_make_int("axis", axis);
        const gradd_emit_t node = {"Split", in, 2, &attr, 1};
        return b->status ? b->status : b->emit(b, &node, out, n);
    }
    int64_t at = 0;
    for (int i = 0; i < n; at += sizes[i++])
        out[i] = gradd_slice(b, v, axis, at, at + sizes[i], 1);
    return b->status;
}

static gradd_status_t split(const sequence_node_t *c, gradd_val_t *out) {
    gradd_builder_t *b = &c->g->builder;
    gradd_val_t v, *parts;
    int64_t kept = 1, asked = 0, *sizes = NULL;
    int axis = 0, n = 0;
    GRADD_TRY(tensor_operand(c, 0, &v));
    GRADD_TRY(number(c, "axis", 0, &asked));
    GRADD_TRY(number(c, "keepdims", 1, &kept));
    if (operand(c, 1) != GRADD_NONE) kept = 1;
    const gradd_type_t type = *graph_type(c->g, v);
    if (!type.rank) return GRADD_FAIL(GRAPH, "input 0 has no axes");
    GRADD_TRY(gradd_axis(asked, type.rank, false, &axis));
    GRADD_TRY(part_sizes(c, type.dims[axis], &sizes, &n));
    GRADD_TRY(new_values(c->g, n, &parts));
    GRADD_TRY(emit_parts(c, v, axis, sizes, n, parts));
    gradd_type_t less = type;
    less.rank--;
    for (int d = axis; d < less.rank; d++)
        less.dims[d] = type.dims[d + 1];
    for (int i = 0; i < n && !kept; i++)
        parts[i] = gradd_reshape_to(b, parts[i], less.dims, less.rank);
    GRADD_TRY(b->status);
    return add_list(c->g, parts, n, out);
}

static gradd_status_t construct(const sequence_node_t *c, gradd_val_t *out) {
    gradd_val_t *v;
    GRADD_TRY(new_values(c->g, c->n->n_in, &v));
    for (int i = 0; i < c->n->n_in; i++)
        GRADD_TRY(tensor_operand(c, i, &v[i]));
    return add_list(c->g, v, c->n->n_in, out);
}

static gradd_status_t at(const sequence_node_t *c, gradd_val_t *out) {
    const tensor_list_t *s = NULL;
    int i;
    GRADD_TRY(list_operand(c, &s));
    GRADD_TRY(position(c, 1, s, s->n - 1, -1, &i));
    if (i < 0) return GRADD_FAIL(GRAPH, "input 1 is missing");
    *out = s->v[i];
    return GRADD_OK;
}

static gradd_status_t insert(const sequence_node_t *c, gradd_val_t *out) {
    const tensor_list_t *s = NULL;
    gradd_val_t tensor, *v;
    int i;
    GRADD_TRY(list_operand(c, &s));
    GRADD_TRY(tensor_operand(c, 1, &tensor));
    GRADD_TRY(position(c, 2, s, s->n, s->n, &i));
    const int n = s->n;
    GRADD_TRY(new_values(c->g, n + 1, &v));
    if (n) memcpy(v, s->v, sizeof *v * (size_t)i);
    if (n > i) memcpy(v + i + 1, s->v + i, sizeof *v * (size_t)(n - i));
    v[i] = tensor;
    return add_list(c->g, v, n + 1, out);
}

static gradd_status_t erase(const sequence_node_t *c, gradd_val_t *out) {
    const tensor_list_t *s = NULL;
    gradd_val_t *v;
    int i;
    GRADD_TRY(list_operand(c, &s));
    GRADD_TRY(position(c, 1, s, s->n - 1, s->n - 1, &i));
    if (i < 0) return GRADD_FAIL(GRAPH, "the sequence is empty");
    const int n = s->n;
    GRADD_TRY(new_values(c->g, n - 1, &v));
    memcpy(v, s->v, sizeof *v * (size_t)i);
    memcpy(v + i, s->v + i + 1, sizeof *v * (size_t)(n - 1 - i));
    return add_list(c->g, v, n - 1, out);
}

static gradd_status_t length(const sequence_node_t *c, gradd_val_t *out) {
    const gradd_type_t number = {.dtype = GRADD_DT_I64};
    const tensor_list_t *s = NULL;
    GRADD_TRY(list_operand(c, &s));
    const int64_t n = s->n;
    return graph_constant(c->g, &number, &n, out);
}

static gradd_status_t join(const sequence_node_t *c, gradd_val_t *out) {
    gradd_builder_t *b = &c->g->builder;
    const tensor_list_t *s = NULL;
    gradd_val_t *parts;
    int64_t fresh = 0, asked = 0;
    int axis = 0;
    GRADD_TRY(list_operand(c, &s));
    GRADD_TRY(number(c, "new_axis", 0, &fresh));
    GRADD_TRY(number(c, "axis", 0, &asked));
    if (!s->n) return GRADD_FAIL(UNSUPPORTED, "the sequence is empty, so the sizes are unknown");
    if (!gradd_attr_find(c->n->attrs, "axis"))
        return GRADD_FAIL(GRAPH, "attribute 'axis' is missing");
    GRADD_TRY(new_values(c->g, s->n, &parts));
    for (int i = 0; i < s->n; i++) {
        const gradd_type_t type = *graph_type(c->g, s->v[i]);
        const int rank = type.rank + (fresh != 0);
        int64_t dims[GRADD_MAX_RANK];
        if (rank > GRADD_MAX_RANK) return GRADD_FAIL(LIMIT, "tensors of rank %d", type.rank);
        GRADD_TRY(gradd_axis(asked, rank, false, &axis));
        for (int d = 0; d < rank; d++)
            dims[d] = fresh && d == axis ? 1 : type.dims[d - (fresh && d > axis)];
        parts[i] = fresh ? gradd_reshape_to(b, s->v[i], dims, rank) : s->v[i];
    }
    const int n = s->n;
    *out = n > 1 ? gradd_concat(b, parts, n, axis) : parts[0];
    return b->status;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    gradd_status_t (*add)(const sequence_node_t *c, gradd_val_t *out);
} operators[] = {
    {"SplitToSequence",    split    },
    {"SequenceConstruct",  construct},
    {"SequenceEmpty",      construct},
    {"SequenceAt",         at       },
    {"SequenceInsert",     insert   },
    {"SequenceErase",      erase    },
    {"SequenceLength",     length   },
    {"ConcatFromSequence", join     },
};
enum { N_OPERATORS = sizeof operators / sizeof operators[0] };

static int find_operator(const char *type) {
    int i = 0;
    while (i < N_OPERATORS && strcmp(operators[i].name, type))
        i++;
    return i;
}

bool graph_knows_sequence(const char *op_type) {
    return find_operator(op_type) < N_OPERATORS;
}

gradd_status_t graph_add_sequence(graph_t *g, const model_node_t *n, gradd_val_t *map) {
    const sequence_node_t c = {g, n, map};
    gradd_val_t out = GRADD_NONE;
    if (n->n_out > 1) return GRADD_FAIL(GRAPH, "%d outputs, expected 1", n->n_out);
    if (n->op) /* Identity */
        out = operand(&c, 0);
    else
        GRADD_TRY(operators[find_operator(n->op_type)].add(&c, &out));
    if (n->n_out && n->out[0] >= 0) map[n->out[0]] = out;
    return GRADD_OK;
}
