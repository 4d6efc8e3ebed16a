/* A sequence of sets of kept values, each with less memory than the one before. See recompute.h.
 *
 * Greedy, against the planned peak: at the position with the most bytes in use, those values count
 * that are there only because a backward reads them later. The node that frees most of them per
 * microsecond of computing it again, with the chain that it pulls in as things are now, goes first;
 * then the search measures everything again. A choice that does not lower the peak is undone, and
 * its value kept for good: a value whose recomputation would hold a whole stretch of others longer
 * than it saves rules itself out that way. First come the values within layers, then those between
 * them.
 *
 * A node whose scratch is at the peak competes with shorter chunks in the same way.
 *
 * Nodes go in small batches, so that the number of measurements is bounded whatever the graph. */
#include <stdlib.h>
#include <string.h>

#include "server/graph/compile_time.h"
#include "server/plan/recompute.h"

/* Measurements of one search, about: a batch is so many nodes that this is enough. */
#define SEARCH_BATCHES 48
/* Of the best ratio in a batch, what the others must have. */
#define SEARCH_ALIKE 0.5
/* A smaller part of the peak is not worth a launch. */
#define SEARCH_PART 1024
/* How far bytes in use must rise on both sides of a position for it to lie between layers. */
#define LAYER_RISE 1.5

/* Nodes that a walk meets in about a microsecond. */
#define WALK_UNIT 32

typedef struct candidate_s {
    int32_t node;
    chunked_t *chunked; /* whose chunks become shorter; NULL = what it makes is given up */
    double ratio;       /* bytes per microsecond */
} candidate_t;

typedef struct search_s {
    recompute_t *r;
    const graph_t *g;
    recompute_sets_t *sets;
    int32_t *last, *first; /* per root: last position of the forward, first of the backward */
    bool *pinned;          /* per root: lies between layers */
    bool *banned;          /* per forward node: giving it up did not pay */
    int32_t *seen;         /* per forward node: number of the walk that has met it */
    int32_t *stack;
    candidate_t *found;
    int n_found, walk;
    int64_t steps; /* of all walks */
    bool between;  /* values between layers are candidates as well */
} search_t;

static gradd_status_t no_memory(void) {
    return GRADD_FAIL(NOMEM, "no memory to plan the graph");
}

/* ---- positions ------------------------------------------------------------------------------- */

static void find_positions(search_t *s) {
    const sequence_t *q = &s->r->sequence;
    for (int v = 0; v < s->r->n_values; v++)
        s->last[v] = -1, s->first[v] = q->n;
    for (int k = 0; k < q->n; k++) {
        const graph_node_t *n = &s->g->nodes[q->nodes[k]];
        for (int i = 0, reads = plan_reads(n); i < reads; i++) {
            if (n->in[i] == GRADD_NONE) continue;
            const gradd_val_t root = plan_root(s->g, n->in[i]);
            if (root >= s->r->n_values) continue;
            if (k < q->n_forward) s->last[root] = k;
            const bool runs = !(n->op->flags & GRADD_OP_VIEW);
            if (runs && k >= q->n_forward && s->first[root] > k) s->first[root] = k;
        }
        for (int j = 0; j < n->n_out && k < q->n_forward; j++)
            if (n->out[j] != GRADD_NONE && s->last[n->out[j]] < k) s->last[n->out[j]] = k;
    }
}

/* Whether a kept value is at the peak for the backward alone. */
static bool only_waits(const search_t *s, gradd_val_t v) {
    return s->r->saved[v] && s->last[v] < s->r->peak && s->r->peak < s->first[v];
}

/* ---- layers ---------------------------------------------------------------------------------- */

/* Bytes that a later forward node reads, behind each forward position of a plan that keeps all. */
static void add_up_flow(const search_t *s, int64_t *flow) {
    const sequence_t *q = &s->r->sequence;
    memset(flow, 0, sizeof flow[0] * (size_t)(q->n_forward + 1));
    for (int k = 0; k < q->n_forward; k++) {
        const graph_node_t *n = &s->g->nodes[q->nodes[k]];
        for (int j = 0; j < n->n_out; j++) {
            const gradd_val_t v = n->out[j];
            if (v == GRADD_NONE || plan_root(s->g, v) != v || s->last[v] <= k) continue;
            const int64_t bytes = gradd_type_bytes(graph_type(s->g, v));
            flow[k] += bytes;
            flow[s->last[v]] -= bytes;
        }
    }
    for (int k = 1; k < q->n_forward; k++)
        flow[k] += flow[k - 1];
}

static void pin(search_t *s, int position) {
    const sequence_t *q = &s->r->sequence;
    for (int k = 0; k <= position; k++) {
        const graph_node_t *n = &s->g->nodes[q->nodes[k]];
        for (int j = 0; j < n->n_out; j++)
            if (n->out[j] != GRADD_NONE && s->last[n->out[j]] > position)
                s->pinned[n->out[j]] = true;
    }
}

