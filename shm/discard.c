/* Threads that close foreign descriptors, and one that gives much memory back. See discard.h. */
#include "shm/discard.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CLOSERS     16
#define WAITING     1024
#define STACK_BYTES (64 << 10)
#define MEMORIES    64                   /* that wait for the thread */
#define MUCH        ((uint64_t)32 << 20) /* bytes: less is given back at once, in some ms */
#define PIECE       ((uint64_t)8 << 20)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int waiting[WAITING];
static int n_waiting, n_closers;

static bool take(int *out_fd) {
    pthread_mutex_lock(&lock);
    bool any = n_waiting > 0;
    if (any)
        *out_fd = waiting[--n_waiting];
    else
        n_closers--;
    pthread_mutex_unlock(&lock);
    return any;
}

static void *run_closer(void *context) {
    int fd;
    (void)context;
    while (take(&fd))
        close(fd);
    return NULL;
}

static bool start_thread(void *(*run)(void *)) {
    pthread_attr_t attributes;
    pthread_t thread;
    size_t bytes = STACK_BYTES > PTHREAD_STACK_MIN ? STACK_BYTES : (size_t)PTHREAD_STACK_MIN;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, bytes);
    bool started = pthread_create(&thread, &attributes, run, NULL) == 0;
    pthread_attr_destroy(&attributes);
    return started;
}

/* ---- memory ---- */

typedef struct returned_s {
    char *base; /* NULL: a descriptor alone */
    uint64_t bytes;
    int fd; /* -1: none */
} returned_t;

static returned_t memories[MEMORIES];
static int n_memories;
static bool gives_back; /* the thread runs */
static pthread_cond_t all_back = PTHREAD_COND_INITIALIZER;

/* In pieces, which no huge page lies across: what maps or unmaps meanwhile waits for one of them.
 */
static void give_back(const returned_t *m) {
    for (char *at = m->base, *end = m->base + m->bytes, *next; m->base && at < end; at = next) {
        next = (char *)(((uintptr_t)at / PIECE + 1) * PIECE);
        if (next > end) next = end;
        munmap(at, (size_t)(next - at));
    }
    if (m->fd >= 0) close(m->fd);
}

static void *run_memories(void *context) {
    (void)context;
    for (;;) {
        pthread_mutex_lock(&lock);
        const returned_t m = n_memories ? memories[n_memories - 1] : (returned_t){.fd = -1};
        gives_back = n_memories > 0;
        n_memories -= gives_back;
        if (!gives_back) pthread_cond_broadcast(&all_back);
        pthread_mutex_unlock(&lock);
        if (m.fd < 0 && !m.base) return NULL;
        give_back(&m);
    }
}

/* False: the caller is to give it back. */
static bool queue_memory(returned_t m) {
    pthread_mutex_lock(&lock);
    bool room = m.bytes >= MUCH && n_memories < MEMORIES;
    if (room && !gives_back) gives_back = room = start_thread(run_memories);
    if (room) memories[n_memories++] = m;
    pthread_mutex_unlock(&lock);
    return room;
}

static void discard_memory(void *base, uint64_t bytes, int fd) {
    const returned_t m = {base, bytes, fd};
    if (!queue_memory(m)) give_back(&m);
}

void gradd_discard_mapping(void *base, uint64_t bytes) {
    discard_memory(base, bytes, -1);
}

void gradd_discard_wait(void) {
    pthread_mutex_lock(&lock);
    while (gives_back)
        pthread_cond_wait(&all_back, &lock);
    pthread_mutex_unlock(&lock);
}

void gradd_discard(int fd) {
    struct stat st;
    if (fd < 0) return;
    if (fcntl(fd, F_GET_SEALS) >= 0) { /* a memfd, or tmpfs: close() cannot block */
        discard_memory(NULL, fstat(fd, &st) == 0 ? (uint64_t)st.st_size : 0, fd);
        return;
    }
    pthread_mutex_lock(&lock);
    /* Beyond this it stays open: descriptors are counted and run out, the daemon goes on. */
    if (n_waiting < WAITING) waiting[n_waiting++] = fd;
    bool start = n_waiting > 0 && n_closers < CLOSERS;
    n_closers += start;
    pthread_mutex_unlock(&lock);
    if (!start || start_thread(run_closer)) return;
    pthread_mutex_lock(&lock);
    n_closers--;
    pthread_mutex_unlock(&lock);
}
