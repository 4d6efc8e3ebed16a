/* Verbs bind, unbind, forward, backward, release: tensors of a session meet its plans.
 *
 * Everything that the engine will touch is checked here, before it starts: types against the plan,
 * ranges against the segments, what is written against everything else. Engine thread.
 */
#include <stdlib.h>
#include <string.h>

#include "server/exec/device.h"
#include "server/worker.h"

#define MAX_FLAGS (GRADD_RUN_DROPOUT_OFF | GRADD_RUN_FINITE_CHECK | GRADD_RUN_ONCE)

/* ---- bind, unbind ---- */

static gradd_status_t check_held(const work_t *work, int more, const char *verb) {
    if (more <= WORK_MAX_HELD - work->n_held) return GRADD_OK;
    return GRADD_FAIL(LIMIT,
                      "%s: bindings and unreleased runs of this session would hold %d tensors, the "
                      "limit is %d",
                      verb, work->n_held + more, WORK_MAX_HELD);
}

static gradd_status_t bind_tensors(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    uint64_t id = wire_u64(request->args[0]);
    (void)worker;
    binding_t *binding = calloc(1, sizeof *binding);
    if (!binding) return GRADD_FAIL(NOMEM, "no memory for a binding");
    *binding = (binding_t){.id = id, .work = work, .refs = 1};
    gradd_status_t st = tensors_init(&binding->tensors, gradd_lease_table(request->session->lease),
                                     request->args[1], "bind: tensors");
    work->n_held += binding->tensors.n; /* until it is released */
    if (st == GRADD_OK) {
        work_release_binding(id_list_take(&work->bindings, id));
        st = check_held(work, 0, "bind");
    }
    if (st == GRADD_OK && work->bindings.n >= WORK_MAX_BINDINGS)
        st = GRADD_FAIL(LIMIT, "bind: this session has %d bindings, the limit", work->bindings.n);
    if (st == GRADD_OK) st = id_list_put(&work->bindings, id, binding);
    if (st != GRADD_OK) work_release_binding(binding);
    return st;
}

static gradd_status_t unbind_tensors(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    (void)worker;
    work_release_binding(id_list_take(&work->bindings, wire_u64(request->args[0])));
    return GRADD_OK;
}

/* ---- checks ---- */

static gradd_status_t wrong_type(const char *verb, const char *what, const char *name, int i,
                                 const gradd_type_t *want, const gradd_type_t *got) {
    char expected[GRADD_TYPE_TEXT], found[GRADD_TYPE_TEXT];
    return GRADD_FAIL(TENSOR, "%s: %s %d '%s': expected %s, got %s", verb, what, i, name,
                      gradd_type_format(want, expected), gradd_type_format(got, found));
}

static const char *input_name(const work_plan_t *plan, int i) {
    return gradd_model_input_name(plan->compiled->model->model, i);
}

static const char *output_name(const work_plan_t *plan, int i) {
    return gradd_model_output_name(plan->compiled->model->model, plan->out[i]);
}

/* Compares tensors [0, n) of a list with the plan's input types of these positions. */
static gradd_status_t check_inputs(const work_plan_t *plan, const char *verb, const char *what,
                                   const int32_t *positions, int n, const tensors_t *tensors) {
    for (int i = 0; i < n; i++) {
        const gradd_type_t *want = &plan->in[positions[i]];
        if (!tensors->address[i]) continue;
        if (!gradd_type_equal(want, &tensors->types[i]))
            return wrong_type(verb, what, input_name(plan, positions[i]), i, want,
                              &tensors->types[i]);
    }
    return GRADD_OK;
}

static gradd_status_t find_binding(work_t *work, const msgpack_object *id, int n, const char *verb,
                                   binding_t **out_binding) {
    binding_t *binding = id ? id_list_get(&work->bindings, wire_u64(id)) : NULL;
    *out_binding = NULL;
    if (id && !binding)
        return GRADD_FAIL(STALE, "%s: binding %llu is not known (bind it again)", verb,
                          (unsigned long long)wire_u64(id));
    if (!id && n > 0)
        return GRADD_FAIL(TENSOR, "%s: field 'b': the plan has %d bound inputs, got nil", verb, n);
    *out_binding = binding;
    return GRADD_OK;
}

static gradd_status_t overlap(const char *verb, const char *a, int i, const char *b, int k) {
    return GRADD_FAIL(TENSOR, "%s: %s %d and %s %d share memory", verb, a, i, b, k);
}

