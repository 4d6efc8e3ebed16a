/* The place of every value of a sequence: external memory where an output or gradient can be
 * produced in place, else a buffer in the arena with a lifetime; operators that may overwrite an
 * operand that dies with them take its buffer. See plan.h. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/plan.h"

typedef struct maker_s {
    const graph_t *g;
    const layout_options_t *o;
    layout_t *out;
    int *start, *end;    /* per root: positions; start -1 = not computed in this sequence */
    gradd_val_t *buffer; /* per root: the root whose buffer it uses (in place), itself by default */
    memory_item_t *items; /* one per buffer, then one per scratch */
    int n_items;
    int32_t *item_of; /* per root that owns a buffer */
    int last;         /* position after the last node: copies of gradients */
} maker_t;

static bool is_fixed(const maker_t *m, gradd_val_t root) {
    return m->o->fixed && root < m->o->n_fixed && m->o->fixed[root].kind != LOC_NONE;
}

static bool is_saved(const maker_t *m, gradd_val_t root) {
    return root < m->o->n_fixed && m->o->saved[root];
}

static void use(maker_t *m, gradd_val_t v, int position) {
    if (v == GRADD_NONE) return;
    gradd_val_t root = plan_root(m->g, v);
    if (m->end[root] < position) m->end[root] = position;
}

static void find_lifetimes(maker_t *m) {
    const sequence_t *s = m->o->sequence;
    for (int v = 0; v < m->out->n_values; v++)
        m->start[v] = m->end[v] = -1;
    for (int k = 0; k < s->n; k++) {
        const graph_node_t *n = &m->g->nodes[s->nodes[k]];
        for (int i = 0, reads = plan_reads(n); i < reads; i++)
            use(m, n->in[i], k);
        for (int j = 0; j < n->n_out; j++) {
            if (n->out[j] == GRADD_NONE) continue;
            gradd_val_t root = plan_root(m->g, n->out[j]);
            if (root != n->out[j]) continue; /* a view computes nothing */
            m->start[root] = k;
            if (m->end[root] < k) m->end[root] = k;
        }
    }
    for (int v = 0; v < m->o->n_fixed && v < m->out->n_values; v++) {
        if (!m->o->saved[v] || m->start[v] < 0) continue;
        /* another variant may want it: it outlives the forward at least */
        if (m->end[v] < s->n_forward) m->end[v] = s->n_forward;
    }
}

/* ---- external places ------------------------------------------------------------------------- */

static void add_copy(maker_t *m, gradd_val_t from, loc_t to, bool after_forward) {
    m->out->copies[m->out->n_copies++] = (copy_t){from, to, after_forward};
    /* past the last forward node, so that this one does not overwrite what is copied after it */
    use(m, from, after_forward ? m->o->sequence->n_forward : m->last);
}

/* Lets the value be produced in external memory; false if its bytes are needed elsewhere. */
static bool bind_external(maker_t *m, gradd_val_t v, loc_t to) {
    gradd_val_t root = plan_root(m->g, v);
    if (m->start[root] < 0 || m->out->loc[root].kind != LOC_NONE) return false;
    if (gradd_type_bytes(graph_type(m->g, root)) != gradd_type_bytes(graph_type(m->g, v)))
        return false;
    m->out->loc[root] = to;
    return true;
}

static void place_external(maker_t *m) {
    const graph_t *g = m->g;
    for (int j = 0; m->o->place_outputs && j < g->n_outputs; j++) {
        loc_t to = {LOC_OUTPUT, j, 0};
        /* the client may change an output after forward: what backward reads stays private */
        if (is_saved(m, plan_root(g, g->outputs[j])) || !bind_external(m, g->outputs[j], to))
            add_copy(m, g->outputs[j], to, true);
    }
    for (int i = 0; i < m->o->n_grads; i++) {
        gradd_val_t v = m->o->grads[i];
        if (v == GRADD_NONE) continue;
        gradd_val_t root = plan_root(g, v);
        loc_t to = {LOC_GRAD, i, 0};
        bool own = m->start[root] >= m->o->sequence->n_forward; /* computed in backward */
        if (!own || !bind_external(m, v, to)) add_copy(m, v, to, false);
    }
}

static void place_given(maker_t *m) {
    for (int v = 0; v < m->out->n_values; v++) {
        const graph_value_t *value = m->g->values[v];
        if (value->data)
            m->out->loc[v] = (loc_t){LOC_CONST, 0, 0};
        else if (value->kind == VALUE_INPUT)
            m->out->loc[v] = (loc_t){LOC_INPUT, value->index, 0};
        else if (value->kind == VALUE_GRAD_OUTPUT)
            m->out->loc[v] = (loc_t){LOC_GRAD_OUTPUT, value->index, 0};
        else if (is_fixed(m, v))
            m->out->loc[v] = m->o->fixed[v];
    }
    for (int i = 0; i < m->g->n_formed; i++)
        if (m->g->formed[i] != GRADD_NONE) m->out->loc[m->g->formed[i]] = (loc_t){LOC_EARLY, i, 0};
}

/* ---- in place -------------------------------------------------------------------------------- */

