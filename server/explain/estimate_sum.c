/* The parts of an estimate and how they are added up. See estimate.h. */
#include "server/explain/estimate.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "server/explain/explain_report.h"

static const optimizer_t optimizers[] = {
#define OPTIMIZER(name, per_byte, per_element) {name, per_byte, per_element},
#include "server/explain/columns.inc"
#undef OPTIMIZER
};

const char estimate_optimizers[] = ""
#define OPTIMIZER(name, per_byte, per_element) " " name
#include "server/explain/columns.inc"
#undef OPTIMIZER
    ;

const estimate_part_t estimate_parts[] = {
#define PART(member, heading) {#member, heading, offsetof(estimate_t, member)},
#include "server/explain/columns.inc"
#undef PART
    {0}};

int64_t estimate_value(const estimate_t *e, const estimate_part_t *part) {
    return *(const int64_t *)((const char *)e + part->offset);
}

double estimate_percent(const gradd_curve_t *curve, int point) {
    return curve->model_us > 0 ? 100 * curve->points[point].extra_us / curve->model_us : 0;
}

const char *estimate_curve_line(const gradd_curve_t *curve, int point,
                                char buffer[ESTIMATE_CURVE_LINE]) {
    char arena[24], again[24];
    const gradd_curve_point_t *p = &curve->points[point];
    snprintf(buffer, ESTIMATE_CURVE_LINE, "%22s %15s %8.1f %%",
             explain_amount(p->arena_bytes, arena), explain_amount(p->recomputed_bytes, again),
             estimate_percent(curve, point));
    return buffer;
}

static bool is_named(const optimizer_t *optimizer, const char *name, size_t n) {
    if (strlen(optimizer->name) != n) return false;
    for (size_t i = 0; i < n; i++)
        if (optimizer->name[i] != (name[i] == '_' ? '-' : name[i])) return false;
    return true;
}

gradd_status_t estimate_optimizer(const char *name, size_t n, const char *what,
                                  const optimizer_t **out_optimizer) {
    for (size_t i = 0; i < sizeof optimizers / sizeof optimizers[0]; i++)
        if (!name || is_named(&optimizers[i], name, n)) {
            *out_optimizer = &optimizers[i];
            return GRADD_OK;
        }
    return GRADD_FAIL(UNSUPPORTED, "%s '%.*s': expected one of%s", what, n < 60 ? (int)n : 60, name,
                      estimate_optimizers);
}

static void add(int64_t *sum, int64_t bytes) {
    if (__builtin_add_overflow(*sum, bytes, sum)) *sum = INT64_MAX;
}

static int64_t times(int64_t count, int bytes) {
    int64_t product;
    return __builtin_mul_overflow(count, bytes, &product) ? INT64_MAX : product;
}

void estimate_add_input(estimate_t *e, estimate_role_t role, const gradd_type_t *type,
                        const optimizer_t *optimizer) {
    int64_t bytes = gradd_type_bytes(type);
    if (role == ESTIMATE_TRAINED) {
        add(&e->parameters, bytes);
        add(&e->gradients, bytes);
        add(&e->state, times(bytes, optimizer->per_byte));
        add(&e->state, times(gradd_type_count(type), optimizer->per_element));
    } else {
        add(role == ESTIMATE_DATA ? &e->ring : &e->frozen, bytes);
    }
}

void estimate_add_plan(estimate_t *e, const gradd_plan_info_t *info, const int32_t *arriving,
                       int n_arriving) {
    for (int j = 0; j < info->n_outputs; j++)
        add(&e->ring, gradd_type_bytes(&info->outputs[j]));
    for (int k = 0; k < n_arriving; k++)
        add(&e->ring, gradd_type_bytes(&info->outputs[arriving[k]]));
    add(&e->activations, info->arena_bytes);
    add(&e->constants, info->constant_bytes);
}

void estimate_set_trained(estimate_t *e, int64_t bytes, int64_t elements,
                          const optimizer_t *optimizer) {
    e->parameters = e->gradients = bytes;
    e->state = times(bytes, optimizer->per_byte);
    add(&e->state, times(elements, optimizer->per_element));
}

/* Modelled time per byte that the step behind a point saves; the last point has none. */
static double price(const gradd_curve_t *curve, int point) {
    if (point + 1 >= curve->n) return INFINITY;
    const gradd_curve_point_t *p = &curve->points[point];
    return (p[1].extra_us - p[0].extra_us) / (double)(p[0].arena_bytes - p[1].arena_bytes);
}

void estimate_merge_curves(gradd_curve_t *curve, const gradd_curve_t *other) {
    gradd_curve_point_t found[2 * GRADD_CURVE_POINTS];
    int i = 0, j = 0, n = 0;
    for (;;) {
        const gradd_curve_point_t *a = &curve->points[i], *b = &other->points[j];
        found[n++] = (gradd_curve_point_t){a->arena_bytes + b->arena_bytes,
                                           a->recomputed_bytes + b->recomputed_bytes,
                                           a->extra_us + b->extra_us};
        if (i + 1 >= curve->n && j + 1 >= other->n) break;
        if (price(curve, i) <= price(other, j))
            i++;
        else
            j++;
    }
    curve->model_us += other->model_us;
    curve->n = n < GRADD_CURVE_POINTS ? n : GRADD_CURVE_POINTS;
    for (int k = 0; k < curve->n; k++) /* the first and the last one, and some between */
        curve->points[k] = found[curve->n > 1 ? k * (n - 1) / (curve->n - 1) : 0];
}

void estimate_finish(estimate_t *e, bool accumulate) {
    e->second_slot = accumulate ? e->gradients : 0;
    e->total = 0;
    for (const estimate_part_t *part = estimate_parts; part[1].key; part++)
        add(&e->total, estimate_value(e, part));
}
