/* Verbs forward, release: runs of a plan. The verb backward is in cmd_backward.c.
 *
 * Everything that the engine will touch is checked here, before it starts: types against the plan,
 * ranges against the segments, and written memory against everything else. Engine thread.
 */
#include <stdlib.h>
#include <string.h>

#include "server/device/device.h"
#include "server/exec/run.h"
#include "server/verbs/run_tensors.h"

#define MAX_FLAGS                                                                                  \
    (GRADD_RUN_DROPOUT_OFF | GRADD_RUN_FINITE_CHECK | GRADD_RUN_ONCE | GRADD_RUN_GRADIENT_CHECK)

enum {
    FORWARD_PLAN,
    FORWARD_RUN,
    FORWARD_SEED,
    FORWARD_FLAGS,
    FORWARD_B,
    FORWARD_IN,
    FORWARD_OUT,
    FORWARD_LOOK,
    FORWARD_GEN,
    FORWARD_SUM,
    FORWARD_EARLY
};
enum { LOOK_NOT, LOOK_DRAWN, LOOK_SUM }; /* what the client wants to know of the bound inputs */

static gradd_status_t check_forward_types(const session_plan_t *plan, binding_t *binding,
                                          const session_run_t *run) {
    const gradd_plan_info_t *info = gradd_plan_info(plan->compiled->plan);
    if (run->in.n != plan->n_rest)
        return GRADD_FAIL(TENSOR, "forward: field 'in': the plan takes %d inputs, got %d",
                          plan->n_rest, run->in.n);
    if (run->out.n != plan->n_out)
        return GRADD_FAIL(TENSOR, "forward: field 'out': the plan gives %d outputs, got %d",
                          plan->n_out, run->out.n);
    GRADD_TRY(run_check_inputs(plan, "forward", "input", plan->rest, plan->n_rest, &run->in));
    for (int i = 0; i < plan->n_out; i++)
        if (!gradd_type_equal(&info->outputs[i], &run->out.types[i]))
            return run_wrong_type("forward", "output", run_output_name(plan, i), i,
                                  &info->outputs[i], &run->out.types[i]);
    if (!binding || binding->input_serial == plan->serial) return GRADD_OK;
    if (binding->tensors.n < plan->n_bound)
        return GRADD_FAIL(TENSOR, "forward: binding %llu has %d tensors, the plan takes %d",
                          (unsigned long long)binding->id, binding->tensors.n, plan->n_bound);
    GRADD_TRY(run_check_inputs(plan, "forward", "bound input", plan->bound, plan->n_bound,
                               &binding->tensors));
    binding->input_serial = plan->serial;
    return GRADD_OK;
}

static gradd_status_t check_forward_memory(const binding_t *binding, const session_run_t *run) {
    GRADD_TRY(run_check_self("forward", "output", &run->out));
    GRADD_TRY(run_check_disjoint("forward", "output", &run->out, "input", &run->in));
    if (!binding) return GRADD_OK;
    return run_check_disjoint("forward", "output", &run->out, "bound input", &binding->tensors);
}

/* Gradients that the forward forms lie in `early` until the run ends, so no other run may have
 * it. */
static gradd_status_t check_early(const session_objects_t *objects, const session_plan_t *plan,
                                  const binding_t *bound, const session_run_t *run,
                                  const binding_t *early) {
    const int n = early ? early->tensors.n : 0;
    if (n != plan->early.n)
        return GRADD_FAIL(TENSOR, "forward: field 'early': the plan forms %d gradients, got %d",
                          plan->early.n, n);
    if (!early) return GRADD_OK;
    GRADD_TRY(run_check_inputs(plan, "forward", "early gradient", plan->early.inputs, n,
                               &early->tensors));
    GRADD_TRY(run_check_self("forward", "early gradient", &early->tensors));
    GRADD_TRY(run_check_disjoint("forward", "early gradient", &early->tensors, "input", &run->in));
    GRADD_TRY(
        run_check_disjoint("forward", "early gradient", &early->tensors, "output", &run->out));
    for (int i = 0; i < objects->runs.n; i++) {
        const session_run_t *other = objects->runs.items[i].object;
        if (other->early == early && other->id != run->id)
            return GRADD_FAIL(TENSOR, "forward: field 'early': run %llu has that binding",
                              (unsigned long long)other->id);
    }
    if (!bound) return GRADD_OK;
    return run_check_disjoint("forward", "early gradient", &early->tensors, "bound input",
                              &bound->tensors);
}

static gradd_status_t make_handle(session_plan_t *plan, session_run_t *run,
                                  const binding_t *early) {
    void **given = calloc((size_t)plan->n_grads + 1, sizeof *given);
    if (!given) return GRADD_FAIL(NOMEM, "no memory for a run");
    for (int i = 0; early && i < plan->early.n; i++)
        given[plan->early.at[i]] = early->tensors.address[i];
    gradd_status_t st = gradd_run_create(plan->compiled->plan, &run->handle);
    if (st == GRADD_OK) {
        gradd_run_set_early(run->handle, given);
        run->arena_bytes = gradd_run_bytes(run->handle);
    }
    free(given);
    return gradd_wrap(st, "forward");
}

