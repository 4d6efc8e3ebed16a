/* The worker of an owner as a process. */
#ifndef GRADD_SERVER_OWNER_PROCESS_H
#define GRADD_SERVER_OWNER_PROCESS_H

#include <sys/types.h>

#include "shm/status.h"

typedef struct worker_process_s {
    pid_t pid; /* 0: there is none */
    int pidfd; /* Owned: readable when it has ended */
    int link;  /* Owned */
} worker_process_t;

/* Starts this binary with argv; it ends with us, whatever ends us. Fails with IO. */
gradd_status_t process_start(char *const *argv, int lock, worker_process_t *out_process);
/* It has ended: its exit code, or 128 + the signal. */
int process_reap(worker_process_t *process);

#endif
