/* What the engine asks of the machine beside the C library: one table, which a build takes from one
 * file: posix.c, wasm.c or web.c. */
#ifndef GRADD_PLATFORM_PLATFORM_H
#define GRADD_PLATFORM_PLATFORM_H

#include <stddef.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a file that is written from several places. */
typedef struct gradd_file_part_s {
    const void *data; /* Borrowed; NULL only without bytes */
    size_t n;
} gradd_file_part_t;

typedef struct gradd_platform_s {
    const char *name;
    /* Memory aligned to 64 bytes, of any content; NULL = there is none. Large pieces cost few page
     * faults, and go back to the system when they are given back. */
    void *(*take)(size_t bytes);
    void (*give_back)(void *memory, size_t bytes); /* accepts NULL */
    double (*seconds)(void);                       /* from some point in time; never falls */
    double (*thread_seconds)(void); /* processor time of this thread, or else seconds() */
    /* All of a file, to be freed; a NUL stands behind it. Errors: IO, LIMIT (more than `most`
     * bytes), NOMEM. They name the path. */
    gradd_status_t (*read_file)(const char *path, size_t most, void **out_bytes, size_t *out_n);
    /* Writes the parts, one after the other, beside the path, makes the disk keep them, and
     * renames: after a failure at any instruction the path holds all that it held, or all that it
     * gets. Errors: IO, NOMEM. They name the path. */
    gradd_status_t (*write_file)(const char *path, const gradd_file_part_t *parts, int n);
} gradd_platform_t;

extern const gradd_platform_t gradd_platform;

#ifdef __cplusplus
}
#endif
#endif