static gradd_status_t check_disjoint(const char *verb, const char *what_a, const tensors_t *a,
                                     const char *what_b, const tensors_t *b) {
    int i, k;
    if (spans_overlap(a->spans, a->n_spans, b->spans, b->n_spans, &i, &k))
        return overlap(verb, what_a, i, what_b, k);
    return GRADD_OK;
}

static gradd_status_t check_self(const char *verb, const char *what, const tensors_t *a) {
    int i, k;
    if (spans_overlap_self(a->spans, a->n_spans, &i, &k)) return overlap(verb, what, i, what, k);
    return GRADD_OK;
}

/* ---- forward ---- */

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
    FORWARD_SUM
};
enum { LOOK_NOT, LOOK_DRAWN, LOOK_SUM }; /* what the client wants to know of the bound inputs */

static gradd_status_t check_forward_types(const work_plan_t *plan, binding_t *binding,
                                          const work_run_t *run) {
    const gradd_plan_info_t *info = gradd_plan_info(plan->compiled->plan);
    if (run->in.n != plan->n_rest)
        return GRADD_FAIL(TENSOR, "forward: field 'in': the plan takes %d inputs, got %d",
                          plan->n_rest, run->in.n);
    if (run->out.n != plan->n_out)
        return GRADD_FAIL(TENSOR, "forward: field 'out': the plan gives %d outputs, got %d",
                          plan->n_out, run->out.n);
    GRADD_TRY(check_inputs(plan, "forward", "input", plan->rest, plan->n_rest, &run->in));
    for (int i = 0; i < plan->n_out; i++)
        if (!gradd_type_equal(&info->outputs[i], &run->out.types[i]))
            return wrong_type("forward", "output", output_name(plan, i), i, &info->outputs[i],
                              &run->out.types[i]);
    if (!binding || binding->input_serial == plan->serial) return GRADD_OK;
    if (binding->tensors.n < plan->n_bound)
        return GRADD_FAIL(TENSOR, "forward: binding %llu has %d tensors, the plan takes %d",
                          (unsigned long long)binding->id, binding->tensors.n, plan->n_bound);
    GRADD_TRY(check_inputs(plan, "forward", "bound input", plan->bound, plan->n_bound,
                           &binding->tensors));
    binding->input_serial = plan->serial;
    return GRADD_OK;
}

static gradd_status_t check_forward_memory(const binding_t *binding, const work_run_t *run) {
    GRADD_TRY(check_self("forward", "output", &run->out));
    GRADD_TRY(check_disjoint("forward", "output", &run->out, "input", &run->in));
    if (!binding) return GRADD_OK;
    return check_disjoint("forward", "output", &run->out, "bound input", &binding->tensors);
}

static gradd_status_t make_handle(work_plan_t *plan, work_run_t *run) {
    gradd_status_t st = gradd_run_create(plan->compiled->plan, &run->handle);
    if (st != GRADD_OK) return gradd_wrap(st, "forward");
    run->arena_bytes = gradd_run_bytes(run->handle);
    return GRADD_OK;
}

static gradd_status_t fill_run(worker_t *worker, work_t *work, request_t *request,
                               work_plan_t *plan, work_run_t *run) {
    const msgpack_object *const *args = request->args;
    gradd_handle_table_t *table = gradd_lease_table(request->session->lease);
    binding_t *binding;
    GRADD_TRY(find_binding(work, args[FORWARD_B], plan->n_bound, "forward", &binding));
    GRADD_TRY(tensors_init(&run->in, table, args[FORWARD_IN], "forward: in"));
    GRADD_TRY(tensors_init(&run->out, table, args[FORWARD_OUT], "forward: out"));
    GRADD_TRY(check_forward_types(plan, binding, run));
    GRADD_TRY(check_forward_memory(binding, run));
    run->inputs = calloc((size_t)plan->n_in + 1, sizeof *run->inputs);
    if (!run->inputs) return GRADD_FAIL(NOMEM, "no memory for a run");
    for (int i = 0; i < plan->n_bound; i++)
        run->inputs[plan->bound[i]] = binding->tensors.address[i];
    for (int i = 0; i < plan->n_rest; i++)
        run->inputs[plan->rest[i]] = run->in.address[i];
    work_release_run(work, run->id); /* a live run of this id starts anew */
    if (work->runs.n >= WORK_MAX_RUNS)
        return GRADD_FAIL(LIMIT, "forward: this session has %d unreleased runs, the limit",
                          work->runs.n);
    GRADD_TRY(check_held(work, run->in.n + run->out.n, "forward"));
    GRADD_TRY(make_handle(plan, run));
    gradd_status_t st = id_list_put(&work->runs, run->id, run);
    if (st != GRADD_OK) {
        gradd_run_destroy(run->handle);
        return st;
    }
    /* From here on the run is complete: work_release_run undoes all of it. */
    run->plan = plan;
    plan->n_runs++;
    work->n_held += run->in.n + run->out.n;
    plan->used = plan->ran = ++worker->clock;
    run->binding = binding;
    if (binding) binding->refs++;
    atomic_fetch_add(&work->session->counts.arena_bytes, run->arena_bytes);
    return GRADD_OK;
}

