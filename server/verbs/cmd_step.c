/* Verb step: one optimizer step on parameters in the client's memory, through its journal.
 *
 * Parameters and state are bindings, which are validated once; gradients come with the request,
 * because `.grad` may be another tensor every time. Everything that is written is checked to be
 * disjoint before the first element changes. Engine thread.
 */
#include <math.h>
#include <stdlib.h>

#include "server/exec/step.h"
#include "server/verbs/worker.h"

enum {
    STEP_STEP,
    STEP_JOURNAL,
    STEP_NORM,
    STEP_GROUPS,
    STEP_GROUP,
    STEP_P,
    STEP_M,
    STEP_V,
    STEP_G,
    STEP_W,
    STEP_ONCE,
    STEP_WIDTH,
    STEP_SCALE,
    STEP_FINITE
};

/* Field 'groups'. */
enum {
    GROUP_LR,
    GROUP_B1,
    GROUP_B2,
    GROUP_EPS,
    GROUP_DECAY,
    GROUP_MODE,
    GROUP_BC,
    GROUP_T,
    GROUP_N
};

static const wire_field_t group_keys[] = {
    [GROUP_LR] = {.name = "lr", .kind = WIRE_LIST, .item = WIRE_F64},
    [GROUP_B1] = {.name = "beta1", .kind = WIRE_LIST, .item = WIRE_F64},
    [GROUP_B2] = {.name = "beta2", .kind = WIRE_LIST, .item = WIRE_F64},
    [GROUP_EPS] = {.name = "eps", .kind = WIRE_LIST, .item = WIRE_F64},
    [GROUP_DECAY] = {.name = "weight_decay", .kind = WIRE_LIST, .item = WIRE_F64},
    [GROUP_MODE] = {.name = "mode", .kind = WIRE_LIST, .item = WIRE_U64},
    [GROUP_BC] = {.name = "bias_correction", .kind = WIRE_LIST, .item = WIRE_FLAG},
    [GROUP_T] = {.name = "t", .kind = WIRE_LIST, .item = WIRE_U64},
    {0},
};

#define MAX_T 9000000000000000 /* a double holds every one */

typedef struct update_s {
    binding_t *p, *m, *v; /* Borrowed */
    binding_t *w;         /* Borrowed: master weights of the bf16 and f16 parameters; or NULL */
    tensors_t g, journal;
    step_tensor_t *tensors; /* Owned */
    gradd_adam_t *groups;   /* Owned */
    step_request_t request;
    stepping_t *step; /* Owned; NULL = not begun */
} update_t;

static void update_end(session_objects_t *objects) {
    update_t *u = objects->update;
    if (!u) return;
    step_destroy(u->step);
    tensors_finish(&u->g);
    tensors_finish(&u->journal);
    free(u->tensors);
    free(u->groups);
    free(u);
    objects->update = NULL;
}

bool update_finish(session_objects_t *objects) {
    bool done = true;
    if (objects->update && step_continue(objects->update->step, &done) == GRADD_OK && !done)
        return false;
    update_end(objects);
    return true;
}

static gradd_status_t find(session_objects_t *objects, const msgpack_object *id, const char *field,
                           binding_t **out) {
    *out = id_list_get(&objects->bindings, wire_u64(id));
    if (!*out)
        return GRADD_FAIL(STALE, "step: field '%s': binding %llu is not known (bind it again)",
                          field, (unsigned long long)wire_u64(id));
    return GRADD_OK;
}

static gradd_status_t find_list(session_objects_t *objects, const msgpack_object *id,
                                const char *field, int n, binding_t **out) {
    GRADD_TRY(find(objects, id, field, out));
    if ((*out)->tensors.n != n)
        return GRADD_FAIL(TENSOR, "step: field '%s': expected %d tensors, got %d", field, n,
                          (*out)->tensors.n);
    return GRADD_OK;
}

/* One element of `field` against the parameter that it belongs to. */
static gradd_status_t check_type(const char *field, int i, gradd_dtype_t dtype,
                                 const gradd_type_t *parameter, const gradd_type_t *got) {
    char expected[GRADD_TYPE_TEXT], found[GRADD_TYPE_TEXT];
    if (got->dtype == dtype && gradd_type_count(parameter) == gradd_type_count(got))
        return GRADD_OK;
    return GRADD_FAIL(TENSOR, "step: %s[%d]: expected %s elements as in %s, got %s", field, i,
                      gradd_dtype_name(dtype), gradd_type_format(parameter, expected),
                      gradd_type_format(got, found));
}

