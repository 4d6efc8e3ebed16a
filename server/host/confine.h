/* What a process of the daemon gives up, so that an error in it costs little.
 *
 * All: new privileges and cores. Owner, and worker of the CPU: that other processes of the user
 * look into it. Owner of a daemon on the CPU and its worker: paths (Landlock) and system calls
 * (seccomp, an allow-list; what is not on it fails with EPERM). The driver of a GPU needs paths and
 * calls of its own, in the worker, which inherits what its owner has given up; so neither is
 * confined there. What the kernel does not offer is left out, and said (confine_text).
 */
#ifndef GRADD_SERVER_HOST_CONFINE_H
#define GRADD_SERVER_HOST_CONFINE_H

#include <stdbool.h>
#include <stddef.h>

#define CONFINE_TEXT_BYTES 96

typedef struct confined_s {
    bool no_privileges, no_core, hidden, seccomp;
    int landlock; /* the kernel's version of it; 0: none */
} confined_t;

/* New privileges, cores, and, if `hidden`, being looked into. */
void confine_process(bool hidden, confined_t *confined);
/* The kernel ends this process before the others of the daemon, if it is short of memory. */
void confine_end_first(void);
/* Before there are threads. `folder`: of the sockets. An owner may read, execute, and make files
 * beside and in it; a worker reads /proc and /sys, and writes files in it. */
void confine_paths(bool is_owner, int folder, confined_t *confined);
/* All threads. */
void confine_calls(bool is_owner, confined_t *confined);
/* Whether a process that this one was has done the last two already. */
bool confine_is_done(confined_t *confined);
/* What is in force: "landlock 7, seccomp, ..."; "nothing". */
const char *confine_text(const confined_t *confined, char text[CONFINE_TEXT_BYTES]);
/* What the kernel offers. */
confined_t confine_offered(void);

#endif