static gradd_status_t fill_run(worker_t *worker, session_objects_t *objects, request_t *request,
                               session_plan_t *plan, session_run_t *run) {
    const msgpack_object *const *args = request->args;
    gradd_handle_table_t *table = gradd_lease_table(request->session->lease);
    binding_t *binding, *early;
    GRADD_TRY(run_find_binding(objects, args[FORWARD_B], plan->n_bound, "forward", &binding));
    GRADD_TRY(run_find_binding(objects, args[FORWARD_EARLY], 0, "forward", &early));
    GRADD_TRY(tensors_init(&run->in, table, args[FORWARD_IN], "forward: in"));
    GRADD_TRY(tensors_init(&run->out, table, args[FORWARD_OUT], "forward: out"));
    GRADD_TRY(check_forward_types(plan, binding, run));
    GRADD_TRY(check_forward_memory(binding, run));
    GRADD_TRY(check_early(objects, plan, binding, run, early));
    run->inputs = calloc((size_t)plan->n_in + 1, sizeof *run->inputs);
    if (!run->inputs) return GRADD_FAIL(NOMEM, "no memory for a run");
    for (int i = 0; i < plan->n_bound; i++)
        run->inputs[plan->bound[i]] = binding->tensors.address[i];
    for (int i = 0; i < plan->n_rest; i++)
        run->inputs[plan->rest[i]] = run->in.address[i];
    objects_release_run(objects, run->id); /* the new run replaces an open one of this id */
    if (objects->runs.n >= SESSION_MAX_RUNS)
        return GRADD_FAIL(LIMIT, "forward: this session has %d unreleased runs, the limit",
                          objects->runs.n);
    GRADD_TRY(run_check_held(objects, run->in.n + run->out.n, "forward"));
    GRADD_TRY(make_handle(plan, run, early));
    gradd_status_t st = id_list_put(&objects->runs, run->id, run);
    if (st != GRADD_OK) {
        gradd_run_destroy(run->handle);
        return st;
    }
    /* From here on the run is complete: objects_release_run undoes all of it. */
    run->plan = plan;
    plan->n_runs++;
    objects->n_held += run->in.n + run->out.n;
    plan->used = plan->ran = ++worker->clock;
    run->binding = binding;
    run->early = early;
    if (binding) binding->refs++;
    if (early) early->refs++;
    const int64_t before =
        atomic_fetch_add(&objects->session->counts.arena_bytes, run->arena_bytes);
    record_arena(&objects->session->record, before + run->arena_bytes);
    return GRADD_OK;
}

static gradd_status_t find_plan(session_objects_t *objects, uint64_t id,
                                session_plan_t **out_plan) {
    *out_plan = id_list_get(&objects->plans, id);
    if (*out_plan) return GRADD_OK;
    return GRADD_FAIL(STALE, "forward: plan %llu is not known (send graph.plan again)",
                      (unsigned long long)id);
}

/* The fingerprint of the bound inputs, by the plan's device. */
static gradd_status_t fingerprint(const session_run_t *run, bool whole, uint64_t *out) {
    const gradd_device_t *d = gradd_plan_device(run->plan->compiled->plan);
    int n = run->binding ? run->plan->n_bound : 0;
    gradd_bytes_t *list = calloc((size_t)n + 1, sizeof *list);
    if (!list) return GRADD_FAIL(NOMEM, "no memory for a run");
    for (int i = 0; i < n; i++) {
        const tensors_t *bound = &run->binding->tensors;
        size_t bytes = bound->address[i] ? (size_t)gradd_type_bytes(&bound->types[i]) : 0;
        list[i] = (gradd_bytes_t){bound->address[i], bytes};
    }
    gradd_status_t st = d->backend->queue_enter(d->queue, 0);
    if (st == GRADD_OK) st = d->backend->fingerprint(d->queue, list, n, whole, out);
    free(list);
    return st;
}

/* Puts the generation of the bound inputs, their fingerprints, into the reply. If the client says
 * which it expects and it is another, puts `changed` instead: then nothing may be run. */
static gradd_status_t look(request_t *request, session_run_t *run, bool *out_changed) {
    const msgpack_object *gen = request->args[FORWARD_GEN], *sum = request->args[FORWARD_SUM];
    uint64_t asked = LOOK_NOT, drawn, whole = 0;
    if (request->args[FORWARD_LOOK]) asked = wire_u64(request->args[FORWARD_LOOK]);
    bool in_full = sum || asked == LOOK_SUM;
    *out_changed = false;
    if (asked > LOOK_SUM)
        return GRADD_FAIL(UNSUPPORTED, "forward: field 'look': %llu, expected 0 to 2",
                          (unsigned long long)asked);
    if (!gen && !sum && asked == LOOK_NOT) return GRADD_OK;
    GRADD_TRY(fingerprint(run, false, &drawn));
    run->generation = drawn;
    *out_changed = gen && wire_u64(gen) != drawn;
    if (in_full && !*out_changed) GRADD_TRY(fingerprint(run, true, &whole));
    if (sum && wire_u64(sum) != whole) *out_changed = true;
    wire_key(&request->reply, *out_changed ? "changed" : "gen");
    wire_put_u64(&request->reply, *out_changed ? 1 : drawn);
    if (*out_changed || !in_full) return GRADD_OK;
    wire_key(&request->reply, "sum");
    wire_put_u64(&request->reply, whole);
    return GRADD_OK;
}

