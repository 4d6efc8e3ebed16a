/* See state.h. Below the outermost map all is lists, in the order of the functions here. */
#include "server/owner/state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_BYTES (1 << 30)
#define MOST_ITEMS (1u << 23)

void state_close_on_exec(void) {
    close_range(STDERR_FILENO + 1, ~0u, CLOSE_RANGE_CLOEXEC);
}

/* ---- writing ---- */

static void put_fd(wire_out_t *out, int fd) {
    if (fd >= 0) fcntl(fd, F_SETFD, 0);
    wire_put_i64(out, fd);
}

static void put_held(wire_out_t *out, const held_segment_t *held) {
    wire_put_list(out, 3);
    wire_put_u64(out, held->id);
    put_fd(out, held->fd);
    wire_put_bytes(out, held->packet, held->packet ? held->n_bytes : 0);
}

static void put_segments(wire_out_t *out, const held_segment_t *segments, uint32_t n) {
    wire_put_list(out, n);
    for (uint32_t i = 0; i < n; i++)
        put_held(out, &segments[i]);
}

static void put_client(wire_out_t *out, const relay_client_t *client) {
    wire_put_list(out, 14);
    wire_put_u64(out, client->number);
    put_fd(out, client->outer);
    put_fd(out, client->peer.pidfd);
    wire_put_u64(out, (uint64_t)client->peer.pid);
    wire_put_u64(out, client->peer.uid);
    wire_put_u64(out, client->peer.gid);
    wire_put_u64(out, client->peer.start_ticks);
    wire_put_bytes(out, client->token, sizeof client->token);
    wire_put_u64(out, client->dropped);
    wire_put_u64(out, client->spoken);
    wire_put_u64(out, (uint64_t)client->n_tries);
    put_held(out, &client->hello);
    put_held(out, &client->words);
    put_segments(out, client->segments, client->n_segments);
}

static void put_kept(wire_out_t *out, const kept_session_t *kept) {
    wire_put_list(out, 12);
    wire_put_text(out, kept->name);
    wire_put_f64(out, kept->seconds);
    wire_put_i64(out, kept->expires_ms);
    wire_put_u64(out, (uint64_t)kept->pid);
    wire_put_u64(out, kept->start_ticks);
    put_fd(out, kept->pidfd);
    wire_put_u64(out, kept->client);
    wire_put_u64(out, kept->said);
    wire_put_u64(out, kept->base);
    wire_put_list(out, kept->n_ids);
    for (uint32_t i = 0; i < kept->n_ids; i++)
        wire_put_u64(out, kept->ids[i]);
    put_fd(out, kept->manifest);
    put_segments(out, kept->segments, kept->n_segments);
}

static void put_place(wire_out_t *out, const owner_t *owner) {
    wire_key(out, "place");
    wire_put_list(out, 8);
    put_fd(out, owner->dir.folder);
    put_fd(out, owner->dir.lock);
    put_fd(out, owner->control);
    put_fd(out, owner->commands);
    for (int i = 0; i < RUNDIR_SOCKETS; i++) {
        wire_put_u64(out, owner->dir.sockets[i].device);
        wire_put_u64(out, owner->dir.sockets[i].inode);
    }
}

static void put_owner(wire_out_t *out, const owner_t *owner) {
    wire_key(out, "format");
    wire_put_u64(out, STATE_FORMAT);
    put_place(out, owner);
    wire_key(out, "counts");
    wire_put_list(out, 6);
    wire_put_i64(out, owner->started_ms);
    wire_put_u64(out, owner->n_workers);
    wire_put_u64(out, owner->n_born);
    wire_put_u64(out, (uint64_t)owner->n_listeners);
    wire_put_u64(out, owner->displaced);
    put_fd(out, owner->asker);
    wire_key(out, "clients");
    wire_put_list(out, (uint32_t)owner->n_clients);
    for (int i = 0; i < owner->n_clients; i++)
        put_client(out, owner->clients[i]);
    wire_key(out, "kept");
    wire_put_list(out, (uint32_t)owner->kept.n);
    for (int i = 0; i < owner->kept.n; i++)
        put_kept(out, owner->kept.sessions[i]);
}

