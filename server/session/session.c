/* The session table. See session.h for the life of a session. */
#include "server/session/session.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "server/session/link.h"

int64_t session_now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

gradd_status_t session_draw_key(uint8_t key[SESSION_KEY_BYTES]) {
    ssize_t n = getrandom(key, SESSION_KEY_BYTES, 0);
    return n == SESSION_KEY_BYTES ? GRADD_OK : GRADD_FAIL(IO, "getrandom: %s", strerror(errno));
}

/* Takes the same time wherever the first difference is. */
static bool same_key(const uint8_t *a, const uint8_t *b) {
    uint8_t difference = 0;
    for (int i = 0; i < SESSION_KEY_BYTES; i++)
        difference |= (uint8_t)(a[i] ^ b[i]);
    return difference == 0;
}

static bool is_surplus(const session_table_t *table, pid_t pid) {
    int of_process = 0;
    for (int i = 0; i < table->n; i++)
        of_process += !table->sessions[i]->surplus && table->sessions[i]->pid == pid;
    return table->n - table->n_surplus >= SESSION_MAX || of_process >= SESSION_MAX_OF_PROCESS;
}

gradd_status_t session_create(session_table_t *table, uint32_t number,
                              const uint8_t token[SESSION_KEY_BYTES], int control,
                              gradd_peer_t *peer, session_t **out_session) {
    const gradd_handle_limits_t limits = {.segments = SESSION_MAX_SEGMENTS};
    const pid_t pid = peer->pid;
    const uid_t uid = peer->uid;
    gradd_status_t st = GRADD_OK;
    session_t *session = NULL;
    const bool surplus = is_surplus(table, pid);
    if (surplus && table->n_surplus >= SESSION_MAX_SURPLUS) {
        st = GRADD_FAIL(LIMIT, "%d clients are connected, too many of all or of one process",
                        table->n);
        goto fail;
    }
    session = calloc(1, sizeof *session);
    if (!session) {
        st = GRADD_FAIL(NOMEM, "no memory for a session");
        goto fail;
    }
    if ((st = gradd_lease_create(peer, limits, &session->lease)) != GRADD_OK) goto fail;
    record_init(&session->record);
    session->share = FAIR_SHARE;
    session->pid = pid;
    session->uid = uid;
    session->number = number;
    memcpy(session->token, token, sizeof session->token);
    table->n_born++;
    session->control = control;
    session->surplus = surplus;
    table->n_surplus += surplus;
    session->born_ms = session->active_ms = session->awaited_ms = session_now_ms();
    session->end_reason = "connection closed";
    table->sessions[table->n++] = session;
    *out_session = session;
    return GRADD_OK;
fail:
    gradd_peer_finish(peer);
    free(session);
    link_say_end(control);
    close(control);
    return st;
}

void session_destroy(session_table_t *table, session_t *session) {
    for (int i = 0; i < table->n; i++) {
        if (table->sessions[i] != session) continue;
        table->sessions[i] = table->sessions[--table->n];
        table->n_surplus -= session->surplus;
        break;
    }
    gradd_lease_destroy(session->lease);
    gradd_segment_finish(&session->marks);
    gradd_segment_finish(&session->words);
    link_say_end(session->control);
    close(session->control); /* last: it may free what it has lent */
    record_finish(&session->record);
    free(session->last_reply);
    explicit_bzero(session->token, sizeof session->token);
    free(session);
}

gradd_status_t session_greet(session_t *session, const char *client, size_t client_bytes) {
    if (session->state > SESSION_GREETED)
        return GRADD_FAIL(SESSION, "hello: session %u is attached already", session->number);
    GRADD_TRY(session_draw_key(session->nonce));
    quota_name(session->client, client, client_bytes); /* shown in tables and logs */
    session->state = SESSION_GREETED;
    return GRADD_OK;
}

gradd_status_t session_attach(session_table_t *table, const uint8_t *nonce, size_t nonce_bytes,
                              const session_caller_t *caller, session_t **out_session) {
    const size_t route_bytes = caller->route_bytes;
    session_t *found = NULL;
    if (nonce_bytes == SESSION_KEY_BYTES)
        for (int i = 0; i < table->n; i++) {
            session_t *session = table->sessions[i];
            bool equal = same_key(session->nonce, nonce);
            if (equal && session->state == SESSION_GREETED && session->uid == caller->uid)
                found = session;
        }
    if (!found || route_bytes == 0 || route_bytes > SESSION_ROUTE_BYTES)
        return GRADD_FAIL(SESSION, "attach: the nonce is unknown, used or of another user");
    for (int i = 0; i < table->n; i++) {
        const session_t *other = table->sessions[i];
        if (other->state == SESSION_ATTACHED && other->n_route == route_bytes &&
            memcmp(other->route, caller->route, caller->route_bytes) == 0)
            return GRADD_FAIL(SESSION, "attach: this connection serves session %u already",
                              other->number);
    }
    explicit_bzero(found->nonce, sizeof found->nonce);
    memcpy(found->route, caller->route, route_bytes);
    found->n_route = (uint8_t)route_bytes;
    found->state = SESSION_ATTACHED;
    *out_session = found;
    return GRADD_OK;
}

