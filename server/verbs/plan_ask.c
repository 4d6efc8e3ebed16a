/* Reading of graph.plan: positions and names, types. See plan_ask.h. */
#include "server/verbs/plan_ask.h"

#include <stdlib.h>
#include <string.h>

typedef const char *(*name_of_t)(const gradd_model_t *model, int i);

typedef struct named_s {
    const char *name;
    int position;
} named_t;

static int by_name(const void *a, const void *b) {
    const named_t *x = a, *y = b;
    int order = strcmp(x->name, y->name);
    return order ? order : x->position - y->position;
}

/* The names, sorted: a list may hold as many as the model has, and each is looked up. */
static gradd_status_t sort_names(const gradd_model_t *model, name_of_t name_of, int n,
                                 named_t **out_names) {
    named_t *names = calloc((size_t)n + 1, sizeof *names);
    if (!names) return GRADD_FAIL(NOMEM, "no memory for a list");
    for (int k = 0; k < n; k++)
        names[k] = (named_t){name_of(model, k), k};
    qsort(names, (size_t)n, sizeof *names, by_name);
    *out_names = names;
    return GRADD_OK;
}

/* Position of the first of that name, or -1. */
static int find_name(const named_t *names, int n, const msgpack_object_str *text) {
    int low = 0, high = n;
    while (low < high) {
        int middle = low + (high - low) / 2;
        const char *name = names[middle].name;
        int order = strncmp(name, text->ptr, text->size);
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool same = low < n && strlen(names[low].name) == text->size &&
                memcmp(names[low].name, text->ptr, text->size) == 0;
    return same ? names[low].position : -1;
}

/* A list of positions or names of the model's inputs or outputs, each at most once. */
static gradd_status_t positions(const gradd_model_t *model, const msgpack_object *list,
                                const char *field, name_of_t name_of, int limit,
                                int32_t *out_positions) {
    uint8_t *seen = calloc((size_t)limit + 1, 1);
    named_t *names = NULL;
    gradd_status_t st = seen ? GRADD_OK : GRADD_FAIL(NOMEM, "no memory for a list");
    for (int i = 0; i < wire_count(list) && st == GRADD_OK; i++) {
        const msgpack_object *o = wire_at(list, i);
        bool named = o->type == MSGPACK_OBJECT_STR;
        int found = -1;
        if (named && !names && (st = sort_names(model, name_of, limit, &names)) != GRADD_OK) break;
        if (!named && wire_u64(o) < (uint64_t)limit) found = (int)wire_u64(o);
        if (named) found = find_name(names, limit, &o->via.str);
        if (found < 0 && named)
            st = GRADD_FAIL(TENSOR, "graph.plan: field '%s[%d]': the graph has no '%.*s'", field, i,
                            o->via.str.size < 200 ? (int)o->via.str.size : 200, o->via.str.ptr);
        else if (found < 0)
            st = GRADD_FAIL(TENSOR, "graph.plan: field '%s[%d]': position %llu, expected below %d",
                            field, i, (unsigned long long)wire_u64(o), limit);
        else if (seen[found]++)
            st = GRADD_FAIL(TENSOR, "graph.plan: field '%s[%d]': position %d comes twice", field, i,
                            found);
        else
            out_positions[i] = found;
    }
    free(names);
    free(seen);
    return st;
}

/* What the message asks for; the arrays live in one block, freed by the caller. */ void
plan_ask_finish(plan_ask_t *ask) {
    free(ask->in);
    free(ask->bound);
    free(ask->rest);
    free(ask->grads);
    free(ask->out);
    free(ask->gmask);
    free(ask->parameters);
}

static gradd_status_t ask_types(const gradd_model_t *model, const msgpack_object *table,
                                gradd_type_t *out_types) {
    const wire_tensors_t types = wire_tensors(table);
    for (int i = 0; i < types.n; i++) {
        gradd_status_t st = wire_type_at(&types, i, &out_types[i]);
        if (st != GRADD_OK)
            return gradd_wrap(st, "graph.plan: input '%s'", gradd_model_input_name(model, i));
    }
    return GRADD_OK;
}

/* A list of live rows, which comes with the call, behind all other inputs. */
static gradd_status_t ask_list(plan_ask_t *ask, const msgpack_object *size, const char *field,
                               int64_t *out_rows) {
    const uint64_t rows = size ? wire_u64(size) : 0;
    if (!rows) return GRADD_OK;
    if (rows > INT32_MAX)
        return GRADD_FAIL(LIMIT, "graph.plan: field '%s': %llu rows, the limit is %d", field,
                          (unsigned long long)rows, INT32_MAX);
    *out_rows = (int64_t)rows;
    ask->rest[ask->n_rest++] = ask->n_in + ask->n_lists;
    ask->in[ask->n_in + ask->n_lists++] = (gradd_type_t){GRADD_DT_I64, 1, {(int64_t)rows}};
    return GRADD_OK;
}

static int by_position(const void *a, const void *b) {
    const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

gradd_status_t plan_ask_init(plan_ask_t *ask, const gradd_model_t *model,
                             const msgpack_object *const *args) {
    int n_in = gradd_model_n_inputs(model), n_out = gradd_model_n_outputs(model);
    *ask = (plan_ask_t){.n_in = n_in,
                        .n_bound = wire_count(args[PLAN_BOUND]),
                        .n_grads = wire_count(args[PLAN_GRAD]),
                        .n_out = wire_count(args[PLAN_OUT]),
                        .n_gmask = wire_count(args[PLAN_GMASK]),
                        .n_parameters = wire_count(args[PLAN_PARAMETERS])};
    if (wire_rows(args[PLAN_IN]) != n_in)
        return GRADD_FAIL(TENSOR, "graph.plan: field 'in': the graph has %d inputs, got %d types",
                          n_in, wire_rows(args[PLAN_IN]));
    ask->in = calloc((size_t)n_in + PLAN_MAX_LISTS + 1, sizeof *ask->in);
    ask->bound = calloc((size_t)ask->n_bound + 1, sizeof *ask->bound);
    ask->rest = calloc((size_t)n_in + PLAN_MAX_LISTS + 1, sizeof *ask->rest);
    ask->grads = calloc((size_t)ask->n_grads + 1, sizeof *ask->grads);
    ask->out = calloc((size_t)ask->n_out + 1, sizeof *ask->out);
    ask->gmask = calloc((size_t)ask->n_gmask + 1, sizeof *ask->gmask);
    ask->parameters = calloc((size_t)ask->n_parameters + 1, sizeof *ask->parameters);
    if (!ask->in || !ask->bound || !ask->rest || !ask->grads || !ask->out || !ask->gmask ||
        !ask->parameters)
        return GRADD_FAIL(NOMEM, "no memory for a plan");
    GRADD_TRY(ask_types(model, args[PLAN_IN], ask->in));
    GRADD_TRY(
        positions(model, args[PLAN_BOUND], "bound", gradd_model_input_name, n_in, ask->bound));
    GRADD_TRY(positions(model, args[PLAN_GRAD], "grad", gradd_model_input_name, n_in, ask->grads));
    GRADD_TRY(positions(model, args[PLAN_OUT], "out", gradd_model_output_name, n_out, ask->out));
    GRADD_TRY(positions(model, args[PLAN_PARAMETERS], "parameters", gradd_model_input_name, n_in,
                        ask->parameters));
    /* A set: its order makes no other plan. */
    qsort(ask->parameters, (size_t)ask->n_parameters, sizeof *ask->parameters, by_position);
    for (int k = 0; k < ask->n_bound; k++)
        ask->rest[ask->bound[k]] = -1; /* a mark, overwritten below after it was read */
    for (int i = 0; i < n_in; i++)
        if (ask->rest[i] == 0) ask->rest[ask->n_rest++] = i;
    GRADD_TRY(ask_list(ask, args[PLAN_LABEL_ROWS], "label_rows", &ask->label_rows));
    GRADD_TRY(ask_list(ask, args[PLAN_REAL_ROWS], "real_rows", &ask->real_rows));
    GRADD_TRY(ask_list(ask, args[PLAN_SOURCE_ROWS], "source_rows", &ask->source_rows));
    return positions(model, args[PLAN_GMASK], "gmask", NULL, ask->n_out, ask->gmask);
}

gradd_status_t plan_ask_memory(const msgpack_object *const *args, gradd_plan_options_t *options) {
    const msgpack_object *budget = args[PLAN_MEMORY_BUDGET], *recompute = args[PLAN_RECOMPUTE];
    if (budget && (!wire_u64(budget) || wire_u64(budget) > INT64_MAX))
        return GRADD_FAIL(LIMIT, "graph.plan: field 'memory_budget': expected 1 to 2^63 - 1 bytes");
    options->memory_budget = budget ? (int64_t)wire_u64(budget) : 0;
    if (!recompute) return GRADD_OK;
    return gradd_recompute_find(recompute->via.str.ptr, recompute->via.str.size,
                                "graph.plan: field 'recompute'", &options->recompute);
}