static bool write_all(int fd, const uint8_t *data, size_t bytes) {
    while (bytes > 0) {
        const ssize_t n = write(fd, data, bytes);
        if (n <= 0) return false;
        data += n;
        bytes -= (size_t)n;
    }
    return true;
}

gradd_status_t state_write(const owner_t *owner, int *out_fd) {
    wire_out_t out = {0};
    wire_begin(&out);
    put_owner(&out, owner);
    wire_end(&out);
    const int fd = out.failed ? -1 : memfd_create("gradd-state", 0);
    if (fd >= 0 && write_all(fd, out.data, out.bytes)) {
        wire_out_finish(&out);
        *out_fd = fd;
        return GRADD_OK;
    }
    const gradd_status_t st = out.failed ? GRADD_FAIL(NOMEM, "no memory for the state")
                                         : GRADD_FAIL(IO, "the state: %s", strerror(errno));
    if (fd >= 0) close(fd);
    wire_out_finish(&out);
    return st;
}

/* ---- reading ---- */

/* Values of a list, one after the other; the first one that is missing or no such value sticks. */
typedef struct reader_s {
    const msgpack_object *list;
    int next;
    bool *failed; /* of all readers of a file */
} reader_t;

static reader_t read_list(const msgpack_object *list, bool *failed) {
    if (!list || list->type != MSGPACK_OBJECT_ARRAY) *failed = true;
    return (reader_t){list, 0, failed};
}

static const msgpack_object *read_any(reader_t *reader) {
    static const msgpack_object none = {.type = MSGPACK_OBJECT_NIL};
    if (!*reader->failed && reader->next < wire_count(reader->list))
        return wire_at(reader->list, reader->next++);
    *reader->failed = true;
    return &none;
}

static uint64_t read_u64(reader_t *reader, uint64_t most) {
    const msgpack_object *value = read_any(reader);
    if (value->type == MSGPACK_OBJECT_POSITIVE_INTEGER && value->via.u64 <= most)
        return value->via.u64;
    *reader->failed = true;
    return 0;
}

static bool is_open(int fd) {
    return fd > STDERR_FILENO && fcntl(fd, F_GETFD) >= 0;
}

/* A descriptor that no other value has: marked close-on-exec, it is taken. -1: none. */
static int read_fd(reader_t *reader) {
    const msgpack_object *value = read_any(reader);
    if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER && value->via.i64 == -1) return -1;
    const bool fits = value->type == MSGPACK_OBJECT_POSITIVE_INTEGER && value->via.u64 <= INT_MAX;
    const int fd = fits ? (int)value->via.u64 : -1;
    if (is_open(fd) && fcntl(fd, F_GETFD) == 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0) return fd;
    *reader->failed = true;
    return -1;
}

static int64_t read_time(reader_t *reader) {
    const msgpack_object *value = read_any(reader);
    if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER) return value->via.i64;
    if (value->type == MSGPACK_OBJECT_POSITIVE_INTEGER && value->via.u64 <= INT64_MAX)
        return (int64_t)value->via.u64;
    *reader->failed = true;
    return 0;
}

/* Copies at most so many bytes, and returns how many there are. */
static uint32_t read_bytes(reader_t *reader, void *out, uint32_t most) {
    const msgpack_object *value = read_any(reader);
    if (value->type == MSGPACK_OBJECT_BIN && value->via.bin.size <= most) {
        if (value->via.bin.size) memcpy(out, value->via.bin.ptr, value->via.bin.size);
        return value->via.bin.size;
    }
    *reader->failed = true;
    return 0;
}

static void read_held(reader_t *reader, held_segment_t *out) {
    uint8_t packet[RELAY_MAX_KEPT];
    reader_t held = read_list(read_any(reader), reader->failed);
    out->id = read_u64(&held, UINT64_MAX);
    out->fd = read_fd(&held);
    out->n_bytes = read_bytes(&held, packet, sizeof packet);
    out->packet = out->n_bytes ? malloc(out->n_bytes) : NULL;
    if (out->packet)
        memcpy(out->packet, packet, out->n_bytes);
    else if (out->n_bytes)
        *reader->failed = true;
}

