/* Takes the cheapest set of kept values that fits a budget, or the one that a policy names, and
 * draws the curve of memory and time. See recompute.h.
 *
 * The sets do not depend on the budget, and each needs at least the time of those before it. So the
 * first that fits is the cheapest that does, and a smaller budget never takes more memory: what
 * fits it would have been found for the larger one, too. The bytes in use at once, which the
 * search knows, are a bound that leaves most sets without a layout. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/plan/recompute.h"

/* So many sets are laid out for a curve. */
#define CURVE_SETS 14

typedef struct point_s {
    int set;
    int64_t arena_bytes, saved_bytes;
    double extra_us;
} point_t;

typedef struct chooser_s {
    recompute_t r;
    recompute_sets_t sets;
    point_t whole; /* set 0 */
} chooser_t;

static void take_chunks(chooser_t *c, int set) {
    for (int i = 0; i < c->r.n_chunked; i++) {
        chunked_t *chunked = &c->r.chunked[i];
        int level = 0;
        for (int l = 1; l < chunked->n; l++)
            if (chunked->since[l] && chunked->since[l] <= set) level = l;
        recompute_set_level(&c->r, chunked, level);
    }
}

static gradd_status_t take_set(chooser_t *c, int set) {
    take_chunks(c, set);
    for (int v = 0; v < c->r.n_values; v++) {
        const int since = set ? c->sets.dropped[v] : 0;
        c->r.keep[v] = c->r.first_saved[v] && !(since && since <= set);
    }
    return recompute_measure(&c->r);
}

static gradd_status_t lay_out_set(chooser_t *c, int set, point_t *out) {
    recompute_t *r = &c->r;
    layout_t layout = {0};
    GRADD_TRY(take_set(c, set));
    const layout_options_t o =
        layout_of_plan(r->plan, &r->sequence, r->saved, r->n_values, r->ends.primary);
    GRADD_TRY(layout_make(r->plan->graph, &o, &layout));
    *out = (point_t){set, layout.arena_bytes, layout.saved_bytes, r->extra_us};
    layout_finish(&layout);
    return GRADD_OK;
}

/* The set that takes the least memory. */
static gradd_status_t find_least(chooser_t *c, point_t *out) {
    *out = c->whole;
    for (int i = c->sets.n - 1; i > 0; i--) {
        point_t point;
        if (c->sets.peak[i] >= out->arena_bytes) continue;
        GRADD_TRY(lay_out_set(c, i, &point));
        if (point.arena_bytes < out->arena_bytes) *out = point;
    }
    return GRADD_OK;
}

/* With everything kept, which may do; `chunks`: they may be shorter. */
static gradd_status_t begin(chooser_t *c, gradd_plan_t *p, const recompute_ends_t *ends,
                            bool chunks) {
    GRADD_TRY(recompute_begin(p, ends, &c->r));
    if (chunks) GRADD_TRY(recompute_find_chunks(&c->r));
    return lay_out_set(c, 0, &c->whole);
}

static void finish(chooser_t *c) {
    recompute_finish(&c->r);
    recompute_sets_finish(&c->sets);
}

/* ---- policies -------------------------------------------------------------------------------- */

static const char *const names[] = {
    [GRADD_RECOMPUTE_NONE] = "none",
    [GRADD_RECOMPUTE_LAYERS] = "layers",
    [GRADD_RECOMPUTE_COMPROMISE] = "compromise",
};

const char *gradd_recompute_name(gradd_recompute_t recompute) {
    return recompute >= 0 && (size_t)recompute < sizeof names / sizeof names[0] ? names[recompute]
                                                                                : "?";
}

gradd_status_t gradd_recompute_find(const char *name, size_t n, const char *what,
                                    gradd_recompute_t *out_recompute) {
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strlen(names[i]) != n || memcmp(names[i], name, n)) continue;
        *out_recompute = (gradd_recompute_t)i;
        return GRADD_OK;
    }
    return GRADD_FAIL(UNSUPPORTED, "%s '%.*s': expected none, layers or compromise", what,
                      n < 60 ? (int)n : 60, name);
}

/* ---- the choice ------------------------------------------------------------------------------ */

#define AMOUNT_BYTES 64

/* "3145728 bytes (3.0 MiB)" */
static const char *amount(int64_t bytes, char text[AMOUNT_BYTES]) {
    const double kib = (double)bytes / 1024;
    const int n = snprintf(text, AMOUNT_BYTES, "%lld bytes", (long long)bytes);
    if (kib >= 1)
        snprintf(text + n, AMOUNT_BYTES - (size_t)n, " (%.1f %s)", kib < 1024 ? kib : kib / 1024,
                 kib < 1024 ? "KiB" : "MiB");
    return text;
}

static gradd_status_t too_small(chooser_t *c, int64_t budget) {
    point_t least;
    GRADD_TRY(find_least(c, &least));
    const double percent = c->r.total_us > 0 ? 100 * least.extra_us / c->r.total_us : 0;
    char asked[AMOUNT_BYTES], smallest[AMOUNT_BYTES], whole[AMOUNT_BYTES];
    return GRADD_FAIL(NOMEM,
                      "no plan fits the memory budget of %s: the smallest that can be met is %s, "
                      "for %.1f %% more time by the model; a plan that computes nothing again "
                      "takes %s",
                      amount(budget, asked), amount(least.arena_bytes, smallest), percent,
                      amount(c->whole.arena_bytes, whole));
}

static gradd_status_t choose_by_budget(chooser_t *c, int64_t budget, point_t *out) {
    GRADD_TRY(recompute_search(&c->r, &c->sets));
    for (int i = 1; i < c->sets.n; i++) {
        if (c->sets.peak[i] > budget) continue;
        GRADD_TRY(lay_out_set(c, i, out));
        if (out->arena_bytes <= budget) return GRADD_OK;
    }
    return too_small(c, budget);
}

