/* Lanes, ring and the finished list behind one mutex; a flag spares system calls.
 *
 * The mutex is held for a few list operations only. A thread that announces sleep checks again
 * afterwards, so no wake-up is lost.
 */
#include "server/session/queue.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct queue_s {
    pthread_mutex_t lock;
    lane_t *ring, *ring_tail;   /* lanes with a job that may run */
    job_t *done, *done_tail;    /* finished, to be reaped */
    atomic_int n_ready, n_done; /* lanes in the ring, jobs in done */
    atomic_int n_words;         /* jobs in lanes that have a word */
    atomic_int n_out;           /* jobs pushed and not reaped */
    atomic_bool io_sleeps;
    atomic_bool held; /* see queue_hold */
    int event;        /* Owned */
};

gradd_status_t queue_create(queue_t **out_queue) {
    queue_t *queue = calloc(1, sizeof *queue);
    if (!queue) return GRADD_FAIL(NOMEM, "no memory for a queue");
    queue->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (queue->event < 0) {
        free(queue);
        return GRADD_FAIL(IO, "eventfd: %s", strerror(errno));
    }
    pthread_mutex_init(&queue->lock, NULL);
    *out_queue = queue;
    return GRADD_OK;
}

void queue_destroy(queue_t *queue) {
    if (!queue) return;
    pthread_mutex_destroy(&queue->lock);
    close(queue->event);
    free(queue);
}

/* ---- ring of lanes; the lock is held ---- */

static bool may_run(const queue_t *queue, const job_t *job) {
    if (atomic_load(&queue->held) && !job->urgent) return false;
    return !job->word || __atomic_load_n(job->word, __ATOMIC_ACQUIRE) >= job->value;
}

static lane_t *first_to_run(const queue_t *queue) {
    lane_t *lane = queue->ring;
    while (lane && !may_run(queue, lane->head))
        lane = lane->next;
    return lane;
}

static void ring_append(queue_t *queue, lane_t *lane) {
    if (lane->in_ring || lane->busy || !lane->head) return;
    lane->in_ring = true;
    lane->next = NULL;
    if (queue->ring_tail)
        queue->ring_tail->next = lane;
    else
        queue->ring = lane;
    queue->ring_tail = lane;
    atomic_fetch_add(&queue->n_ready, 1);
}

static void ring_remove(queue_t *queue, lane_t *lane) {
    lane_t **link = &queue->ring, *before = NULL;
    if (!lane->in_ring) return;
    while (*link != lane) {
        before = *link;
        link = &before->next;
    }
    *link = lane->next;
    if (queue->ring_tail == lane) queue->ring_tail = before;
    lane->in_ring = false;
    lane->next = NULL;
    atomic_fetch_sub(&queue->n_ready, 1);
}

static void ring_prepend(queue_t *queue, lane_t *lane) {
    ring_remove(queue, lane);
    if (lane->busy) return;
    lane->in_ring = true;
    lane->next = queue->ring;
    queue->ring = lane;
    if (!queue->ring_tail) queue->ring_tail = lane;
    atomic_fetch_add(&queue->n_ready, 1);
}

/* ---- I/O thread ---- */

static void push(queue_t *queue, lane_t *lane, job_t *job, bool first) {
    pthread_mutex_lock(&queue->lock);
    job->lane = lane;
    job->urgent = first;
    job->next = first ? lane->head : NULL;
    if (!lane->head) lane->tail = job;
    if (first)
        lane->head = job;
    else if (lane->head)
        lane->tail = lane->tail->next = job;
    else
        lane->head = job;
    lane->length++;
    atomic_fetch_add(&queue->n_words, job->word != NULL);
    atomic_fetch_add(&queue->n_out, 1);
    if (first)
        ring_prepend(queue, lane);
    else
        ring_append(queue, lane);
    pthread_mutex_unlock(&queue->lock);
}

void queue_push(queue_t *queue, lane_t *lane, job_t *job) {
    push(queue, lane, job, false);
}

void queue_push_first(queue_t *queue, lane_t *lane, job_t *job) {
    push(queue, lane, job, true);
}

