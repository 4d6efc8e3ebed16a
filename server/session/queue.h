/* The two-way queue between the I/O side and the engine thread.
 *
 * Each session owns a lane, a first-in first-out list of jobs. The engine takes the next job from
 * the lane that has had the least engine time by its share (fair.h), so a client that sends much
 * waits for itself, not for others; within a lane one job runs at a time and in order. Finished
 * jobs come back on one list.
 *
 * A job that runs for long asks now and then whether it has to make way for another lane. If so,
 * the engine puts it aside, and takes it again when its lane is next.
 *
 * A job may wait for a word that its client's device writes: then the job's lane waits, and no
 * other.
 *
 * The queue never blocks; loop.c decides which side waits where. It allocates no memory: links are
 * fields of the job and of the lane.
 */
#ifndef GRADD_SERVER_SESSION_QUEUE_H
#define GRADD_SERVER_SESSION_QUEUE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "server/session/fair.h"
#include "shm/status.h"

/* Embedded in a queued object. */
typedef struct job_s {
    struct job_s *next; /* Borrowed: in a lane or in the finished list */
    struct lane_s *lane;
    bool urgent;          /* also while the queue is held */
    const uint64_t *word; /* Borrowed: the job may run once *word is at least `value`; NULL: now */
    uint64_t value;
    bool told;  /* one of the queue's two threads writes the word: it is not polled for */
    bool begun; /* the engine has taken it */
} job_t;

/* Embedded in its owner, zeroed; may be forgotten once it is empty and not busy. */
typedef struct lane_s {
    job_t *head, *tail;
    struct lane_s *next; /* in the ring of lanes that have a job to run */
    bool in_ring;
    bool urgent; /* before all others, until a job of it runs */
    bool busy;   /* one of its jobs is with the engine */
    fair_account_t account;
    atomic_int length; /* jobs that wait; read for `ps` without the lock */
} lane_t;

typedef struct queue_s queue_t;

gradd_status_t queue_create(queue_t **out_queue);
void queue_destroy(queue_t *queue); /* both threads have left; accepts NULL */
/* For tests: another clock, in microseconds above 0. */
void queue_set_clock(queue_t *queue, int64_t (*now_us)(void));

/* ---- I/O side: one thread at a time ---- */

void queue_push(queue_t *queue, lane_t *lane, job_t *job);
/* Puts the job before all others of all lanes: for giving memory back. */
void queue_push_first(queue_t *queue, lane_t *lane, job_t *job);
/* Takes all waiting jobs out of a lane; the running one stays. Returns the list. */
job_t *queue_drop(queue_t *queue, lane_t *lane);
/* The same, but one that was put aside stays, too, unless it waits for another process. */
job_t *queue_drop_new(queue_t *queue, lane_t *lane);
/* From now on the lane has that share of the engine (fair.h). */
void queue_set_share(queue_t *queue, lane_t *lane, uint32_t share);
/* While it is held no job is taken, but those of queue_push_first and queue_again. */
void queue_hold(queue_t *queue, bool held);
/* The finished jobs since the last call, oldest first; their lanes are free again. */
job_t *queue_reap(queue_t *queue);
/* A descriptor that becomes readable when a job finishes while the I/O side sleeps. */
int queue_fd(const queue_t *queue);
/* Announces sleep; false if there is something to reap, then do not sleep. */
bool queue_sleep(queue_t *queue);
void queue_wake(queue_t *queue); /* after sleeping: also empties the descriptor */
/* Jobs that wait or run or were not reaped. */
int queue_depth(queue_t *queue);
/* True if queue_take would return a job. */
bool queue_ready(queue_t *queue);
/* True if there is one, but all wait for their words, of which one is polled for: nothing tells
 * when to look again. */
bool queue_waits(queue_t *queue);

/* ---- engine thread ---- */

/* The next job, NULL when none may run now. */
job_t *queue_take(queue_t *queue);
void queue_finish(queue_t *queue, job_t *job);
/* Whether the job that was taken last has to make way for another lane. Cheap while none waits. */
bool queue_makes_way(queue_t *queue);
/* The job that was taken is not finished: it comes first in its lane, once its word is there. */
void queue_again(queue_t *queue, job_t *job);

#endif
