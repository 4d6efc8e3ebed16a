/* Verb backward: gradients of a run, into the client's memory.
 *
 * As in forward, all that is read and written is checked before the engine starts. A backward whose
 * gradients are averaged over processes goes on when its communicator has ended, and one that was
 * put aside when its session is next: what it writes stays valid until then (backward_t). Engine
 * thread.
 */
#include <stdlib.h>

#include "server/device/device.h"
#include "server/exec/run.h"
#include "server/session/turns.h"
#include "server/verbs/run_tensors.h"

enum {
    BACKWARD_RUN,
    BACKWARD_GO,
    BACKWARD_B,
    BACKWARD_G,
    BACKWARD_KEEP,
    BACKWARD_EARLY,
    BACKWARD_GROUPS,
    BACKWARD_SKIP,
    BACKWARD_REDUCE
};

typedef struct pass_s {
    tensors_t go, g;
    binding_t *binding, *early; /* NULL = none */
    const void **grad_outputs;  /* Owned */
    void **grads;               /* Owned */
    bool *written;              /* Owned */
    int32_t *of;                /* Owned: the group of each gradient; NULL = there are no groups */
    communicator_t *reduce;     /* Borrowed; NULL = nothing is averaged */
    uint64_t reduce_round;      /* of that; 0 = not begun */
} pass_t;

static void pass_finish(pass_t *pass) {
    tensors_finish(&pass->go);
    tensors_finish(&pass->g);
    free(pass->grad_outputs);
    free(pass->grads);
    free(pass->written);
    free(pass->of);
}

/* The gradients that arrive, each at the position of its output. */
static gradd_status_t fill_grad_outputs(const session_plan_t *plan, const msgpack_object *table,
                                        gradd_handle_table_t *handles, pass_t *pass) {
    const gradd_plan_info_t *info = gradd_plan_info(plan->compiled->plan);
    GRADD_TRY(tensors_init_placed(&pass->go, handles, table, plan->n_out, "backward: go"));
    for (int i = 0; i < plan->n_out; i++) {
        pass->grad_outputs[i] = pass->go.address[i];
        if (!pass->go.address[i]) continue;
        if (!gradd_type_equal(&info->outputs[i], &pass->go.types[i]))
            return run_wrong_type("backward", "gradient of output", run_output_name(plan, i), i,
                                  &info->outputs[i], &pass->go.types[i]);
    }
    return GRADD_OK;
}

/* The rest of the gradients that the forward has not formed, behind those of the binding: all of
 * them, or those that 'at' names. */
static gradd_status_t fill_rest(const session_plan_t *plan, const msgpack_object *table,
                                gradd_handle_table_t *handles, pass_t *pass) {
    int n_bound = pass->binding ? pass->binding->tensors.n : 0, given = wire_rows(table);
    int rest = plan->late.n - n_bound;
    bool all = !table || !wire_in(table, "at");
    if (rest < 0 || (all && given != rest))
        return GRADD_FAIL(
            TENSOR, "backward: the plan has %d gradients%s; binding and 'g' give %d and %d",
            plan->late.n, plan->early.n ? " that its forward does not form" : "", n_bound, given);
    return tensors_init_placed(&pass->g, handles, table, rest, "backward: g");
}

static gradd_status_t fill_grads(session_plan_t *plan, pass_t *pass) {
    binding_t *binding = pass->binding;
    int n_bound = binding ? binding->tensors.n : 0;
    if (binding && binding->grad_serial != plan->serial) {
        GRADD_TRY(run_check_inputs(plan, "backward", "gradient", plan->late.inputs, n_bound,
                                   &binding->tensors));
        GRADD_TRY(run_check_self("backward", "gradient", &binding->tensors));
        binding->grad_serial = plan->serial;
    }
    GRADD_TRY(run_check_inputs(plan, "backward", "gradient", plan->late.inputs + n_bound, pass->g.n,
                               &pass->g));
    for (int i = 0; i < plan->late.n; i++)
        pass->grads[plan->late.at[i]] =
            i < n_bound ? binding->tensors.address[i] : pass->g.address[i - n_bound];
    return GRADD_OK;
}

/* Where the forward has formed gradients, unless the message names other memory. */
static gradd_status_t fill_early(session_objects_t *objects, const msgpack_object *id,
                                 const session_run_t *run, pass_t *pass) {
    const session_plan_t *plan = run->plan;
    GRADD_TRY(run_find_binding(objects, id, 0, "backward", &pass->early));
    if (!pass->early) pass->early = run->early;
    const int n = pass->early ? pass->early->tensors.n : 0;
    if (n != plan->early.n)
        return GRADD_FAIL(TENSOR, "backward: field 'early': the plan forms %d gradients, got %d",
                          plan->early.n, n);
    if (pass->early && pass->early != run->early)
        GRADD_TRY(run_check_inputs(plan, "backward", "early gradient", plan->early.inputs, n,
                                   &pass->early->tensors));
    for (int i = 0; i < n; i++)
        pass->grads[plan->early.at[i]] = pass->early->tensors.address[i];
    return GRADD_OK;
}

