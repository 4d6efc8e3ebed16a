/* Verbs bind, unbind: lists of tensors that later requests name by number. Engine thread. */
#include <stdlib.h>

#include "server/verbs/run_tensors.h"

static gradd_status_t bind_tensors(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    uint64_t id = wire_u64(request->args[0]);
    (void)worker;
    binding_t *binding = calloc(1, sizeof *binding);
    if (!binding) return GRADD_FAIL(NOMEM, "no memory for a binding");
    *binding = (binding_t){.id = id, .objects = objects, .refs = 1};
    gradd_status_t st = tensors_init(&binding->tensors, gradd_lease_table(request->session->lease),
                                     request->args[1], "bind: tensors");
    objects->n_held += binding->tensors.n; /* until it is released */
    if (st == GRADD_OK) {
        objects_release_binding(id_list_take(&objects->bindings, id));
        st = run_check_held(objects, 0, "bind");
    }
    if (st == GRADD_OK && objects->bindings.n >= SESSION_MAX_BINDINGS)
        st =
            GRADD_FAIL(LIMIT, "bind: this session has %d bindings, the limit", objects->bindings.n);
    if (st == GRADD_OK) st = id_list_put(&objects->bindings, id, binding);
    if (st != GRADD_OK) objects_release_binding(binding);
    return st;
}

static gradd_status_t unbind_tensors(worker_t *worker, request_t *request) {
    session_objects_t *objects = request->session->objects;
    (void)worker;
    objects_release_binding(id_list_take(&objects->bindings, wire_u64(request->args[0])));
    return GRADD_OK;
}

GRADD_COMMANDS(bind,
               {
                   .name = "bind",
                   .handle = bind_tensors,
                   .needs_session = true,
                   .fields = {{.name = "bind", .kind = WIRE_U64},
                              {.name = "tensors", .kind = WIRE_TABLE, .keys = wire_tensors_keys}}
},
               {.name = "unbind",
                .handle = unbind_tensors,
                .needs_session = true,
                .fields = {{.name = "bind", .kind = WIRE_U64}}});
