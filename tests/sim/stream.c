/* Streams of the stand-in: lists of work with a thread each. See sim.h. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/sim/internal.h"

typedef struct sim_item_s {
    struct sim_item_s *next;
    void (*run)(void *);
    void *argument;
} sim_item_t;

struct sim_stream_s {
    struct sim_stream_s *next;
    pthread_t thread;
    sim_item_t *first, **end; /* `first` is in progress until it leaves the list */
    bool ending;
    int device; /* its number on the machine */
    unsigned random;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all lists */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct sim_stream_s *streams;

/* ---- the thread ------------------------------------------------------------------------------ */

/* No test may rely on the time between the request and the work. */
static void pause_for(cudaStream_t s) {
    const char *text = getenv("GRADD_SIM_DELAY_US");
    const long most = text ? atol(text) : 500;
    if (sim_settings()->pause_us)
        usleep(sim_settings()->pause_us);
    else if (most > 0)
        usleep((unsigned)(most / 4 + rand_r(&s->random) % most * 3 / 4));
}

static sim_item_t *next_item(cudaStream_t s) {
    pthread_mutex_lock(&lock);
    while (!s->first && !s->ending)
        pthread_cond_wait(&changed, &lock);
    sim_item_t *item = s->first;
    pthread_mutex_unlock(&lock);
    return item;
}

/* Closes the memory behind the last one, before others see that the stream is idle. */
static bool finish_item(cudaStream_t s, sim_item_t *item) {
    pthread_mutex_lock(&lock);
    const bool last = !item->next;
    if (last) sim_memory_close();
    s->first = item->next;
    if (last) s->end = &s->first;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(item);
    return last;
}

static void *serve(void *argument) {
    cudaStream_t s = argument;
    bool idle = true;
    sim_item_t *item;
    while ((item = next_item(s))) {
        if (idle) {
            pause_for(s);
            sim_memory_open();
        }
        item->run(item->argument);
        idle = finish_item(s, item);
    }
    return NULL;
}

static void append(cudaStream_t s, void (*run)(void *), void *argument) {
    sim_item_t *item = malloc(sizeof *item);
    if (!item) abort();
    *item = (sim_item_t){NULL, run, argument};
    *s->end = item;
    s->end = &item->next;
}

void sim_give(cudaStream_t s, void (*run)(void *), void *argument) {
    if (!s || sim_settings()->blocking) {
        if (s) cudaStreamSynchronize(s);
        sim_memory_open();
        run(argument);
        sim_memory_close();
        return;
    }
    pthread_mutex_lock(&lock);
    append(s, run, argument);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void sim_give_all(int number, void (*run)(void *), void *argument, _Atomic int *left) {
    pthread_mutex_lock(&lock);
    for (cudaStream_t s = streams; s; s = s->next)
        *left += s->device == number;
    for (cudaStream_t s = streams; s; s = s->next)
        if (s->device == number) append(s, run, argument);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int sim_pending(void) {
    int n = 0;
    pthread_mutex_lock(&lock);
    for (const struct sim_stream_s *s = streams; s; s = s->next)
        for (const sim_item_t *item = s->first; item; item = item->next)
            n++;
    pthread_mutex_unlock(&lock);
    return n;
}

/* ---- streams --------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    SIM_CALL(cudaErrorMemoryAllocation);
    if (flags != cudaStreamNonBlocking) return sim_failed(cudaErrorInvalidValue);
    cudaStream_t s = calloc(1, sizeof *s);
    if (!s) return sim_failed(cudaErrorMemoryAllocation);
    s->end = &s->first;
    s->device = sim_device();
    s->random = (unsigned)getpid();
    pthread_mutex_lock(&lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&lock);
    if (pthread_create(&s->thread, NULL, serve, s)) abort();
    *out = s;
    return cudaSuccess;
}

static void settle(cudaStream_t s) {
    while (s->first)
        pthread_cond_wait(&changed, &lock);
}

cudaError_t cudaStreamDestroy(cudaStream_t s) {
    pthread_mutex_lock(&lock);
    s->ending = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_lock(&lock);
    for (struct sim_stream_s **link = &streams; *link; link = &(*link)->next)
        if (*link == s) {
            *link = s->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    free(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
    SIM_CALL(cudaErrorLaunchFailure);
    sim_count_wait();
    pthread_mutex_lock(&lock);
    if (s) settle(s);
    pthread_mutex_unlock(&lock);
    return sim_lost();
}

void sim_wait_all(void) {
    pthread_mutex_lock(&lock);
    for (struct sim_stream_s *s = streams; s;) {
        const bool busy = s->first;
        settle(s);
        s = busy ? streams : s->next; /* the list may have changed */
    }
    pthread_mutex_unlock(&lock);
}

cudaError_t cudaDeviceSynchronize(void) {
    SIM_CALL(cudaErrorLaunchFailure);
    sim_count_wait();
    sim_wait_all();
    return sim_lost();
}