static gradd_status_t fill_tensor(update_t *u, int i, uint64_t group, int *n_masters) {
    const gradd_type_t *p = &u->p->tensors.types[i];
    bool half = gradd_dtype_is_half(p->dtype);
    float *master = NULL;
    if (!half) GRADD_TRY(check_type("p", i, GRADD_DT_F32, p, p));
    GRADD_TRY(check_type("m", i, GRADD_DT_F32, p, &u->m->tensors.types[i]));
    GRADD_TRY(check_type("v", i, GRADD_DT_F32, p, &u->v->tensors.types[i]));
    if (u->g.address[i]) GRADD_TRY(check_type("g", i, p->dtype, p, &u->g.types[i]));
    if (half && u->w) {
        int k = (*n_masters)++;
        if (k >= u->w->tensors.n) return GRADD_OK; /* counted by the caller */
        GRADD_TRY(check_type("w", k, GRADD_DT_F32, p, &u->w->tensors.types[k]));
        master = u->w->tensors.address[k];
    }
    u->tensors[i] = (step_tensor_t){.p = u->p->tensors.address[i],
                                    .m = u->m->tensors.address[i],
                                    .v = u->v->tensors.address[i],
                                    .g = u->g.address[i],
                                    .n = gradd_type_count(p),
                                    .group = group < INT32_MAX ? (int)group : -1,
                                    .dtype = p->dtype,
                                    .master = master};
    return GRADD_OK;
}

/* Which parameters are stepped by rows; step_apply checks that they have such. */
static gradd_status_t fill_widths(update_t *u, const msgpack_object *width, int n) {
    if (wire_count(width) != n)
        return GRADD_FAIL(TENSOR, "step: field 'width': expected %d numbers, got %d", n,
                          wire_count(width));
    for (int i = 0; i < n; i++) {
        const uint64_t elements = wire_u64(wire_at(width, i));
        u->tensors[i].width = elements < INT64_MAX ? (int64_t)elements : INT64_MAX;
    }
    return GRADD_OK;
}

static gradd_status_t fill_tensors(update_t *u, const msgpack_object *group, int n) {
    int n_masters = 0;
    for (int i = 0; i < n; i++)
        GRADD_TRY(fill_tensor(u, i, wire_u64(wire_at(group, i)), &n_masters));
    if (u->w && n_masters != u->w->tensors.n)
        return GRADD_FAIL(TENSOR, "step: field 'bw': %d tensors for %d half parameters",
                          u->w->tensors.n, n_masters);
    return GRADD_OK;
}

/* No setting of Adam is negative or infinite; the decays of the moments stay below 1, by which the
 * bias correction divides. */
static gradd_status_t check_setting(int which, int k, double value) {
    bool beta = which == GROUP_B1 || which == GROUP_B2;
    if (isfinite(value) && value >= 0 && (!beta || value < 1)) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "step: field 'groups.%s[%d]': expected %s, got %g",
                      group_keys[which].name, k,
                      beta ? "a number from 0 to below 1" : "a finite number from 0", value);
}

static gradd_status_t fill_group(const msgpack_object *const *columns, int k,
                                 gradd_adam_t *out_group) {
    const msgpack_object *x[GROUP_N];
    for (int i = 0; i < GROUP_N; i++)
        x[i] = wire_at(columns[i], k);
    for (int i = GROUP_LR; i <= GROUP_DECAY; i++)
        GRADD_TRY(check_setting(i, k, wire_f64(x[i])));
    uint64_t mode = wire_u64(x[GROUP_MODE]), t = wire_u64(x[GROUP_T]);
    if (mode > GRADD_ADAMW_TORCH)
        return GRADD_FAIL(TENSOR, "step: field 'groups.mode[%d]': %llu, expected 0 to %d", k,
                          (unsigned long long)mode, GRADD_ADAMW_TORCH);
    if (t < 1 || t > MAX_T)
        return GRADD_FAIL(TENSOR, "step: field 'groups.t[%d]': %llu, expected 1 to %lld", k,
                          (unsigned long long)t, (long long)MAX_T);
    *out_group = (gradd_adam_t){.lr = wire_f64(x[GROUP_LR]),
                                .beta1 = wire_f64(x[GROUP_B1]),
                                .beta2 = wire_f64(x[GROUP_B2]),
                                .eps = wire_f64(x[GROUP_EPS]),
                                .weight_decay = wire_f64(x[GROUP_DECAY]),
                                .mode = (gradd_adam_mode_t)mode,
                                .bias_correction = wire_flag(x[GROUP_BC]),
                                .step = (int64_t)t};
    return GRADD_OK;
}