/* `written` holds gradients: nothing that is read or returned may share their memory. */
static gradd_status_t check_written(const char *what, const tensors_t *written,
                                    const session_run_t *run, const pass_t *pass) {
    GRADD_TRY(run_check_disjoint("backward", what, written, "output's gradient", &pass->go));
    GRADD_TRY(run_check_disjoint("backward", what, written, "input", &run->in));
    GRADD_TRY(run_check_disjoint("backward", what, written, "output", &run->out));
    if (!run->binding) return GRADD_OK;
    return run_check_disjoint("backward", what, written, "bound input", &run->binding->tensors);
}

static gradd_status_t check_early_memory(const session_run_t *run, const pass_t *pass) {
    if (!pass->early) return GRADD_OK;
    const tensors_t *early = &pass->early->tensors, *formed = &run->early->tensors;
    GRADD_TRY(run_check_disjoint("backward", "gradient 'g'", &pass->g, "early gradient", early));
    GRADD_TRY(run_check_disjoint("backward", "gradient 'g'", &pass->g, "early gradient", formed));
    GRADD_TRY(
        run_check_disjoint("backward", "early gradient", early, "output's gradient", &pass->go));
    if (pass->binding) {
        const tensors_t *bound = &pass->binding->tensors;
        GRADD_TRY(run_check_disjoint("backward", "bound gradient", bound, "early gradient", early));
        GRADD_TRY(
            run_check_disjoint("backward", "bound gradient", bound, "early gradient", formed));
    }
    if (early == formed) return GRADD_OK;
    GRADD_TRY(run_check_self("backward", "early gradient", early));
    GRADD_TRY(run_check_disjoint("backward", "early gradient", early, "formed one", formed));
    return check_written("early gradient", early, run, pass);
}

static gradd_status_t check_backward_memory(const session_run_t *run, const pass_t *pass) {
    GRADD_TRY(check_early_memory(run, pass));
    GRADD_TRY(run_check_self("backward", "gradient 'g'", &pass->g));
    GRADD_TRY(check_written("gradient 'g'", &pass->g, run, pass));
    if (!pass->binding) return GRADD_OK;
    GRADD_TRY(run_check_disjoint("backward", "gradient 'g'", &pass->g, "bound gradient",
                                 &pass->binding->tensors));
    return check_written("bound gradient", &pass->binding->tensors, run, pass);
}

/* The group of each gradient, and how many there are. */
static gradd_status_t read_groups(const msgpack_object *list, const session_plan_t *plan,
                                  pass_t *pass, int *out_n) {
    if (wire_count(list) != plan->n_grads)
        return GRADD_FAIL(TENSOR, "backward: field 'groups': the plan has %d gradients, got %d",
                          plan->n_grads, wire_count(list));
    for (int i = 0; i < plan->n_grads; i++) {
        const uint64_t group = wire_u64(wire_at(list, i));
        if (group >= TURNS_MAX_GROUPS)
            return GRADD_FAIL(LIMIT, "backward: field 'groups': %llu, the last one is %d",
                              (unsigned long long)group, TURNS_MAX_GROUPS - 1);
        pass->of[i] = (int32_t)group;
        if (pass->of[i] >= *out_n) *out_n = pass->of[i] + 1;
    }
    return GRADD_OK;
}

static gradd_status_t check_groups(const request_t *request, uint64_t skip) {
    const bool reduces = request->args[BACKWARD_REDUCE], turn = request->turn;
    if (skip && !request->args[BACKWARD_GROUPS])
        return GRADD_FAIL(TENSOR, "backward: field 'skip' without 'groups'");
    if (skip && reduces)
        return GRADD_FAIL(TENSOR, "backward: field 'skip' with 'reduce': other ranks do not "
                                  "average again");
    if (request->args[BACKWARD_GROUPS] && (turn || !reduces) &&
        (!turn || request->turn >= TURNS_MAX))
        return GRADD_FAIL(SESSION, "backward: field 'groups': it needs a turn from 1 to 2^46 - 1");
    return GRADD_OK;
}