void queue_hold(queue_t *queue, bool held) {
    atomic_store(&queue->held, held);
}

job_t *queue_drop(queue_t *queue, lane_t *lane) {
    pthread_mutex_lock(&queue->lock);
    job_t *list = lane->head;
    ring_remove(queue, lane);
    for (const job_t *job = list; job; job = job->next)
        atomic_fetch_sub(&queue->n_words, job->word != NULL);
    lane->head = lane->tail = NULL;
    atomic_fetch_sub(&queue->n_out, lane->length);
    lane->length = 0;
    pthread_mutex_unlock(&queue->lock);
    return list;
}

job_t *queue_reap(queue_t *queue) {
    if (atomic_load(&queue->n_done) == 0) return NULL;
    pthread_mutex_lock(&queue->lock);
    job_t *list = queue->done;
    queue->done = queue->done_tail = NULL;
    atomic_fetch_sub(&queue->n_out, atomic_exchange(&queue->n_done, 0));
    pthread_mutex_unlock(&queue->lock);
    return list;
}

int queue_fd(const queue_t *queue) {
    return queue->event;
}

bool queue_sleep(queue_t *queue) {
    atomic_store(&queue->io_sleeps, true);
    if (atomic_load(&queue->n_done) == 0) return true;
    atomic_store(&queue->io_sleeps, false);
    return false;
}

void queue_wake(queue_t *queue) {
    uint64_t count;
    atomic_store(&queue->io_sleeps, false);
    ssize_t n = read(queue->event, &count, sizeof count);
    (void)n; /* EAGAIN: something else woke us */
}

int queue_depth(queue_t *queue) {
    return atomic_load(&queue->n_out);
}

bool queue_ready(queue_t *queue) {
    if (atomic_load(&queue->n_ready) == 0) return false;
    if (atomic_load(&queue->n_words) == 0 && !atomic_load(&queue->held)) return true;
    pthread_mutex_lock(&queue->lock);
    const bool found = first_to_run(queue);
    pthread_mutex_unlock(&queue->lock);
    return found;
}

bool queue_waits(queue_t *queue) {
    const bool held = atomic_load(&queue->held); /* no other event ends that */
    return !held && atomic_load(&queue->n_ready) > 0 && !queue_ready(queue);
}

/* ---- engine thread ---- */

job_t *queue_take(queue_t *queue) {
    if (!queue_ready(queue)) return NULL;
    pthread_mutex_lock(&queue->lock);
    lane_t *lane = first_to_run(queue);
    if (!lane) {
        pthread_mutex_unlock(&queue->lock);
        return NULL;
    }
    ring_remove(queue, lane);
    job_t *job = lane->head;
    lane->head = job->next;
    if (!lane->head) lane->tail = NULL;
    lane->length--;
    atomic_fetch_sub(&queue->n_words, job->word != NULL);
    lane->busy = true;
    job->next = NULL;
    pthread_mutex_unlock(&queue->lock);
    return job;
}

void queue_finish(queue_t *queue, job_t *job) {
    pthread_mutex_lock(&queue->lock);
    lane_t *lane = job->lane;
    job->next = NULL;
    if (queue->done_tail)
        queue->done_tail->next = job;
    else
        queue->done = job;
    queue->done_tail = job;
    lane->busy = false;
    ring_append(queue, lane);
    atomic_fetch_add(&queue->n_done, 1);
    pthread_mutex_unlock(&queue->lock);
    if (!atomic_load(&queue->io_sleeps)) return;
    uint64_t one = 1;
    ssize_t n = write(queue->event, &one, sizeof one);
    (void)n; /* the counter cannot overflow before a read */
}

void queue_again(queue_t *queue, job_t *job) {
    pthread_mutex_lock(&queue->lock);
    lane_t *lane = job->lane;
    job->urgent = true; /* it has begun */
    job->next = lane->head;
    if (!lane->head) lane->tail = job;
    lane->head = job;
    lane->length++;
    lane->busy = false;
    atomic_fetch_add(&queue->n_words, job->word != NULL);
    ring_append(queue, lane);
    pthread_mutex_unlock(&queue->lock);
}
