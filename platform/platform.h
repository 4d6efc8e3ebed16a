/* What the engine asks of the machine beside the C library: one table, which a build takes from one
 * file: posix.c, wasm.c or web.c. */
#ifndef GRADD_PLATFORM_PLATFORM_H
#define GRADD_PLATFORM_PLATFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of a file that is written from several places. */
typedef struct gradd_file_part_s {
    const void *data; /* Borrowed; NULL only without bytes */
    size_t n;
} gradd_file_part_t;

/* A file that is read and written in place. */
typedef struct gradd_file_s gradd_file_t;

typedef struct gradd_platform_s {
    const char *name;
    /* Memory aligned to 64 bytes, of any content; NULL = there is none. Large pieces cost few page
     * faults, and go back to the system when they are given back. */
    void *(*take)(size_t bytes);
    void (*give_back)(void *memory, size_t bytes); /* accepts NULL */
    /* Makes pages of whole memory present that are going to be read, or written, for the first
     * time: cheaper than one by one, and in pieces. Does nothing where it cannot. `memory` and
     * `bytes` are multiples of a page. NULL where the machine has no such thing. */
    void (*touch)(void *memory, size_t bytes, bool written);
    double (*seconds)(void);        /* from some point in time; never falls */
    double (*thread_seconds)(void); /* processor time of this thread, or else seconds() */
    /* All of a file, to be freed; a NUL stands behind it. Errors: IO, LIMIT (more than `most`
     * bytes), NOMEM. They name the path. */
    gradd_status_t (*read_file)(const char *path, size_t most, void **out_bytes, size_t *out_n);
    /* Writes the parts, one after the other, beside the path, makes the disk keep them, and
     * renames: after a failure at any instruction the path holds all that it held, or all that it
     * gets. Errors: IO, NOMEM. They name the path. */
    gradd_status_t (*write_file)(const char *path, const gradd_file_part_t *parts, int n);

    /* Files that are written in place. Errors of all: IO, which names the path.
     *
     * Opens one, which no other program can open until it is closed or the program ends. `fresh`:
     * an empty one, in place of what the path names; else the disk keeps the name, and NULL in
     * *out_file says that the path names nothing. Errors: STALE (it is open elsewhere), NOMEM. */
    gradd_status_t (*open_file)(const char *path, bool fresh, gradd_file_t **out_file);
    /* Accepts NULL. `remove`: nothing is to be left of it. */
    void (*close_file)(gradd_file_t *file, bool remove);
    /* Whether the path names this file; NULL: that of its opening, at which it may have been
     * deleted, renamed or replaced. NULL where the machine cannot tell. */
    bool (*is_named)(const gradd_file_t *file, const char *path);
    gradd_status_t (*file_bytes)(gradd_file_t *file, uint64_t *out_bytes);
    gradd_status_t (*read_at)(gradd_file_t *file, uint64_t at, void *to, size_t n);
    /* Beyond the end as well, where the bytes between are zeros then. */
    gradd_status_t (*write_at)(gradd_file_t *file, uint64_t at, const void *from, size_t n);
    /* The barrier: returns when all that was written before survives a loss of power. POSIX:
     * fdatasync, Apple: F_FULLFSYNC; Windows has FlushFileBuffers. In WebAssembly it is what the
     * file system behind it makes of that: the disk in node, nothing for files in memory. */
    gradd_status_t (*keep)(gradd_file_t *file);
    /* Gives the file another name, in place of what that names, and makes the disk keep the name.
     * At any instruction the name stands for the one or the other. */
    gradd_status_t (*keep_as)(gradd_file_t *file, const char *path);
    /* The file's first bytes as memory, aligned to 64: pages that were not written to need no
     * memory of their own, and what is written stays in memory. Pages not written to may show what
     * is written to the file later. NULL where the machine has no such thing. */
    gradd_status_t (*map_file)(gradd_file_t *file, size_t bytes, void **out_memory);
    void (*unmap_file)(void *memory, size_t bytes); /* accepts NULL */
} gradd_platform_t;

extern const gradd_platform_t gradd_platform;

/* Of posix.c: how a process gives large memory back whose threads must not wait for that. `discard`
 * takes a mapping that nothing uses any more, and may return before it is gone; `settle` waits
 * until all are, where there is no memory. NULL: they are unmapped at once. Set once, at the start,
 * by what owns the process. */
typedef struct gradd_discarder_s {
    void (*discard)(void *mapping, uint64_t bytes);
    void (*settle)(void);
} gradd_discarder_t;
extern const gradd_discarder_t *gradd_discarder;

#ifdef __cplusplus
}
#endif
#endif
