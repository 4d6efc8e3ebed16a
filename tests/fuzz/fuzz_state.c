/* libFuzzer target: the state that an owner hands on to the process that it becomes.
 *
 * The input is the file. Some descriptors are open at known numbers, as they are after exec(), and
 * the seed names them. Whatever the file says, what was read of it can be let go of, and a
 * descriptor is taken once.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/owner/state.h"
#include "tests/fuzz/target.h"

enum { FIRST = 40, N_OPEN = 16 }; /* descriptors that are handed on */

static owner_t owner;

static void open_all(void) {
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i < N_OPEN; i++)
        REQUIRE(dup2(null, FIRST + i) == FIRST + i);
    close(null);
}

static void close_one(int fd) {
    if (fd >= 0) close(fd);
}

static void finish(void) {
    for (int i = 0; i < owner.n_clients; i++)
        relay_destroy(owner.clients[i]);
    kept_finish(&owner.kept);
    close_one(owner.control);
    close_one(owner.commands);
    close_one(owner.asker);
    close_one(owner.dir.folder);
    close_one(owner.dir.lock);
}

static void begin(void) {
    memset(&owner, 0, sizeof owner);
    owner.control = owner.commands = owner.asker = owner.successor = -1;
    owner.dir.folder = owner.dir.lock = -1;
}

static held_segment_t held(uint64_t id, int fd) {
    static const uint8_t packet[] = {0x81, 0xa1, 'v', 0xa1, 'x'};
    held_segment_t made = {id, fd, malloc(sizeof packet), sizeof packet};
    REQUIRE(made.packet);
    memcpy(made.packet, packet, sizeof packet);
    return made;
}

static void add_client(uint32_t number, int fd) {
    gradd_peer_t peer = {.pidfd = fd + 1, .pid = 7, .uid = 1, .gid = 1, .start_ticks = 9};
    relay_client_t *client = relay_create(number, fd, &peer);
    REQUIRE(client);
    client->spoken = true;
    client->hello = held(0, -1);
    client->words = held(0, fd + 2);
    client->segments = calloc(2, sizeof *client->segments);
    REQUIRE(client->segments);
    client->segments[client->n_segments++] = held(1, fd + 3);
    client->segments[client->n_segments++] = held(UINT64_MAX, -1);
    owner.clients[owner.n_clients++] = client;
}

static void add_kept(int fd) {
    kept_session_t *kept = calloc(1, sizeof *kept);
    REQUIRE(kept);
    snprintf(kept->name, sizeof kept->name, "net");
    kept->seconds = 600;
    kept->pid = 7;
    kept->pidfd = fd;
    kept->client = 3;
    kept->said = true;
    kept->ids = calloc(1, sizeof *kept->ids);
    REQUIRE(kept->ids);
    kept->ids[kept->n_ids++] = 1;
    kept->manifest = fd + 1;
    owner.kept.sessions[owner.kept.n++] = kept;
}

/* What an owner with two clients and a kept session writes. */
static void write_seed(const char *folder) {
    static uint8_t data[16384];
    char path[4096];
    int fd;
    begin();
    open_all();
    owner.dir.folder = FIRST;
    owner.dir.lock = FIRST + 1;
    owner.control = FIRST + 2;
    owner.commands = FIRST + 3;
    owner.n_listeners = 1;
    add_client(3, FIRST + 4);
    add_client(4, FIRST + 8);
    add_kept(FIRST + 12);
    REQUIRE(state_write(&owner, &fd) == GRADD_OK);
    const ssize_t n = pread(fd, data, sizeof data, 0);
    REQUIRE(n > 0);
    close(fd);
    snprintf(path, sizeof path, "%s/seed_0", folder);
    FILE *file = fopen(path, "wb");
    REQUIRE(file && fwrite(data, 1, (size_t)n, file) == (size_t)n);
    fclose(file);
    finish();
    open_all(); /* it is read as it was written */
    REQUIRE(LLVMFuzzerTestOneInput(data, (size_t)n) == 1);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    const char *folder = getenv("GRADD_FUZZ_SEEDS");
    signal(SIGPIPE, SIG_IGN);
    state_close_on_exec(); /* ours are no descriptors that were handed on */
    if (folder) {
        write_seed(folder);
        exit(0);
    }
    return 0;
}

/* 1: the state is fine. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const int fd = memfd_create("state", MFD_CLOEXEC);
    REQUIRE(fd >= 0 && write(fd, data, n) == (ssize_t)n);
    begin();
    open_all();
    const gradd_status_t st = state_read(fd, &owner);
    REQUIRE(st == GRADD_OK || gradd_error_message()[0]);
    REQUIRE(st != GRADD_OK || (owner.dir.lock >= 0 && owner.commands >= 0));
    for (int i = 0; i < owner.n_clients; i++)
        REQUIRE(owner.clients[i]->outer >= FIRST && owner.clients[i]->outer < FIRST + N_OPEN);
    const bool fine = st == GRADD_OK;
    finish();
    close(fd);
    for (int i = 0; i < N_OPEN; i++)
        close(FIRST + i);
    return fine && getenv("GRADD_FUZZ_SEEDS");
}
