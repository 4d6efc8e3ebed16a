/* The list of work and the thread behind it. See queue.h. */
#include "tests/fake/queue.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- failures -------------------------------------------------------------------------------- */

static const char *const point_names[FAKE_POINTS] = {"alloc", "map", "item", "launch"};

static void read_environment(gradd_queue_t *q) {
    const char *delay = getenv("GRADD_FAKE_DELAY_US"), *fail = getenv("GRADD_FAKE_FAIL");
    const char *once = getenv("GRADD_FAKE_ONCE");
    q->delay_us = delay ? (unsigned)atoi(delay) : 500;
    q->random = (unsigned)getpid();
    if (once) snprintf(q->once, sizeof q->once, "%s", once);
    for (int p = 0; fail && p < FAKE_POINTS; p++) {
        const size_t n = strlen(point_names[p]);
        if (!strncmp(fail, point_names[p], n) && fail[n] == ':') q->left[p] = atoi(fail + n + 1);
    }
}

bool fake_queue_hits(gradd_queue_t *q, fake_point_t point) {
    pthread_mutex_lock(&q->lock);
    bool hits = q->left[point] > 0 && --q->left[point] == 0;
    if (hits && *q->once) {
        int fd = open(q->once, O_CREAT | O_EXCL | O_CLOEXEC | O_WRONLY, 0600);
        hits = fd >= 0; /* it has happened in another life */
        if (hits) close(fd);
    }
    pthread_mutex_unlock(&q->lock);
    return hits;
}

void fake_fail(gradd_queue_t *q, fake_point_t point, int n) {
    pthread_mutex_lock(&q->lock);
    q->left[point] = n;
    pthread_mutex_unlock(&q->lock);
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void note_failure(gradd_queue_t *q, const item_t *item, gradd_status_t status) {
    q->lost |= status == GRADD_E_DEVICE;
    if (q->status) return;
    q->status = status;
    /* as of a GPU, which says of an error late and not of whose work it is */
    const bool known = item->kind == ITEM_LAUNCH && status != GRADD_E_DEVICE;
    q->launch = known ? item->launch.launch : -1;
    snprintf(q->message, sizeof q->message, "%s", gradd_error_message());
}

gradd_status_t fake_queue_lose(gradd_queue_t *q) {
    const item_t nothing = {.kind = ITEM_FREE};
    const gradd_status_t status = GRADD_FAIL(DEVICE, "the device is lost");
    pthread_mutex_lock(&q->lock);
    note_failure(q, &nothing, status);
    pthread_mutex_unlock(&q->lock);
    return status;
}

static gradd_status_t carry_out(gradd_queue_t *q, item_t *item) {
    if (item->kind == ITEM_FREE) return item_carry_out(q, item); /* also of a device that is lost */
    if (q->status || q->lost) return GRADD_OK;
    if (fake_queue_hits(q, FAKE_ITEM)) return GRADD_FAIL(DEVICE, "the device is lost");
    return item_carry_out(q, item);
}

/* No test may rely on the time between one piece of work and the next. */
static void pause_for(gradd_queue_t *q) {
    if (q->delay_us) usleep(q->delay_us / 4 + (unsigned)rand_r(&q->random) % q->delay_us * 3 / 4);
}

static item_t *next_item(gradd_queue_t *q) {
    pthread_mutex_lock(&q->lock);
    const bool was_idle = !q->first;
    while (!q->first && !q->ending)
        pthread_cond_wait(&q->arrived, &q->lock);
    item_t *item = q->first;
    pthread_mutex_unlock(&q->lock);
    if (item && was_idle) pause_for(q);
    return item;
}

static void finish_item(gradd_queue_t *q, item_t *item, gradd_status_t status) {
    pthread_mutex_lock(&q->lock);
    if (status) note_failure(q, item, status);
    q->first = item->next;
    if (!q->first) q->end = &q->first;
    if (!--q->pending) pthread_cond_broadcast(&q->idle);
    pthread_mutex_unlock(&q->lock);
    free(item->views);
    free(item);
}

static void *serve(void *argument) {
    gradd_queue_t *q = argument;
    item_t *item;
    gradd_cpu_enter(1);
    while ((item = next_item(q))) {
        gradd_status_t status = carry_out(q, item);
        memory_leave(&q->memory);
        finish_item(q, item, status);
    }
    return NULL;
}

/* ---- what the engine does -------------------------------------------------------------------- */

gradd_status_t fake_queue_create(gradd_queue_t **out) {
    gradd_queue_t *q = calloc(1, sizeof *q);
    REQUIRE(q, "no memory for a queue");
    memory_init(&q->memory);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->arrived, NULL);
    pthread_cond_init(&q->idle, NULL);
    q->end = &q->first;
    read_environment(q);
    gradd_cpu_threads(); /* the process's number, before a thread of another one asks */
    REQUIRE(!pthread_create(&q->thread, NULL, serve, q), "no thread");
    *out = q;
    return GRADD_OK;
}

void fake_queue_destroy(gradd_queue_t *q) {
    if (!q) return;
    pthread_mutex_lock(&q->lock);
    q->ending = true;
    pthread_cond_signal(&q->arrived);
    pthread_mutex_unlock(&q->lock);
    pthread_join(q->thread, NULL);
    memory_finish(&q->memory);
    free(q);
}

void fake_queue_enter(gradd_queue_t *q) {
    q->entered = true;
}

static void add(gradd_queue_t *q, const item_t *from) {
    item_t *item = malloc(sizeof *item);
    REQUIRE(item, "no memory for work");
    *item = *from;
    item->next = NULL;
    *q->end = item;
    q->end = &item->next;
    q->pending++;
    pthread_cond_signal(&q->arrived);
}

void fake_queue_add(gradd_queue_t *q, const item_t *item) {
    REQUIRE(q->entered || item->kind == ITEM_FREE, "work without fake_queue_enter");
    pthread_mutex_lock(&q->lock);
    add(q, item);
    pthread_mutex_unlock(&q->lock);
}

static void settle(gradd_queue_t *q) {
    while (q->pending)
        pthread_cond_wait(&q->idle, &q->lock);
}

gradd_status_t fake_queue_ask(gradd_queue_t *q, const item_t *item) {
    REQUIRE(q->entered, "work without fake_queue_enter");
    pthread_mutex_lock(&q->lock);
    add(q, item);
    settle(q);
    const gradd_status_t status = q->status;
    if (status) gradd_error_set(q->message);
    pthread_mutex_unlock(&q->lock);
    return status;
}

gradd_status_t fake_queue_wait(gradd_queue_t *q, int *out_launch) {
    pthread_mutex_lock(&q->lock);
    settle(q);
    const gradd_status_t status = q->status;
    if (status) gradd_error_set(q->message);
    if (out_launch) *out_launch = status ? q->launch : -1;
    if (!q->lost) q->status = GRADD_OK;
    q->launch = -1;
    q->entered = false;
    pthread_mutex_unlock(&q->lock);
    return status;
}

int fake_pending(gradd_queue_t *q) {
    pthread_mutex_lock(&q->lock);
    const int pending = q->pending;
    pthread_mutex_unlock(&q->lock);
    return pending;
}

int64_t fake_bytes(gradd_queue_t *q) {
    pthread_mutex_lock(&q->memory.lock);
    const int64_t bytes = q->memory.bytes;
    pthread_mutex_unlock(&q->memory.lock);
    return bytes;
}
