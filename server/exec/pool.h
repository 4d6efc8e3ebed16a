/* Arenas of finished runs, kept for the next one: mapping and first touching some hundred megabytes
 * costs more than a small step. The pool is one per process and holds few arenas, whatever the
 * number of plans, so that many sequence lengths do not hold many arenas. Thread-safe.
 */
#ifndef GRADD_SERVER_EXEC_POOL_H
#define GRADD_SERVER_EXEC_POOL_H

#include "kernels/backend.h"

/* Asks who was named by gradd_set_admit whether `bytes` of new memory may be taken. */
gradd_status_t pool_admit(int64_t bytes);
/* Memory of at least `bytes`; *out_bytes is its true size. New memory is admitted first. Errors:
 * NOMEM. */
gradd_status_t pool_take(const gradd_backend_t *backend, int64_t bytes, void **out,
                         int64_t *out_bytes);
/* Held for the next run; gradd_trim gives it back. */
int64_t pool_bytes(void);
void pool_give(const gradd_backend_t *backend, void *memory, int64_t bytes);

#endif
