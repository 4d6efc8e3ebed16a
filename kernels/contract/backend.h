/* The device table: all functions that the engine calls on a device.
 *
 * One struct with version and size. Fields are only appended within a version, so the program takes
 * a plug-in of its own version whose table is at least as long as its own. Work is given to a
 * queue, which runs it in order of arrival; the CPU's queue is the calling thread. A device's
 * kernel rows say what it can run (kernels/contract/kernel.h).
 *
 * A function returns when its work is enqueued, unless it says that it waits. The memory that the
 * work touches must stay valid until the queue has passed it, and so must operators, attributes and
 * kernel states; all other structs may be changed at once. One thread at a time uses a queue.
 */
#ifndef GRADD_KERNELS_CONTRACT_BACKEND_H
#define GRADD_KERNELS_CONTRACT_BACKEND_H

#include "kernels/contract/adam.h"
#include "kernels/contract/kernel.h"
#include "shm/segment.h"

#define GRADD_BACKEND_ABI 2u

typedef struct gradd_queue_s gradd_queue_t; /* device's own: a stream */
typedef struct gradd_comm_s gradd_comm_t;   /* device's own: a communicator */

typedef struct gradd_bytes_s {
    const void *data; /* Borrowed; NULL only without bytes */
    size_t bytes;
} gradd_bytes_t;

/* Positions of the first NaN and of the first infinity, each -1 if there is none. */
typedef struct gradd_nonfinite_s {
    int64_t nan, inf;
    bool negative; /* that infinity */
} gradd_nonfinite_t;

#define GRADD_COMM_ID_BYTES 128
#define GRADD_COMM_RANKS    1024       /* at most */
#define GRADD_COMM_FAILED   UINT64_MAX /* of the word of a communicator that has failed */

typedef struct gradd_comm_options_s {
    const uint8_t *id;          /* GRADD_COMM_ID_BYTES, by comm_id in one of the processes */
    int rank, ranks;            /* 0 <= rank < ranks <= GRADD_COMM_RANKS */
    int64_t limit_ms;           /* how long it waits for the other ranks, each time */
    const volatile int *cancel; /* Borrowed until comm_leave: not 0 = it gives up; NULL = never */
} gradd_comm_options_t;

/* Tensors that are averaged together. */
typedef struct gradd_comm_part_s {
    const gradd_span_t *spans; /* written in place */
    int n;
    uint64_t *word; /* of the device, raised to `value` behind the averages; NULL = none */
    uint64_t value;
    bool last; /* nothing more of this round */
} gradd_comm_part_t;