/* Microseconds that the request waited and ran. */
static void put_times(request_t *request) {
    wire_key(&request->reply, "us");
    wire_put_list(&request->reply, 2);
    wire_put_i64(&request->reply, request->started_us - request->arrived_us);
    wire_put_i64(&request->reply, command_now_us() - request->started_us);
}

static gradd_status_t find_plan(work_t *work, uint64_t id, work_plan_t **out_plan) {
    *out_plan = id_list_get(&work->plans, id);
    if (*out_plan) return GRADD_OK;
    return GRADD_FAIL(STALE, "forward: plan %llu is not known (send graph.plan again)",
                      (unsigned long long)id);
}

/* What the plan's device finds in the bound inputs. */
static gradd_status_t fingerprint(const work_run_t *run, bool whole, uint64_t *out) {
    const gradd_device_t *d = gradd_plan_device(run->plan->compiled->plan);
    int n = run->binding ? run->plan->n_bound : 0;
    gradd_bytes_t *list = calloc((size_t)n + 1, sizeof *list);
    if (!list) return GRADD_FAIL(NOMEM, "no memory for a run");
    for (int i = 0; i < n; i++) {
        const tensors_t *bound = &run->binding->tensors;
        size_t bytes = bound->address[i] ? (size_t)gradd_type_bytes(&bound->types[i]) : 0;
        list[i] = (gradd_bytes_t){bound->address[i], bytes};
    }
    gradd_status_t st = d->backend->queue_enter(d->queue);
    if (st == GRADD_OK) st = d->backend->fingerprint(d->queue, list, n, whole, out);
    free(list);
    return st;
}

/* Puts the generation of the bound inputs, their fingerprints, into the reply. If the client says
 * which it expects and it is another, puts `changed` instead: then nothing may be run. */
