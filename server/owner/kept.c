/* Verbs on sessions with a name. See kept.h. */
#include "server/owner/kept.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/host/log.h"
#include "server/session/session.h"
#include "shm/discard.h"
#include "shm/fdpass.h"

/* One verb in hand. */
typedef struct ask_s {
    kept_table_t *table;
    relay_client_t *client;
    const kept_clients_t *clients; /* Borrowed */
    const msgpack_object *const *args;
    wire_out_t reply;
    int fd; /* Borrowed: goes along with the reply; -1: none */
} ask_t;

/* ---- the table ---- */

static void drop_segments(kept_session_t *kept) {
    for (uint32_t i = 0; i < kept->n_segments; i++)
        gradd_discard(kept->segments[i].fd);
    free(kept->segments);
    kept->segments = NULL;
    kept->n_segments = 0;
}

static void destroy(kept_session_t *kept) {
    if (!kept) return;
    drop_segments(kept);
    gradd_discard(kept->manifest);
    if (kept->pidfd >= 0) close(kept->pidfd);
    free(kept->ids);
    free(kept);
}

static void drop(kept_table_t *table, int i) {
    destroy(table->sessions[i]);
    table->sessions[i] = table->sessions[--table->n];
}

static kept_session_t *find_name(const kept_table_t *table, const char *name, int *out_at) {
    for (int i = 0; i < table->n; i++) {
        if (strcmp(table->sessions[i]->name, name) != 0) continue;
        if (out_at) *out_at = i;
        return table->sessions[i];
    }
    return NULL;
}

static bool is_same_process(const kept_session_t *kept, const relay_client_t *client) {
    return kept->pid == client->peer.pid && kept->start_ticks == client->peer.start_ticks;
}

static bool is_alive(const kept_session_t *kept) {
    const gradd_peer_t peer = {.pidfd = kept->pidfd};
    return gradd_peer_alive(&peer);
}

/* The name is this client's. */
static void assign(kept_session_t *kept, const relay_client_t *client) {
    if (kept->pidfd >= 0) close(kept->pidfd);
    kept->pidfd = fcntl(client->peer.pidfd, F_DUPFD_CLOEXEC, 0);
    kept->client = client->number;
    kept->pid = client->peer.pid;
    kept->start_ticks = client->peer.start_ticks;
}

static int64_t expiry(const kept_session_t *kept) {
    const double ms = kept->seconds * 1000;
    return kept->seconds < 0 || ms > 1e15 ? INT64_MAX : session_now_ms() + (int64_t)ms;
}

bool kept_has(const kept_table_t *table, const relay_client_t *client) {
    for (int i = 0; i < table->n; i++)
        if (table->sessions[i]->client == client->number && table->sessions[i]->said) return true;
    return false;
}

/* Copies, as two names may share a segment. False with errno, ENOENT for a segment that the client
 * has taken back. */
static bool hold(kept_session_t *kept, const relay_client_t *client) {
    held_segment_t *segments = calloc(kept->n_ids ? kept->n_ids : 1, sizeof *segments);
    if (!segments) return false;
    kept->segments = segments;
    for (uint32_t i = 0; i < kept->n_ids; i++) {
        const int held = relay_find(client, kept->ids[i]);
        errno = ENOENT;
        const int fd = held >= 0 ? fcntl(held, F_DUPFD_CLOEXEC, 0) : -1;
        if (fd < 0) return false;
        segments[kept->n_segments++] = (held_segment_t){.id = kept->ids[i], .fd = fd};
    }
    return true;
}

void kept_leave(kept_table_t *table, const relay_client_t *client) {
    for (int i = table->n - 1; i >= 0; i--) {
        kept_session_t *kept = table->sessions[i];
        if (kept->client != client->number) continue;
        kept->client = 0;
        kept->expires_ms = expiry(kept);
        if (kept->said && !hold(kept, client)) {
            log_event(LOG_ERROR, "not_kept", "name=%s pid=%d what=\"a segment cannot be kept: %s\"",
                      kept->name, (int)kept->pid, strerror(errno));
            drop(table, i);
            continue;
        }
        kept->said = false;
        log_event(LOG_INFO, "kept", "name=%s pid=%d segments=%u seconds=%.0f", kept->name,
                  (int)kept->pid, kept->n_segments, kept->seconds);
    }
}