gradd_status_t session_authorize(session_table_t *table, const uint8_t *token, size_t token_bytes,
                                 const session_caller_t *caller, session_t **out_session) {
    for (int i = 0; i < table->n; i++) {
        session_t *session = table->sessions[i];
        if (session->state != SESSION_ATTACHED || session->n_route != caller->route_bytes ||
            memcmp(session->route, caller->route, caller->route_bytes) != 0)
            continue;
        if (token_bytes != SESSION_KEY_BYTES || !same_key(session->token, token) ||
            session->uid != caller->uid)
            break;
        *out_session = session;
        return GRADD_OK;
    }
    return GRADD_FAIL(SESSION, "unknown or foreign session: attach again");
}

session_t *session_by_number(session_table_t *table, uint32_t number) {
    for (int i = 0; i < table->n; i++)
        if (table->sessions[i]->number == number) return table->sessions[i];
    return NULL;
}

gradd_status_t session_order(const session_t *session, uint64_t q, session_order_t *out_order) {
    if (q > session->q_taken) {
        if (session->lane.length >= SESSION_MAX_WAITING)
            return GRADD_FAIL(LIMIT, "%d requests of this session wait, the limit",
                              SESSION_MAX_WAITING);
        *out_order = SESSION_RUN;
        return GRADD_OK;
    }
    if (q > session->q_done) {
        *out_order = SESSION_WAIT;
        return GRADD_OK;
    }
    if (q == session->q_done && session->last_reply) {
        *out_order = SESSION_REPEAT;
        return GRADD_OK;
    }
    return GRADD_FAIL(SESSION, "request %llu comes after request %llu was finished",
                      (unsigned long long)q, (unsigned long long)session->q_done);
}

void session_take(session_t *session, uint64_t q) {
    session->q_taken = q;
    session->n_requests++;
    session->active_ms = session_now_ms();
}

void session_keep_reply(session_t *session, uint64_t q, const void *reply, size_t bytes) {
    uint8_t *copy = realloc(session->last_reply, bytes ? bytes : 1);
    session->q_done = q;
    session->active_ms = session_now_ms();
    if (!copy) {
        free(session->last_reply);
        session->last_reply = NULL;
        session->last_reply_bytes = 0;
        return;
    }
    memcpy(copy, reply, bytes);
    session->last_reply = copy;
    session->last_reply_bytes = bytes;
}

#define PACE_MS 5000 /* in which what was before loses most of its weight */

void session_pace_look(session_pace_t *pace, int64_t ms) {
    const double part = ms < PACE_MS ? (double)ms / PACE_MS : 1, seconds = (double)ms / 1000;
    const double busy = (double)(pace->engine_us - pace->seen_us) / 1e6 / seconds;
    const double rate = (double)(pace->n_steps - pace->seen_steps) / seconds;
    pace->busy += part * (busy - pace->busy);
    pace->steps_per_second += part * (rate - pace->steps_per_second);
    pace->seen_us = pace->engine_us;
    pace->seen_steps = pace->n_steps;
}

int64_t session_own_bytes(session_t *session) {
    uint64_t kinds[GRADD_N_SEGMENT_PURPOSES], bytes = 0;
    gradd_handle_purpose_bytes(gradd_lease_table(session->lease), kinds);
    for (int i = 0; i < GRADD_N_SEGMENT_PURPOSES; i++)
        if (i != GRADD_SEGMENT_base) bytes += kinds[i];
    return (int64_t)bytes + atomic_load(&session->counts.arena_bytes) +
           atomic_load(&session->counts.constant_bytes);
}

gradd_status_t session_check_bytes(session_t *session, const char *what, int64_t bytes) {
    const int64_t most = atomic_load(&session->most_bytes);
    if (!most) return GRADD_OK;
    const int64_t own = session_own_bytes(session);
    if (bytes <= most - own) return GRADD_OK;
    return GRADD_FAIL(NOMEM,
                      "%s needs %.2f MiB; session %u, %s, has %.2f of the %lld MiB of its quota "
                      "(gradd quota)",
                      what, (double)bytes / (1 << 20), session->number, session->client,
                      (double)own / (1 << 20), (long long)(most >> 20));
}

void session_holder_text(const session_t *session, char text[SESSION_HOLDER_BYTES]) {
    snprintf(text, SESSION_HOLDER_BYTES,
             "session %u, %s, pid %d, which has %lld MiB of activations", session->number,
             session->client, (int)session->pid,
             (long long)(atomic_load(&session->counts.arena_bytes) >> 20));
}

void session_set_quota(session_t *session, queue_t *queue, const quota_t *rule) {
    session->share = rule->share;
    atomic_store(&session->most_bytes, rule->bytes);
    queue_set_share(queue, &session->lane, rule->share);
}

int session_count(const session_table_t *table, const char *client, const session_t *without) {
    int n = 0;
    for (int i = 0; i < table->n; i++) {
        const session_t *s = table->sessions[i];
        n += s != without && !s->ends && s->state > SESSION_NEW && !strcmp(s->client, client);
    }
    return n;
}

const char *session_state_name(const session_t *session) {
    if (session->state == SESSION_CLOSING) return "closing";
    if (session->state != SESSION_ATTACHED) return "connecting";
    if (session->stalled_ms) return "stalled";
    if (atomic_load(&session->counts.running)) return "running";
    if (atomic_load(&session->counts.wanted_bytes)) return "waiting";
    return session->lane.length > 0 ? "queued" : "idle";
}
