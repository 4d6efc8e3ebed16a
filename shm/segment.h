/* Segments: sealed anonymous shared memory that two processes map.
 *
 * A segment is a memfd whose size can never change again (F_SEAL_SHRINK | F_SEAL_GROW |
 * F_SEAL_SEAL) and whose pages were reserved when it was made. So the other side can neither
 * truncate it under our feet (SIGBUS) nor hand us pages for which there is no memory. A named
 * shm_open object cannot be sealed and is refused. The creator is normally the client; the daemon
 * opens what it was sent.
 *
 * A gradd_segment_t owns its descriptor and its mapping. It is a plain value without a lock: move
 * it, do not copy it. Contents may change at any time by the hand of the other process: read each
 * value that matters once, then validate the copy. An owner that punches holes into a segment gets
 * zero pages back: wrong numbers for itself, never a fault for us.
 */
#ifndef GRADD_SHM_SEGMENT_H
#define GRADD_SHM_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

#include "shm/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a device takes a segment into its own memory. Any thread calls, at any time. */
typedef struct gradd_mapper_s {
    void *context;
    /* All bytes of fd; *out is an address of the device, page aligned. Fails with NOMEM or SHM. */
    gradd_status_t (*map)(void *context, int fd, uint64_t bytes, void **out);
    void (*unmap)(void *context, void *base, uint64_t bytes);
} gradd_mapper_t;

typedef struct gradd_segment_s {
    int fd;         /* Owned. -1: none */
    void *base;     /* Owned mapping of all bytes, page aligned. NULL: not mapped */
    uint64_t bytes; /* size of the file as the kernel reports it, never as a message claims it */
    const gradd_mapper_t *mapper; /* Borrowed; whose address base is. NULL: this process's */
    uint32_t header_bytes;        /* in front, where no tensor lies (header.h); 0 = none */
    uint32_t kind;                /* GRADD_SEGMENT_... of header.h */
} gradd_segment_t;

/* The empty segment: gradd_segment_t s = GRADD_SEGMENT_INIT; */
#define GRADD_SEGMENT_INIT {-1, NULL, 0, NULL, 0, 0}

/* Makes a segment of exactly `bytes` zero bytes (> 0), reserved, sealed and mapped. `name` is for
 * /proc only, at most 200 characters. Fails with LIMIT (size), NOSPC (no room), SHM. */
gradd_status_t gradd_segment_create(const char *name, uint64_t bytes, gradd_segment_t *out_segment);

/* Checks that fd may be used as a segment: a memfd open for reading and writing, all three seals
 * present, not sealed against writing, every page reserved. Gives its real size.
 * Fails with SHM, or NOSPC when pages are not reserved. */
gradd_status_t gradd_segment_check(int fd, uint64_t *out_bytes);

/* Checks fd and maps it. expect_bytes is what the message said: a different real size is refused
 * (SHM). Takes over fd on success and closes it, as the mapping keeps the memory; on failure fd
 * stays with the caller. mapper: NULL for this process, else it must outlive the segment. */
gradd_status_t gradd_segment_open(int fd, uint64_t expect_bytes, const gradd_mapper_t *mapper,
                                  gradd_segment_t *out_segment);

/* Maps a created segment that was unmapped; nothing to do when it is mapped. Fails with NOMEM or
 * SHM. */
gradd_status_t gradd_segment_map(gradd_segment_t *segment);

/* Gives the address range back and keeps the descriptor. */
void gradd_segment_unmap(gradd_segment_t *segment);

/* Unmaps and closes; the segment is empty afterwards. Accepts NULL and empty segments. */
void gradd_segment_finish(gradd_segment_t *segment);

#ifdef __cplusplus
}
#endif
#endif