static int users_of(const kept_session_t *kept, const kept_clients_t *clients) {
    return kept->base ? clients->users(clients->context, kept->segments[0].fd) : 0;
}

void kept_expire(kept_table_t *table, int64_t now_ms, const kept_clients_t *clients) {
    for (int i = table->n - 1; i >= 0; i--) {
        kept_session_t *kept = table->sessions[i];
        if (kept->base && users_of(kept, clients)) {
            kept->expires_ms = expiry(kept);
            continue;
        }
        if (kept->client || now_ms < kept->expires_ms) continue;
        if (!kept->base && is_alive(kept)) { /* it has closed its client, or will come back */
            kept->expires_ms = expiry(kept);
            continue;
        }
        log_event(LOG_INFO, "kept_no_more", "name=%s pid=%d", kept->name, (int)kept->pid);
        drop(table, i);
    }
}

void kept_finish(kept_table_t *table) {
    while (table->n > 0)
        drop(table, table->n - 1);
}

/* ---- keep ---- */

enum { KEEP_NAME, KEEP_SECONDS, KEEP_SEGMENTS };

/* Shown in tables and logs. */
static gradd_status_t read_name(const msgpack_object *given, char name[KEPT_NAME_BYTES + 1]) {
    const msgpack_object_str *text = &given->via.str;
    bool fine = text->size > 0;
    for (uint32_t i = 0; i < text->size; i++)
        fine = fine && text->ptr[i] > 0x20 && text->ptr[i] < 0x7f && text->ptr[i] != '"';
    if (!fine)
        return GRADD_FAIL(UNSUPPORTED,
                          "field 'name': expected 1 to %d printable characters of ASCII, without "
                          "blanks and quotes",
                          KEPT_NAME_BYTES);
    snprintf(name, KEPT_NAME_BYTES + 1, "%.*s", (int)text->size, text->ptr);
    return GRADD_OK;
}

/* Another process has it, or is about to let go of it. */
static gradd_status_t check_free(const ask_t *ask, const kept_session_t *kept) {
    if (kept->base) return GRADD_OK; /* those that have it mapped keep it */
    if (kept->client == ask->client->number || is_same_process(kept, ask->client)) return GRADD_OK;
    if (is_alive(kept))
        return GRADD_FAIL(SESSION, "session '%s' is in use by process %d", kept->name,
                          (int)kept->pid);
    if (kept->client)
        return GRADD_FAIL(STALE, "session '%s' is about to end with process %d: ask again",
                          kept->name, (int)kept->pid);
    return GRADD_OK;
}

static gradd_status_t check_keep(const ask_t *ask, const kept_session_t *kept) {
    const relay_client_t *client = ask->client;
    const msgpack_object *ids = ask->args[KEEP_SEGMENTS];
    for (int i = 0; i < wire_count(ids); i++)
        if (relay_find(client, wire_u64(wire_at(ids, i))) < 0)
            return GRADD_FAIL(SHM, "field 'segments[%d]': unknown segment %llu", i,
                              (unsigned long long)wire_u64(wire_at(ids, i)));
    if (client->n_fds != 1)
        return GRADD_FAIL(SHM, "%d descriptors came along, expected 1", client->n_fds);
    if (!kept)
        return ask->table->n < KEPT_MOST
                   ? GRADD_OK
                   : GRADD_FAIL(LIMIT, "there are %d kept sessions, the limit", KEPT_MOST);
    GRADD_TRY(check_free(ask, kept));
    if (kept->base) return GRADD_FAIL(SESSION, "'%s' is the name of a base", kept->name);
    if (kept->client || is_same_process(kept, client)) return GRADD_OK;
    return GRADD_FAIL(SESSION,
                      "session '%s' of process %d, which has ended, is kept: take it over by "
                      "gradd.reattach(), or end it by gradd.forget()",
                      kept->name, (int)kept->pid);
}

static gradd_status_t read_seconds(const ask_t *ask, double *out_seconds) {
    *out_seconds = wire_f64(ask->args[KEEP_SECONDS]);
    if (!isnan(*out_seconds)) return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED, "field 'seconds': nan, expected a number of seconds, or one "
                                   "below 0, which is as long as the daemon");
}

