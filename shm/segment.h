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

/* What the memory of a segment is: MEMORY(symbol, name on the wire). */
#define GRADD_MEMORIES(MEMORY)                                                                     \
    MEMORY(MEMFD, "memfd")       /* of the host, by a descriptor that both can check */            \
    MEMORY(CUDA_VMM, "cuda-vmm") /* of a device, by a descriptor of its driver's (cuMemCreate) */  \
    MEMORY(CUDA_IPC,                                                                               \
           "cuda-ipc") /* of a device, by a handle of its driver's (cudaIpcGetMemHandle) */
typedef enum gradd_memory_e {
#define MEMORY(symbol, name) GRADD_MEMORY_##symbol,
    GRADD_MEMORIES(MEMORY)
#undef MEMORY
        GRADD_N_MEMORIES
} gradd_memory_t;

#define GRADD_IPC_HANDLE_BYTES 64

/* Memory of a device as a client's message names it. */
typedef struct gradd_lent_s {
    gradd_memory_t memory; /* CUDA_VMM or CUDA_IPC */
    int fd;                /* CUDA_VMM: the descriptor, which is the caller's; else -1 */
    const void *handle;    /* CUDA_IPC: Borrowed, GRADD_IPC_HANDLE_BYTES; else NULL */
    uint64_t bytes;        /* as the message claims */
} gradd_lent_t;

/* How a device takes a segment into its own memory. Any thread calls, at any time. */
typedef struct gradd_mapper_s {
    void *context;
    /* All bytes of fd; *out is an address of the device, page aligned. Fails with NOMEM or SHM. */
    gradd_status_t (*map)(void *context, int fd, uint64_t bytes, void **out);
    void (*unmap)(void *context, void *base, uint64_t bytes);
    /* Memory of the device itself. Fails with NOMEM, SHM (also where it has fewer bytes), or
     * UNSUPPORTED. */
    gradd_status_t (*open)(void *context, const gradd_lent_t *lent, void **out);
    void (*close)(void *context, gradd_memory_t memory, void *base, uint64_t bytes);
} gradd_mapper_t;

typedef struct gradd_segment_s {
    int fd;     /* Owned. -1: none */
    void *base; /* Owned mapping of all bytes, page aligned. NULL: not mapped */
    /* Of the file as the kernel reports it, never as a message claims it; of a device's memory at
     * most what its driver reports. */
    uint64_t bytes;
    const gradd_mapper_t *mapper; /* Borrowed; whose address base is. NULL: this process's */
    uint32_t header_bytes;        /* in front, where no tensor lies (header.h); 0 = none */
    uint32_t purpose;             /* GRADD_SEGMENT_... of header.h */
    gradd_memory_t memory;
    uint64_t device, inode; /* of the file, which say whether two are one; inode 0: not known */
} gradd_segment_t;

/* The empty segment: gradd_segment_t s = GRADD_SEGMENT_INIT; */
#define GRADD_SEGMENT_INIT {-1, NULL, 0, NULL, 0, 0, GRADD_MEMORY_MEMFD, 0, 0}

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

/* The same of a base: memory that many clients read, and none can write, as it is sealed against
 * writing in addition. It is mapped privately: what is written there by mistake changes the copy of
 * this mapping, not the memory. The process's own mapping alone. Fails with SHM, NOMEM. */
gradd_status_t gradd_segment_check_base(int fd, uint64_t *out_bytes);
gradd_status_t gradd_segment_open_base(int fd, uint64_t expect_bytes, gradd_segment_t *out_segment);

/* Opens memory of a device. There is nothing to check but what the driver says; the descriptor may
 * be closed afterwards. mapper: as above; NULL: UNSUPPORTED. */
gradd_status_t gradd_segment_borrow(const gradd_lent_t *lent, const gradd_mapper_t *mapper,
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
