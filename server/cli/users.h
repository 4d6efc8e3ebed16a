/* What all may know of the users of a shared directory: sums. */
#ifndef GRADD_SERVER_CLI_USERS_H
#define GRADD_SERVER_CLI_USERS_H

#include <stdbool.h>
#include <sys/types.h>

#include "server/host/rundir.h"

#define USERS_MOST 256

typedef struct users_s {
    char dir[RUNDIR_PATH_MAX];
    int n; /* with a daemon */
    int n_sessions;
    struct {
        uid_t uid;
        int n_sessions;
    } of[USERS_MOST]; /* for root */
} users_t;

/* False unless that is this process's folder in a shared directory of its group. Sessions are
 * connections to the control sockets there, by the kernel's list of sockets: no daemon is asked. */
bool users_look(const rundir_t *dir, users_t *out_users);
/* A line; for root a line for each user, too. */
void users_print(const users_t *users);
/* The same as a JSON object. */
void users_print_json(const users_t *users);

#endif