static gradd_status_t choose_by_policy(chooser_t *c, gradd_recompute_t policy, point_t *out) {
    GRADD_TRY(recompute_search(&c->r, &c->sets));
    const int set = policy == GRADD_RECOMPUTE_LAYERS ? c->sets.layers : c->sets.n - 1;
    return lay_out_set(c, set, out);
}

/* From now on, the plan keeps the values that this set reads. */
static gradd_status_t settle(const chooser_t *c, const point_t *taken, gradd_plan_t *p) {
    bool *saved = calloc((size_t)p->graph->n_values + 1, sizeof saved[0]);
    if (!saved) return GRADD_FAIL(NOMEM, "no memory to plan the graph");
    memcpy(saved, c->r.saved, sizeof saved[0] * (size_t)c->r.n_values);
    free(p->saved);
    p->saved = saved;
    p->info.whole_bytes = c->whole.arena_bytes;
    p->info.recomputed_bytes = c->whole.saved_bytes - taken->saved_bytes;
    p->info.recompute_us = taken->extra_us;
    p->info.model_us = c->r.total_us;
    return GRADD_OK;
}

/* Whether the plan as it is meets the budget: then it stays so, without clones. */
static gradd_status_t try_whole(gradd_plan_t *p, const recompute_ends_t *ends, int64_t budget,
                                bool *out_fits) {
    sequence_t sequence = {0};
    layout_t layout = {0};
    gradd_status_t status = plan_join(p, ends->primary, p->saved, &sequence);
    if (!status) status = plan_choose(p, &sequence);
    for (int k = 0; k < sequence.n && !status; k++)
        p->info.model_us +=
            plan_node_us(p, &p->graph->nodes[sequence.nodes[k]], &sequence.choices[k]);
    if (!status) status = plan_apply_passes(p, &sequence);
    if (!status) {
        const layout_options_t o =
            layout_of_plan(p, &sequence, p->saved, p->graph->n_values, ends->primary);
        status = layout_make(p->graph, &o, &layout);
    }
    p->info.whole_bytes = layout.arena_bytes;
    *out_fits = !status && layout.arena_bytes <= budget;
    layout_finish(&layout);
    sequence_finish(&sequence);
    return status;
}

gradd_status_t recompute_choose(gradd_plan_t *p, const recompute_ends_t *ends) {
    const int64_t budget = p->options.memory_budget;
    chooser_t c = {0};
    point_t taken = {0};
    bool fits = false;
    if (budget) GRADD_TRY(try_whole(p, ends, budget, &fits));
    if (fits) return GRADD_OK;
    gradd_status_t status = begin(&c, p, ends, budget > 0);
    if (!status && budget) status = choose_by_budget(&c, budget, &taken);
    if (!status && !budget) status = choose_by_policy(&c, p->options.recompute, &taken);
    if (!status) status = settle(&c, &taken, p);
    finish(&c);
    return status;
}

/* ---- the curve ------------------------------------------------------------------------------- */

/* Sets evenly by memory, with the first and the last. Rising; returns how many. */
static int pick_sets(const recompute_sets_t *s, int out[CURVE_SETS]) {
    const int64_t top = s->peak[0], range = top - s->peak[s->n - 1];
    int steps = 0, n = 0; /* of the way down */
    for (int i = 0; i < s->n && n < CURVE_SETS; i++) {
        const int before = steps;
        while (steps < CURVE_SETS - 1 && top - s->peak[i] >= range / (CURVE_SETS - 1) * steps)
            steps++;
        if (steps > before || i == s->n - 1) out[n++] = i;
    }
    return n;
}

/* Adds a point if it needs less memory; of two with the same time, the smaller one stays. There are
 * *n points. */
static void add_best(const point_t *point, point_t *best, int *n) {
    if (*n && point->arena_bytes >= best[*n - 1].arena_bytes) return;
    if (*n && point->extra_us <= best[*n - 1].extra_us) (*n)--;
    best[(*n)++] = *point;
}

static gradd_status_t find_best(chooser_t *c, point_t best[CURVE_SETS + 2], int *n) {
    int set[CURVE_SETS];
    point_t point, least;
    const int n_sets = pick_sets(&c->sets, set);
    *n = 0;
    GRADD_TRY(find_least(c, &least));
    add_best(&c->whole, best, n);
    for (int i = 1; i < n_sets && set[i] < least.set; i++) {
        GRADD_TRY(lay_out_set(c, set[i], &point));
        add_best(&point, best, n);
    }
    add_best(&least, best, n);
    return GRADD_OK;
}

static void fill_curve(const chooser_t *c, const point_t *best, int n, gradd_curve_t *out) {
    out->n = n < GRADD_CURVE_POINTS ? n : GRADD_CURVE_POINTS;
    out->model_us = c->r.total_us;
    for (int i = 0; i < out->n; i++) {
        const point_t *at = &best[out->n > 1 ? i * (n - 1) / (out->n - 1) : 0];
        out->points[i] = (gradd_curve_point_t){
            at->arena_bytes, c->whole.saved_bytes - at->saved_bytes, at->extra_us};
    }
}

gradd_status_t recompute_curve(gradd_plan_t *p, const recompute_ends_t *ends, gradd_curve_t *out) {
    point_t best[CURVE_SETS + 2];
    chooser_t c = {0};
    int n = 0;
    *out = (gradd_curve_t){0};
    gradd_status_t status = begin(&c, p, ends, true);
    if (!status) status = recompute_search(&c.r, &c.sets);
    if (!status) status = find_best(&c, best, &n);
    if (!status) fill_curve(&c, best, n, out);
    finish(&c);
    return status;
}