static gradd_status_t end_forward(request_t *request, session_run_t *run, gradd_status_t status);

/* It was put aside, and is next. */
static gradd_status_t continue_forward(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    session_run_t *run = id_list_get(&objects->runs, wire_u64(request->args[FORWARD_RUN]));
    (void)worker;
    if (!run) return GRADD_FAIL(INTERNAL, "forward: the run is gone");
    objects_run_plan(objects, run->plan, false);
    return end_forward(request, run, run_continue(run->handle));
}

/* What has become of the computation. */
static gradd_status_t end_forward(request_t *request, session_run_t *run, gradd_status_t status) {
    if (status) {
        objects_release_run(request->session->objects, run->id);
        return status;
    }
    if (run_is_aside(run->handle))
        request_go_on(request, NULL, 0, continue_forward);
    else
        command_put_times(request);
    return GRADD_OK;
}

/* From its beginning, again if it has waited for memory. */
static gradd_status_t forward(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    uint64_t flags = wire_u64(request->args[FORWARD_FLAGS]);
    session_plan_t *plan;
    GRADD_TRY(find_plan(objects, wire_u64(request->args[FORWARD_PLAN]), &plan));
    objects_run_plan(objects, plan, false);
    if (flags & ~(uint64_t)MAX_FLAGS)
        return GRADD_FAIL(UNSUPPORTED, "forward: field 'flags': unknown bits in %llu",
                          (unsigned long long)flags);
    const int64_t bytes = gradd_plan_info(plan->compiled->plan)->arena_bytes;
    GRADD_TRY(session_check_bytes(request->session, "forward: the run", bytes));
    if (worker_yields(worker, request, bytes, forward)) return GRADD_OK;
    session_run_t *run = calloc(1, sizeof *run);
    if (!run) return GRADD_FAIL(NOMEM, "no memory for a run");
    run->id = wire_u64(request->args[FORWARD_RUN]);
    gradd_status_t st = fill_run(worker, objects, request, plan, run);
    if (st != GRADD_OK) {
        tensors_finish(&run->in);
        tensors_finish(&run->out);
        free(run->inputs);
        free(run);
        return st == GRADD_E_NOMEM && worker_waits(worker, request, forward) ? GRADD_OK : st;
    }
    bool changed;
    st = look(request, run, &changed);
    if (st != GRADD_OK || changed) {
        objects_release_run(objects, run->id);
        return st;
    }
    atomic_fetch_add(&worker->n_forward, 1);
    st = gradd_run_forward(run->handle, wire_u64(request->args[FORWARD_SEED]), (uint32_t)flags,
                           run->inputs, run->out.address, &request->session->cancel);
    return end_forward(request, run, st);
}

static gradd_status_t release(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    (void)worker;
    for (int i = 0; i < wire_count(request->args[0]); i++)
        objects_release_run(objects, wire_u64(wire_at(request->args[0], i)));
    return GRADD_OK;
}

GRADD_COMMANDS(
    run,
    {
        .name = "forward",
        .handle = forward,
        .needs_session = true,
        .fields = {[FORWARD_PLAN] = {.name = "plan", .kind = WIRE_U64},
                   [FORWARD_RUN] = {.name = "run", .kind = WIRE_U64},
                   [FORWARD_SEED] = {.name = "seed", .kind = WIRE_U64},
                   [FORWARD_FLAGS] = {.name = "flags", .kind = WIRE_U64},
                   [FORWARD_B] = {.name = "b", .kind = WIRE_U64, .optional = true},
                   [FORWARD_IN] = {.name = "in", .kind = WIRE_TABLE, .keys = wire_tensors_keys},
                   [FORWARD_OUT] = {.name = "out", .kind = WIRE_TABLE, .keys = wire_tensors_keys},
                   [FORWARD_LOOK] = {.name = "look", .kind = WIRE_U64, .optional = true},
                   [FORWARD_GEN] = {.name = "gen", .kind = WIRE_U64, .optional = true},
                   [FORWARD_SUM] = {.name = "sum", .kind = WIRE_U64, .optional = true},
                   [FORWARD_EARLY] = {.name = "early", .kind = WIRE_U64, .optional = true}}
},
    {.name = "release",
     .handle = release,
     .needs_session = true,
     .fields = {{.name = "runs", .kind = WIRE_LIST, .item = WIRE_U64}}});