/* Without a list all gradients are one group, if they are averaged. */
static gradd_status_t fill_groups(const request_t *request, session_run_t *run, pass_t *pass) {
    const msgpack_object *list = request->args[BACKWARD_GROUPS];
    const uint64_t skip = request->args[BACKWARD_SKIP] ? wire_u64(request->args[BACKWARD_SKIP]) : 0;
    gradd_groups_t groups = {0};
    GRADD_TRY(check_groups(request, skip));
    if (list || pass->reduce) {
        groups.n = !list;
        pass->of = calloc((size_t)run->plan->n_grads + 1, sizeof pass->of[0]);
        if (!pass->of) return GRADD_FAIL(NOMEM, "no memory for a backward");
        if (list) GRADD_TRY(read_groups(list, run->plan, pass, &groups.n));
        if (skip > (uint64_t)groups.n)
            return GRADD_FAIL(TENSOR, "backward: field 'skip': %llu of %d groups",
                              (unsigned long long)skip, groups.n);
        groups.of = pass->of;
        groups.skipped = (int)skip;
        groups.word = list && request->turn ? turns_groups(request->session) : NULL;
        groups.value = request->turn << TURNS_GROUP_BITS;
        groups.comm = pass->reduce ? pass->reduce->comm : NULL;
        groups.out_round = &pass->reduce_round;
        groups.same = run->generation;
    }
    gradd_run_set_groups(run->handle, &groups);
    return GRADD_OK;
}

static gradd_status_t find_communicator(session_objects_t *objects, const request_t *request,
                                        pass_t *pass) {
    const msgpack_object *id = request->args[BACKWARD_REDUCE];
    return id ? communicator_find(objects, wire_u64(id), "backward", &pass->reduce) : GRADD_OK;
}

static gradd_status_t fill_pass(session_objects_t *objects, request_t *request,
                                const session_run_t *run, pass_t *pass) {
    session_plan_t *plan = run->plan;
    gradd_handle_table_t *table = gradd_lease_table(request->session->lease);
    GRADD_TRY(find_communicator(objects, request, pass));
    pass->grad_outputs = calloc((size_t)plan->n_out + 1, sizeof *pass->grad_outputs);
    pass->grads = calloc((size_t)plan->n_grads + 1, sizeof *pass->grads);
    pass->written = calloc((size_t)plan->n_grads + 1, sizeof *pass->written);
    if (!pass->grad_outputs || !pass->grads || !pass->written)
        return GRADD_FAIL(NOMEM, "no memory for a backward");
    GRADD_TRY(run_find_binding(objects, request->args[BACKWARD_B], 0, "backward", &pass->binding));
    GRADD_TRY(fill_rest(plan, request->args[BACKWARD_G], table, pass));
    GRADD_TRY(fill_grad_outputs(plan, request->args[BACKWARD_GO], table, pass));
    GRADD_TRY(fill_grads(plan, pass));
    GRADD_TRY(fill_early(objects, request->args[BACKWARD_EARLY], run, pass));
    return check_backward_memory(run, pass);
}

static void put_untouched(request_t *request, const pass_t *pass, int n) {
    uint32_t count = 0;
    for (int i = 0; i < n; i++)
        count += !pass->written[i];
    wire_key(&request->reply, "none");
    wire_put_list(&request->reply, count);
    for (int i = 0; i < n; i++)
        if (!pass->written[i]) wire_put_i64(&request->reply, i);
}

/* A backward may have made the run's arena larger. */
static void count_growth(session_objects_t *objects, session_run_t *run) {
    int64_t more = gradd_run_bytes(run->handle) - run->arena_bytes;
    run->arena_bytes += more;
    atomic_fetch_add(&objects->session->counts.arena_bytes, more);
}

/* ---- what is not finished ---- */

/* What a backward writes that was put aside, or waits for its communicator. */
typedef struct backward_s {
    pass_t pass;
} backward_t;

void backward_end(session_objects_t *objects) {
    if (objects->backward) pass_finish(&objects->backward->pass);
    free(objects->backward);
    objects->backward = NULL;
}

/* The communicator is of no use any more. */
static gradd_status_t fail_round(worker_t *worker, communicator_t *reduce, gradd_status_t status) {
    communicator_fail(worker, reduce);
    return gradd_wrap(status, "backward: communicator %llu", (unsigned long long)reduce->id);
}

static gradd_status_t finish_averages(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    communicator_t *reduce = objects->backward->pass.reduce;
    const gradd_status_t status = worker->device->backend->comm_status(reduce->comm);
    backward_end(objects);
    if (status) return fail_round(worker, reduce, status);
    command_put_times(request);
    return GRADD_OK;
}

/* All is computed: the request goes on when all is averaged. */
static void await_averages(worker_t *worker, request_t *request, const pass_t *pass) {
    request_go_on(request, worker->device->backend->comm_ended(pass->reduce->comm),
                  pass->reduce_round, finish_averages);
}

/* ---- the verb ---- */

static gradd_status_t backward(worker_t *worker, request_t *request);