static held_segment_t *read_segments(reader_t *reader, uint32_t *out_n) {
    reader_t list = read_list(read_any(reader), reader->failed);
    const int n = *reader->failed ? 0 : wire_count(list.list);
    held_segment_t *segments =
        n > 0 && n <= SESSION_MAX_SEGMENTS ? calloc((size_t)n, sizeof *segments) : NULL;
    *out_n = 0;
    if (n > 0 && !segments) *reader->failed = true;
    for (int i = 0; segments && i < n; i++)
        read_held(&list, &segments[(*out_n)++]);
    return segments;
}

static gradd_peer_t read_peer(reader_t *reader) {
    gradd_peer_t peer = GRADD_PEER_INIT;
    peer.pidfd = read_fd(reader);
    peer.pid = (pid_t)read_u64(reader, INT32_MAX);
    peer.uid = (uid_t)read_u64(reader, UINT32_MAX);
    peer.gid = (gid_t)read_u64(reader, UINT32_MAX);
    peer.start_ticks = read_u64(reader, UINT64_MAX);
    if (peer.pidfd < 0) *reader->failed = true;
    return peer;
}

/* NULL without memory, or without a connection: the descriptors are closed then. */
static relay_client_t *begin_client(reader_t *reader) {
    const uint32_t number = (uint32_t)read_u64(reader, UINT32_MAX);
    const int outer = read_fd(reader);
    gradd_peer_t peer = read_peer(reader);
    relay_client_t *client = outer >= 0 ? relay_create(number, outer, &peer) : NULL;
    if (client) return client;
    *reader->failed = true;
    if (outer >= 0) close(outer);
    gradd_peer_finish(&peer);
    return NULL;
}

static void read_client(const msgpack_object *o, owner_t *owner, bool *failed) {
    reader_t reader = read_list(o, failed);
    relay_client_t *client = begin_client(&reader);
    if (!client) return;
    owner->clients[owner->n_clients++] = client;
    if (read_bytes(&reader, client->token, sizeof client->token) != sizeof client->token)
        *failed = true;
    client->dropped = read_u64(&reader, 1);
    client->spoken = read_u64(&reader, 1);
    client->n_tries = (int)read_u64(&reader, INT_MAX);
    read_held(&reader, &client->hello);
    read_held(&reader, &client->words);
    client->segments = read_segments(&reader, &client->n_segments);
    client->segment_capacity = client->n_segments;
    client->movable = client->waits = true; /* the others have been hung up on */
    if (client->spoken != (client->hello.packet != NULL)) *failed = true;
    if (!client->spoken && (client->n_segments || client->words.packet)) *failed = true;
    for (uint32_t i = 0; i < client->n_segments; i++)
        if (!client->segments[i].packet) *failed = true;
}

static void read_ids(reader_t *reader, kept_session_t *kept) {
    reader_t list = read_list(read_any(reader), reader->failed);
    const int n = *reader->failed ? 0 : wire_count(list.list);
    kept->ids = n <= SESSION_MAX_SEGMENTS ? calloc(n ? (size_t)n : 1, sizeof *kept->ids) : NULL;
    if (!kept->ids) *reader->failed = true;
    for (int i = 0; kept->ids && i < n; i++)
        kept->ids[kept->n_ids++] = read_u64(&list, UINT64_MAX);
}

static void read_kept(const msgpack_object *o, owner_t *owner, bool *failed) {
    reader_t reader = read_list(o, failed);
    kept_session_t *kept = calloc(1, sizeof *kept);
    if (!kept) {
        *failed = true;
        return;
    }
    kept->manifest = kept->pidfd = -1;
    owner->kept.sessions[owner->kept.n++] = kept;
    const msgpack_object *name = read_any(&reader), *seconds;
    if (name->type == MSGPACK_OBJECT_STR && name->via.str.size <= KEPT_NAME_BYTES)
        memcpy(kept->name, name->via.str.ptr, name->via.str.size);
    else
        *failed = true;
    seconds = read_any(&reader);
    if (seconds->type != MSGPACK_OBJECT_FLOAT64) *failed = true;
    kept->seconds = *failed ? 0 : seconds->via.f64;
    kept->expires_ms = read_time(&reader);
    kept->pid = (pid_t)read_u64(&reader, INT32_MAX);
    kept->start_ticks = read_u64(&reader, UINT64_MAX);
    kept->pidfd = read_fd(&reader);
    kept->client = (uint32_t)read_u64(&reader, UINT32_MAX);
    kept->said = read_u64(&reader, 1);
    kept->base = read_u64(&reader, 1);
    read_ids(&reader, kept);
    kept->manifest = read_fd(&reader);
    kept->segments = read_segments(&reader, &kept->n_segments);
    if (kept->base && kept->n_segments != 1) *failed = true;
}

