/* What runs out in another process: its n-th allocation or system call fails, once.
 *
 * A library for LD_PRELOAD. GRADD_SCARCE names a file that holds a scarce_t; a test maps it, too,
 * and writes there which process is meant and which of its calls from now on fails:
 *
 * - an allocation, with ENOMEM: malloc and its relatives, also those of libraries, mmap, epoll_ctl;
 * - a system call that Linux refuses when it is short of descriptors, memory or threads, with the
 *   error that it gives there;
 * - a wait that a signal ends: epoll_wait and poll, while nothing is ready. If something is, they
 *   return it, as Linux does, and as libzmq relies on: it is told once of what has come.
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
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define HANDED_ON 200 /* a descriptor */

typedef struct scarce_s {
    int64_t pid;   /* 0 = none */
    int64_t at;    /* the one that fails, from 1 */
    int64_t count; /* so many there were */
    int64_t kind;  /* scarce_kind_t */
    char name[16]; /* of the system call that failed */
} scarce_t;

typedef enum scarce_kind_e { ALLOCATION, CALL, WAIT } scarce_kind_t;

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

static bool comes_to(scarce_kind_t kind) {
    if (!shared || __atomic_load_n(&shared->pid, __ATOMIC_ACQUIRE) != own_pid) return false;
    if (shared->kind != kind) return false;
    return __atomic_add_fetch(&shared->count, 1, __ATOMIC_RELAXED) == shared->at;
}

static bool fails(void) {
    if (!comes_to(ALLOCATION)) return false;
    errno = ENOMEM;
    return true;
}

static bool call_fails(const char *name, int error) {
    if (!comes_to(error == EINTR ? WAIT : CALL)) return false;
    snprintf(shared->name, sizeof shared->name, "%s", name);
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
#define REFUSED(type, name, error, parameters, ...)                                                \
    type name parameters {                                                                         \
        if (call_fails(#name, error)) return (type) - 1;                                           \
        return REAL(name)(__VA_ARGS__);                                                            \
    }

REFUSED(int, accept, EMFILE, (int fd, struct sockaddr *at, socklen_t *bytes), fd, at, bytes)
REFUSED(int, accept4, EMFILE, (int fd, struct sockaddr *at, socklen_t *bytes, int flags), fd, at,
        bytes, flags)
REFUSED(int, dup, EMFILE, (int fd), fd)
REFUSED(int, epoll_create1, EMFILE, (int flags), flags)
REFUSED(int, eventfd, EMFILE, (unsigned value, int flags), value, flags)
REFUSED(int, ftruncate, ENOMEM, (int fd, off_t bytes), fd, bytes)
REFUSED(int, memfd_create, EMFILE, (const char *name, unsigned flags), name, flags)
REFUSED(ssize_t, send, ENOBUFS, (int fd, const void *bytes, size_t n, int flags), fd, bytes, n,
        flags)
REFUSED(ssize_t, sendmsg, ENOBUFS, (int fd, const struct msghdr *message, int flags), fd, message,
        flags)
REFUSED(int, socket, EMFILE, (int family, int type, int protocol), family, type, protocol)
REFUSED(int, socketpair, EMFILE, (int family, int type, int protocol, int fds[2]), family, type,
        protocol, fds)
REFUSED(int, timerfd_create, EMFILE, (int clock, int flags), clock, flags)

int epoll_wait(int epoll, struct epoll_event *events, int most, int ms) {
    const int ready = REAL(epoll_wait)(epoll, events, most, 0);
    if (ready || !ms) return ready;
    return call_fails("epoll_wait", EINTR) ? -1 : REAL(epoll_wait)(epoll, events, most, ms);
}

int poll(struct pollfd *fds, nfds_t n, int ms) {
    const int ready = REAL(poll)(fds, n, 0);
    if (ready || !ms) return ready;
    return call_fails("poll", EINTR) ? -1 : REAL(poll)(fds, n, ms);
}

/* A process without room for descriptors gets the packet, and a flag in their place. */
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    const ssize_t got = REAL(recvmsg)(fd, message, flags);
    const struct cmsghdr *first = got < 0 ? NULL : CMSG_FIRSTHDR(message);
    if (!first || first->cmsg_type != SCM_RIGHTS || !call_fails("recvmsg", errno)) return got;
    const int *fds = (const int *)(const void *)CMSG_DATA(first);
    for (size_t i = 0; i < (first->cmsg_len - CMSG_LEN(0)) / sizeof *fds; i++)
        close(fds[i]);
    message->msg_controllen = 0;
    message->msg_flags |= MSG_CTRUNC;
    return got;
}

/* Those with a list of arguments that may end early: of the daemon's the last is a number or an
 * address. */
int fcntl(int fd, int what, ...) {
    va_list list;
    va_start(list, what);
    void *argument = va_arg(list, void *);
    va_end(list);
    if ((what == F_DUPFD || what == F_DUPFD_CLOEXEC) && call_fails("fcntl", EMFILE)) return -1;
    return REAL(fcntl)(fd, what, argument);
}

static int open_at(int folder, const char *path, int flags, unsigned mode) {
    return call_fails("openat", EMFILE) ? -1 : (int)syscall(SYS_openat, folder, path, flags, mode);
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
    if (number == SYS_pidfd_open && call_fails("pidfd_open", EMFILE)) return -1;
    return call(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

pid_t fork(void) {
    return call_fails("fork", EAGAIN) ? -1 : REAL(fork)();
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                   void *argument) {
    const int saved = errno;
    if (!call_fails("pthread_create", EAGAIN))
        return REAL(pthread_create)(thread, attributes, run, argument);
    errno = saved;
    return EAGAIN;
}
