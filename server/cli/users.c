/* See users.h. */
#include "server/cli/users.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "server/host/shared_dir.h"

#define SOCKETS        "/proc/net/unix"
#define SEQPACKET_TYPE 5
#define LISTENS        1 /* states */
#define CONNECTED      3

static void count(users_t *users, uid_t uid, unsigned state) {
    int i = 0;
    while (i < users->n && users->of[i].uid != uid)
        i++;
    if (i == USERS_MOST) return;
    if (i == users->n) {
        users->of[users->n].n_sessions = 0;
        users->of[users->n++].uid = uid;
    }
    if (state != CONNECTED) return;
    users->of[i].n_sessions++;
    users->n_sessions++;
}

/* DIR/UID/ctl.sock, or that of a GPU's daemon, DIR/UID/NAME/ctl.sock. */
static bool is_control(const users_t *users, const char *path, uid_t *out_uid) {
    static const char end[] = "/" RUNDIR_CTL;
    const size_t n = strlen(users->dir), all = strlen(path);
    char *rest;
    if (strncmp(path, users->dir, n) != 0 || path[n] != '/' || all < sizeof end) return false;
    if (strcmp(path + all - (sizeof end - 1), end) != 0) return false;
    const unsigned long uid = strtoul(path + n + 1, &rest, 10);
    *out_uid = (uid_t)uid;
    return rest > path + n + 1 && *rest == '/';
}

bool users_look(const rundir_t *dir, users_t *out_users) {
    char line[512], path[RUNDIR_PATH_MAX + 1];
    unsigned type, state;
    uid_t uid;
    *out_users = (users_t){.n = 0};
    if (!shared_dir_around(dir, out_users->dir) || access(out_users->dir, R_OK) != 0) return false;
    FILE *file = fopen(SOCKETS, "re");
    if (!file) return false;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%*s %*x %*x %*x %x %x %*u %108s", &type, &state, path) == 3 &&
            type == SEQPACKET_TYPE && (state == LISTENS || state == CONNECTED) &&
            is_control(out_users, path, &uid))
            count(out_users, uid, state);
    fclose(file);
    return true;
}

void users_print(const users_t *users) {
    printf("users of %s: %d, with %d session%s\n", users->dir, users->n, users->n_sessions,
           users->n_sessions == 1 ? "" : "s");
    for (int i = 0; geteuid() == 0 && i < users->n; i++)
        printf("%10u: %d\n", (unsigned)users->of[i].uid, users->of[i].n_sessions);
}

void users_print_json(const users_t *users) {
    printf("{\"users\": %d, \"sessions\": %d}", users->n, users->n_sessions);
}
