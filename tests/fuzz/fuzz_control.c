/* libFuzzer target: packets of a client with descriptors, through the owner to the worker and back.
 *
 * The input is a row of packets of the control socket, right and wrong, with descriptors of all
 * kinds, and of deaths of the worker. The owner's record of the client must be what the worker's
 * table of segments is, before a death and when the next worker has been told.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/daemon/control.h"
#include "server/host/log.h"
#include "server/owner/kept.h"
#include "server/owner/retell.h"
#include "server/session/link.h"
#include "shm/fdpass.h"
#include "tests/fuzz/target.h"

enum { N_FILES = 6, STEPS = 40 };

typedef struct input_s {
    const uint8_t *at, *end;
} input_t;

typedef struct scene_s {
    relay_client_t *client; /* NULL: hung up on */
    session_t *session;     /* NULL: the worker has ended it */
    session_table_t table;
    kept_table_t kept;
    int end; /* the client's */
} scene_t;

static queue_t *queue;
static int files[N_FILES]; /* three segments, memory that is none, /dev/null, a socket */

static uint64_t take(input_t *in, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && in->at < in->end; i++)
        value |= (uint64_t)*in->at++ << (8 * i);
    return value;
}

static void put_name(wire_out_t *out, input_t *in) {
    static const char *const names[] = {"a", "b", "", "a b", "-"};
    wire_key(out, "name");
    wire_put_text(out, names[take(in, 1) % 5]);
}

static void put_number(wire_out_t *out, const char *key, uint64_t value) {
    wire_key(out, key);
    wire_put_u64(out, value);
}

static void put_verb(wire_out_t *out, const char *verb) {
    wire_key(out, "v");
    wire_put_text(out, verb);
}

/* A packet that may be right; `kind` says which. */
static void put_packet(wire_out_t *out, input_t *in, uint64_t kind) {
    static const uint64_t sizes[] = {4096, 8192, 0, UINT64_MAX};
    wire_begin(out);
    switch (kind) {
    case 0:
    case 1:
        put_verb(out, "hello");
        wire_key(out, "proto");
        wire_put_list(out, 2);
        wire_put_u64(out, take(in, 1) % 4);
        wire_put_u64(out, 2);
        put_number(out, "replaced", take(in, 1) % 4);
        break;
    case 2:
    case 3:
    case 4:
        put_verb(out, "segment");
        put_number(out, "id", take(in, 1) % 4);
        put_number(out, "bytes", sizes[take(in, 1) % 4]);
        break;
    case 5:
        put_verb(out, "unsegment");
        put_number(out, "id", take(in, 1) % 4);
        break;
    case 6:
        put_verb(out, "timeline");
        put_number(out, "bytes", 4096);
        break;
    case 7:
        put_verb(out, "keep");
        put_name(out, in);
        put_number(out, "seconds", take(in, 1));
        wire_key(out, "segments");
        wire_put_list(out, 1);
        wire_put_u64(out, take(in, 1) % 4);
        break;
    case 8:
        put_verb(out, take(in, 1) % 2 ? "reattach" : "forget");
        put_name(out, in);
        put_number(out, "at", take(in, 1) % 3);
        break;
    default:
        put_verb(out, "kept");
    }
    wire_end(out);
    for (uint64_t n = take(in, 1) % 8; n > 5 && out->bytes; n--) /* damage, now and then */
        out->data[take(in, 2) % out->bytes] = (uint8_t)take(in, 1);
}

static const relay_client_t *find_client(void *context, uint32_t number) {
    const scene_t *scene = context;
    return number == 1 ? scene->client : NULL;
}

static int count_users(void *context, int fd) {
    (void)context, (void)fd;
    return 0;
}

static bool answer_own(void *context, relay_client_t *client, const wire_doc_t *doc,
                       bool *out_sent) {
    scene_t *scene = context;
    const kept_clients_t clients = {find_client, count_users, scene};
    return kept_answer(&scene->kept, client, doc, &clients, out_sent);
}

static void hang_up(scene_t *scene) {
    kept_leave(&scene->kept, scene->client);
    relay_destroy(scene->client);
    scene->client = NULL;
}

/* The worker's part: what has come, until nothing does. */
static void let_worker_read(scene_t *scene) {
    static const quotas_t quotas = {.folder = -1};
    const control_host_t host = {.dir = "/",
                                 .owner = 1,
                                 .device = "cpu",
                                 .quotas = &quotas,
                                 .table = &scene->table,
                                 .queue = queue};
    request_t *later;
    bool open = true;
    if (!scene->session) return;
    control_read(scene->session, &host, &open, &later);
    REQUIRE(!later);
    if (open) return;
    session_destroy(&scene->table, scene->session);
    scene->session = NULL;
}

static void start_worker(scene_t *scene, int end) {
    gradd_peer_t peer;
    REQUIRE(gradd_peer_identify(end, 0, GRADD_LEASE_AUTO, &peer) == GRADD_OK);
    REQUIRE(session_create(&scene->table, 1, scene->client->token, end, &peer, &scene->session) ==
            GRADD_OK);
}

static void check_record(const scene_t *scene) {
    uint32_t n;
    uint64_t bytes;
    if (!scene->client || !scene->session) return;
    gradd_handle_usage(gradd_lease_table(scene->session->lease), &n, &bytes);
    REQUIRE(scene->client->n_segments == n);
    REQUIRE((scene->client->words.packet != NULL) == (scene->session->words.base != NULL));
}

