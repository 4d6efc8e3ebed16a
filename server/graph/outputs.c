/* Makes values of a model outputs, and leaves out what outputs do not need. See model.h. */
#include <string.h>

#include "server/graph/arena.h"
#include "server/graph/model.h"

gradd_status_t model_add_outputs(model_t *m, const int32_t *values, int n) {
    const size_t total = (size_t)m->n_outputs + (size_t)n;
    if (!n) return GRADD_OK;
    int32_t *outputs = arena_array(m->arena, total, sizeof outputs[0]);
    model_value_t *declared = arena_array(m->arena, total, sizeof declared[0]);
    if (!outputs || !declared) return GRADD_FAIL(NOMEM, "no memory for more outputs");
    memcpy(outputs, m->outputs, sizeof outputs[0] * (size_t)m->n_outputs);
    memcpy(declared, m->declared, sizeof declared[0] * (size_t)m->n_outputs);
    for (int k = 0; k < n; k++) {
        outputs[m->n_outputs + k] = values[k];
        declared[m->n_outputs + k] = (model_value_t){.name = m->values[values[k]].name, .rank = -1};
    }
    m->outputs = outputs;
    m->declared = declared;
    m->n_outputs = (int)total;
    return model_find_facts(m);
}

void model_mark_needed(const model_t *m, bool *needed) {
    for (int k = m->n_nodes - 1; k >= 0; k--) {
        const model_node_t *n = &m->nodes[k];
        bool any = false;
        for (int j = 0; j < n->n_out; j++)
            any |= n->out[j] >= 0 && needed[n->out[j]];
        for (int i = 0; any && i < n->n_in; i++)
            if (n->in[i] >= 0) needed[n->in[i]] = true;
    }
}

void model_drop_nodes(model_t *m, const bool *needed) {
    int n = 0;
    m->n_unsupported = 0;
    for (int k = 0; k < m->n_nodes; k++) {
        const model_node_t *node = &m->nodes[k];
        bool keep = false;
        for (int j = 0; j < node->n_out; j++)
            keep |= node->out[j] >= 0 && needed[node->out[j]];
        if (!keep) continue;
        if (node->unsupported) m->unsupported[m->n_unsupported++] = n;
        m->nodes[n++] = *node;
    }
    m->n_nodes = n;
}