/* A position between layers is the lowest one of a valley of bytes in use. */
static void find_layers(search_t *s, const int64_t *flow) {
    const int n = s->r->sequence.n_forward;
    int low = -1;
    int64_t high = 0;
    for (int k = 0; k < n; k++) {
        if (low < 0) {
            if (flow[k] > high) high = flow[k];
            if (flow[k] > 0 && (double)flow[k] * LAYER_RISE <= (double)high) low = k;
        } else if (flow[k] > 0 && flow[k] < flow[low]) {
            low = k;
        } else if ((double)flow[k] >= (double)flow[low] * LAYER_RISE) {
            pin(s, low);
            high = flow[k];
            low = -1;
        }
    }
}

/* ---- candidates ------------------------------------------------------------------------------ */

static bool must_run(const search_t *s, gradd_val_t v) {
    const graph_value_t *value = v == GRADD_NONE ? NULL : s->g->values[v];
    if (!value || value->data || value->kind != VALUE_NODE || value->node >= s->g->n_forward)
        return false;
    return s->g->values[value->root]->kind == VALUE_NODE && !s->r->keep[value->root];
}

/* Whether the backward computes the node again already. */
static bool is_cloned(const search_t *s, int32_t node) {
    return s->seen[node] == -1;
}

static void mark_cloned(search_t *s) {
    const sequence_t *q = &s->r->sequence;
    memset(s->seen, 0, sizeof s->seen[0] * (size_t)(s->g->n_forward + 1));
    s->walk = 0;
    for (int k = q->n_forward; k < q->n; k++)
        if (graph_is_clone(s->g, q->nodes[k])) s->seen[q->nodes[k] - s->g->n_forward] = -1;
}

/* Time of computing the node again, with all that it needs and that is not there. */
static double chain_us(search_t *s, int32_t node) {
    double us = 0;
    int depth = 0;
    if (is_cloned(s, node)) return 0;
    s->walk++;
    s->stack[depth++] = node;
    s->seen[node] = s->walk;
    while (depth) {
        const int32_t id = s->stack[--depth];
        const graph_node_t *n = &s->g->nodes[id];
        s->steps++;
        us += s->r->us[id];
        for (int i = 0, reads = plan_reads(n); i < reads; i++) {
            if (!must_run(s, n->in[i])) continue;
            const int32_t from = s->g->values[n->in[i]]->node;
            if (is_cloned(s, from) || s->seen[from] == s->walk) continue;
            s->seen[from] = s->walk;
            s->stack[depth++] = from;
        }
    }
    return us;
}

/* Bytes at the peak that go if the node is computed again; 0 = it is no candidate. */
static int64_t bytes_at_peak(const search_t *s, const graph_node_t *n) {
    int64_t bytes = 0;
    for (int j = 0; j < n->n_out; j++) {
        const gradd_val_t v = n->out[j];
        if (v == GRADD_NONE || plan_root(s->g, v) != v || !s->r->saved[v]) continue;
        if (s->pinned[v] && !s->between) return 0;
        if (only_waits(s, v)) bytes += gradd_type_bytes(graph_type(s->g, v));
    }
    return bytes >= s->r->in_use[s->r->peak] / SEARCH_PART ? bytes : 0;
}

static int by_ratio(const void *a, const void *b) {
    const candidate_t *x = a, *y = b;
    if (x->ratio != y->ratio) return x->ratio < y->ratio ? 1 : -1;
    return x->node - y->node; /* early layers: their backward comes when the others are gone */
}

/* A node that forms gradients in the forward costs as much as the backward itself. */
static bool forms_gradients(const graph_node_t *n) {
    for (size_t j = 0; j < sizeof n->op->formed; j++)
        if (n->op->formed[j]) return true;
    return false;
}

/* These nodes form gradients: they are no candidates of the other kind. */
static void find_shorter_chunks(search_t *s) {
    const recompute_t *r = s->r;
    for (int i = 0; i < r->n_chunked; i++) {
        chunked_t *c = &r->chunked[i];
        const int64_t bytes = recompute_spared(c);
        if (s->banned[c->node] || r->peak >= r->sequence.n ||
            r->sequence.nodes[r->peak] != c->node || !bytes ||
            bytes < r->in_use[r->peak] / SEARCH_PART)
            continue;
        const double us = c->us[c->level + 1] - c->us[c->level];
        s->found[s->n_found++] = (candidate_t){c->node, c, (double)bytes / (us + 0.1)};
    }
}

static gradd_status_t find_candidates(search_t *s) {
    s->n_found = 0;
    find_positions(s);
    mark_cloned(s);
    for (int32_t id = 0; id < s->g->n_forward; id++) {
        if (s->banned[id] || forms_gradients(&s->g->nodes[id])) continue;
        const int64_t bytes = bytes_at_peak(s, &s->g->nodes[id]);
        if (!bytes) continue;
        s->found[s->n_found++] = (candidate_t){id, NULL, (double)bytes / (chain_us(s, id) + 0.1)};
        GRADD_TRY(compile_time_spend(s->steps / WALK_UNIT));
        s->steps %= WALK_UNIT;
    }
    find_shorter_chunks(s);
    qsort(s->found, (size_t)s->n_found, sizeof s->found[0], by_ratio);
    return GRADD_OK;
}

