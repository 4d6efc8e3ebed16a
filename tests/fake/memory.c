/* Reserved addresses and the files behind them. See memory.h. */
#include "tests/fake/memory.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE ((size_t)4096)

struct fake_block_s {
    fake_block_t *next;
    char *base; /* reserved: `room` bytes, of which the last page is behind the end */
    size_t bytes, room;
    int fd;   /* Owned */
    bool own; /* by memory_take */
    char *at; /* where the present work sees it; NULL = it does not */
};

void fake_defect(const char *file, int line, const char *condition, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s:%d: fake device: ", file, line);
    vfprintf(stderr, format, args);
    fprintf(stderr, " (%s)\n", condition);
    va_end(args);
    fflush(NULL);
    abort();
}

void memory_init(memory_t *m) {
    *m = (memory_t){0};
    pthread_mutex_init(&m->lock, NULL);
}

void memory_finish(memory_t *m) {
    REQUIRE(!m->blocks, "memory is left: %zu bytes", m->blocks->bytes);
    pthread_mutex_destroy(&m->lock);
}

static void *add(memory_t *m, int fd, size_t bytes, bool own) {
    fake_block_t *b = calloc(1, sizeof *b);
    REQUIRE(b, "no memory for a block");
    const size_t room = (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    *b = (fake_block_t){.bytes = bytes, .room = room, .fd = fd, .own = own};
    b->base = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(b->base != MAP_FAILED, "no addresses for %zu bytes", bytes);
    pthread_mutex_lock(&m->lock);
    b->next = m->blocks;
    m->blocks = b;
    if (own) m->bytes += (int64_t)bytes;
    pthread_mutex_unlock(&m->lock);
    return b->base;
}

static bool fill(int fd, size_t bytes) {
    static const char ones[16 * 4096] = {[0 ... 16 * 4096 - 1] = (char)0xff};
    for (size_t at = 0; at < bytes;) {
        const size_t left = bytes - at;
        ssize_t n = write(fd, ones, left < sizeof ones ? left : sizeof ones);
        if (n <= 0) return false;
        at += (size_t)n;
    }
    return true;
}

void *memory_take(memory_t *m, size_t bytes) {
    int fd = memfd_create("gradd-fake", MFD_CLOEXEC);
    if (fd < 0) return NULL;
    if (!fill(fd, bytes)) {
        close(fd);
        return NULL;
    }
    return add(m, fd, bytes, true);
}

void *memory_map(memory_t *m, int fd, size_t bytes) {
    int mine = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    return mine < 0 ? NULL : add(m, mine, bytes, false);
}

void memory_drop(memory_t *m, void *address, size_t bytes) {
    pthread_mutex_lock(&m->lock);
    fake_block_t **link = &m->blocks;
    while (*link && (*link)->base != address)
        link = &(*link)->next;
    fake_block_t *b = *link;
    REQUIRE(b && b->bytes == bytes, "%zu bytes at %p were not taken here", bytes, address);
    REQUIRE(!b->at, "%zu bytes at %p are dropped while work uses them", bytes, address);
    *link = b->next;
    if (b->own) m->bytes -= (int64_t)bytes;
    pthread_mutex_unlock(&m->lock);
    munmap(b->base, b->room);
    close(b->fd);
    free(b);
}

void *memory_find(memory_t *m, const void *address) {
    const uintptr_t wanted = (uintptr_t)address;
    pthread_mutex_lock(&m->lock);
    fake_block_t *b = m->blocks;
    while (b && (wanted < (uintptr_t)b->base || wanted > (uintptr_t)b->base + b->bytes))
        b = b->next;
    if (b && !b->at) {
        b->at =
            mmap(NULL, b->room - PAGE + !b->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, b->fd, 0);
        REQUIRE(b->at != MAP_FAILED, "cannot map %zu bytes", b->bytes);
    }
    pthread_mutex_unlock(&m->lock);
    return b ? b->at + (wanted - (uintptr_t)b->base) : NULL;
}

void memory_leave(memory_t *m) {
    pthread_mutex_lock(&m->lock);
    for (fake_block_t *b = m->blocks; b; b = b->next) {
        if (b->at) munmap(b->at, b->room - PAGE + !b->bytes);
        b->at = NULL;
    }
    pthread_mutex_unlock(&m->lock);
}