static bool in_arena(const maker_t *m, gradd_val_t root) {
    loc_kind_t kind = m->out->loc[root].kind;
    return (kind == LOC_NONE && m->start[root] >= 0) || kind == LOC_ARENA;
}

static uint32_t inplace(const maker_t *m, int position) {
    const gradd_kernel_t *kernel = m->o->sequence->choices[position].kernel;
    return kernel ? kernel->inplace : 0;
}

/* A mask has a bit for each of the first operands; no later one is overwritten. */
static bool has_bit(uint32_t mask, int k) {
    return k < 32 && mask >> k & 1;
}

/* Whether operand k of a node at this position may be overwritten by its result. */
static bool may_overwrite(const maker_t *m, const graph_node_t *n, int k, int position) {
    const graph_t *g = m->g;
    const uint32_t mask = inplace(m, position);
    if (!has_bit(mask, k) || k >= n->n_in || n->in[k] == GRADD_NONE) return false;
    gradd_val_t root = plan_root(g, n->in[k]);
    if (!in_arena(m, root) || m->end[root] != position) return false;
    if (is_fixed(m, root) && m->o->keep) return false;
    if (!gradd_type_equal(graph_type(g, n->in[k]), graph_type(g, n->out[0]))) return false;
    int64_t bytes = gradd_type_bytes(graph_type(g, root));
    if (bytes != gradd_type_bytes(graph_type(g, n->out[0]))) return false;
    for (int i = 0; i < n->n_in; i++) {
        if (i == k || n->in[i] == GRADD_NONE || plan_root(g, n->in[i]) != root) continue;
        /* the same bytes read through another shape, or at other places than those written */
        if (n->in[i] != n->in[k] || !has_bit(mask, i)) return false;
    }
    return true;
}

static void share_buffers(maker_t *m) {
    const sequence_t *s = m->o->sequence;
    for (int k = 0; k < s->n; k++) {
        const graph_node_t *n = &m->g->nodes[s->nodes[k]];
        if (!inplace(m, k) || n->n_out < 1 || n->out[0] == GRADD_NONE) continue;
        if (m->out->loc[n->out[0]].kind != LOC_NONE) continue; /* external */
        for (int i = 0; i < n->n_in; i++) {
            if (!may_overwrite(m, n, i, k)) continue;
            m->buffer[n->out[0]] = m->buffer[plan_root(m->g, n->in[i])];
            break;
        }
    }
}

/* Puts an operand that the node of v overwrites where v is, if it is made at that position or
 * later; returns it. */
static gradd_val_t share_gradient(maker_t *m, gradd_val_t v, int from) {
    const graph_value_t *value = m->g->values[v];
    if (value->kind != VALUE_NODE) return GRADD_NONE;
    const graph_node_t *n = &m->g->nodes[value->node];
    for (int k = 0; n->out[0] == v && k < n->n_in; k++) {
        if (!may_overwrite(m, n, k, m->start[v])) continue;
        const gradd_val_t root = plan_root(m->g, n->in[k]);
        if (m->out->loc[root].kind != LOC_NONE || m->start[root] < from) continue;
        m->out->loc[root] = m->out->loc[v];
        return root;
    }
    return GRADD_NONE;
}

/* What a gradient in the client's memory overwrites is made there as well: the product that rows of
 * a tied table are added to. Where the forward has formed a part of it, it may lie in the same
 * memory: that is not written before the last reader of the part. */
static void share_gradients(maker_t *m) {
    for (int i = 0; i < m->o->n_grads; i++) {
        gradd_val_t v = m->o->grads[i] == GRADD_NONE ? GRADD_NONE : plan_root(m->g, m->o->grads[i]);
        if (v == GRADD_NONE || m->out->loc[v].kind != LOC_GRAD || m->out->loc[v].index != i)
            continue; /* copied from where it lies: another input's gradient, seen to there */
        int from = m->o->sequence->n_forward;
        const gradd_val_t formed = i < m->g->n_formed ? m->g->formed[i] : GRADD_NONE;
        if (formed != GRADD_NONE && m->end[formed] > from) from = m->end[formed];
        while (v != GRADD_NONE)
            v = share_gradient(m, v, from);
    }
}

/* ---- buffers --------------------------------------------------------------------------------- */

static void extend(memory_item_t *item, int start, int end) {
    if (start < item->start) item->start = start;
    if (end > item->end) item->end = end;
}

static void collect_buffers(maker_t *m) {
    for (int v = 0; v < m->out->n_values; v++) {
        bool fixed = is_fixed(m, v);
        m->item_of[v] = -1;
        if (!in_arena(m, v) || m->buffer[v] != v) continue;
        m->item_of[v] = m->n_items;
        m->items[m->n_items++] = (memory_item_t){.bytes = gradd_type_bytes(graph_type(m->g, v)),
                                                 .offset = fixed ? m->o->fixed[v].offset : -1,
                                                 .start = fixed ? 0 : m->start[v],
                                                 .end = fixed && m->o->keep ? m->last : m->end[v]};
    }
    for (int v = 0; v < m->out->n_values; v++) {
        if (!in_arena(m, v) || m->buffer[v] == v) continue;
        extend(&m->items[m->item_of[m->buffer[v]]], m->start[v], m->end[v]);
    }
}

