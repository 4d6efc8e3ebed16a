/* The system calls that owner and worker of a daemon on the CPU may make, as code for seccomp.
 */
#ifndef GRADD_SERVER_HOST_CONFINE_CALLS_H
#define GRADD_SERVER_HOST_CONFINE_CALLS_H

#include <linux/filter.h>
#include <stdbool.h>

#define CONFINE_MAX_CODE 1024

/* Number of instructions; 0 on a processor for which there is no list. */
unsigned short confine_code(bool is_owner, struct sock_filter code[CONFINE_MAX_CODE]);

#endif
