/* See restart.h. */
#include "server/owner/restart.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "server/host/log.h"
#include "server/owner/state.h"
#include "server/wire/version.h"
#include "shm/fdpass.h"

#define MOST_ARGUMENTS 64

enum { RESTART_FORMAT, RESTART_DEVICE, RESTART_INODE, RESTART_FIELDS };

static const wire_field_t fields[] = {
    [RESTART_FORMAT] = {.name = "format", .kind = WIRE_U64},
    [RESTART_DEVICE] = {.name = "device", .kind = WIRE_U64},
    [RESTART_INODE] = {.name = "inode",  .kind = WIRE_U64},
};

static bool is_restart(const wire_doc_t *packet) {
    static const char verb[] = "restart";
    const msgpack_object *given = wire_get(packet, "v");
    return given && given->type == MSGPACK_OBJECT_STR && given->via.str.size == sizeof verb - 1 &&
           !memcmp(given->via.str.ptr, verb, sizeof verb - 1);
}

static gradd_status_t check_binary(const owner_t *owner, int fd,
                                   const msgpack_object *const *args) {
    struct stat file;
    if (fd < 0) return GRADD_FAIL(IO, "%s: %s", owner->binary, strerror(errno));
    if (fstat(fd, &file) != 0 || !S_ISREG(file.st_mode))
        return GRADD_FAIL(IO, "%s is no file", owner->binary);
    if (file.st_dev == wire_u64(args[RESTART_DEVICE]) &&
        file.st_ino == wire_u64(args[RESTART_INODE]))
        return GRADD_OK;
    return GRADD_FAIL(UNSUPPORTED,
                      "this daemon was started as %s, which is not the program that asks: run `%s "
                      "restart`",
                      owner->binary, owner->binary);
}

static gradd_status_t check(const owner_t *owner, const wire_doc_t *packet, int *out_binary) {
    static const char *const envelope[] = {"v", "q", NULL};
    const msgpack_object *args[RESTART_FIELDS];
    GRADD_TRY(wire_check_known(packet, "restart", fields, RESTART_FIELDS, envelope));
    GRADD_TRY(wire_match(packet, "restart", fields, RESTART_FIELDS, args));
    if (wire_u64(args[RESTART_FORMAT]) != STATE_FORMAT)
        return GRADD_FAIL(
            VERSION,
            "daemon %d, gradd %s, hands its clients on in another form than %s reads: "
            "`gradd stop` ends it, and a trainer's next call starts the new one",
            (int)getpid(), GRADD_VERSION, owner->binary);
    if (owner->stopping) return GRADD_FAIL(STALE, "this daemon, pid %d, is ending", (int)getpid());
    if (owner->successor >= 0) return GRADD_FAIL(STALE, "this daemon restarts already");
    const int fd = open(owner->binary, O_RDONLY | O_CLOEXEC);
    const gradd_status_t st = check_binary(owner, fd, args);
    if (st == GRADD_OK)
        *out_binary = fd;
    else if (fd >= 0)
        close(fd);
    return st;
}

static bool refuse(int fd, gradd_status_t status) {
    wire_out_t reply = {0};
    wire_reply_fail(&reply, 0, status, "restart", gradd_error_message(), "alive");
    const bool sent =
        !reply.failed && gradd_fd_send(fd, reply.data, reply.bytes, NULL, 0) == GRADD_OK;
    wire_out_finish(&reply);
    return sent;
}

bool restart_answer(owner_t *owner, const relay_client_t *client, const wire_doc_t *packet,
                    bool *out_sent) {
    int binary = -1;
    if (!is_restart(packet)) return false;
    gradd_status_t st = check(owner, packet, &binary);
    if (st == GRADD_OK) {
        owner->asker = fcntl(client->outer, F_DUPFD_CLOEXEC, 0);
        if (owner->asker < 0) {
            st = GRADD_FAIL(IO, "no descriptor: %s", strerror(errno));
            close(binary);
        }
    }
    if (st == GRADD_OK) owner->successor = binary;
    *out_sent = st == GRADD_OK || refuse(client->outer, st);
    return true;
}

gradd_status_t restart_become(const owner_t *owner) {
    char command[32];
    char *argv[MOST_ARGUMENTS];
    int n = 0, state;
    for (char **word = owner->words.argv; *word; word++) {
        if (n == MOST_ARGUMENTS - 1) return GRADD_FAIL(LIMIT, "too many arguments");
        argv[n++] = word == owner->words.command ? command : *word;
    }
    argv[n] = NULL;
    gradd_status_t st = state_write(owner, &state);
    if (st == GRADD_OK) {
        snprintf(command, sizeof command, RESTART_COMMAND "%d", state);
        syscall(SYS_execveat, owner->successor, "", argv, environ, AT_EMPTY_PATH);
        st = GRADD_FAIL(IO, "%s: %s", owner->binary, strerror(errno));
        close(state);
    }
    state_close_on_exec();
    return st;
}

void restart_tell(owner_t *owner, gradd_status_t status) {
    wire_out_t reply = {0};
    if (owner->asker < 0) return;
    if (status != GRADD_OK) {
        refuse(owner->asker, status);
    } else {
        wire_reply_begin(&reply, 0);
        wire_key(&reply, "pid");
        wire_put_i64(&reply, getpid());
        wire_key(&reply, "version");
        wire_put_text(&reply, GRADD_VERSION);
        wire_end(&reply);
        if (!reply.failed) gradd_fd_send(owner->asker, reply.data, reply.bytes, NULL, 0);
        wire_out_finish(&reply);
    }
    close(owner->asker);
    owner->asker = -1;
}