static gradd_status_t copy_ids(const msgpack_object *list, uint64_t **out_ids) {
    const int n = wire_count(list);
    uint64_t *ids = calloc(n ? (size_t)n : 1, sizeof *ids);
    if (!ids) return GRADD_FAIL(NOMEM, "no memory for a list of %d", n);
    for (int i = 0; i < n; i++)
        ids[i] = wire_u64(wire_at(list, i));
    *out_ids = ids;
    return GRADD_OK;
}

static gradd_status_t keep(ask_t *ask) {
    char name[KEPT_NAME_BYTES + 1];
    uint64_t *ids = NULL;
    double seconds;
    relay_client_t *client = ask->client;
    GRADD_TRY(read_name(ask->args[KEEP_NAME], name));
    GRADD_TRY(read_seconds(ask, &seconds));
    kept_session_t *kept = find_name(ask->table, name, NULL);
    GRADD_TRY(check_keep(ask, kept));
    GRADD_TRY(copy_ids(ask->args[KEEP_SEGMENTS], &ids));
    if (!kept) {
        kept = calloc(1, sizeof *kept);
        if (!kept) {
            free(ids);
            return GRADD_FAIL(NOMEM, "no memory for a name");
        }
        memcpy(kept->name, name, sizeof name);
        kept->manifest = kept->pidfd = -1;
        ask->table->sessions[ask->table->n++] = kept;
    }
    drop_segments(kept);
    gradd_discard(kept->manifest);
    free(kept->ids);
    kept->ids = ids;
    kept->n_ids = (uint32_t)wire_count(ask->args[KEEP_SEGMENTS]);
    kept->manifest = client->fds[0];
    client->fds[0] = -1;
    kept->seconds = seconds;
    assign(kept, client);
    kept->said = true;
    return GRADD_OK;
}

/* ---- share ---- */

static gradd_status_t check_share(const ask_t *ask, const char *name, uint64_t *out_bytes) {
    const kept_session_t *other = find_name(ask->table, name, NULL);
    if (other && other->base)
        return GRADD_FAIL(SESSION, "there is a base '%s' already: take it by gradd.load()", name);
    if (other) return GRADD_FAIL(SESSION, "'%s' is the name of a kept session", name);
    if (ask->table->n >= KEPT_MOST)
        return GRADD_FAIL(LIMIT, "there are %d kept sessions and bases, the limit", KEPT_MOST);
    if (ask->client->n_fds != 2)
        return GRADD_FAIL(SHM, "%d descriptors came along, expected 2", ask->client->n_fds);
    return gradd_segment_check_base(ask->client->fds[0], out_bytes);
}

static gradd_status_t share(ask_t *ask) {
    char name[KEPT_NAME_BYTES + 1];
    relay_client_t *client = ask->client;
    uint64_t bytes;
    double seconds;
    GRADD_TRY(read_name(ask->args[KEEP_NAME], name));
    GRADD_TRY(read_seconds(ask, &seconds));
    GRADD_TRY(check_share(ask, name, &bytes));
    kept_session_t *base = calloc(1, sizeof *base);
    held_segment_t *segment = calloc(1, sizeof *segment);
    if (!base || !segment) {
        free(base);
        free(segment);
        return GRADD_FAIL(NOMEM, "no memory for a name");
    }
    *segment = (held_segment_t){.id = 1, .fd = client->fds[0]};
    memcpy(base->name, name, sizeof name);
    base->base = true;
    base->pidfd = -1;
    base->pid = client->peer.pid;
    base->start_ticks = client->peer.start_ticks;
    base->seconds = seconds;
    base->segments = segment;
    base->n_segments = 1;
    base->manifest = client->fds[1];
    base->expires_ms = expiry(base);
    client->fds[0] = client->fds[1] = -1;
    ask->table->sessions[ask->table->n++] = base;
    log_event(LOG_INFO, "base", "name=%s pid=%d bytes=%llu", name, (int)base->pid,
              (unsigned long long)bytes);
    return GRADD_OK;
}

/* ---- reattach, peek, forget, kept ---- */

