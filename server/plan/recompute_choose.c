/* Takes the cheapest set of kept values that fits a budget, or the one that a policy names, and
 * draws the curve of memory and time. See recompute.h.
 *
 * Which sets are laid out does not depend on the budget, and each needs at least the time of those
 * before it. So the first that fits is the cheapest that does, and a smaller budget never takes
 * more memory: what fits it would have been found for the larger one, too. */
#include <stdlib.h>
#include <string.h>

#include "server/plan/recompute.h"

typedef struct point_s {
    int set;
    int64_t arena_bytes, saved_bytes;
    double extra_us;
} point_t;

typedef struct chooser_s {
    recompute_t r;
    recompute_sets_t sets;
    int set[RECOMPUTE_POINTS + 2]; /* that are laid out, rising */
    point_t point[RECOMPUTE_POINTS + 2];
    int n;
} chooser_t;

/* Evenly by memory, with the first, the last and the one of a policy. */
static void pick_sets(chooser_t *c) {
    const recompute_sets_t *s = &c->sets;
    const int64_t top = s->peak[0], range = top - s->peak[s->n - 1];
    int steps = 0; /* of the way down */
    for (int i = 0; i < s->n; i++) {
        const int before = steps;
        while (steps < RECOMPUTE_POINTS &&
               top - s->peak[i] >= range / (RECOMPUTE_POINTS - 1) * steps)
            steps++;
        if (steps > before || i == s->layers || i == s->n - 1) c->set[c->n++] = i;
    }
}

static gradd_status_t take_set(chooser_t *c, int set) {
    for (int v = 0; v < c->r.n_values; v++) {
        const int since = set ? c->sets.dropped[v] : 0;
        const bool known = c->r.first_saved[v];
        c->r.keep[v] = known && !(since && since <= set);
    }
    return recompute_measure(&c->r);
}

static gradd_status_t lay_out_set(chooser_t *c, int i) {
    recompute_t *r = &c->r;
    layout_t layout = {0};
    GRADD_TRY(take_set(c, c->set[i]));
    const layout_options_t o = {.sequence = &r->sequence,
                                .saved = r->saved,
                                .n_fixed = r->n_values,
                                .grads = r->ends.primary->grads,
                                .n_grads = r->plan->n_grads,
                                .place_outputs = true};
    GRADD_TRY(layout_make(r->plan->graph, &o, &layout));
    c->point[i] = (point_t){c->set[i], layout.arena_bytes, layout.saved_bytes, r->extra_us};
    layout_finish(&layout);
    return GRADD_OK;
}

/* With everything kept, which may do. */
static gradd_status_t begin(chooser_t *c, gradd_plan_t *p, const recompute_ends_t *ends) {
    c->n = 1;
    GRADD_TRY(recompute_begin(p, ends, &c->r));
    return lay_out_set(c, 0);
}

static gradd_status_t search(chooser_t *c) {
    GRADD_TRY(recompute_search(&c->r, &c->sets));
    c->n = 0;
    pick_sets(c);
    return GRADD_OK;
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

static gradd_status_t too_small(const chooser_t *c, int64_t budget) {
    const point_t *least = &c->point[0];
    for (int i = 1; i < c->n; i++)
        if (c->point[i].arena_bytes < least->arena_bytes) least = &c->point[i];
    const double percent = c->r.total_us > 0 ? 100 * least->extra_us / c->r.total_us : 0;
    return GRADD_FAIL(LIMIT,
                      "no plan fits the memory budget of %lld bytes: the smallest that can be met "
                      "is %lld bytes, for %.1f %% more time by the model; a plan that computes "
                      "nothing again takes %lld bytes",
                      (long long)budget, (long long)least->arena_bytes, percent,
                      (long long)c->point[0].arena_bytes);
}

static gradd_status_t choose_by_budget(chooser_t *c, int64_t budget, point_t *out) {
    *out = c->point[0];
    if (out->arena_bytes <= budget) return GRADD_OK;
    GRADD_TRY(search(c));
    for (int i = 1; i < c->n; i++) {
        GRADD_TRY(lay_out_set(c, i));
        *out = c->point[i];
        if (out->arena_bytes <= budget) return GRADD_OK;
    }
    return too_small(c, budget);
}

static gradd_status_t choose_by_policy(chooser_t *c, gradd_recompute_t policy, point_t *out) {
    GRADD_TRY(search(c));
    const int set = policy == GRADD_RECOMPUTE_LAYERS ? c->sets.layers : c->sets.n - 1;
    int i = 0;
    while (c->set[i] != set)
        i++;
    GRADD_TRY(lay_out_set(c, i));
    *out = c->point[i];
    return GRADD_OK;
}

/* What is kept from now on is what this set reads. */
static gradd_status_t settle(const chooser_t *c, const point_t *taken, gradd_plan_t *p) {
    bool *saved = calloc((size_t)p->graph->n_values + 1, sizeof saved[0]);
    if (!saved) return GRADD_FAIL(NOMEM, "no memory to plan the graph");
    memcpy(saved, c->r.saved, sizeof saved[0] * (size_t)c->r.n_values);
    free(p->saved);
    p->saved = saved;
    p->info.whole_bytes = c->point[0].arena_bytes;
    p->info.recomputed_bytes = c->point[0].saved_bytes - taken->saved_bytes;
    p->info.recompute_us = taken->extra_us;
    p->info.model_us = c->r.total_us;
    return GRADD_OK;
}

gradd_status_t recompute_choose(gradd_plan_t *p, const recompute_ends_t *ends) {
    const int64_t budget = p->options.memory_budget;
    chooser_t c = {0};
    point_t taken = {0};
    gradd_status_t status = begin(&c, p, ends);
    if (!status && budget) status = choose_by_budget(&c, budget, &taken);
    if (!status && !budget) status = choose_by_policy(&c, p->options.recompute, &taken);
    if (!status) status = settle(&c, &taken, p);
    finish(&c);
    return status;
}

/* ---- the curve ------------------------------------------------------------------------------- */

/* Points that some other one beats in memory and time go; the rest falls in memory. */
static int keep_best(const chooser_t *c, const point_t **out) {
    int n = 0;
    for (int i = 0; i < c->n; i++) {
        if (n && c->point[i].arena_bytes >= out[n - 1]->arena_bytes) continue;
        if (n && c->point[i].extra_us <= out[n - 1]->extra_us) n--;
        out[n++] = &c->point[i];
    }
    return n;
}

gradd_status_t recompute_curve(gradd_plan_t *p, const recompute_ends_t *ends, gradd_curve_t *out) {
    const point_t *best[RECOMPUTE_POINTS + 2];
    chooser_t c = {0};
    *out = (gradd_curve_t){0};
    gradd_status_t status = begin(&c, p, ends);
    if (!status) status = search(&c);
    for (int i = 1; i < c.n && !status; i++)
        status = lay_out_set(&c, i);
    if (!status) {
        const int n = keep_best(&c, best), most = n < GRADD_CURVE_POINTS ? n : GRADD_CURVE_POINTS;
        for (int i = 0; i < most; i++) {
            const point_t *at = best[most > 1 ? i * (n - 1) / (most - 1) : 0];
            out->points[i] = (gradd_curve_point_t){
                at->arena_bytes, c.point[0].saved_bytes - at->saved_bytes, at->extra_us};
        }
        out->n = most;
        out->model_us = c.r.total_us;
    }
    finish(&c);
    return status;
}
