/* Verb quota: the rules for sessions by name (server/session/quota.h), for the user of the daemon.
 * I/O thread. */
#include <string.h>

#include "server/daemon/daemon.h"
#include "server/daemon/shown.h"
#include "server/host/log.h"

enum { QUOTA_NAME, QUOTA_SHARE, QUOTA_BYTES, QUOTA_SESSIONS, QUOTA_REMOVE };

static gradd_status_t check_number(const msgpack_object *given, const char *field, uint64_t least,
                                   uint64_t most) {
    if (!given || (wire_u64(given) >= least && wire_u64(given) <= most)) return GRADD_OK;
    return GRADD_FAIL(LIMIT, "quota: field '%s': %llu, expected %llu to %llu", field,
                      (unsigned long long)wire_u64(given), (unsigned long long)least,
                      (unsigned long long)most);
}

/* What is not given stays as it is. */
static gradd_status_t change(daemon_t *daemon, const msgpack_object *const *args,
                             const char *name) {
    const msgpack_object *share = args[QUOTA_SHARE], *bytes = args[QUOTA_BYTES];
    const msgpack_object *sessions = args[QUOTA_SESSIONS];
    if (wire_flag(args[QUOTA_REMOVE])) return quota_remove(&daemon->quotas, name);
    if (!share && !bytes && !sessions) return GRADD_OK;
    GRADD_TRY(check_number(share, "share", 1, FAIR_SHARE_MAX));
    GRADD_TRY(check_number(bytes, "bytes", 0, INT64_MAX));
    GRADD_TRY(check_number(sessions, "sessions", 0, SESSION_MAX));
    quota_t rule = quota_for(&daemon->quotas, name);
    if (strcmp(rule.name, name) != 0) rule = (quota_t){.share = FAIR_SHARE};
    memcpy(rule.name, name, sizeof rule.name);
    if (share) rule.share = (uint32_t)wire_u64(share);
    if (bytes) rule.bytes = (int64_t)wire_u64(bytes);
    if (sessions) rule.n_sessions = (uint32_t)wire_u64(sessions);
    log_event(LOG_INFO, "quota", "name=%s share=%u mib=%lld sessions=%u", name, rule.share,
              (long long)(rule.bytes >> 20), rule.n_sessions);
    return quota_set(&daemon->quotas, &rule);
}

static void apply(daemon_t *daemon) {
    for (int i = 0; i < daemon->table.n; i++) {
        session_t *session = daemon->table.sessions[i];
        const quota_t rule = quota_for(&daemon->quotas, session->client);
        session_set_quota(session, daemon->queue, &rule);
    }
}

static void put_rules(wire_out_t *out, const daemon_t *daemon) {
    wire_key(out, "quotas");
    wire_put_list(out, (uint32_t)daemon->quotas.n);
    for (int i = 0; i < daemon->quotas.n; i++) {
        const quota_t *rule = &daemon->quotas.rules[i];
        wire_put_map(out, 5);
        shown_text(out, "name", rule->name);
        shown_number(out, "share", rule->share);
        shown_number(out, "bytes", rule->bytes);
        shown_number(out, "sessions", rule->n_sessions);
        shown_number(out, "connected", session_count(&daemon->table, rule->name, NULL));
    }
}

static gradd_status_t quota(daemon_t *daemon, request_t *request) {
    const msgpack_object *given = request->args[QUOTA_NAME];
    char name[QUOTA_NAME_BYTES] = "";
    if (given) quota_name(name, given->via.str.ptr, given->via.str.size);
    if (given && !name[0]) return GRADD_FAIL(UNSUPPORTED, "quota: field 'name' is empty");
    for (int i = QUOTA_SHARE; i <= QUOTA_REMOVE && !given; i++)
        if (request->args[i])
            return GRADD_FAIL(UNSUPPORTED, "quota: field 'name' is missing: a rule is for a name");
    if (given) {
        const gradd_status_t st = change(daemon, request->args, name);
        apply(daemon); /* also if it cannot be written */
        if (st != GRADD_OK) return gradd_wrap(st, "quota");
    }
    wire_key(&request->reply, "device");
    wire_put_text(&request->reply, gradd_device_info(daemon->worker.device)->name);
    put_rules(&request->reply, daemon);
    return GRADD_OK;
}

GRADD_COMMANDS(quota,
               {
                   .name = "quota",
                   .io = quota,
                   .fields = {
                              [QUOTA_NAME] = {.name = "name",
                                       .kind = WIRE_TEXT,
                                       .optional = true,
                                       .max = QUOTA_NAME_BYTES - 1},
                              [QUOTA_SHARE] = {.name = "share", .kind = WIRE_U64, .optional = true},
                              [QUOTA_BYTES] = {.name = "bytes", .kind = WIRE_U64, .optional = true},
                              [QUOTA_SESSIONS] = {.name = "sessions", .kind = WIRE_U64, .optional = true},
                              [QUOTA_REMOVE] = {.name = "remove", .kind = WIRE_FLAG, .optional = true}}
});
