/* The optimizer step: updates parameters and optimizer state in the client's shared memory, and
 * survives a kill at any instruction.
 *
 * Parameters are cut into chunks. The new values of a chunk are first written to a journal (new p,
 * m and v, all f32) in the client's memory, then the journal is sealed by a sequence word, then
 * copied over the old values, then the progress word advances. A bf16 or f16 parameter is rounded
 * while it is copied, so the journal serves its f32 master weights as well. A process that finds
 * the journal sealed for the current chunk copies it again; otherwise it computes the chunk again
 * from untouched values. So a step that was interrupted, by whatever process, is finished by the
 * next one with the same bits.
 *
 * Of a parameter with a width, rows whose gradient is all zeros are left alone, moments and all.
 * The journal says which rows of the chunk are new, so a process that finds it sealed does not need
 * the gradient.
 *
 * Where gradients were scaled (loss scaling in f16) the request says by which factor they count,
 * and may ask for finite ones: else the step is skipped as a whole, which the journal remembers.
 *
 * All of it happens on a device, in the order of its queue; the host reads the first words of the
 * journal and the norm.
 */
#ifndef GRADD_SERVER_EXEC_STEP_H
#define GRADD_SERVER_EXEC_STEP_H

#include <stddef.h>

#include "kernels/contract/adam.h"
#include "server/api/gradd.h"
#include "shm/dtype.h"
#include "shm/status.h"

#define STEP_CHUNK         ((int64_t)128 << 10) /* elements; the journal holds three chunks */
#define STEP_JOURNAL_MAGIC 0x4c4e524a44524731ull
/* In the upper half of the magic: the lower half is the length of the journal's chunks in elements,
 * a multiple of STEP_CHUNK. Fewer chunks are fewer launches, in more memory. */
#define STEP_JOURNAL_LONG 0x324e524aull
#define STEP_CHUNK_MAX    ((int64_t)16 << 20)

#define STEP_ROW_WORDS 507 /* 64 rows each; a chunk has no more */

/* Lies at the start of the journal region; zeroed memory is a valid, new journal of chunks of
 * STEP_CHUNK. One of longer chunks begins with its magic, and `sealed` of ones. */
typedef struct step_journal_s {
    uint64_t magic;
    uint64_t progress; /* step << 24 | chunks finished of it */
    /* Progress value for which the chunk buffers are valid. Of a step that was skipped: that of a
     * chunk beyond all there can be. */
    uint64_t sealed;
    uint64_t fingerprint; /* of the request in progress, or of the last one: no other passes */
    uint64_t norm;        /* gradient norm of the step in progress: the bits of a double */
    /* Bit per row of the chunk that is sealed, if it is one of a parameter with a width: whether
     * the buffers hold it. They hold these rows only, side by side. */
    uint64_t rows[STEP_ROW_WORDS];
} step_journal_t;

/* With chunks of so many elements. */
#define STEP_JOURNAL_BYTES_OF(chunk) (sizeof(step_journal_t) + 3 * sizeof(float) * (size_t)(chunk))
#define STEP_JOURNAL_BYTES           STEP_JOURNAL_BYTES_OF(STEP_CHUNK)

/* One parameter of n elements. Moments and master weights are always f32. */
typedef struct step_tensor_s {
    void *p;
    float *m, *v;
    const void *g; /* NULL: this parameter has no gradient in this step */
    int64_t n;
    int group;
    gradd_dtype_t dtype; /* of p and g: f32, bf16 or f16 */
    float *master;       /* of a half parameter, which is then master rounded; or NULL */
    int64_t width; /* elements of a row, where only rows with a gradient are stepped; 0 = all are */
} step_tensor_t;

typedef struct step_request_s {
    const step_tensor_t *tensors;
    int n_tensors;
    const gradd_adam_t *groups;
    int n_groups;
    double max_norm; /* clip the global gradient norm to this; <= 0 or inf: do not clip */
    uint64_t step;   /* 0 for a new journal, then last finished + 1 (or the last finished again) */
    void *journal;   /* shared, aligned to 64 */
    int64_t journal_bytes; /* at least STEP_JOURNAL_BYTES */
    uint64_t once;     /* the same in every repetition of this request and in no other; 0 = none */
    double grad_scale; /* of all gradients, before anything else looks at them; 0 = 1 */
    bool finite;       /* skip the step where an element of a gradient is no finite number */
} step_request_t;

/* A step on its way. */
typedef struct stepping_s stepping_t;

/* Does nothing yet. The request and what it names stay valid until step_destroy. */
gradd_status_t step_create(gradd_device_t *device, const step_request_t *request,
                           stepping_t **out_step);
/* Goes on with the step until its end, or until something else is to run between two chunks
 * (device_set_way): then *out_done is false. Waits. May be called from any state of the journal:
 * repeating the last finished step does nothing; another request of the same number is refused,
 * because its gradients would be lost silently.
 * Errors: STALE (journal is at another step or holds another request), SHM (not a journal, or one
 * with chunks of a length that is not allowed), TENSOR (journal too small for its chunks), LIMIT,
 * NONFINITE never: a non-finite norm clips to a scale that is not finite, as torch does. */
gradd_status_t step_continue(stepping_t *step, bool *out_done);
void step_destroy(stepping_t *step); /* accepts NULL */
/* Of one that is done: the global L2 norm of the gradients before clipping, 0 if nothing asked for
 * it. *out_skipped: nothing has changed but the journal, whose number is the next one all the same.
 */
double step_norm(const stepping_t *step, bool *out_skipped);
/* All of these at once, never put aside. */
gradd_status_t step_apply(gradd_device_t *device, const step_request_t *request, double *out_norm,
                          bool *out_skipped);

#endif