static gradd_status_t unknown(const kept_table_t *table, const char *name) {
    char names[400] = "none is kept";
    size_t n = 0;
    for (int i = 0; i < table->n && n < sizeof names - KEPT_NAME_BYTES - 8; i++)
        n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", i ? ", " : "there is ",
                              table->sessions[i]->name);
    return GRADD_FAIL(SESSION, "there is no session '%s': %s", name, names);
}

/* Puts the `at`-th segment of a session into the reply, or the manifest (0). client: that has the
 * segments; NULL: they are held. */
static gradd_status_t put_part(ask_t *ask, const kept_session_t *kept,
                               const relay_client_t *client) {
    const uint32_t n = client ? kept->n_ids : kept->n_segments;
    const uint64_t at = wire_u64(ask->args[1]);
    if (at > n)
        return GRADD_FAIL(LIMIT, "field 'at': expected 0 to %u, got %llu", n,
                          (unsigned long long)at);
    uint64_t id = 0;
    ask->fd = kept->manifest;
    if (at) {
        id = client ? kept->ids[at - 1] : kept->segments[at - 1].id;
        ask->fd = client ? relay_find(client, id) : kept->segments[at - 1].fd;
    }
    wire_key(&ask->reply, "segments");
    wire_put_u64(&ask->reply, n);
    wire_key(&ask->reply, "id"); /* as its client calls it, or has called it; 0: the manifest */
    wire_put_u64(&ask->reply, id);
    wire_key(&ask->reply, "pid");
    wire_put_i64(&ask->reply, kept->pid);
    wire_key(&ask->reply, "seconds");
    wire_put_f64(&ask->reply, kept->seconds);
    return GRADD_OK;
}

static gradd_status_t reattach(ask_t *ask) {
    char name[KEPT_NAME_BYTES + 1];
    GRADD_TRY(read_name(ask->args[0], name));
    kept_session_t *kept = find_name(ask->table, name, NULL);
    if (!kept) return unknown(ask->table, name);
    if (kept->base) return GRADD_FAIL(SESSION, "'%s' is a base: take it by gradd.load()", name);
    GRADD_TRY(check_free(ask, kept));
    if (kept->said) return GRADD_FAIL(SESSION, "session '%s' is this process's own", name);
    GRADD_TRY(put_part(ask, kept, NULL));
    assign(kept, ask->client);
    return GRADD_OK;
}

/* For a look: the session stays whose it is. */
static gradd_status_t peek(ask_t *ask) {
    char name[KEPT_NAME_BYTES + 1];
    GRADD_TRY(read_name(ask->args[0], name));
    const kept_session_t *kept = find_name(ask->table, name, NULL);
    if (!kept) return unknown(ask->table, name);
    return put_part(ask, kept,
                    kept->said ? ask->clients->find(ask->clients->context, kept->client) : NULL);
}

static gradd_status_t forget(ask_t *ask) {
    char name[KEPT_NAME_BYTES + 1];
    int at;
    GRADD_TRY(read_name(ask->args[0], name));
    kept_session_t *kept = find_name(ask->table, name, &at);
    if (!kept) return unknown(ask->table, name);
    GRADD_TRY(check_free(ask, kept));
    drop(ask->table, at);
    return GRADD_OK;
}

static void put_number(wire_out_t *out, const char *key, int64_t value) {
    wire_put_text(out, key);
    wire_put_i64(out, value);
}

static int64_t bytes_of(const kept_session_t *kept, const relay_client_t *client) {
    int64_t bytes = 0;
    for (uint32_t i = 0; i < (client ? kept->n_ids : kept->n_segments); i++) {
        const int fd = client ? relay_find(client, kept->ids[i]) : kept->segments[i].fd;
        const off_t size = fd >= 0 ? lseek(fd, 0, SEEK_END) : 0;
        if (size > 0) bytes += size;
    }
    return bytes;
}

