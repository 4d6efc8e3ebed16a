/* Threads that close foreign descriptors. See discard.h. */
#include "shm/discard.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <unistd.h>

#define CLOSERS     16
#define WAITING     1024
#define STACK_BYTES (64 << 10)

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

static bool start_closer(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    size_t bytes = STACK_BYTES > PTHREAD_STACK_MIN ? STACK_BYTES : (size_t)PTHREAD_STACK_MIN;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, bytes);
    bool started = pthread_create(&thread, &attributes, run_closer, NULL) == 0;
    pthread_attr_destroy(&attributes);
    return started;
}

void gradd_discard(int fd) {
    if (fd < 0) return;
    if (fcntl(fd, F_GET_SEALS) >= 0) { /* a memfd, or tmpfs: close() cannot block */
        close(fd);
        return;
    }
    pthread_mutex_lock(&lock);
    /* Beyond this it stays open: descriptors are counted and run out, the daemon goes on. */
    if (n_waiting < WAITING) waiting[n_waiting++] = fd;
    bool start = n_waiting > 0 && n_closers < CLOSERS;
    n_closers += start;
    pthread_mutex_unlock(&lock);
    if (!start || start_closer()) return;
    pthread_mutex_lock(&lock);
    n_closers--;
    pthread_mutex_unlock(&lock);
}
