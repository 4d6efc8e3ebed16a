/* Names of an imported graph: numbers the values, refuses duplicates, finds by name.
 *
 * A sorted array instead of a hash table: a hostile model can choose names that collide in a hash
 * function, but nothing makes n log n comparisons slow. Value ids follow the order of definition
 * (inputs, initializers, then node outputs), so "defined before use" is a comparison of node
 * indices.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/graph/import.h"

int import_clip(const char *text) {
    enum { MAX = 80 };
    if (!text) return 0;
    size_t n = strnlen(text, MAX + 1);
    if (n <= MAX) return (int)n;
    n = MAX;
    while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
        n--;
    return (int)n;
}

const char *import_text(const char *text) {
    return text ? text : "";
}

gradd_status_t import_check_name(const import_t *m, const char *what, const char *name,
                                 bool required) {
    if (!name || !name[0]) {
        if (required) return GRADD_FAIL(GRAPH, "the %s is empty", what);
        return GRADD_OK;
    }
    size_t n = strlen(name);
    if (n > (size_t)m->limits.max_name)
        return GRADD_FAIL(LIMIT, "the %s '%.*s...' has %zu bytes, the limit is %d", what,
                          IMPORT_TEXT(name), n, m->limits.max_name);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7f)
            return GRADD_FAIL(GRAPH, "the %s has a control character (code %d at byte %zu)", what,
                              name[i], i);
    return GRADD_OK;
}

/* Counts in 64 bits first: a model of 2 GiB can name more values than an int holds. */
static gradd_status_t count_values(const import_t *m, size_t *out_n) {
    const Onnx__GraphProto *g = m->graph;
    size_t n = g->n_input + g->n_initializer;
    for (size_t i = 0; i < g->n_node; i++)
        n += g->node[i]->n_output;
    if (n + (size_t)m->model->n_values > (size_t)m->limits.max_values)
        return GRADD_FAIL(LIMIT, "the graph has %zu values, the limit is %d",
                          n + (size_t)m->model->n_values, m->limits.max_values);
    *out_n = n;
    return GRADD_OK;
}

static gradd_status_t add_def(import_t *m, const char *what, const char *name, int32_t from,
                              size_t slot) {
    GRADD_TRY(import_check_name(m, what, name, true));
    m->defs[m->n_defs++] = (import_def_t){.name = name, .from = from, .slot = (int32_t)slot};
    return GRADD_OK;
}

static gradd_status_t collect(import_t *m) {
    const Onnx__GraphProto *g = m->graph;
    for (size_t i = 0; i < g->n_input; i++) {
        gradd_status_t status = add_def(m, "name", g->input[i]->name, IMPORT_FROM_INPUT, i);
        if (status) return gradd_wrap(status, "graph input %zu", i);
    }
    for (size_t i = 0; i < g->n_initializer; i++) {
        const char *name = g->initializer[i]->name;
        gradd_status_t status = add_def(m, "name", name, IMPORT_FROM_INITIALIZER, i);
        if (status) return gradd_wrap(status, "initializer %zu", i);
    }
    for (size_t k = 0; k < g->n_node; k++)
        for (size_t j = 0; j < g->node[k]->n_output; j++) {
            const char *name = g->node[k]->output[j];
            if (!name[0]) continue; /* an optional output that is not wanted */
            gradd_status_t status = add_def(m, "output name", name, (int32_t)k, j);
            if (status)
                return gradd_wrap(gradd_at_node(status, g->node[k]->name), "node %zu '%.*s' (%.*s)",
                                  k, IMPORT_TEXT(g->node[k]->name),
                                  IMPORT_TEXT(g->node[k]->op_type));
        }
    return GRADD_OK;
}

static int compare(const void *a, const void *b) {
    const import_def_t *x = *(import_def_t *const *)a, *y = *(import_def_t *const *)b;
    int order = strcmp(x->name, y->name);
    return order ? order : (x > y) - (x < y);
}

static gradd_status_t refuse_duplicate(const import_t *m, const import_def_t *first,
                                       const import_def_t *second) {
    const char *name = second->name;
    if (second->from == IMPORT_FROM_INPUT)
        return GRADD_FAIL(GRAPH, "graph input '%.*s' is listed twice (positions %d and %d)",
                          IMPORT_TEXT(name), first->slot, second->slot);
    if (second->from == IMPORT_FROM_INITIALIZER)
        return GRADD_FAIL(GRAPH, "initializer '%.*s' is given twice", IMPORT_TEXT(name));
    const Onnx__NodeProto *node = m->graph->node[second->from];
    char by[32] = "a graph input";
    if (first->from == IMPORT_FROM_INITIALIZER) strcpy(by, "an initializer");
    if (first->from >= 0) snprintf(by, sizeof by, "an output of node %d", first->from);
    return gradd_at_node(GRADD_FAIL(GRAPH, "node %d '%.*s' (%.*s): output %d '%.*s' is already %s",
                                    second->from, IMPORT_TEXT(node->name),
                                    IMPORT_TEXT(node->op_type), second->slot, IMPORT_TEXT(name),
                                    by),
                         node->name);
}

/* Sorts and numbers. A graph input that is also an initializer (its default) is one value. */
static gradd_status_t number(import_t *m) {
    for (size_t i = 0; i < m->n_defs; i++) {
        m->by_name[i] = &m->defs[i];
        m->defs[i].id = -1;
    }
    qsort(m->by_name, m->n_defs, sizeof m->by_name[0], compare);
    for (size_t i = 1; i < m->n_defs; i++) {
        const import_def_t *first = m->by_name[i - 1], *second = m->by_name[i];
        if (strcmp(first->name, second->name)) continue;
        bool is_default =
            first->from == IMPORT_FROM_INPUT && second->from == IMPORT_FROM_INITIALIZER;
        if (!is_default) return refuse_duplicate(m, first, second);
        m->defs[second - m->defs].id = -2 - first->slot; /* inputs are numbered by position */
    }
    const int32_t first = m->model->n_values; /* of a body: behind those around it */
    int32_t next = first;
    for (size_t i = 0; i < m->n_defs; i++) {
        int32_t id = m->defs[i].id;
        m->defs[i].id = id <= -2 ? first - 2 - id : next++;
    }
    m->model->n_values = next;
    return GRADD_OK;
}

gradd_status_t import_define_values(import_t *m) {
    size_t n = 0;
    GRADD_TRY(count_values(m, &n));
    m->defs = arena_array(m->scratch, n, sizeof *m->defs);
    m->by_name = arena_array(m->scratch, n, sizeof *m->by_name);
    if (!m->defs || !m->by_name) return GRADD_E_NOMEM;
    GRADD_TRY(collect(m));
    return number(m);
}

const import_def_t *import_find(const import_t *m, const char *name) {
    size_t low = 0, high = m->n_defs;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(name, m->by_name[middle]->name);
        if (order == 0) return m->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}