static gradd_status_t look(request_t *request, const work_run_t *run, bool *out_changed) {
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

static gradd_status_t forward(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    uint64_t flags = wire_u64(request->args[FORWARD_FLAGS]);
    work_plan_t *plan;
    GRADD_TRY(find_plan(work, wire_u64(request->args[FORWARD_PLAN]), &plan));
    work->subject = plan->compiled->model;
    if (flags & ~(uint64_t)MAX_FLAGS)
        return GRADD_FAIL(UNSUPPORTED, "forward: field 'flags': unknown bits in %llu",
                          (unsigned long long)flags);
    work_run_t *run = calloc(1, sizeof *run);
    if (!run) return GRADD_FAIL(NOMEM, "no memory for a run");
    run->id = wire_u64(request->args[FORWARD_RUN]);
    gradd_status_t st = fill_run(worker, work, request, plan, run);
    if (st != GRADD_OK) {
        tensors_finish(&run->in);
        tensors_finish(&run->out);
        free(run->inputs);
        free(run);
        return st;
    }
    bool changed;
    st = look(request, run, &changed);
    if (st != GRADD_OK || changed) {
        work_release_run(work, run->id);
        return st;
    }
    atomic_fetch_add(&worker->n_forward, 1);
    st = gradd_run_forward(run->handle, wire_u64(request->args[FORWARD_SEED]), (uint32_t)flags,
                           run->inputs, run->out.address, &request->session->cancel);
    if (st != GRADD_OK) {
        work_release_run(work, run->id);
        return st;
    }
    put_times(request);
    return GRADD_OK;
}

/* ---- backward ---- */

enum { BACKWARD_RUN, BACKWARD_GO, BACKWARD_B, BACKWARD_G, BACKWARD_KEEP };

typedef struct pass_s {
    tensors_t go, g;
    binding_t *binding;
    const void **grad_outputs; /* Owned */
    void **grads;              /* Owned */
    bool *written;             /* Owned */
} pass_t;

static void pass_finish(pass_t *pass) {
    tensors_finish(&pass->go);
    tensors_finish(&pass->g);
    free(pass->grad_outputs);
    free(pass->grads);
    free(pass->written);
}

static gradd_status_t fill_grad_outputs(const work_plan_t *plan, const msgpack_object *list,
                                        gradd_handle_table_t *table, pass_t *pass) {
    const gradd_plan_info_t *info = gradd_plan_info(plan->compiled->plan);
    int n = wire_count(list);
    uint64_t *positions = calloc((size_t)n + 1, sizeof *positions);
    if (!positions) return GRADD_FAIL(NOMEM, "no memory for a backward");
    gradd_status_t st = tensors_init_pairs(&pass->go, table, list, "backward: go", positions);
    for (int i = 0; i < n && st == GRADD_OK; i++) {
        if (positions[i] >= (uint64_t)plan->n_out)
            st = GRADD_FAIL(TENSOR, "backward: field 'go[%d]': output %llu, expected below %d", i,
                            (unsigned long long)positions[i], plan->n_out);
        else if (pass->grad_outputs[positions[i]])
            st = GRADD_FAIL(TENSOR, "backward: field 'go[%d]': output %llu comes twice", i,
                            (unsigned long long)positions[i]);
        else if (!gradd_type_equal(&info->outputs[positions[i]], &pass->go.types[i]))
            st = wrong_type("backward", "gradient of output", output_name(plan, (int)positions[i]),
                            (int)positions[i], &info->outputs[positions[i]], &pass->go.types[i]);
        else
            pass->grad_outputs[positions[i]] = pass->go.address[i];
    }
    free(positions);
    return st;
}

static gradd_status_t fill_grads(work_plan_t *plan, pass_t *pass) {
    binding_t *binding = pass->binding;
    int n_bound = binding ? binding->tensors.n : 0;
    if (n_bound + pass->g.n != plan->n_grads)
        return GRADD_FAIL(TENSOR,
                          "backward: the plan has %d gradients; binding and 'g' give %d and %d",
                          plan->n_grads, n_bound, pass->g.n);
    if (binding && binding->grad_serial != plan->serial) {
        GRADD_TRY(
            check_inputs(plan, "backward", "gradient", plan->grads, n_bound, &binding->tensors));
        GRADD_TRY(check_self("backward", "gradient", &binding->tensors));
        binding->grad_serial = plan->serial;
    }
    GRADD_TRY(
        check_inputs(plan, "backward", "gradient", plan->grads + n_bound, pass->g.n, &pass->g));
    for (int i = 0; i < plan->n_grads; i++)
        pass->grads[i] = i < n_bound ? binding->tensors.address[i] : pass->g.address[i - n_bound];
    return GRADD_OK;
}

/* `written` holds gradients: nothing that is read or returned may share their memory. */
static gradd_status_t check_written(const char *what, const tensors_t *written,
                                    const work_run_t *run, const pass_t *pass) {
    GRADD_TRY(check_disjoint("backward", what, written, "output's gradient", &pass->go));
    GRADD_TRY(check_disjoint("backward", what, written, "input", &run->in));
    GRADD_TRY(check_disjoint("backward", what, written, "output", &run->out));
    if (!run->binding) return GRADD_OK;
    return check_disjoint("backward", what, written, "bound input", &run->binding->tensors);
}

static gradd_status_t check_backward_memory(const work_run_t *run, const pass_t *pass) {
    GRADD_TRY(check_self("backward", "gradient 'g'", &pass->g));
    GRADD_TRY(check_written("gradient 'g'", &pass->g, run, pass));
    if (!pass->binding) return GRADD_OK;
    GRADD_TRY(check_disjoint("backward", "gradient 'g'", &pass->g, "bound gradient",
                             &pass->binding->tensors));
    return check_written("bound gradient", &pass->binding->tensors, run, pass);
}

static gradd_status_t fill_pass(work_t *work, request_t *request, const work_run_t *run,
                                pass_t *pass) {
    work_plan_t *plan = run->plan;
    gradd_handle_table_t *table = gradd_lease_table(request->session->lease);
    pass->grad_outputs = calloc((size_t)plan->n_out + 1, sizeof *pass->grad_outputs);
    pass->grads = calloc((size_t)plan->n_grads + 1, sizeof *pass->grads);
    pass->written = calloc((size_t)plan->n_grads + 1, sizeof *pass->written);
    if (!pass->grad_outputs || !pass->grads || !pass->written)
        return GRADD_FAIL(NOMEM, "no memory for a backward");
    GRADD_TRY(find_binding(work, request->args[BACKWARD_B], 0, "backward", &pass->binding));
    GRADD_TRY(tensors_init(&pass->g, table, request->args[BACKWARD_G], "backward: g"));
    GRADD_TRY(fill_grad_outputs(plan, request->args[BACKWARD_GO], table, pass));
    GRADD_TRY(fill_grads(plan, pass));
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
static void count_growth(work_t *work, work_run_t *run) {
    int64_t more = gradd_run_bytes(run->handle) - run->arena_bytes;
    run->arena_bytes += more;
    atomic_fetch_add(&work->session->counts.arena_bytes, more);
}

static gradd_status_t backward(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    uint64_t id = wire_u64(request->args[BACKWARD_RUN]);
    bool keep = wire_flag(request->args[BACKWARD_KEEP]);
    work_run_t *run = id_list_get(&work->runs, id);
    if (!run)
        return GRADD_FAIL(STALE,
                          "backward: run %llu is not known: it was released, or a backward "
                          "without 'keep' has used it up",
                          (unsigned long long)id);
    work->subject = run->plan->compiled->model;
    pass_t pass = {0};
    gradd_status_t st = fill_pass(work, request, run, &pass);
    if (st == GRADD_OK) {
        atomic_fetch_add(&worker->n_backward, 1);
        st = gradd_run_backward(run->handle, pass.grad_outputs, pass.grads, keep, pass.written,
                                &request->session->cancel);
        if (st == GRADD_E_NOMEM) st = gradd_wrap(st, "backward");
    }
    count_growth(work, run);
    if (st == GRADD_OK) {
        put_untouched(request, &pass, run->plan->n_grads);
        put_times(request);
        /* The activations are used up: their memory goes back now, not at `release`. */
        if (!keep) work_release_run(work, id);
    }
    pass_finish(&pass);
    return st;
}

static gradd_status_t release(worker_t *worker, request_t *request) {
    work_t *work = request->session->work;
    (void)worker;
    for (int i = 0; i < wire_count(request->args[0]); i++)
        work_release_run(work, wire_u64(wire_at(request->args[0], i)));
    return GRADD_OK;
}

GRADD_COMMANDS(
    run,
    {
        .name = "bind",
        .run = bind_tensors,
        .needs_session = true,
        .fields = {{.name = "bind", .kind = WIRE_U64},
                   {.name = "tensors", .kind = WIRE_LIST, .item = WIRE_TENSOR}}
},
    {.name = "unbind",
     .run = unbind_tensors,
     .needs_session = true,
     .fields = {{.name = "bind", .kind = WIRE_U64}}},
    {.name = "forward",
     .run = forward,
     .needs_session = true,
     .fields = {[FORWARD_PLAN] = {.name = "plan", .kind = WIRE_U64},
                [FORWARD_RUN] = {.name = "run", .kind = WIRE_U64},
                [FORWARD_SEED] = {.name = "seed", .kind = WIRE_U64},
                [FORWARD_FLAGS] = {.name = "flags", .kind = WIRE_U64},
                [FORWARD_B] = {.name = "b", .kind = WIRE_U64, .optional = true},
                [FORWARD_IN] = {.name = "in", .kind = WIRE_LIST, .item = WIRE_TENSOR},
                [FORWARD_OUT] = {.name = "out", .kind = WIRE_LIST, .item = WIRE_TENSOR},
                [FORWARD_LOOK] = {.name = "look", .kind = WIRE_U64, .optional = true},
                [FORWARD_GEN] = {.name = "gen", .kind = WIRE_U64, .optional = true},
                [FORWARD_SUM] = {.name = "sum", .kind = WIRE_U64, .optional = true}}},
    {.name = "backward",
     .run = backward,
     .needs_session = true,
     .fields = {[BACKWARD_RUN] = {.name = "run", .kind = WIRE_U64},
                [BACKWARD_GO] = {.name = "go", .kind = WIRE_LIST, .item = WIRE_PLACED},
                [BACKWARD_B] = {.name = "b", .kind = WIRE_U64, .optional = true},
                [BACKWARD_G] =
                    {.name = "g", .kind = WIRE_LIST, .item = WIRE_TENSOR_OR_NIL, .optional = true},
                [BACKWARD_KEEP] = {.name = "keep", .kind = WIRE_FLAG, .optional = true}}},
    {.name = "release",
     .run = release,
     .needs_session = true,
     .fields = {{.name = "runs", .kind = WIRE_LIST, .item = WIRE_U64}}});