static gradd_status_t fill_groups(update_t *u, const msgpack_object *table) {
    const msgpack_object *columns[GROUP_N];
    int n = wire_rows(table);
    u->groups = calloc((size_t)n + 1, sizeof u->groups[0]);
    if (!u->groups) return GRADD_FAIL(NOMEM, "no memory for a step");
    for (int i = 0; i < GROUP_N; i++)
        columns[i] = wire_in(table, group_keys[i].name);
    for (int k = 0; k < n; k++)
        GRADD_TRY(fill_group(columns, k, &u->groups[k]));
    u->request.groups = u->groups;
    u->request.n_groups = n;
    return GRADD_OK;
}

static gradd_status_t disjoint(const char *a_name, const tensors_t *a, const char *b_name,
                               const tensors_t *b) {
    int i, k;
    if (!spans_overlap(a->spans, a->n_spans, b->spans, b->n_spans, &i, &k)) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "step: %s[%d] and %s[%d] share memory", a_name, i, b_name, k);
}

static gradd_status_t check_memory(const update_t *u) {
    static const tensors_t none = {0};
    const tensors_t *lists[] = {&u->p->tensors, &u->m->tensors,
                                &u->v->tensors, u->w ? &u->w->tensors : &none,
                                &u->journal,    &u->g};
    static const char *const names[] = {"p", "m", "v", "w", "journal", "g"};
    for (int a = 0; a < 6; a++) {
        int i, k;
        for (int b = 0; b < a; b++)
            GRADD_TRY(disjoint(names[a], lists[a], names[b], lists[b]));
        if (a < 5 && spans_overlap_self(lists[a]->spans, lists[a]->n_spans, &i, &k))
            return GRADD_FAIL(TENSOR, "step: %s[%d] and %s[%d] share memory", names[a], i, names[a],
                              k);
    }
    return GRADD_OK;
}

static gradd_status_t fill_journal(update_t *u, const msgpack_object *journal,
                                   gradd_handle_table_t *table) {
    GRADD_TRY(tensors_init_one(&u->journal, table, journal, "step: journal"));
    if (u->journal.types[0].dtype != GRADD_DT_U8)
        return GRADD_FAIL(TENSOR, "step: journal: expected u8, got %s",
                          gradd_dtype_name(u->journal.types[0].dtype));
    if (gradd_type_bytes(&u->journal.types[0]) < (int64_t)STEP_JOURNAL_BYTES)
        return GRADD_FAIL(TENSOR, "step: journal: expected %zu bytes, got %lld", STEP_JOURNAL_BYTES,
                          (long long)gradd_type_bytes(&u->journal.types[0]));
    u->request.journal = u->journal.address[0];
    u->request.journal_bytes = gradd_type_bytes(&u->journal.types[0]);
    return GRADD_OK;
}

static gradd_status_t fill_norm(update_t *u, const msgpack_object *norm) {
    u->request.max_norm = norm ? wire_f64(norm) : 0;
    if (isfinite(u->request.max_norm) && u->request.max_norm >= 0) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "step: field 'max_norm': expected a finite number from 0, got %g",
                      u->request.max_norm);
}

/* Of loss scaling. */
static gradd_status_t fill_scale(update_t *u, const msgpack_object *scale,
                                 const msgpack_object *finite) {
    u->request.finite = finite && wire_flag(finite);
    if (!scale) return GRADD_OK;
    u->request.grad_scale = wire_f64(scale);
    if (isfinite(u->request.grad_scale) && u->request.grad_scale > 0) return GRADD_OK;
    return GRADD_FAIL(TENSOR, "step: field 'scale': expected a finite number above 0, got %g",
                      u->request.grad_scale);
}

