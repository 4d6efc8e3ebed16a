/* Verb about: what a client says of itself, for `gradd show`. Engine thread, in turn with the plans
 * that it is about. */
#include "server/verbs/worker.h"

enum { ABOUT_MODEL, ABOUT_PARAMETERS, ABOUT_FALLBACKS, ABOUT_CHECK };

static gradd_status_t about(worker_t *worker, request_t *request) {
    session_record_t *record = &request->session->record;
    const msgpack_object *model = request->args[ABOUT_MODEL];
    const msgpack_object *parameters = request->args[ABOUT_PARAMETERS];
    (void)worker;
    if (model)
        record_model(record, model->via.str.ptr, model->via.str.size,
                     parameters ? wire_u64(parameters) : 0);
    if (request->args[ABOUT_FALLBACKS])
        record_fallbacks(record, wire_u64(request->args[ABOUT_FALLBACKS]));
    if (request->args[ABOUT_CHECK]) record_check(record, wire_u64(request->args[ABOUT_CHECK]));
    return GRADD_OK;
}

GRADD_COMMANDS(
    about,
    {
        .name = "about",
        .handle = about,
        .needs_session = true,
        .fields = {
                   [ABOUT_MODEL] = {.name = "model", .kind = WIRE_TEXT, .optional = true, .max = 1024},
                   [ABOUT_PARAMETERS] = {.name = "parameters", .kind = WIRE_U64, .optional = true},
                   [ABOUT_FALLBACKS] = {.name = "fallbacks", .kind = WIRE_U64, .optional = true},
                   [ABOUT_CHECK] = {.name = "check", .kind = WIRE_U64, .optional = true}}
});
