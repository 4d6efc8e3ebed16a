/* A budget of descriptors for connections. See accept_budget.h. */
#include "server/host/accept_budget.h"

#include <errno.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "server/host/connections.h"

#define KEPT_PART 4 /* 1 / KEPT_PART of all descriptors, at most KEPT_MOST, stay free */
#define KEPT_MOST 256
#define LEAST     32 /* of a daemon with a session */
#define PAUSE_NS  10000000

static int spare = -1;
static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;

static int open_spare(void) {
    return eventfd(0, EFD_CLOEXEC); /* needs no path */
}

static rlim_t descriptor_limit(void) {
    struct rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

gradd_status_t gate_open(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    if (descriptor_limit() < LEAST)
        return GRADD_FAIL(LIMIT, "`ulimit -n` allows %llu open files, a daemon needs at least %d",
                          (unsigned long long)descriptor_limit(), LEAST);
    spare = open_spare();
    return GRADD_OK;
}

/* Descriptors are handed out from the lowest on, so a high number says that most are taken. */
static int within_budget(int fd) {
    rlim_t all = descriptor_limit();
    rlim_t kept = all / KEPT_PART < KEPT_MOST ? all / KEPT_PART : KEPT_MOST;
    return (rlim_t)fd < all - kept;
}

static int real_accept(int listener, struct sockaddr *address, socklen_t *bytes, int flags) {
    return (int)syscall(SYS_accept4, listener, address, bytes, flags);
}

/* There is none left: one is freed for as long as it takes to send the newcomer away. */
static void send_away(int listener) {
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    pthread_mutex_lock(&spare_lock);
    if (spare >= 0) close(spare);
    int fd = real_accept(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) close(fd);
    spare = open_spare();
    pthread_mutex_unlock(&spare_lock);
    /* Another thread took it: the new connection stays pending, and its listener readable. */
    if (fd < 0) nanosleep(&pause, NULL);
}

int gate_accept(int listener) {
    return real_accept(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
}

bool gate_has_room(void) {
    const int a = open_spare(), b = open_spare();
    if (a >= 0) close(a);
    if (b >= 0) close(b);
    return a >= 0 && b >= 0;
}

/* libzmq's calls; its assertion after accept() knows ECONNABORTED and not EMFILE. */
int accept4(int listener, struct sockaddr *address, socklen_t *bytes, int flags) {
    int fd = real_accept(listener, address, bytes, flags);
    if (fd >= 0 && within_budget(fd) && connections_add(fd)) return fd;
    if (fd >= 0)
        close(fd);
    else if (errno == EMFILE || errno == ENFILE)
        send_away(listener);
    else if (errno != ENOMEM && errno != ENOBUFS)
        return -1;
    errno = ECONNABORTED;
    return -1;
}

int accept(int listener, struct sockaddr *address, socklen_t *bytes) {
    return accept4(listener, address, bytes, 0);
}
