/* See maker.h. The list is the engine thread's; the lock guards the queue in front of the thread.
 */
#include "server/verbs/maker.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "server/device/device.h"
#include "server/verbs/crash.h"

struct plan_maker_s {
    worker_t *worker; /* Borrowed */
    making_t *all;    /* Owned */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t more;
    making_t *queue, *queue_tail;
    bool stops;
};

static bool is_dropped(const making_t *making) {
    return __atomic_load_n(&making->dropped, __ATOMIC_RELAXED);
}

/* ---- the thread ---- */

static making_t *next_queued(plan_maker_t *maker) {
    pthread_mutex_lock(&maker->lock);
    while (!maker->queue && !maker->stops)
        pthread_cond_wait(&maker->more, &maker->lock);
    making_t *making = maker->stops ? NULL : maker->queue;
    if (making) maker->queue = making->next_queued;
    if (!maker->queue) maker->queue_tail = NULL;
    pthread_mutex_unlock(&maker->lock);
    return making;
}

static void load(making_t *making) {
    making->status = gradd_model_load(making->onnx, making->onnx_bytes, &making->loaded);
    if (making->status) making->failure = *gradd_failure();
}

static void make(making_t *making) {
    crash_blame_making(making->key);
    making->status = gradd_plan_create(making->model->model, &making->options, &making->plan);
    crash_blame_making(NULL);
    if (making->status) making->failure = *gradd_failure();
}

static void *make_plans(void *arg) {
    plan_maker_t *maker = arg;
    prctl(PR_SET_NAME, "gradd-plans");
    crash_guard_making();
    for (making_t *making; (making = next_queued(maker));) {
        if (!is_dropped(making)) (making->onnx ? load : make)(making);
        __atomic_store_n(&making->done, 1, __ATOMIC_RELEASE); /* from here on it is the engine's */
    }
    return NULL;
}

/* ---- the engine thread ---- */

gradd_status_t maker_start(worker_t *worker, plan_maker_t **out) {
    *out = NULL;
    if (!worker->device->backend->host) return GRADD_OK;
    plan_maker_t *maker = calloc(1, sizeof *maker);
    if (!maker) return GRADD_FAIL(NOMEM, "no memory for a thread");
    maker->worker = worker;
    pthread_mutex_init(&maker->lock, NULL);
    pthread_cond_init(&maker->more, NULL);
    const int rc = pthread_create(&maker->thread, NULL, make_plans, maker);
    if (rc) {
        free(maker);
        return GRADD_FAIL(IO, "pthread_create: %s", strerror(rc));
    }
    *out = maker;
    return GRADD_OK;
}

static void destroy(plan_maker_t *maker, making_t *making) {
    making_t **link = &maker->all;
    while (*link != making)
        link = &(*link)->next;
    *link = making->next;
    gradd_plan_destroy(making->plan); /* before its model */
    if (making->loaded) gradd_model_destroy(making->loaded);
    free(making->onnx);
    cache_release_model(maker->worker, making->model);
    plan_ask_finish(&making->ask);
    free(making);
}

/* Those that are there, and for which no request waits any more. */
static void sweep(plan_maker_t *maker) {
    for (making_t *making = maker->all, *next; making; making = next) {
        next = making->next;
        if (!making->refs && __atomic_load_n(&making->done, __ATOMIC_ACQUIRE))
            destroy(maker, making);
    }
}

void maker_stop(plan_maker_t *maker) {
    if (!maker) return;
    pthread_mutex_lock(&maker->lock);
    maker->stops = true;
    pthread_cond_signal(&maker->more);
    pthread_mutex_unlock(&maker->lock);
    pthread_join(maker->thread, NULL);
    while (maker->all)
        destroy(maker, maker->all);
    pthread_cond_destroy(&maker->more);
    pthread_mutex_destroy(&maker->lock);
    free(maker);
}

making_t *maker_find(plan_maker_t *maker, const uint8_t key[GRADD_SHA256_BYTES]) {
    for (making_t *making = maker->all; making; making = making->next) {
        if (is_dropped(making) || memcmp(making->key, key, sizeof making->key) != 0) continue;
        making->refs++;
        return making;
    }
    return NULL;
}

static void enqueue(plan_maker_t *maker, making_t *making) {
    pthread_mutex_lock(&maker->lock);
    if (maker->queue_tail)
        maker->queue_tail->next_queued = making;
    else
        maker->queue = making;
    maker->queue_tail = making;
    pthread_cond_signal(&maker->more);
    pthread_mutex_unlock(&maker->lock);
}

static void begin(plan_maker_t *maker, making_t *making) {
    making->refs = 1;
    making->next = maker->all;
    maker->all = making;
    enqueue(maker, making);
}

gradd_status_t maker_begin(plan_maker_t *maker, model_entry_t *model,
                           const gradd_plan_options_t *options, plan_ask_t *ask,
                           making_t **out_making) {
    sweep(maker);
    making_t *making = calloc(1, sizeof *making);
    if (!making) return GRADD_FAIL(NOMEM, "no memory for a plan");
    cache_plan_key(model, options, making->key);
    making->model = model;
    model->refs++;
    making->options = *options;
    making->options.cancel = &making->dropped;
    making->ask = *ask;
    *ask = (plan_ask_t){0};
    begin(maker, making);
    *out_making = making;
    return GRADD_OK;
}

gradd_status_t maker_load(plan_maker_t *maker, const uint8_t id[GRADD_SHA256_BYTES], void *onnx,
                          size_t bytes, making_t **out_making) {
    sweep(maker);
    making_t *making = calloc(1, sizeof *making);
    if (!making) {
        free(onnx);
        return GRADD_FAIL(NOMEM, "no memory for a model");
    }
    memcpy(making->key, id, sizeof making->key);
    making->onnx = onnx;
    making->onnx_bytes = bytes;
    begin(maker, making);
    *out_making = making;
    return GRADD_OK;
}

gradd_status_t making_status(const making_t *making) {
    if (making->status) gradd_failure_restore(&making->failure);
    return making->status;
}

void maker_release(plan_maker_t *maker, making_t *making) {
    if (!making || --making->refs > 0) return;
    __atomic_store_n(&making->dropped, 1, __ATOMIC_RELAXED);
    sweep(maker);
}
