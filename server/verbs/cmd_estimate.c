/* Verb plan.estimate: the memory of training with a plan, in parts. Engine thread. */
#include <stdlib.h>

#include "server/explain/estimate.h"
#include "server/explain/explain_report.h"
#include "server/verbs/worker.h"

enum {
    ASK_PLAN,
    ASK_MORE,
    ASK_OPTIMIZER,
    ASK_ACCUMULATE,
    ASK_HELD,
    ASK_TRAINED,
    ASK_ELEMENTS,
    ASK_CURVE
};

#define MAX_MORE 1024 /* plans of one step */

/* The wanted estimate. */
typedef struct wanted_s {
    const optimizer_t *optimizer;
    bool curve;
    estimate_t e;
} wanted_t;

/* Inputs come with the call or from a binding; of the latter a gradient may be wanted. */
static gradd_status_t add_inputs(const session_plan_t *plan, const gradd_plan_info_t *info,
                                 const optimizer_t *optimizer, estimate_t *e) {
    estimate_role_t *roles = calloc((size_t)plan->n_in + 1, sizeof *roles); /* ESTIMATE_FROZEN */
    if (!roles) return GRADD_FAIL(NOMEM, "no memory for an estimate");
    for (int i = 0; i < plan->n_grads; i++)
        if (info->has_grad[i]) roles[plan->grads[i]] = ESTIMATE_TRAINED;
    for (int k = 0; k < plan->n_rest; k++)
        roles[plan->rest[k]] = ESTIMATE_DATA;
    for (int i = 0; i < plan->n_in; i++)
        estimate_add_input(e, roles[i], &plan->in[i], optimizer);
    free(roles);
    return GRADD_OK;
}

static void put_parts(wire_out_t *out, const estimate_t *e) {
    uint32_t n = 0;
    char amount[24];
    while (estimate_parts[n].key)
        n++;
    wire_key(out, "parts");
    wire_put_list(out, n);
    for (const estimate_part_t *part = estimate_parts; part->key; part++) {
        wire_put_map(out, 4);
        wire_put_text(out, "key");
        wire_put_text(out, part->key);
        wire_put_text(out, "heading");
        wire_put_text(out, part->heading);
        wire_put_text(out, "bytes");
        wire_put_i64(out, estimate_value(e, part));
        wire_put_text(out, "amount");
        wire_put_text(out, explain_amount(estimate_value(e, part), amount));
    }
}

static void put_curve(wire_out_t *out, const gradd_curve_t *curve) {
    char line[ESTIMATE_CURVE_LINE];
    wire_key(out, "curve");
    wire_put_list(out, (uint32_t)curve->n);
    for (int i = 0; i < curve->n; i++) {
        wire_put_map(out, 5);
        wire_put_text(out, "bytes");
        wire_put_i64(out, curve->points[i].arena_bytes);
        wire_put_text(out, "us");
        wire_put_f64(out, curve->points[i].extra_us);
        wire_put_text(out, "recomputed");
        wire_put_i64(out, curve->points[i].recomputed_bytes);
        wire_put_text(out, "percent");
        wire_put_f64(out, estimate_percent(curve, i));
        wire_put_text(out, "line");
        wire_put_text(out, estimate_curve_line(curve, i, line));
    }
    wire_key(out, "model_us");
    wire_put_f64(out, curve->model_us);
    wire_key(out, "curve_head");
    wire_put_text(out, ESTIMATE_CURVE_HEAD);
}

static gradd_status_t add_plan(const session_objects_t *objects, uint64_t id, wanted_t *w) {
    const session_plan_t *plan = id_list_get(&objects->plans, id);
    if (!plan) return GRADD_FAIL(STALE, "plan.estimate: there is no such plan (any more)");
    const gradd_plan_info_t *info = gradd_plan_info(plan->compiled->plan);
    GRADD_TRY(add_inputs(plan, info, w->optimizer, &w->e));
    estimate_add_plan(&w->e, info, plan->gmask, plan->n_gmask);
    if (!w->curve) return GRADD_OK;
    gradd_curve_t curve;
    GRADD_TRY(gradd_plan_curve(plan->compiled->plan, &curve));
    if (w->e.curve.n)
        estimate_merge_curves(&w->e.curve, &curve);
    else
        w->e.curve = curve;
    return GRADD_OK;
}

/* A number of bytes or elements; `given` is NULL where there is none, which is 0. */
static gradd_status_t read_amount(const msgpack_object *given, const char *name, int64_t *out) {
    const uint64_t value = given ? wire_u64(given) : 0;
    if (value > INT64_MAX)
        return GRADD_FAIL(LIMIT, "plan.estimate: field '%s' is above 2^63 - 1", name);
    *out = (int64_t)value;
    return GRADD_OK;
}

static gradd_status_t plan_estimate(worker_t *worker, request_t *request) {
    (void)worker;
    const session_objects_t *objects = request->session->objects;
    const msgpack_object *const *args = request->args;
    const msgpack_object *name = args[ASK_OPTIMIZER], *more = args[ASK_MORE];
    wanted_t w = {.curve = wire_flag(args[ASK_CURVE])};
    int64_t held = 0, trained = 0, elements = 0;
    char foot[120];
    GRADD_TRY(estimate_optimizer(name ? name->via.str.ptr : NULL, name ? name->via.str.size : 0,
                                 "plan.estimate: field 'optimizer'", &w.optimizer));
    GRADD_TRY(read_amount(args[ASK_HELD], "held", &held));
    GRADD_TRY(read_amount(args[ASK_TRAINED], "trained", &trained));
    GRADD_TRY(read_amount(args[ASK_ELEMENTS], "elements", &elements));
    GRADD_TRY(add_plan(objects, wire_u64(args[ASK_PLAN]), &w));
    for (int i = 0; more && i < wire_count(more); i++)
        GRADD_TRY(add_plan(objects, wire_u64(wire_at(more, i)), &w));
    if (args[ASK_TRAINED]) estimate_set_trained(&w.e, trained, elements, w.optimizer);
    if (args[ASK_HELD]) w.e.frozen = held > w.e.parameters ? held - w.e.parameters : 0;
    estimate_finish(&w.e, wire_flag(args[ASK_ACCUMULATE]));
    put_parts(&request->reply, &w.e);
    snprintf(foot, sizeof foot, ESTIMATE_FOOT, w.optimizer->name);
    wire_key(&request->reply, "foot");
    wire_put_text(&request->reply, foot);
    if (w.curve) put_curve(&request->reply, &w.e.curve);
    return GRADD_OK;
}

GRADD_COMMANDS(
    estimate,
    {
        .name = "plan.estimate",
        .handle = plan_estimate,
        .needs_session = true,
        .fields = {[ASK_PLAN] = {.name = "plan", .kind = WIRE_U64},
                   [ASK_MORE] = {.name = "more",
                                 .kind = WIRE_LIST,
                                 .item = WIRE_U64,
                                 .optional = true,
                                 .max = MAX_MORE},
                   [ASK_OPTIMIZER] = {.name = "optimizer", .kind = WIRE_TEXT, .optional = true},
                   [ASK_ACCUMULATE] = {.name = "accumulate", .kind = WIRE_FLAG, .optional = true},
                   [ASK_HELD] = {.name = "held", .kind = WIRE_U64, .optional = true},
                   [ASK_TRAINED] = {.name = "trained", .kind = WIRE_U64, .optional = true},
                   [ASK_ELEMENTS] = {.name = "elements", .kind = WIRE_U64, .optional = true},
                   [ASK_CURVE] = {.name = "curve", .kind = WIRE_FLAG, .optional = true}}
});