static void read_place(const msgpack_object *o, owner_t *owner, bool *failed) {
    reader_t reader = read_list(o, failed);
    owner->dir.folder = read_fd(&reader);
    owner->dir.lock = read_fd(&reader);
    owner->control = read_fd(&reader);
    owner->commands = read_fd(&reader);
    for (int i = 0; i < RUNDIR_SOCKETS; i++) {
        owner->dir.sockets[i].device = read_u64(&reader, UINT64_MAX);
        owner->dir.sockets[i].inode = read_u64(&reader, UINT64_MAX);
    }
    if (owner->dir.folder < 0 || owner->dir.lock < 0 || owner->control < 0 || owner->commands < 0)
        *failed = true;
}

static void read_counts(const msgpack_object *o, owner_t *owner, bool *failed) {
    reader_t reader = read_list(o, failed);
    owner->started_ms = read_time(&reader);
    owner->n_workers = (uint32_t)read_u64(&reader, UINT32_MAX);
    owner->n_born = (uint32_t)read_u64(&reader, UINT32_MAX);
    owner->n_listeners = (int)read_u64(&reader, INT_MAX);
    owner->displaced = read_u64(&reader, 1);
    owner->asker = read_fd(&reader);
}

typedef void (*read_entry_t)(const msgpack_object *o, owner_t *owner, bool *failed);

static void read_entries(const msgpack_object *list, owner_t *owner, read_entry_t read, int most,
                         bool *failed) {
    const reader_t reader = read_list(list, failed);
    if (*failed || wire_count(reader.list) > most) {
        *failed = true;
        return;
    }
    for (int i = 0; i < wire_count(list) && !*failed; i++)
        read(wire_at(list, i), owner, failed);
}

static gradd_status_t read_doc(const wire_doc_t *doc, owner_t *owner) {
    const bool is_map = doc->root.type == MSGPACK_OBJECT_MAP;
    const msgpack_object *format = is_map ? wire_get(doc, "format") : NULL;
    bool failed = false;
    if (!format || format->type != MSGPACK_OBJECT_POSITIVE_INTEGER ||
        format->via.u64 != STATE_FORMAT)
        return GRADD_FAIL(VERSION, "the state that was handed on has another format than %d",
                          STATE_FORMAT);
    read_place(wire_get(doc, "place"), owner, &failed);
    read_counts(wire_get(doc, "counts"), owner, &failed);
    read_entries(wire_get(doc, "clients"), owner, read_client, OWNER_MAX_CLIENTS, &failed);
    read_entries(wire_get(doc, "kept"), owner, read_kept, KEPT_MOST, &failed);
    return failed ? GRADD_FAIL(VERSION, "the state that was handed on is damaged") : GRADD_OK;
}

gradd_status_t state_read(int fd, owner_t *owner) {
    struct stat file;
    wire_doc_t doc;
    if (fstat(fd, &file) != 0 || file.st_size <= 0 || file.st_size > MOST_BYTES)
        return GRADD_FAIL(IO, "there is no state at descriptor %d", fd);
    const size_t bytes = (size_t)file.st_size;
    void *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) return GRADD_FAIL(IO, "the state: %s", strerror(errno));
    gradd_status_t st = wire_decode_any(data, bytes, MOST_ITEMS, &doc);
    if (st == GRADD_OK) {
        st = read_doc(&doc, owner);
        wire_doc_finish(&doc);
    }
    munmap(data, bytes);
    state_close_on_exec();
    return st;
}
