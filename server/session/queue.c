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
#include <time.h>
#include <unistd.h>

struct queue_s {
    pthread_mutex_t lock;
    lane_t *ring, *ring_tail;   /* lanes with a job that may run */
    job_t *done, *done_tail;    /* finished, to be reaped */
    atomic_int n_ready, n_done; /* lanes in the ring, jobs in done */
    atomic_int n_words;         /* jobs in lanes that have a word */
    atomic_int n_out;           /* jobs pushed and not reaped */
    atomic_int n_first;         /* lanes in the ring that go before others */
    atomic_bool io_sleeps;
    int event; /* Owned */
    fair_t fair;
    int64_t (*now_us)(void);
    int64_t taken_us; /* the engine thread's: when it took the last job */
    atomic_bool held; /* see queue_hold */
};

static int64_t monotonic_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

gradd_status_t queue_create(queue_t **out_queue) {
    queue_t *queue = calloc(1, sizeof *queue);
    if (!queue) return GRADD_FAIL(NOMEM, "no memory for a queue");
    queue->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (queue->event < 0) {
        free(queue);
        return GRADD_FAIL(IO, "eventfd: %s", strerror(errno));
    }
    pthread_mutex_init(&queue->lock, NULL);
    queue->now_us = monotonic_us;
    *out_queue = queue;
    return GRADD_OK;
}

void queue_set_clock(queue_t *queue, int64_t (*now_us)(void)) {
    queue->now_us = now_us;
}

void queue_destroy(queue_t *queue) {
    if (!queue) return;
    pthread_mutex_destroy(&queue->lock);
    close(queue->event);
    free(queue);
}

/* ---- ring of lanes; the lock is held ---- */

static bool may_run(const queue_t *queue, const job_t *job) {
    if (atomic_load(&queue->held) && !job->urgent && !job->begun) return false;
    return !job->word || __atomic_load_n(job->word, __ATOMIC_ACQUIRE) >= job->value;
}

static bool before(const lane_t *a, const lane_t *b) {
    return a->urgent != b->urgent ? a->urgent : fair_before(&a->account, &b->account);
}

/* The next lane that may run; of equal ones that which waits longer. */
static lane_t *next_to_run(const queue_t *queue) {
    lane_t *found = NULL;
    for (lane_t *lane = queue->ring; lane; lane = lane->next)
        if (may_run(queue, lane->head) && (!found || before(lane, found))) found = lane;
    return found;
}

static bool goes_first(const lane_t *lane) {
    return lane->urgent || lane->account.first;
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
    atomic_fetch_add(&queue->n_first, goes_first(lane));
    atomic_fetch_add(&queue->n_ready, 1);
}

static void ring_remove(queue_t *queue, lane_t *lane) {
    lane_t **link = &queue->ring, *before_it = NULL;
    if (!lane->in_ring) return;
    while (*link != lane) {
        before_it = *link;
        link = &before_it->next;
    }
    *link = lane->next;
    if (queue->ring_tail == lane) queue->ring_tail = before_it;
    lane->in_ring = false;
    lane->next = NULL;
    atomic_fetch_sub(&queue->n_first, goes_first(lane));
    atomic_fetch_sub(&queue->n_ready, 1);
}

/* ---- I/O thread ---- */

static void push(queue_t *queue, lane_t *lane, job_t *job, bool first) {
    pthread_mutex_lock(&queue->lock);
    if (first) ring_remove(queue, lane); /* it counts as another there */
    if (!lane->head && !lane->busy) fair_join(&queue->fair, &lane->account, queue->now_us());
    lane->urgent |= first;
    job->lane = lane;
    job->begun = false;
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

static job_t *drop(queue_t *queue, lane_t *lane, bool keep_begun) {
    pthread_mutex_lock(&queue->lock);
    job_t *head = lane->head;
    job_t *kept = keep_begun && head && head->begun && !head->word ? head : NULL;
    job_t *list = kept ? kept->next : lane->head;
    if (!kept) ring_remove(queue, lane);
    for (const job_t *job = list; job; job = job->next)
        atomic_fetch_sub(&queue->n_words, job->word != NULL);
    if (kept) kept->next = NULL;
    lane->head = lane->tail = kept;
    atomic_fetch_sub(&queue->n_out, lane->length - (kept != NULL));
    lane->length = kept != NULL;
    pthread_mutex_unlock(&queue->lock);
    return list;
}

job_t *queue_drop(queue_t *queue, lane_t *lane) {
    return drop(queue, lane, false);
}

job_t *queue_drop_new(queue_t *queue, lane_t *lane) {
    return drop(queue, lane, true);
}

void queue_set_share(queue_t *queue, lane_t *lane, uint32_t share) {
    pthread_mutex_lock(&queue->lock);
    lane->account.share = share;
    pthread_mutex_unlock(&queue->lock);
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
    const bool found = next_to_run(queue);
    pthread_mutex_unlock(&queue->lock);
    return found;
}

bool queue_waits(queue_t *queue) {
    const bool held = atomic_load(&queue->held); /* no other event ends that */
    if (held || atomic_load(&queue->n_ready) == 0 || queue_ready(queue)) return false;
    bool polls = false;
    pthread_mutex_lock(&queue->lock);
    for (const lane_t *lane = queue->ring; lane; lane = lane->next)
        polls |= lane->head->word && !lane->head->told;
    pthread_mutex_unlock(&queue->lock);
    return polls;
}

/* ---- engine thread ---- */

job_t *queue_take(queue_t *queue) {
    if (!queue_ready(queue)) return NULL;
    pthread_mutex_lock(&queue->lock);
    lane_t *lane = next_to_run(queue);
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
    lane->urgent = false;
    /* Nothing is saved up while it waits for a word. */
    if (job->word) fair_join(&queue->fair, &lane->account, queue->now_us());
    fair_begin(&queue->fair, &lane->account);
    job->next = NULL;
    job->begun = true;
    queue->taken_us = queue->now_us();
    pthread_mutex_unlock(&queue->lock);
    return job;
}

bool queue_makes_way(queue_t *queue) {
    if (atomic_load_explicit(&queue->n_ready, memory_order_relaxed) == 0) return false;
    const int64_t ran_us = queue->now_us() - queue->taken_us;
    if (ran_us < FAIR_SLICE_US && atomic_load(&queue->n_first) == 0) return false;
    pthread_mutex_lock(&queue->lock);
    const lane_t *lane = next_to_run(queue);
    const bool way = lane && (lane->urgent || fair_makes_way(&lane->account, ran_us));
    pthread_mutex_unlock(&queue->lock);
    return way;
}

/* The engine leaves the lane; the lock is held. */
static void leave(queue_t *queue, lane_t *lane) {
    const int64_t now = queue->now_us();
    lane->busy = false;
    fair_end(&lane->account, now, now - queue->taken_us);
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
    leave(queue, lane);
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
    leave(queue, lane);
    atomic_fetch_add(&queue->n_words, job->word != NULL);
    ring_append(queue, lane);
    pthread_mutex_unlock(&queue->lock);
}