static void say(scene_t *scene, input_t *in) {
    wire_out_t out = {0};
    int fds[5], n = (int)(take(in, 1) % 8);
    n = n > 5 ? 1 : n > 2 ? n - 2 : n; /* mostly one */
    for (int i = 0; i < n; i++)
        fds[i] = files[take(in, 1) % N_FILES];
    put_packet(&out, in, take(in, 1) % 10);
    if (!out.failed && gradd_fd_send(scene->end, out.data, out.bytes, fds, n) == GRADD_OK &&
        relay_from_client(scene->client, answer_own, scene) == RELAY_OVER)
        hang_up(scene);
    wire_out_finish(&out);
}

static void lose_worker(scene_t *scene, bool answered) {
    int ends[2];
    if (answered) let_worker_read(scene);
    if (answered && scene->client->in_flight && relay_from_worker(scene->client) != RELAY_OPEN) {
        hang_up(scene);
        return;
    }
    if (scene->session) session_destroy(&scene->table, scene->session);
    scene->session = NULL;
    if (!retell_wait(scene->client)) {
        hang_up(scene);
        return;
    }
    REQUIRE(link_create(ends) == GRADD_OK);
    start_worker(scene, ends[1]);
    relay_state_t state = retell_begin(scene->client, ends[0]);
    while (state == RELAY_OPEN && scene->client->moves) {
        let_worker_read(scene);
        state = retell_go_on(scene->client);
    }
    REQUIRE(state == RELAY_OPEN); /* it has taken all that once */
}

static void drain(int end) {
    static uint8_t buffer[65536];
    int fds[4];
    gradd_fd_event_t event = GRADD_FD_PACKET;
    while (event == GRADD_FD_PACKET) {
        gradd_fd_packet_t packet = {
            .data = buffer, .capacity = sizeof buffer, .fds = fds, .max_fds = 4};
        if (gradd_fd_recv(end, &packet, &event) != GRADD_OK || event != GRADD_FD_PACKET) return;
        for (int i = 0; i < packet.n_fds; i++)
            close(fds[i]);
    }
}

static void step(scene_t *scene, input_t *in) {
    const uint64_t what = take(in, 1) % 8;
    if (what == 0) {
        lose_worker(scene, take(in, 1) % 2);
    } else if (!scene->client->waits) {
        say(scene, in);
    } else {
        let_worker_read(scene);
        if (relay_from_worker(scene->client) != RELAY_OPEN) hang_up(scene);
    }
    if (scene->client && !scene->client->waits) check_record(scene);
    drain(scene->end);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    static scene_t scene;
    input_t in = {data, data + n};
    int outer[2], inner[2];
    gradd_peer_t peer;
    memset(&scene, 0, sizeof scene);
    REQUIRE(link_create(outer) == GRADD_OK && link_create(inner) == GRADD_OK);
    REQUIRE(gradd_peer_identify(outer[1], 0, GRADD_LEASE_AUTO, &peer) == GRADD_OK);
    scene.end = outer[0];
    scene.client = relay_create(1, outer[1], &peer);
    REQUIRE(scene.client);
    scene.client->inner = inner[0];
    start_worker(&scene, inner[1]);
    for (int i = 0; i < STEPS && in.at < in.end && scene.client; i++)
        step(&scene, &in);
    if (scene.client) hang_up(&scene);
    if (scene.session) session_destroy(&scene.table, scene.session);
    kept_finish(&scene.kept);
    close(scene.end);
    return 0;
}

static void write_seed(const char *folder) {
    static const uint8_t rows[][64] = {
        /* hello, a segment, a death, another one, kept; `unsegment` and a death with its answer */
        {1, 0, 0, 2, 1, 0, 1, 1, 3, 0, 2, 1, 0, 0, 1, 0, 0, 1, 3, 1, 2, 2, 1,
         0, 1, 1, 3, 3, 7, 0, 9, 1, 0, 1, 0, 5, 1, 0, 0, 1, 1, 3, 0, 2, 3, 0},
        /* hello, words, a segment whose worker dies with it, the same once more */
        {1, 0, 0, 2, 1, 0, 1, 1, 3, 0, 6, 0, 1, 1, 3, 1, 2, 1, 1, 0, 0, 0, 1, 3, 1, 2, 1, 1, 0, 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char path[4096];
        snprintf(path, sizeof path, "%s/seed_%zu", folder, i);
        FILE *file = fopen(path, "wb");
        REQUIRE(file && fwrite(rows[i], 1, sizeof rows[i], file) == sizeof rows[i]);
        fclose(file);
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    int ends[2];
    signal(SIGPIPE, SIG_IGN);
    log_set_level("error");
    if (folder) {
        write_seed(folder);
        exit(0);
    }
    REQUIRE(queue_create(&queue) == GRADD_OK);
    for (int i = 0; i < 3; i++) {
        gradd_segment_t segment = GRADD_SEGMENT_INIT;
        REQUIRE(gradd_segment_create("fuzz", i ? 8192 : 4096, &segment) == GRADD_OK);
        files[i] = dup(segment.fd);
        gradd_segment_finish(&segment);
    }
    files[3] = memfd_create("unsealed", MFD_CLOEXEC);
    files[4] = open("/dev/null", O_RDWR | O_CLOEXEC);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    files[5] = ends[0];
    return 0;
}
