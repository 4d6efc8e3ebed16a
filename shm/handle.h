/* Handles: names of memory that travel in messages, and the table that turns them into addresses.
 *
 * A message names memory as (segment id, offset, bytes); ids are chosen by the client and are valid
 * within its table only, so no client can name another's memory. The table owns the segments.
 * Every access goes through gradd_handle_resolve or gradd_handle_tensor, which check the range
 * against the real size of the segment without overflow. Addresses stay valid while the segment is
 * retained (or the caller keeps it from being removed otherwise).
 *
 * Threading: every function on a table takes its lock; the I/O thread adds and removes while the
 * engine thread resolves. gradd_handle_close() may come at any time: segments in use are
 * unmapped by their last gradd_handle_release().
 */
#ifndef GRADD_SHM_HANDLE_H
#define GRADD_SHM_HANDLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shm/header.h"
#include "shm/segment.h"
#include "shm/status.h"
#include "shm/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gradd_handle_table_s gradd_handle_table_t;

/* Limits of one table; 0 means none. */
typedef struct gradd_handle_limits_s {
    uint32_t segments; /* how many segments at once */
    uint64_t bytes;    /* sum of their sizes */
} gradd_handle_limits_t;

gradd_status_t gradd_handle_table_create(gradd_handle_limits_t limits,
                                         gradd_handle_table_t **out_table);
/* Closes the table if needed. Every segment must have been released. Accepts NULL. */
void gradd_handle_table_destroy(gradd_handle_table_t *table);

/* Puts *segment into the table under `id` and empties *segment. On failure it stays the caller's.
 * Fails with SHM when the id is taken, LIMIT when a limit would be passed, STALE when the table is
 * closed, NOMEM. */
gradd_status_t gradd_handle_add(gradd_handle_table_t *table, uint64_t id, gradd_segment_t *segment);

/* Takes a segment out and unmaps it. Fails with SHM (unknown id) or STALE (in use). */
gradd_status_t gradd_handle_remove(gradd_handle_table_t *table, uint64_t id);

/* Keeps a segment mapped until the same number of releases. Fails with SHM (unknown id) or STALE
 * (table closed). */
gradd_status_t gradd_handle_retain(gradd_handle_table_t *table, uint64_t id);
/* Ends one use; ids that are not there are ignored. */
void gradd_handle_release(gradd_handle_table_t *table, uint64_t id);

/* The owner is gone: unmaps every segment that is not in use now, the others at their release.
 * From here on nothing can be added, retained or resolved (STALE). May be called twice. */
void gradd_handle_close(gradd_handle_table_t *table);

/* Address of `bytes` bytes at `offset` of segment `id`, behind its header. offset must be a
 * multiple of `align` (a power of two). Fails with SHM (unknown id), TENSOR (range, alignment),
 * STALE (closed). */
gradd_status_t gradd_handle_resolve(gradd_handle_table_t *table, uint64_t id, uint64_t offset,
                                    uint64_t bytes, uint64_t align, void **out_address);

/* The same for a tensor descriptor: checks its type (LIMIT, UNSUPPORTED), its size against the
 * segment and the alignment GRADD_TENSOR_ALIGN. A tensor without elements may lie at the very end.
 */
gradd_status_t gradd_handle_tensor(gradd_handle_table_t *table, const gradd_tensor_t *tensor,
                                   void **out_address);

/* Segments that are mapped now and the sum of their sizes, for `ps` and for tests. */
void gradd_handle_usage(gradd_handle_table_t *table, uint32_t *out_segments, uint64_t *out_bytes);
/* Bytes of the segments of each purpose. */
void gradd_handle_purpose_bytes(gradd_handle_table_t *table,
                                uint64_t out_bytes[GRADD_N_SEGMENT_PURPOSES]);

#ifdef __cplusplus
}
#endif
#endif
