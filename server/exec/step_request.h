/* What the request of an optimizer step says of itself: its fingerprint, its chunks, its faults. No
 * device is asked.
 */
#ifndef GRADD_SERVER_EXEC_STEP_REQUEST_H
#define GRADD_SERVER_EXEC_STEP_REQUEST_H

#include "server/exec/step.h"

#define STEP_CHUNK_BITS 24 /* of the journal's progress, for the number of the chunk */

/* Shapes, groups, hyper-parameters and the client's mark; not addresses, which differ after a
 * restart. */
uint64_t step_fingerprint(const step_request_t *r);
/* Elements of a parameter that are stepped at once, with a journal of chunks of `chunk`. */
int64_t step_chunk_elements(const step_tensor_t *t, int64_t chunk);
/* Errors: TENSOR, LIMIT; they name parameter or group. */
gradd_status_t step_check(const step_request_t *r, int64_t chunk);

#endif