typedef struct gradd_backend_s {
    uint32_t abi;  /* GRADD_BACKEND_ABI of the table's author */
    uint32_t size; /* sizeof of the table's author */
    const char *name;
    bool host; /* it reads the process's memory where it lies */

    /* Makes the pages of a memfd, all of it, memory of the device, and gives its address there.
     * Called by any thread at any time: it gives no work to the queue. NULL = the process's own
     * mapping serves. Errors: NOMEM, SHM. */
    gradd_status_t (*map)(gradd_queue_t *queue, int fd, size_t bytes, void **out);
    void (*unmap)(gradd_queue_t *queue, void *memory, size_t bytes); /* nothing uses it */

    /* `threads`, at least 1: for a device that computes with the host's. */
    gradd_status_t (*queue_create)(int threads, gradd_queue_t **out);
    void (*queue_destroy)(gradd_queue_t *queue); /* waits; accepts NULL */
    /* Makes the calling thread ready for a sequence of calls, which ends with wait; not needed by
     * alloc and free. At most so many threads of the host compute; 0 = the queue's number. */
    gradd_status_t (*queue_enter)(gradd_queue_t *queue, int threads);
    /* Waits for all that was enqueued and reports what failed first since the last report;
     * *out_launch (may be NULL) is the launch that did, or -1. What stands behind failed work may
     * be left out, but for free. A device that is lost reports DEVICE from then on. */
    gradd_status_t (*wait)(gradd_queue_t *queue, int *out_launch);

    /* Memory of the device for what is enqueued from now on, aligned to at least 64 bytes. Errors:
     * NOMEM. bytes may be 0. Free waits its turn: earlier work may still use it;
     * accepts NULL. */
    gradd_status_t (*alloc)(gradd_queue_t *queue, size_t bytes, void **out);
    void (*free)(gradd_queue_t *queue, void *memory, size_t bytes);
    gradd_status_t (*copy)(gradd_queue_t *queue, void *to, const void *from, size_t bytes);
    gradd_status_t (*zero)(gradd_queue_t *queue, void *memory, size_t bytes);
    /* One operator by a kernel of this device. */
    gradd_status_t (*launch)(gradd_queue_t *queue, const gradd_kernel_t *kernel,
                             const gradd_launch_t *launch);

    /* Looks for NaN and infinity in a tensor of floats. Waits; a failure of earlier work is its
     * failure, too, but only wait() reports it for good. The same holds for all waiting functions
     * below. */
    gradd_status_t (*find_nonfinite)(gradd_queue_t *queue, const gradd_view_t *view,
                                     gradd_nonfinite_t *out);
    /* One number for the contents of a list of tensors: of all bytes, so that a single changed
     * element always changes it, or of drawn ones, so that a write of all elements does. A function
     * of the bytes, their sizes and their order alone, the same on every device. Waits. */
    gradd_status_t (*fingerprint)(gradd_queue_t *queue, const gradd_bytes_t *list, int n,
                                  bool whole, uint64_t *out);

    /* The optimizer's step: the sum of squares of all spans, in double (waits); the update; its
     * commit; and one word that other processes may look for: it is never written before all work
     * ahead of it is done, even if this process is killed. */
    gradd_status_t (*norm2)(gradd_queue_t *queue, const gradd_span_t *list, int n, double *out);
    gradd_status_t (*adam)(gradd_queue_t *queue, const gradd_adam_t *hyper, float grad_scale,
                           const gradd_adam_span_t *span);
    gradd_status_t (*adam_commit)(gradd_queue_t *queue, const gradd_adam_commit_t *commit);
    gradd_status_t (*store)(gradd_queue_t *queue, uint64_t *word, uint64_t value);

    /* For people: what multiplies matrices ("oneDNN 3.2.0"), and whether it multiplies that type
     * itself or in a wider one. */
    const char *(*library)(void);
    bool (*multiplies)(gradd_dtype_t dtype);

    const gradd_kernels_t *const *kernels; /* by family; those of one operator: fastest first */
    size_t n_kernels;

    /* Which rows of a gradient hold anything but zeros: bit r % 64 of bits[r / 64], which the host
     * reads. span->n is a multiple of width. Waits. */
    gradd_status_t (*touched)(gradd_queue_t *queue, const gradd_span_t *span, int64_t width,
                              uint64_t *bits);

    /* Of LinearCrossEntropy: the rows with which a chunk takes little longer than more rows would,
     * and the bytes of a block in f32 of its weight's gradient. */
    int64_t head_rows, head_block;

    /* For people: a line about what the device has measured and keeps on disk. NULL = nothing. */
    const char *(*kept)(void);

    /* Opens memory of the device that a client lends, and gives its address. Called by any thread
     * at any time, as map. NULL: the device has none to share. Errors: NOMEM, SHM (the driver does
     * not take it, or it has fewer bytes), UNSUPPORTED (that kind of memory). */
    gradd_status_t (*open)(gradd_queue_t *queue, const gradd_lent_t *lent, void **out);
    void (*close)(gradd_queue_t *queue, gradd_memory_t memory, void *at, size_t bytes);
    /* What the driver calls the device on every machine and in every process, "GPU-...": 40
     * characters. NULL = it has no such name. */
    const char *(*uuid)(void);
    /* Bytes of the device's memory: of all of it, and free for any process. NULL = it computes in
     * the host's. Memory that the queue has freed is free after the next wait. */
    gradd_status_t (*memory)(int64_t *out_free, int64_t *out_total);

    /* A communicator: devices of several processes that average tensors, each process as one rank.
     * No function waits for another rank; a thread of the communicator does. All are NULL, or none.
     * Errors of what the thread does come by comm_status: PEER (another rank does not answer within
     * the limit, does other work, or the library fails), STALE (given up), DEVICE, NOMEM. After one
     * the communicator is of no use but for comm_leave; what was begun is not done, and no word is
     * raised any more.
     *
     * A new id, for all ranks. Errors: UNSUPPORTED (no library), PEER. */
    gradd_status_t (*comm_id)(uint8_t *out);
    /* Begins to join: round 1. Errors: UNSUPPORTED, NOMEM, DEVICE. */
    gradd_status_t (*comm_join)(gradd_queue_t *queue, const gradd_comm_options_t *options,
                                gradd_comm_t **out);
    /* Begins another round, of which the number is given. Its averages are made only if all ranks
     * have begun one with the same fingerprint. Errors: that of comm_status, NOMEM. */
    gradd_status_t (*comm_begin)(gradd_comm_t *comm, uint64_t fingerprint, uint64_t *out_round);
    /* Averages over the ranks, behind what the queue was given so far, on a stream of the
     * communicator's. All ranks give the same parts in the same order. The memory stays valid until
     * the round has ended. Errors: the same, UNSUPPORTED (a type that is no float). */
    gradd_status_t (*comm_average)(gradd_queue_t *queue, gradd_comm_t *comm,
                                   const gradd_comm_part_t *part);
    /* The rounds that have ended, or GRADD_COMM_FAILED: a word of the process, which only rises. */
    const uint64_t *(*comm_ended)(const gradd_comm_t *comm);
    gradd_status_t (*comm_status)(gradd_comm_t *comm);
    /* Gives up a round that has not ended, and waits until nothing of it touches memory. Accepts
     * NULL. */
    void (*comm_leave)(gradd_comm_t *comm);

    /* Makes memory present, of whole pages, that launches are going to read, or write, for the
     * first time. NULL: it always is. */
    void (*touch)(gradd_queue_t *queue, void *memory, size_t bytes, bool written);
} gradd_backend_t;

/* All devices of this build; the first is the default. */
extern const gradd_backend_t *const gradd_backends[];
extern const size_t gradd_backend_count;

/* The device's kernel for a node: the first that takes it. c->out need not be known, and the choice
 * does not depend on it. NULL: there is none; the second function is the failure that says so. */
const gradd_kernel_t *gradd_backend_kernel(const gradd_backend_t *backend, const gradd_infer_t *c);
gradd_status_t gradd_no_kernel(const gradd_backend_t *backend, const gradd_infer_t *c);

extern const gradd_backend_t gradd_backend_cpu;

/* As many threads as the process may use: OMP_NUM_THREADS, else its processor set. */
int gradd_cpu_threads(void);
/* Sets the number of threads for whatever the calling thread computes itself from now on, for
 * folding and preparing. */
void gradd_cpu_enter(int threads);

/* Whether some kernel of the CPU takes the node. */
bool gradd_cpu_can(const gradd_infer_t *c);
/* Makes one launch on the CPU here and now, with the threads that were entered; for folding and
 * tests. c->out is set, launch holds operands and coordinates, scratch, state and threads are set
 * here. */
gradd_status_t gradd_cpu_call(const gradd_infer_t *c, gradd_launch_t *launch);

#endif
