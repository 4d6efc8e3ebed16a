/* Verbs bind, unbind: lists of tensors that later requests name by number. Engine thread. */
#include <stdlib.h>

#include "server/verbs/run_tensors.h"

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
        st = run_check_held(work, 0, "bind");
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

GRADD_COMMANDS(bind,
               {
                   .name = "bind",
                   .run = bind_tensors,
                   .needs_session = true,
                   .fields = {{.name = "bind", .kind = WIRE_U64},
                              {.name = "tensors", .kind = WIRE_TABLE, .keys = wire_tensors_keys}}
},
               {.name = "unbind",
                .run = unbind_tensors,
                .needs_session = true,
                .fields = {{.name = "bind", .kind = WIRE_U64}}});