static gradd_status_t fill(session_objects_t *objects, request_t *request, update_t *u) {
    const msgpack_object *const *args = request->args;
    gradd_handle_table_t *table = gradd_lease_table(request->session->lease);
    int n = wire_count(args[STEP_GROUP]);
    GRADD_TRY(find_list(objects, args[STEP_P], "bp", n, &u->p));
    GRADD_TRY(find_list(objects, args[STEP_M], "bm", n, &u->m));
    GRADD_TRY(find_list(objects, args[STEP_V], "bv", n, &u->v));
    if (args[STEP_W]) GRADD_TRY(find(objects, args[STEP_W], "bw", &u->w));
    if (!wire_in(args[STEP_G], "at") && wire_rows(args[STEP_G]) != n)
        return GRADD_FAIL(TENSOR, "step: field 'g': expected %d tensors, got %d", n,
                          wire_rows(args[STEP_G]));
    GRADD_TRY(tensors_init_placed(&u->g, table, args[STEP_G], n, "step: g"));
    u->tensors = calloc((size_t)n + 1, sizeof u->tensors[0]);
    if (!u->tensors) return GRADD_FAIL(NOMEM, "no memory for a step");
    GRADD_TRY(fill_tensors(u, args[STEP_GROUP], n));
    if (args[STEP_WIDTH]) GRADD_TRY(fill_widths(u, args[STEP_WIDTH], n));
    GRADD_TRY(fill_groups(u, args[STEP_GROUPS]));
    GRADD_TRY(fill_journal(u, args[STEP_JOURNAL], table));
    u->request.tensors = u->tensors;
    u->request.n_tensors = n;
    GRADD_TRY(fill_norm(u, args[STEP_NORM]));
    GRADD_TRY(fill_scale(u, args[STEP_SCALE], args[STEP_FINITE]));
    u->request.step = wire_u64(args[STEP_STEP]);
    u->request.once = args[STEP_ONCE] ? wire_u64(args[STEP_ONCE]) : 0;
    return check_memory(u);
}

/* Until the step is done, or put aside. */
static gradd_status_t continue_step(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    bool done, skipped = false;
    (void)worker;
    gradd_status_t st = step_continue(objects->update->step, &done);
    if (st == GRADD_OK && !done) {
        request_go_on(request, NULL, 0, continue_step);
        return GRADD_OK;
    }
    const double norm = step_norm(objects->update->step, &skipped);
    update_end(objects);
    GRADD_TRY(st);
    wire_key(&request->reply, "norm");
    wire_put_f64(&request->reply, norm);
    wire_key(&request->reply, "skipped");
    wire_put_u64(&request->reply, skipped);
    command_put_times(request);
    return GRADD_OK;
}

static gradd_status_t step(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    update_t *u = objects->update = calloc(1, sizeof *u);
    if (!u) return GRADD_FAIL(NOMEM, "no memory for a step");
    gradd_status_t st = fill(objects, request, u);
    if (st == GRADD_OK) st = step_create(worker->device, &u->request, &u->step);
    if (st == GRADD_OK) return continue_step(worker, request);
    update_end(objects);
    return st;
}

GRADD_COMMANDS(
    step,
    {
        .name = "step",
        .handle = step,
        .needs_session = true,
        .fields = {
                   [STEP_STEP] = {.name = "step", .kind = WIRE_U64},
                   [STEP_JOURNAL] = {.name = "journal", .kind = WIRE_MAP, .keys = wire_tensor_keys},
                   [STEP_NORM] = {.name = "max_norm", .kind = WIRE_F64, .optional = true},
                   [STEP_GROUPS] = {.name = "groups", .kind = WIRE_TABLE, .keys = group_keys},
                   [STEP_GROUP] = {.name = "group", .kind = WIRE_LIST, .item = WIRE_U64},
                   [STEP_P] = {.name = "bp", .kind = WIRE_U64},
                   [STEP_M] = {.name = "bm", .kind = WIRE_U64},
                   [STEP_V] = {.name = "bv", .kind = WIRE_U64},
                   [STEP_G] = {.name = "g", .kind = WIRE_TABLE, .keys = wire_placed_keys},
                   [STEP_W] = {.name = "bw", .kind = WIRE_U64, .optional = true},
                   [STEP_ONCE] = {.name = "once", .kind = WIRE_U64, .optional = true},
                   [STEP_WIDTH] = {.name = "width", .kind = WIRE_LIST, .item = WIRE_U64, .optional = true},
                   [STEP_SCALE] = {.name = "scale", .kind = WIRE_F64, .optional = true},
                   [STEP_FINITE] = {.name = "finite", .kind = WIRE_FLAG, .optional = true}}
});
