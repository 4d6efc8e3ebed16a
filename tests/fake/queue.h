/* The queue of the fake device: work in a list, one thread that carries it out. See fake.h. */
#ifndef GRADD_TESTS_FAKE_QUEUE_H
#define GRADD_TESTS_FAKE_QUEUE_H

#include "kernels/contract/backend.h"
#include "tests/fake/fake.h"
#include "tests/fake/memory.h"

typedef enum item_kind_e {
    ITEM_COPY,
    ITEM_ZERO,
    ITEM_FREE,
    ITEM_LAUNCH,
    ITEM_ADAM,
    ITEM_COMMIT,
    ITEM_STORE,
    ITEM_NONFINITE,
    ITEM_FINGERPRINT,
    ITEM_NORM2,
    ITEM_TOUCHED
} item_kind_t;

/* A piece of work, with everything that may change once it is given. */
typedef struct item_s {
    struct item_s *next;
    item_kind_t kind;
    void *to;
    const void *from;
    size_t bytes;
    uint64_t value;
    const gradd_kernel_t *kernel;
    gradd_launch_t launch;
    gradd_view_t *views; /* Owned: of the launch's operands */
    gradd_adam_t hyper;
    float scale;
    gradd_adam_span_t span;
    gradd_adam_commit_t commit;
    gradd_view_t view; /* of a finite check; the waiting caller owns what follows */
    gradd_nonfinite_t *nonfinite;
    const gradd_bytes_t *bytes_list;
    const gradd_span_t *span_list;
    int n;
    bool whole;
    uint64_t *print;
    double *sum;
    int64_t width;
    uint64_t *bits;
} item_t;

struct gradd_queue_s {
    memory_t memory;
    pthread_t thread;
    pthread_mutex_t lock;         /* guards what follows */
    pthread_cond_t arrived, idle; /* there is work; there is none */
    item_t *first, **end;
    int pending;
    bool ending, entered, lost;
    gradd_status_t status; /* of the first that failed */
    int launch;            /* that it was, or -1 */
    char message[GRADD_ERROR_BYTES];
    int left[FAKE_POINTS]; /* until that fails; 0 = it does not */
    char once[256];        /* file that says that it has; "" = none */
    unsigned delay_us, random;
};

/* Carries one out (work.c). */
gradd_status_t item_carry_out(gradd_queue_t *queue, item_t *item);

/* Whether this one is the one that fails. */
bool fake_queue_hits(gradd_queue_t *queue, fake_point_t point);
gradd_status_t fake_queue_create(gradd_queue_t **out);
void fake_queue_destroy(gradd_queue_t *queue);
void fake_queue_enter(gradd_queue_t *queue);
/* Copies *item into the list. */
void fake_queue_add(gradd_queue_t *queue, const item_t *item);
/* The same, and waits until it is done; a failure stays for fake_queue_wait. */
gradd_status_t fake_queue_ask(gradd_queue_t *queue, const item_t *item);
/* The device is lost here and now: DEVICE. */
gradd_status_t fake_queue_lose(gradd_queue_t *queue);
gradd_status_t fake_queue_wait(gradd_queue_t *queue, int *out_launch);

#endif