static void collect_scratch(maker_t *m) {
    const sequence_t *s = m->o->sequence;
    for (int k = 0; k < s->n; k++) {
        m->out->workspace[k] = -1;
        const int64_t bytes = (int64_t)s->choices[k].prepared.workspace;
        if (!bytes) continue;
        m->out->workspace[k] = m->n_items; /* item for now, offset below */
        m->items[m->n_items++] =
            (memory_item_t){.bytes = bytes, .offset = -1, .start = k, .end = k};
    }
}

static void write_places(maker_t *m) {
    const sequence_t *s = m->o->sequence;
    for (int v = 0; v < m->out->n_values; v++) {
        if (!in_arena(m, v)) continue;
        const memory_item_t *item = &m->items[m->item_of[m->buffer[v]]];
        m->out->loc[v] = (loc_t){LOC_ARENA, 0, item->offset};
        /* one made in the room of a dying operand counts as well: only one of both is saved */
        if (is_saved(m, v)) m->out->saved_bytes += gradd_type_bytes(graph_type(m->g, v));
    }
    for (int k = 0; k < s->n; k++)
        if (m->out->workspace[k] >= 0) m->out->workspace[k] = m->items[m->out->workspace[k]].offset;
}

/* Bytes in use at each position: what no placing can go below. */
static void add_up_in_use(const maker_t *m, int64_t *in_use) {
    for (int k = 0; k <= m->last; k++)
        in_use[k] = 0;
    for (int i = 0; i < m->n_items; i++) {
        const int64_t bytes = (m->items[i].bytes + GRADD_TENSOR_ALIGN - 1) & -GRADD_TENSOR_ALIGN;
        in_use[m->items[i].start] += bytes;
        if (m->items[i].end < m->last) in_use[m->items[i].end + 1] -= bytes;
    }
    for (int k = 1; k <= m->last; k++)
        in_use[k] += in_use[k - 1];
}

static gradd_status_t make(maker_t *m, int64_t *in_use) {
    for (int v = 0; v < m->out->n_values; v++)
        m->buffer[v] = v;
    find_lifetimes(m);
    place_given(m);
    place_external(m);
    share_gradients(m);
    share_buffers(m);
    collect_buffers(m);
    collect_scratch(m);
    if (in_use) {
        add_up_in_use(m, in_use);
        return GRADD_OK;
    }
    GRADD_TRY(memory_place(m->items, m->n_items, &m->out->arena_bytes));
    write_places(m);
    return GRADD_OK;
}

/* Places, or with `in_use` only the bytes in use at each position. */
static gradd_status_t make_any(const graph_t *g, const layout_options_t *options, layout_t *out,
                               int64_t *in_use) {
    size_t n = (size_t)g->n_values + 1, positions = (size_t)options->sequence->n + 1;
    *out = (layout_t){.n_values = g->n_values};
    out->loc = calloc(n, sizeof out->loc[0]);
    out->workspace = calloc(positions, sizeof out->workspace[0]);
    out->copies = calloc((size_t)(g->n_outputs + options->n_grads) + 1, sizeof out->copies[0]);
    maker_t m = {.g = g, .o = options, .out = out, .last = options->sequence->n};
    m.start = calloc(n, sizeof m.start[0]);
    m.end = calloc(n, sizeof m.end[0]);
    m.buffer = calloc(n, sizeof m.buffer[0]);
    m.item_of = calloc(n, sizeof m.item_of[0]);
    m.items = calloc(n + positions, sizeof m.items[0]);
    gradd_status_t status = GRADD_OK;
    if (!out->loc || !out->workspace || !out->copies || !m.start || !m.end || !m.buffer ||
        !m.item_of || !m.items)
        status = GRADD_FAIL(NOMEM, "no memory to plan the graph");
    if (!status) status = make(&m, in_use);
    free(m.start);
    free(m.end);
    free(m.buffer);
    free(m.item_of);
    free(m.items);
    if (status) layout_finish(out);
    return status;
}

layout_options_t layout_of_plan(const gradd_plan_t *plan, const sequence_t *sequence,
                                const bool *saved, int n_saved, const variant_t *backward) {
    return (layout_options_t){.sequence = sequence,
                              .saved = saved,
                              .n_fixed = n_saved,
                              .grads = backward ? backward->grads : NULL,
                              .n_grads = backward ? plan->n_grads : 0,
                              .place_outputs = true};
}

gradd_status_t layout_make(const graph_t *g, const layout_options_t *options, layout_t *out) {
    return make_any(g, options, out, NULL);
}

gradd_status_t layout_in_use(const graph_t *g, const layout_options_t *options, int64_t *in_use) {
    layout_t layout;
    GRADD_TRY(make_any(g, options, &layout, in_use));
    layout_finish(&layout);
    return GRADD_OK;
}

void layout_finish(layout_t *layout) {
    if (!layout) return;
    free(layout->loc);
    free(layout->workspace);
    free(layout->copies);
    *layout = (layout_t){0};
}