static gradd_status_t list(ask_t *ask) {
    wire_out_t *out = &ask->reply;
    wire_key(out, "kept");
    wire_put_list(out, (uint32_t)ask->table->n);
    for (int i = 0; i < ask->table->n; i++) {
        const kept_session_t *kept = ask->table->sessions[i];
        const bool used = kept->client || (kept->base && users_of(kept, ask->clients));
        const bool expires = !used && kept->expires_ms != INT64_MAX;
        const relay_client_t *client =
            kept->client ? ask->clients->find(ask->clients->context, kept->client) : NULL;
        wire_put_map(out, 8);
        wire_put_text(out, "name");
        wire_put_text(out, kept->name);
        put_number(out, "pid", kept->pid);
        put_number(out, "in_use", used);
        put_number(out, "base", kept->base);
        put_number(out, "users", users_of(kept, ask->clients));
        put_number(out, "bytes", bytes_of(kept, kept->said ? client : NULL));
        wire_put_text(out, "seconds");
        wire_put_f64(out, kept->seconds);
        put_number(out, "left_ms", expires ? kept->expires_ms - session_now_ms() : -1);
    }
    return GRADD_OK;
}

/* ---- the verbs ---- */

typedef struct verb_row_s {
    const char *name;
    gradd_status_t (*answer)(ask_t *ask);
    wire_field_t fields[4]; /* ends at the first without a name */
} verb_row_t;

static const verb_row_t rows[] = {
    {"keep",
     keep,               {[KEEP_NAME] = {.name = "name", .kind = WIRE_TEXT, .max = KEPT_NAME_BYTES},
      [KEEP_SECONDS] = {.name = "seconds", .kind = WIRE_F64},
      [KEEP_SEGMENTS] =
          {.name = "segments", .kind = WIRE_LIST, .item = WIRE_U64, .max = SESSION_MAX_SEGMENTS}}},
    {"share",
     share,              {[KEEP_NAME] = {.name = "name", .kind = WIRE_TEXT, .max = KEPT_NAME_BYTES},
      [KEEP_SECONDS] = {.name = "seconds", .kind = WIRE_F64}}                                   },
    {"reattach",
     reattach,           {{.name = "name", .kind = WIRE_TEXT, .max = KEPT_NAME_BYTES},
      {.name = "at", .kind = WIRE_U64}}                                                      },
    {"peek",
     peek,               {{.name = "name", .kind = WIRE_TEXT, .max = KEPT_NAME_BYTES},
      {.name = "at", .kind = WIRE_U64}}                                                          },
    {"forget",   forget, {{.name = "name", .kind = WIRE_TEXT, .max = KEPT_NAME_BYTES}}                     },
    {"kept",     list,   {{0}}                                                                             },
};

static const verb_row_t *find_row(const wire_doc_t *doc) {
    const msgpack_object *verb = wire_get(doc, "v");
    if (!verb || verb->type != MSGPACK_OBJECT_STR) return NULL;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strlen(rows[i].name) == verb->via.str.size &&
            !memcmp(rows[i].name, verb->via.str.ptr, verb->via.str.size))
            return &rows[i];
    return NULL;
}

static gradd_status_t answer(const verb_row_t *row, ask_t *ask, const wire_doc_t *doc) {
    static const char *const envelope[] = {"v", "q", NULL};
    const msgpack_object *args[4] = {NULL};
    int n = 0;
    while (row->fields[n].name)
        n++;
    GRADD_TRY(wire_check_known(doc, row->name, row->fields, n, envelope));
    GRADD_TRY(wire_match(doc, row->name, row->fields, n, args));
    ask->args = args;
    return row->answer(ask);
}

bool kept_answer(kept_table_t *table, relay_client_t *client, const wire_doc_t *doc,
                 const kept_clients_t *clients, bool *out_sent) {
    const verb_row_t *row = find_row(doc);
    if (!row) return false;
    ask_t ask = {.table = table, .client = client, .clients = clients, .fd = -1};
    const msgpack_object *q = wire_get(doc, "q");
    const uint64_t number = q && q->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? q->via.u64 : 0;
    wire_reply_begin(&ask.reply, number);
    const gradd_status_t st = answer(row, &ask, doc);
    if (st == GRADD_OK)
        wire_end(&ask.reply);
    else
        wire_reply_fail(&ask.reply, number, st, row->name, gradd_error_message(), "alive");
    *out_sent = !ask.reply.failed && gradd_fd_send(client->outer, ask.reply.data, ask.reply.bytes,
                                                   &ask.fd, ask.fd >= 0) == GRADD_OK;
    wire_out_finish(&ask.reply);
    return true;
}
