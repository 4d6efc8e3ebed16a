/* A user whose process has connected, and a process of ours that becomes that user's. */
#ifndef GRADD_SERVER_USERS_ACCOUNT_H
#define GRADD_SERVER_USERS_ACCOUNT_H

#include <sys/types.h>

#include "shm/status.h"

typedef struct account_s {
    uid_t uid;
    gid_t gid;
} account_t;

/* The group of that name, or number. Fails with UNSUPPORTED if there is none. */
gradd_status_t account_group(const char *name, gid_t *out_group);
/* By the kernel's word for the socket: the user of the process that has connected. Fails with
 * SESSION if it is not in the group (root is let in), IO. */
gradd_status_t account_of(int socket, gid_t group, account_t *out_account);
/* Fails with SESSION unless the machine knows a user of that uid: a process that has subordinate
 * uids (/etc/subuid) may have any of them, and each would be a user here. */
gradd_status_t account_check(const account_t *account);
/* In a child of ours: gives up root for good, and runs this binary with argv as the daemon of a
 * folder. Beside the user's own gid it keeps `group`, by which it reaches the folder. Of the
 * environment it gets what is about gradd and its libraries, of descriptors and keys none. */
_Noreturn void account_become(const account_t *account, gid_t group, char *const *argv,
                              const char *folder);

#endif
