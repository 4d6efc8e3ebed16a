/* Memory that runs out in another process: its n-th allocation fails, once.
 *
 * A library for LD_PRELOAD. GRADD_SCARCE names a file that holds a scarce_t; a test maps it, too,
 * and writes there which process is meant and which of its allocations from now on fails: malloc
 * and its relatives, also those of libraries, and mmap and epoll_ctl, with ENOMEM.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HANDED_ON 200 /* a descriptor */

typedef struct scarce_s {
    int64_t pid;   /* 0 = none */
    int64_t at;    /* the one that fails, from 1 */
    int64_t count; /* so many there were */
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

static bool fails(void) {
    if (!shared || __atomic_load_n(&shared->pid, __ATOMIC_ACQUIRE) != own_pid) return false;
    if (__atomic_add_fetch(&shared->count, 1, __ATOMIC_RELAXED) != shared->at) return false;
    errno = ENOMEM;
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