static gradd_status_t end_backward(worker_t *worker, request_t *request, session_run_t *run,
                                   gradd_status_t status);

/* It was put aside, and is next. */
static gradd_status_t continue_backward(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    session_run_t *run = id_list_get(&objects->runs, wire_u64(request->args[BACKWARD_RUN]));
    if (!run) return GRADD_FAIL(INTERNAL, "backward: the run is gone");
    objects_run_plan(objects, run->plan, true);
    return end_backward(worker, request, run, run_continue(run->handle));
}

/* All is computed. Ends with the run if nothing needs it any more. */
static void put_computed(request_t *request, session_run_t *run, const pass_t *pass) {
    session_objects_t *objects = request->session->objects;
    put_untouched(request, pass, run->plan->n_grads);
    /* The activations are used up: their memory goes back now, not at `release`. */
    if (!wire_flag(request->args[BACKWARD_KEEP])) objects_release_run(objects, run->id);
    wire_key(&request->reply, "rest");
    wire_put_i64(&request->reply, atomic_load(&objects->session->counts.arena_bytes));
}

/* What has become of the computation. */
static gradd_status_t end_backward(worker_t *worker, request_t *request, session_run_t *run,
                                   gradd_status_t status) {
    session_objects_t *objects = request->session->objects;
    pass_t *pass = &objects->backward->pass;
    if (status && pass->reduce_round)
        fail_round(worker, pass->reduce, status);
    else if (status == GRADD_E_NOMEM)
        gradd_wrap(status, "backward");
    count_growth(objects, run);
    if (!status && run_is_aside(run->handle)) {
        request_go_on(request, NULL, 0, continue_backward);
        return GRADD_OK;
    }
    if (!status) put_computed(request, run, pass);
    if (!status && pass->reduce) {
        await_averages(worker, request, pass);
        return GRADD_OK;
    }
    if (!status) command_put_times(request);
    backward_end(objects);
    /* Its own memory comes first of all, so nothing is written yet, and the run is as it was. */
    return status == GRADD_E_NOMEM && worker_waits(worker, request, backward) ? GRADD_OK : status;
}

static gradd_status_t compute(worker_t *worker, request_t *request, session_run_t *run) {
    const pass_t *pass = &((session_objects_t *)request->session->objects)->backward->pass;
    atomic_fetch_add(&worker->n_backward, 1);
    return end_backward(worker, request, run,
                        gradd_run_backward(run->handle, pass->grad_outputs, pass->grads,
                                           wire_flag(request->args[BACKWARD_KEEP]), pass->written,
                                           &request->session->cancel));
}

static gradd_status_t backward(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    uint64_t id = wire_u64(request->args[BACKWARD_RUN]);
    session_run_t *run = id_list_get(&objects->runs, id);
    if (!run)
        return GRADD_FAIL(STALE,
                          "backward: run %llu is not known: it was released, or a backward "
                          "without 'keep' has used it up",
                          (unsigned long long)id);
    objects_run_plan(objects, run->plan, true);
    objects->backward = calloc(1, sizeof *objects->backward);
    if (!objects->backward) return GRADD_FAIL(NOMEM, "no memory for a backward");
    pass_t *pass = &objects->backward->pass;
    gradd_status_t st = fill_pass(objects, request, run, pass);
    if (st == GRADD_OK) st = fill_groups(request, run, pass);
    if (st == GRADD_OK) return compute(worker, request, run);
    backward_end(objects);
    return st;
}

GRADD_COMMANDS(
    backward,
    {
        .name = "backward",
        .is_step = true,
        .handle = backward,
        .needs_session = true,
        .fields = {[BACKWARD_RUN] = {.name = "run", .kind = WIRE_U64},
                   [BACKWARD_GO] = {.name = "go", .kind = WIRE_TABLE, .keys = wire_placed_keys},
                   [BACKWARD_B] = {.name = "b", .kind = WIRE_U64, .optional = true},
                   [BACKWARD_G] = {.name = "g",
                                   .kind = WIRE_TABLE,
                                   .keys = wire_placed_keys,
                                   .optional = true},
                   [BACKWARD_KEEP] = {.name = "keep", .kind = WIRE_FLAG, .optional = true},
                   [BACKWARD_EARLY] = {.name = "early", .kind = WIRE_U64, .optional = true},
                   [BACKWARD_GROUPS] = {.name = "groups",
                                        .kind = WIRE_LIST,
                                        .item = WIRE_U64,
                                        .optional = true,
                                        .max = SESSION_MAX_TENSORS},
                   [BACKWARD_SKIP] = {.name = "skip", .kind = WIRE_U64, .optional = true},
                   [BACKWARD_REDUCE] = {.name = "reduce", .kind = WIRE_U64, .optional = true}}
});
