/* Memory that runs out in another process: its n-th allocation fails, once.
 *
 * A library for LD_PRELOAD. GRADD_SCARCE names a file that holds a scarce_t; a test maps it, too,
 * and writes there which process is meant and which of its allocations, or of its system calls,
 * from now on fails: malloc and its relatives, also those of libraries, and mmap and epoll_ctl,
 * with ENOMEM; or else calls that the kernel refuses when it is short of descriptors, memory or
 * threads, or that a signal ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define HANDED_ON 200 /* a descriptor */

typedef struct scarce_s {
    int64_t pid;   /* 0 = none */
    int64_t at;    /* the one that fails, from 1 */
    int64_t count; /* so many there were */
    int64_t calls; /* 0: allocations, 1: system calls */
} scarce_t;

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t n, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);

static scarce_t *shared;
static int64_t own_pid;

/* A worker may open nothing any more: it has the descriptor from its owner. */
__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("GRADD_SCARCE");
    const int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (!path || (fd >= 0 && dup2(fd, HANDED_ON) < 0)) return;
    void *found = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, HANDED_ON, 0);
    if (fd >= 0) close(fd);
    own_pid = getpid();
    if (found != MAP_FAILED) shared = found;
}

static bool comes_to(bool calls) {
    if (!shared || __atomic_load_n(&shared->pid, __ATOMIC_ACQUIRE) != own_pid) return false;
    if (shared->calls != calls) return false;
    return __atomic_add_fetch(&shared->count, 1, __ATOMIC_RELAXED) == shared->at;
}

static bool fails(void) {
    if (!comes_to(false)) return false;
    errno = ENOMEM;
    return true;
}

static bool call_fails(int error) {
    if (!comes_to(true)) return false;
    errno = error;
    return true;
}

void *malloc(size_t bytes) {
    return fails() ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t n, size_t bytes) {
    return fails() ? NULL : __libc_calloc(n, bytes);
}

void *realloc(void *memory, size_t bytes) {
    return fails() ? NULL : __libc_realloc(memory, bytes);
}

void *memalign(size_t alignment, size_t bytes) {
    return fails() ? NULL : __libc_memalign(alignment, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    return memalign(alignment, bytes);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *made = memalign(alignment, bytes);
    if (!made) return ENOMEM;
    *out = made;
    return 0;
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    if (fails()) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

int epoll_ctl(int epoll, int what, int fd, struct epoll_event *event) {
    if (what == EPOLL_CTL_ADD && fails()) return -1;
    return (int)syscall(SYS_epoll_ctl, epoll, what, fd, event);
}

/* ---- system calls ---- */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

/* name(arguments), or the error that the kernel gives where it is short of something. */
#define CALL(type, name, error, parameters, ...)                                                   \
    type name parameters {                                                                         \
        if (call_fails(error)) return (type) - 1;                                                  \
        return REAL(name)(__VA_ARGS__);                                                            \
    }

CALL(int, accept, EMFILE, (int fd, struct sockaddr *at, socklen_t *bytes), fd, at, bytes)
CALL(int, accept4, EMFILE, (int fd, struct sockaddr *at, socklen_t *bytes, int flags), fd, at,
     bytes, flags)
CALL(int, dup, EMFILE, (int fd), fd)
CALL(int, epoll_create1, EMFILE, (int flags), flags)
CALL(int, epoll_wait, EINTR, (int epoll, struct epoll_event *events, int most, int ms), epoll,
     events, most, ms)
CALL(int, eventfd, EMFILE, (unsigned value, int flags), value, flags)
CALL(int, fstat, ENOMEM, (int fd, struct stat *out), fd, out)
CALL(int, ftruncate, ENOSPC, (int fd, off_t bytes), fd, bytes)
CALL(int, getsockopt, ENOBUFS, (int fd, int level, int name, void *value, socklen_t *bytes), fd,
     level, name, value, bytes)
CALL(int, memfd_create, EMFILE, (const char *name, unsigned flags), name, flags)
CALL(int, poll, EINTR, (struct pollfd * fds, nfds_t n, int ms), fds, n, ms)
CALL(ssize_t, recvmsg, ENOMEM, (int fd, struct msghdr *message, int flags), fd, message, flags)
CALL(ssize_t, send, ENOBUFS, (int fd, const void *bytes, size_t n, int flags), fd, bytes, n, flags)
CALL(ssize_t, sendmsg, ENOBUFS, (int fd, const struct msghdr *message, int flags), fd, message,
     flags)
CALL(int, socket, EMFILE, (int family, int type, int protocol), family, type, protocol)
CALL(int, socketpair, EMFILE, (int family, int type, int protocol, int fds[2]), family, type,
     protocol, fds)
CALL(int, timerfd_create, EMFILE, (int clock, int flags), clock, flags)

/* Those with a list of arguments that may end early: of the daemon's the last is a number or an
 * address. */
int fcntl(int fd, int what, ...) {
    va_list list;
    va_start(list, what);
    void *argument = va_arg(list, void *);
    va_end(list);
    if ((what == F_DUPFD || what == F_DUPFD_CLOEXEC) && call_fails(EMFILE)) return -1;
    return REAL(fcntl)(fd, what, argument);
}

static int open_at(int folder, const char *path, int flags, unsigned mode) {
    return call_fails(EMFILE) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    const unsigned mode = va_arg(list, unsigned);
    va_end(list);
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    const unsigned mode = va_arg(list, unsigned);
    va_end(list);
    return open_at(folder, path, flags, mode);
}

long syscall(long number, ...) {
    long (*call)(long, ...) = REAL(syscall);
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_pidfd_open && call_fails(EMFILE)) return -1;
    return call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *argument) {
    const int saved = errno;
    if (!call_fails(EAGAIN)) return REAL(pthread_create)(thread, attributes, run, argument);
    errno = saved;
    return EAGAIN;
}