/* ---- sets ------------------------------------------------------------------------------------ */

static void set_kept(search_t *s, int n, bool keep) {
    for (int c = 0; c < n; c++) {
        const graph_node_t *node = &s->g->nodes[s->found[c].node];
        chunked_t *chunked = s->found[c].chunked;
        if (chunked) recompute_set_level(s->r, chunked, chunked->level + (keep ? -1 : 1));
        for (int j = 0; j < node->n_out && !chunked; j++)
            if (node->out[j] != GRADD_NONE && node->out[j] < s->r->n_values &&
                s->r->first_saved[node->out[j]])
                s->r->keep[node->out[j]] = keep;
    }
}

static gradd_status_t add_set(search_t *s, int n) {
    recompute_sets_t *sets = s->sets;
    if (sets->n == sets->cap) {
        const int wider = sets->cap ? 2 * sets->cap : 64;
        int64_t *moved = realloc(sets->peak, sizeof moved[0] * (size_t)wider);
        if (!moved) return no_memory();
        sets->peak = moved;
        sets->cap = wider;
    }
    for (int c = 0; c < n; c++) {
        const graph_node_t *node = &s->g->nodes[s->found[c].node];
        chunked_t *chunked = s->found[c].chunked;
        if (chunked) chunked->since[chunked->level] = sets->n;
        for (int j = 0; j < node->n_out && !chunked; j++)
            if (node->out[j] != GRADD_NONE) sets->dropped[node->out[j]] = sets->n;
    }
    sets->peak[sets->n++] = s->r->in_use[s->r->peak];
    return GRADD_OK;
}

/* Gives up the best candidates, if that lowers the peak; *n = how many they may be. */
static gradd_status_t try_batch(search_t *s, int *n) {
    const int64_t before = s->r->in_use[s->r->peak];
    const int n_before = s->r->n_peak;
    int batch = 1;
    while (batch < *n && batch < s->n_found &&
           s->found[batch].ratio >= SEARCH_ALIKE * s->found[0].ratio)
        batch++;
    set_kept(s, batch, false);
    GRADD_TRY(recompute_measure(s->r));
    const int64_t now = s->r->in_use[s->r->peak];
    if (now < before || (now == before && s->r->n_peak < n_before)) return add_set(s, batch);
    set_kept(s, batch, true);
    if (batch == 1) s->banned[s->found[0].node] = true;
    *n = batch / 2 ? batch / 2 : 1;
    return recompute_measure(s->r);
}

static gradd_status_t descend(search_t *s) {
    int batch = 0, tries = 4 * SEARCH_BATCHES;
    for (;;) {
        GRADD_TRY(find_candidates(s));
        if (!s->n_found || !tries--) return GRADD_OK;
        if (!batch) batch = 1 + s->n_found / SEARCH_BATCHES;
        GRADD_TRY(try_batch(s, &batch));
    }
}

static gradd_status_t search(search_t *s, int64_t *flow) {
    find_positions(s);
    add_up_flow(s, flow);
    find_layers(s, flow);
    GRADD_TRY(add_set(s, 0));
    GRADD_TRY(descend(s));
    s->sets->layers = s->sets->n - 1;
    s->between = true;
    return descend(s);
}

gradd_status_t recompute_search(recompute_t *r, recompute_sets_t *out) {
    const graph_t *g = r->plan->graph;
    const size_t values = (size_t)r->n_values + 1, nodes = (size_t)g->n_forward + 1;
    search_t s = {.r = r, .g = g, .sets = out};
    *out = (recompute_sets_t){.dropped = calloc(values, sizeof out->dropped[0])};
    s.last = malloc(sizeof s.last[0] * values);
    s.first = malloc(sizeof s.first[0] * values);
    s.pinned = calloc(values, sizeof s.pinned[0]);
    s.banned = calloc(nodes, sizeof s.banned[0]);
    s.seen = calloc(nodes, sizeof s.seen[0]);
    s.stack = malloc(sizeof s.stack[0] * nodes);
    s.found = malloc(sizeof s.found[0] * nodes);
    int64_t *flow = malloc(sizeof flow[0] * ((size_t)r->sequence.n_forward + 2));
    const bool got = out->dropped && s.last && s.first && s.pinned && s.banned && s.seen &&
                     s.stack && s.found && flow;
    gradd_status_t status = got ? search(&s, flow) : no_memory();
    free(s.last);
    free(s.first);
    free(s.pinned);
    free(s.banned);
    free(s.seen);
    free(s.stack);
    free(s.found);
    free(flow);
    return status;
}

void recompute_sets_finish(recompute_sets_t *sets) {
    free(sets->dropped);
    free(sets->peak);
    *sets = (recompute_sets_t){0};
}
